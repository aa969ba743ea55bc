"""Ollama's API: chat, generate and embed. A streamed answer has one line of JSON for each piece of text."""

from __future__ import annotations

import asyncio
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from time import perf_counter

import msgspec
from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import Response

from ..chat.body import ChatFields, ChatRequest, OllamaOptions, Options, TextRequest
from ..chat.decode import WHOLE
from ..chat.parts import unsupported
from ..chat.reasoning import Count
from ..chat.sampling_fields import JsonValue
from ..engine.generation import Delta, End, PromptProgress
from ..engine.usage import Fields
from ..formats.answer import CallArguments, CallStart, ContentText, Fragment, ReasoningText, decoded_arguments
from ..http.api_errors import RequestError
from .embeddings import EmbeddingRequest, compute, pooled
from .endpoint import VectorRequest, begin_answer, beside_others, early_meta, prepare, service_of, vectors_of, warn
from .ollama_models import NDJSON, check_model, written
from .reply import JsonReply, ReplyFormat, ResponseMeta, WholeAnswer, encode

ChatMessages = list[dict[str, JsonValue]]
KeepAlive = float | str

# ---- Bodies -------------------------------------------------------------------------------------------------------------


class OllamaMessage(Struct, frozen=True):
    """A message.

    A field may have a value that Ollama's API does not allow, such as a list of parts: `content.take` reads it.

    tool_name, name: the name of the tool, if the message has a tool's result.
    images: images of the message, which become parts of its content. If the last message is a user's, its images are
        refused.
    """

    role: JsonValue = None
    content: JsonValue = ""
    thinking: JsonValue = None
    images: JsonValue = None
    tool_calls: JsonValue = None
    tool_name: JsonValue = None
    name: JsonValue = None
    tool_call_id: JsonValue = None
    documents: list[JsonValue] | None = None


def messages_of(said: Sequence[OllamaMessage]) -> ChatMessages:
    """Return the messages in the form of a chat. Raises RequestError if the last message is a user's and has images."""
    messages: ChatMessages = []
    names: dict[str, JsonValue] = {}  # names of the called functions, by the ids of the calls
    for at, message in enumerate(said):
        made: dict[str, JsonValue] = {"role": message.role, "content": message.content}
        if message.images:
            if at == len(said) - 1 and message.role == "user":
                raise RequestError(f"messages[{at}].images: {unsupported('image')}", param=f"messages[{at}].images")
            images = message.images if isinstance(message.images, list) else [message.images]
            content = message.content or ""
            parts = content if isinstance(content, list) else [content]
            made["content"] = [*parts, *({"type": "image"} for _ in images)]
        if message.thinking:
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = message.tool_calls if isinstance(message.tool_calls, list) else [message.tool_calls]
            made |= {"content": message.content or None, "tool_calls": list(map(_call, calls))}
            names |= _names(calls)
        if message.role == "tool":
            id = message.tool_call_id
            name = message.tool_name or message.name or (names.get(id) if isinstance(id, str) else None)
            made |= {field: value for field, value in (("tool_call_id", id), ("name", name)) if value}
        if message.documents is not None:
            made["documents"] = message.documents
        messages.append(made)
    return messages


def _call(call: JsonValue) -> JsonValue:
    """Return a tool call in the form of a chat: the arguments, an object in Ollama's API, become JSON text.

    If the arguments are no object, return the call unchanged.
    """
    match call:
        case {"function": {"arguments": dict(arguments)} as function}:
            text = msgspec.json.encode(arguments).decode()
            return {"id": call.get("id"), "type": "function", "function": function | {"arguments": text}}
    return call


def _names(calls: Sequence[JsonValue]) -> dict[str, JsonValue]:
    found: dict[str, JsonValue] = {}
    for call in calls:
        match call:
            case {"id": str(id), "function": {"name": name}}:
                found[id] = name
    return found


class OllamaFields(ChatFields, frozen=True, kw_only=True):
    """The fields that Ollama's chat and generate have in common."""

    options: OllamaOptions | None = None
    format: JsonValue = None
    keep_alive: KeepAlive | None = None
    truncate: bool | None = None
    shift: bool | None = None

    def unused(self) -> tuple[str, ...]:
        truncate = f"truncate has no effect: {WHOLE}"
        shift = "shift has no effect: a full context ends an answer with `length`"
        return (*super().unused(), *[truncate] * bool(self.truncate), *[shift] * bool(self.shift))

    def check(self) -> None:
        super().check()
        if (self.n or 1) > 1:
            raise RequestError("there is one answer: leave n out", param="n")
        if not (isinstance(self.format, dict) or self.format in (None, "", "json")):
            raise RequestError(f"format is {reprlib.repr(self.format)}: expected json or a JSON schema", param="format")
        if self.format not in (None, "") and self.is_constrained:
            raise RequestError("format: another field constrains the answer, too: send only one of them", param="format")

    def for_chat(self, **fields: JsonValue) -> ChatRequest:
        """Return a chat with this request's common fields and the given `fields`. Raises RequestError."""
        return ChatRequest(**self.given(ChatFields.__struct_fields__), **fields, echo=False)

    def given(self, names: Iterable[str]) -> dict[str, JsonValue]:
        """Return the request's fields with these names, and the fields of a chat that `stream`, `format` and `options` set.

        Raises RequestError.
        """
        self.check()
        given = {name: getattr(self, name) for name in names} | {"stream": self.stream is not False}
        if self.format not in (None, ""):
            given["json_schema"] = {"type": "object"} if self.format == "json" else self.format
        return given | (self.options.for_chat() if self.options else {})


class OllamaChatRequest(OllamaFields, frozen=True, kw_only=True):
    """`POST /api/chat`.

    A request without messages only loads or unloads the model.

    tool_choice: as in OpenAI's API; Ollama's own API has no `tool_choice`.
    """

    messages: tuple[OllamaMessage, ...] = ()
    tools: list[dict[str, JsonValue]] | None = None
    tool_choice: str | dict[str, JsonValue] | None = None

    def chat(self) -> ChatRequest:
        """Return the request as a chat. Raises RequestError."""
        return self.for_chat(messages=messages_of(self.messages), tools=self.tools, tool_choice=self.tool_choice)


class GenerateRequest(OllamaFields, frozen=True, kw_only=True):
    """`POST /api/generate`.

    raw: whether the prompt is used as it is, without a chat template. suffix: the text that follows the answer.
    """

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    template: str = ""
    images: list[JsonValue] | None = None
    context: list[JsonValue] | None = None

    def check(self) -> None:
        super().check()
        of_chats = self.system or self.asked_reasoning.asks or self.documents or self.retrieval  # they need a template
        for is_wrong, param, message in (
            (self.images, "images", unsupported("image")),
            (self.context, "context", "this server's answers have no context: send the history to /api/chat"),
            (self.template, "template", "this server reads no Go templates: send the whole prompt with raw: true"),
            (self.is_text and of_chats, "raw", "a prompt with raw or suffix has no template for system, think or documents"),
        ):
            if is_wrong:
                raise RequestError(f"{param}: {message}", param=param)

    def unused(self) -> tuple[str, ...]:
        return (*super().unused(), *(self.of_documents() if self.is_text else ()))

    @property
    def is_text(self) -> bool:
        """Whether the prompt is used without a chat template."""
        return self.raw or bool(self.suffix)

    def chat(self) -> ChatRequest:
        """Return the request as a chat with one message of the user. Raises RequestError."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.for_chat(messages=[*system, {"role": "user", "content": self.prompt}])

    def text(self) -> TextRequest:
        """Return the request as a text completion. Raises RequestError."""
        return TextRequest(**self.given(Options.__struct_fields__), prompt=self.prompt, suffix=self.suffix or None)


class EmbedRequest(VectorRequest, frozen=True, kw_only=True):
    """`POST /api/embed`. truncate: whether a text that is too long is cut at its end."""

    input: str | list[str] = ""
    truncate: bool = True
    dimensions: Count | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OldEmbedRequest(VectorRequest, frozen=True, kw_only=True):
    prompt: str = ""
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


# ---- Durations ----------------------------------------------------------------------------------------------------------

UNITS = {"": 1.0, "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|ms|s|m|h|)")
MOST_WRITTEN = 64  # characters of a duration
LONGEST = 365 * 86400.0  # seconds that a model is kept, unless it is kept for ever


def seconds_of(given: KeepAlive) -> float:
    """Return a duration in seconds; inf for a negative duration. Raises RequestError.

    given: a number of seconds, or a duration in Go's form, such as 1h30m.
    """
    if isinstance(given, str):
        text = given.removeprefix("-")
        if not text or len(text) > MOST_WRITTEN or DURATION.sub("", text):
            wrong = f"keep_alive is {reprlib.repr(given)}: expected seconds, or a duration such as 5m or 1h30m"
            raise RequestError(wrong, param="keep_alive")
        seconds = sum(float(number) * UNITS[unit] for number, unit in DURATION.findall(text))
        given = -seconds if text != given else seconds
    return inf if given < 0 else min(given, LONGEST)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


# ---- Answers: a line of JSON for each piece, or one object. -------------------------------------------------------------

Said = dict[str, JsonValue]
"""Content, thinking or a tool call of an answer."""


class OllamaReply:
    """The replies of `/api/chat` and `/api/generate`.

    began: the value of `perf_counter` at the start of the request.
    has_message: whether the text is in an object `message`, as in a chat.
    """

    def __init__(self, envelope: ResponseMeta, began: float, has_message: bool) -> None:
        self.envelope, self._began, self._has_message = envelope, began, has_message
        self._reader = envelope.reader()
        self._probabilities = envelope.probabilities()
        self._unsent: list[Raw] = []  # tokens with their logprobs, for the next line
        self._call: tuple[CallStart, list[str]] | None = None  # the call whose arguments are still arriving

    def begin(self) -> list[bytes]:
        return self.ping()

    def ping(self) -> list[bytes]:
        return [self._line({})]

    def progress(self, index: int, progress: PromptProgress) -> list[bytes]:
        return self.ping()

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        if delta.logprobs:
            self._unsent += self._probabilities[index].entries(delta)
        return [self._line(part) for part in self._parts(self._reader.push(delta.text))]

    def end(self, index: int, end: End) -> list[bytes]:
        return [self._line(part) for part in self._rest(end)]

    def close(self, ends: Sequence[End]) -> list[bytes]:
        (end,) = ends
        return [self._line({}, self._costs(end))]

    def fail(self, error: RequestError) -> list[bytes]:
        return [encode(error.ollama_body()) + b"\n"]

    def whole(self, answers: Sequence[WholeAnswer]) -> Fields:
        (answer,) = answers
        self._unsent = [entry for writer in self._probabilities for entry in writer.entries(answer.whole())]
        parts = [*self._parts(self._reader.push(answer.text)), *self._rest(answer.end)]
        joined: Said = {name: "".join(part.get(name, "") for part in parts) for name in ("content", "thinking")}
        calls = [call for part in parts for call in part.get("tool_calls", ())]
        return self._body(joined | {"tool_calls": calls}, self._costs(answer.end))

    def _rest(self, end: End) -> list[Said]:
        return [*self._parts(self._reader.finish(end.is_cut)), *self._called()]

    def _parts(self, fragments: Sequence[Fragment]) -> Iterator[Said]:
        """Yield the parts of the answer that these fragments complete.

        A call is complete once the next part or the end of the answer follows. A call that was cut is dropped.
        """
        for fragment in fragments:
            match fragment:
                case CallArguments(_, text) if self._call:
                    self._call[1].append(text)
                case CallStart():
                    yield from self._called()
                    self._call = (fragment, [])
                case ContentText(text):
                    yield from self._called()
                    yield {"content": text}
                case ReasoningText(text):
                    yield from self._called()
                    yield {"thinking": text}

    def _called(self) -> Iterator[Said]:
        if self._call:
            (start, texts), self._call = self._call, None
            if (arguments := decoded_arguments("".join(texts))) is not None:
                function = {"index": start.index, "name": start.name, "arguments": arguments}
                yield {"tool_calls": [{"id": start.id, "function": function}]}

    def _line(self, part: Said, costs: Fields | None = None) -> bytes:
        return encode(self._body(part, costs)) + b"\n"

    def _body(self, part: Said, costs: Fields | None = None) -> Fields:
        """Return one object of the answer.

        costs: fields that only the last object has; None: this object is not the last.
        """
        said: Fields = {"content" if self._has_message else "response": part.get("content", "")}
        said |= {name: part[name] for name in ("thinking", "tool_calls") if part.get(name)}
        body: Fields = {"model": self.envelope.model, "created_at": written()}
        body |= {"message": {"role": "assistant"} | said} if self._has_message else said
        if self._unsent:
            body["logprobs"], self._unsent = self._unsent, []
        return body | (costs or {"done": False})

    def _costs(self, end: End) -> Fields:
        """Return the fields of the last object: the counts, times in ns, and this server's own field `slotcache`."""
        report = end.report
        return {
            "done": True,
            "done_reason": end.reason,
            "total_duration": _nanoseconds(perf_counter() - self._began),
            "load_duration": _nanoseconds(report.queue_time),
            "prompt_eval_count": report.num_prompt,
            "prompt_eval_duration": _nanoseconds(report.prompt_time),
            "eval_count": report.num_generated,
            "eval_duration": _nanoseconds(report.generation_time),
            "slotcache": report.slotcache(),
        } | self.envelope.notes()


def opening(request: Request, asked: OllamaChatRequest | GenerateRequest) -> ReplyFormat | None:
    """Return the reply for a stream that begins before its model is loaded.

    The result is None if the answer is not streamed, or if the request only loads or unloads the model.
    """
    has_message = isinstance(asked, OllamaChatRequest)
    if asked.stream is False or not (asked.messages if has_message else asked.prompt or asked.suffix):
        return None
    return OllamaReply(replace(early_meta(request, asked, ""), media_type=NDJSON), perf_counter(), has_message)


async def chat(request: Request, asked: OllamaChatRequest) -> Response | ReplyFormat:
    """Answer a request of Ollama's chat."""
    began = perf_counter()
    name = check_model(request, asked.model, service_of(request).model, "chat")
    if not asked.messages:
        return _keep_only(request, asked, name, {"message": {"role": "assistant", "content": ""}})
    made = await beside_others(request, asked.chat)
    _note(request, asked)
    return _reply(request, asked, begin_answer(request, await prepare(request, made)), began, name)


async def generate(request: Request, asked: GenerateRequest) -> Response | ReplyFormat:
    """Answer a request of Ollama's generate."""
    began = perf_counter()
    name = check_model(request, asked.model, service_of(request).model, "generate")
    if not (asked.prompt or asked.suffix):
        return _keep_only(request, asked, name, {"response": ""})
    made = await beside_others(request, asked.text if asked.is_text else asked.chat)
    _note(request, asked)
    return _reply(request, asked, begin_answer(request, await prepare(request, made)), began, name)


def _reply(request: Request, asked: OllamaFields, envelope: ResponseMeta, began: float, name: str) -> OllamaReply:
    """Return the reply to a submitted request. name: the model's name as the request spells it, for the answer."""
    if asked.keep_alive is not None:
        service_of(request).engine.sleep.keep(seconds_of(asked.keep_alive))
    envelope = replace(envelope, model=name, media_type=NDJSON)
    return OllamaReply(envelope, began, has_message=isinstance(asked, OllamaChatRequest))


def _keep_only(request: Request, asked: OllamaFields, name: str, said: Fields) -> Response:
    """Answer a request that has no prompt. Load the model, or unload it if keep_alive is 0."""
    asked.check()
    _note(request, asked)
    sleep, seconds = service_of(request).engine.sleep, None if asked.keep_alive is None else seconds_of(asked.keep_alive)
    if seconds != 0:
        sleep.bring()
    if seconds is not None:
        sleep.keep(seconds)
    body: Fields = {"model": name, "created_at": written()} | said
    return JsonReply(body | {"done": True, "done_reason": "unload" if seconds == 0 else "load"} | _notes(request))


def _note(request: Request, asked: OllamaFields) -> None:
    """Warn about fields that have no effect. Raises RequestError for an unreadable duration."""
    service = service_of(request)
    limit, wanted = service.submitter.limit, asked.options.num_ctx if asked.options else None
    if wanted is not None and wanted > limit:
        warn(request, [f"options.num_ctx is {wanted:,}: a request may have {limit:,} tokens; the server's -c sets this"])
    if asked.keep_alive is not None:
        _warn_of_staying(request, seconds_of(asked.keep_alive), service.engine.sleep.can_sleep)


def _warn_of_staying(request: Request, seconds: float, can_sleep: bool) -> None:
    if seconds != inf and not can_sleep:
        warn(request, ["keep_alive has no effect: the model stays in memory, unless --sleep-idle-seconds lets it sleep"])


def _notes(request: Request) -> Fields:
    return {"warnings": request.state.warnings} if request.state.warnings else {}


async def embed(request: Request, asked: EmbedRequest) -> Response:
    """Return the vectors of texts in Ollama's form."""
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    made = EmbeddingRequest(input=texts if asked.input else [], truncate=asked.truncate, dimensions=asked.dimensions or None)
    return await _embed(request, asked, made, b'"embeddings":[%b]')


async def embed_one(request: Request, asked: OldEmbedRequest) -> Response:
    """Return the vector of a text in the form of Ollama's older route. The vector is not normalised."""
    made = EmbeddingRequest(input=[asked.prompt] if asked.prompt else [], truncate=True, embd_normalize=-1)
    return await _embed(request, asked, made, b'"embedding":%b')


async def _embed(request: Request, asked: EmbedRequest | OldEmbedRequest, made: EmbeddingRequest, field: bytes) -> Response:
    """Compute the vectors of the request `made`, and return Ollama's answer.

    field: a bytes template for the answer's field with the vectors; `%b` stands for the vectors.
    """
    began, worker = perf_counter(), pooled(vectors_of(request))
    name = check_model(request, asked.model, worker.embedder.model, "embed")
    seconds, can_sleep = None, vectors_of(request).settings.may_unload
    if asked.keep_alive is not None:
        seconds = seconds_of(asked.keep_alive)
        _warn_of_staying(request, seconds, can_sleep)
    numbers, costs = b"" if isinstance(asked, EmbedRequest) else b"[]", {}
    if made.input:
        computed, num_tokens = await compute(request, worker, made)
        numbers = await asyncio.to_thread(lambda: b",".join(encode(vector.tolist()) for vector in computed))
        took = _nanoseconds(perf_counter() - began)
        costs = {"total_duration": took, "load_duration": 0, "prompt_eval_count": num_tokens}
    if seconds is not None and can_sleep:
        worker.keep(seconds)
    rest = encode(costs | _notes(request))[1:]
    return JsonReply(b'{"model":%b,%b%b%b' % (encode(name), field % numbers, b"," * (rest != b"}"), rest))
