"""Ollama's API: chat, generate, embed, the models; lines of JSON."""

from __future__ import annotations

import asyncio
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from math import inf
from time import perf_counter

import msgspec
from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ...models.model import Model
from ...models.model_files import files_of, stamp
from ..chat.body import ChatFields, ChatRequest, OllamaOptions, Options, TextRequest
from ..chat.decode import WHOLE
from ..chat.parts import unsupported
from ..chat.reasoning import Count
from ..chat.sampling_fields import JsonValue
from ..config.settings import VERSION
from ..engine.generation import Delta, End, PromptProgress
from ..engine.usage import Fields
from ..formats.answer import CallArguments, CallStart, ContentText, Fragment, ReasoningText, decoded_arguments
from ..http.api_errors import RequestError, no_route, unknown_model
from ..search.vectors import Vectors
from ..service.models import ModelEntry
from ..service.service import Service
from .completions import submit_text
from .embeddings import EmbeddingRequest, compute, pooled
from .endpoint import VectorRequest, accept, beside_others, early_meta, service_of, submit, vectors_of, warn
from .reply import JsonReply, ReplyFormat, ResponseMeta, WholeAnswer, encode

API_VERSION = "0.13.5"  # of the Ollama whose fields these are: clients compare it
NDJSON = "application/x-ndjson"
ChatMessages = list[dict[str, JsonValue]]
KeepAlive = float | str

# ---- Bodies -------------------------------------------------------------------------------------------------------------


class OllamaMessage(Struct, frozen=True):
    """A message. tool_name, name: whose result it is. images: refused in the last message, else as in a chat.

    What is no message of Ollama's is left to `content.take`.
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
    """Return the messages of a chat. Raises RequestError for an image that the question may be about."""
    messages: ChatMessages = []
    names: dict[str, JsonValue] = {}  # of the functions that were called, by the ids of the calls
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
    """Return a call of Ollama's, whose arguments are an object, as a chat has it; all else as it is."""
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
    """The fields that Ollama's chat and generate have both."""

    options: OllamaOptions | None = None
    format: JsonValue = None
    keep_alive: KeepAlive | None = None
    truncate: bool | None = None
    shift: bool | None = None

    def warnings(self) -> Iterator[str]:
        yield from super().warnings()
        if self.truncate:
            yield f"truncate has no effect: {WHOLE}"
        if self.shift:
            yield "shift has no effect: a full context ends an answer with `length`"

    def check(self) -> None:
        super().check()
        if (self.n or 1) > 1:
            raise RequestError("there is one answer: leave n out", param="n")
        if not (isinstance(self.format, dict) or self.format in (None, "", "json")):
            raise RequestError(f"format is {reprlib.repr(self.format)}: expected json or a JSON schema", param="format")
        if self.format not in (None, "") and self.is_constrained:
            raise RequestError("format: another field says what the answer must be, too: send one", param="format")

    def for_chat(self, **fields: JsonValue) -> ChatRequest:
        """Return a chat with these fields of its own. Raises RequestError."""
        return ChatRequest(**self.given(ChatFields.__struct_fields__), **fields, echo=False)

    def given(self, names: Iterable[str]) -> dict[str, JsonValue]:
        """Return these fields with the options among them. Raises RequestError."""
        self.check()
        given = {name: getattr(self, name) for name in names} | {"stream": self.stream is not False}
        if self.format not in (None, ""):
            given["json_schema"] = {"type": "object"} if self.format == "json" else self.format
        return given | (self.options.for_chat() if self.options else {})


class OllamaChatRequest(OllamaFields, frozen=True, kw_only=True):
    """`POST /api/chat`. Without messages the model is loaded, or unloaded. tool_choice: Ollama has none."""

    messages: tuple[OllamaMessage, ...] = ()
    tools: list[dict[str, JsonValue]] | None = None
    tool_choice: str | dict[str, JsonValue] | None = None

    def chat(self) -> ChatRequest:
        """Return the chat. Raises RequestError."""
        return self.for_chat(messages=messages_of(self.messages), tools=self.tools, tool_choice=self.tool_choice)


class GenerateRequest(OllamaFields, frozen=True, kw_only=True):
    """`POST /api/generate`. raw: the prompt is the whole of it. suffix: the text behind the answer."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    template: str = ""
    images: list[JsonValue] | None = None
    context: list[JsonValue] | None = None

    def check(self) -> None:
        super().check()
        of_chats = self.system or self.asked_reasoning.asks or self.documents or self.retrieval  # what a template shows
        for is_wrong, param, message in (
            (self.images, "images", unsupported("image")),
            (self.context, "context", "no answer has one here: send the history to /api/chat"),
            (self.template, "template", "Go's templates are not read here: send the whole prompt with raw: true"),
            (self.is_text and of_chats, "raw", "a raw prompt and one with a suffix have no chat template around them"),
        ):
            if is_wrong:
                raise RequestError(f"{param}: {message}", param=param)

    @property
    def is_text(self) -> bool:
        """Whether no chat template is applied."""
        return self.raw or bool(self.suffix)

    def chat(self) -> ChatRequest:
        """Return the chat of one question. Raises RequestError."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.for_chat(messages=[*system, {"role": "user", "content": self.prompt}])

    def text(self) -> TextRequest:
        """Return the text completion. Raises RequestError."""
        return TextRequest(**self.given(Options.__struct_fields__), prompt=self.prompt, suffix=self.suffix or None)


class EmbedRequest(VectorRequest, frozen=True, kw_only=True):
    """`POST /api/embed`. truncate: the end of a text that is too long is cut off."""

    input: str | list[str] = ""
    truncate: bool = True
    dimensions: Count | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class OldEmbedRequest(VectorRequest, frozen=True, kw_only=True):
    """`POST /api/embeddings`, the older form."""

    prompt: str = ""
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = None


class ModelName(Struct, frozen=True, kw_only=True):
    """`POST /api/show` and `/api/pull`: a model by its name. The other fields change nothing here."""

    model: str = ""
    name: str = ""
    verbose: bool | None = None
    insecure: bool | None = None
    stream: bool | None = None


# ---- Durations ----------------------------------------------------------------------------------------------------------

UNITS = {"": 1.0, "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|ms|s|m|h|)")
LONGEST = 365 * 86400.0  # seconds that a model is kept, unless it is for ever
FOR_EVER = 100 * LONGEST  # as Ollama's clients are told it


def seconds_of(given: KeepAlive) -> float:
    """Return the seconds of a duration: a number, or as Go writes it, such as 1h30m. Below 0: inf. Raises RequestError."""
    if isinstance(given, str):
        text = given.removeprefix("-")
        if not text or DURATION.sub("", text):
            wrong = f"keep_alive is {reprlib.repr(given)}: expected seconds, or a duration such as 5m or 1h30m"
            raise RequestError(wrong, param="keep_alive")
        seconds = sum(float(number) * UNITS[unit] for number, unit in DURATION.findall(text))
        given = -seconds if text != given else seconds
    return inf if given < 0 else min(given, LONGEST)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _written(time: datetime | None = None) -> str:
    """Return a time, by default now, as Ollama writes it."""
    return (time or datetime.now(UTC)).isoformat().replace("+00:00", "Z")


# ---- Models -------------------------------------------------------------------------------------------------------------

HERE = "models come here by the command line: slotcache serve -m FILE, --models-dir DIR or -hf USER/REPO"


def tagged(name: str) -> str:
    """Return a model's name with a tag, as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _known(request: Request) -> dict[str, Model]:
    """Return the models that generate or embed, by each of their names."""
    known: dict[str, Model] = {}
    for _, vectors in _opened(request):
        for name, model in vectors.models().items():
            if _capabilities(request, model):
                names = vectors.settings.names(model.path) if name == vectors.name else (name,)
                known |= {tagged(each): model for each in names}
    return known


def _opened(request: Request) -> list[tuple[Service | None, Vectors]]:
    """Return what serves each model that was loaded. Raises RequestError 503 while the first one loads."""
    state = request.app.state.app
    vectors = state.loaded()
    if state.models is None:
        return [(state.service, vectors)]
    return [(loaded.service, loaded.vectors) for loaded in state.models.opened()]


def _never_loaded(request: Request) -> list[ModelEntry]:
    """Return the models that were not loaded yet, of several that share the device."""
    models = request.app.state.app.models
    return [entry for entry in models.entries.values() if entry.loaded is None] if models else []


def _find(request: Request, name: str | None, usual: Model) -> Model:
    """Return the model of this name. usual: the one for any name, with --any-model. Raises RequestError."""
    if not name:
        raise RequestError("model is required", param="model")
    known = _known(request)
    if (model := known.get(tagged(name))) is not None:
        return model
    if any(tagged(entry.name) == tagged(name) for entry in _never_loaded(request)):
        told = f"{name!r} was not loaded yet: a request for it or POST /models/load does that"
        raise RequestError(told, status=503, param="model", code="model_not_loaded")
    if request.app.state.app.settings.any_model:
        return usual
    raise unknown_model(name, known)


def _check_model(request: Request, name: str | None, wanted: Model, act: str) -> str:
    """Return the name of a model, which must be the wanted one. act: what it is wanted for. Raises RequestError."""
    if _find(request, name, wanted) is not wanted:
        able = next(each for each, model in _known(request).items() if model is wanted)
        raise RequestError(f"{name!r} does not support {act} here: expected {able}", param="model")
    return str(name)


def _capabilities(request: Request, model: Model) -> list[str]:
    """Return what a model can do, in Ollama's words."""
    opened = _opened(request)
    embedders = [vectors.embedding.embedder.model for _, vectors in opened if vectors.embedding is not None]
    able = ["embedding"] if any(model is one for one in embedders) else []
    if (service := _service_with(request, model)) is not None:
        able += ["completion", "tools"]  # a template that shows no tools gets them in the system message
        able += ["insert"] * service.builder.can_infill + ["thinking"] * service.template.thinks
    return able


def _service_with(request: Request, model: Model) -> Service | None:
    """Return the service of a model; None for one that generates no text."""
    return next((one for one, _ in _opened(request) if one is not None and model is one.model), None)


def _listed(name: str, model: Model) -> Fields:
    """Return a model as Ollama lists it. digest: of its files' sizes and times, not of what they hold."""
    stamps, family, count = sorted(model.weights.files.stamps.values()), _family(model), model.num_parameters
    level = re.sub(r" - ([SML])\w*$", r"_\1", model.file_type).removeprefix("all ")  # llama.cpp's `Q4_K - Medium`
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
    about: Fields = {"parent_model": "", "format": "gguf", "family": family, "families": [family]}
    return {
        "name": name,
        "model": name,
        "modified_at": _written(datetime.fromtimestamp(max(stamp[3] for stamp in stamps) / 1e9, UTC)),
        "size": model.size,
        "digest": sha256(repr(stamps).encode()).hexdigest(),
        "details": about | {"parameter_size": size, "quantization_level": level},
    }


def _family(model: Model) -> str:
    return model.metadata("general.architecture") or ""


OF_FILE = ("general.name", "general.basename", "general.size_label")
OF_ARCHITECTURE = ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv", "expert_count")


def _info(request: Request, model: Model) -> Fields:
    """Return what the file says of a model."""
    family = _family(model)
    told = {key: model.metadata(key) for key in (*OF_FILE, *(f"{family}.{key}" for key in OF_ARCHITECTURE))}
    found: Fields = {"general.architecture": family, "general.parameter_count": model.num_parameters}
    found[f"{family}.context_length"] = _length(request, model)
    return found | {key: int(text) if text.isdecimal() else text for key, text in told.items() if text is not None}


def _length(request: Request, model: Model) -> int:
    """Return the tokens that a request may have."""
    service = _service_with(request, model)
    return service.submitter.limit if service is not None else model.context_train


async def tags(request: Request) -> Response:
    """List the models by their names, for Ollama's clients."""
    known = [_listed(name, model) for name, model in _known(request).items()]
    return JsonReply({"models": [*known, *map(_unread, _never_loaded(request))]})


def _unread(entry: ModelEntry) -> Fields:
    """Return a model that was not loaded yet, of which its files alone are known, as Ollama lists it."""
    files = [file for file in files_of(entry.path) if file.exists()]
    stamps, name = sorted(map(stamp, files)), tagged(entry.name)
    return {
        "name": name,
        "model": name,
        "modified_at": _written(datetime.fromtimestamp(max((one[3] for one in stamps), default=0) / 1e9, UTC)),
        "size": sum(one[2] for one in stamps),
        "digest": sha256(repr(stamps).encode()).hexdigest(),
        "details": {"format": "gguf"},
    }


async def show(request: Request, asked: ModelName) -> Response:
    """Show a model to Ollama's clients."""
    name = asked.model or asked.name
    model = _find(request, name, request.app.state.app.loaded().model)
    service = _service_with(request, model)
    body: Fields = {"license": model.metadata("general.license") or "", "modelfile": f"FROM {model.path.name}\n"}
    if service is not None:
        sampling = service.submitter.defaults.sampling
        names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n")
        values = {"num_ctx": service.submitter.limit} | {name: getattr(sampling, name) for name in names}
        lines = (f"{name:<30} {value}" for name, value in values.items())
        body |= {"parameters": "\n".join(lines), "template": service.template.source}
    shown = {field: value for field, value in _listed(name, model).items() if field in ("details", "modified_at")}
    told = {"model_info": _info(request, model), "capabilities": _capabilities(request, model)}
    return JsonReply(body | shown | told)


async def ps(request: Request) -> Response:
    """List the models that are in memory, for Ollama's clients."""
    opened = _opened(request)
    workers = (worker for _, vectors in opened for worker in vectors.workers)
    left = {id(worker.embedder.model): worker.seconds_left for worker in workers if not worker.is_asleep}
    for service, _ in opened:
        if service is not None and not service.engine.sleep.is_asleep:
            left[id(service.model)] = service.engine.sleep.seconds_left
    loaded = {name: model for name, model in _known(request).items() if id(model) in left}
    shown: list[Fields] = []
    for name, model in loaded.items():
        ends = datetime.now(UTC) + timedelta(seconds=min(left[id(model)], FOR_EVER))
        place = {"size_vram": model.size if model.device else 0, "context_length": _length(request, model)}
        shown.append(_listed(name, model) | place | {"expires_at": _written(ends)})
    return JsonReply({"models": shown})


async def version(request: Request) -> Response:
    """Tell the version of Ollama's API that is spoken here, and of this server."""
    return JsonReply({"version": API_VERSION, "slotcache": VERSION})


async def pull(request: Request, asked: ModelName) -> Response:
    """Do nothing for a model that is served; for another one say how models get here."""
    name = asked.model or asked.name
    try:
        _find(request, name, request.app.state.app.loaded().model)
    except RequestError as error:
        raise RequestError(f"{error.message}; {HERE}", status=error.status, param=error.param, code=error.code) from None
    return Response(encode({"status": "success"}) + b"\n", media_type=NDJSON)


async def refuse(request: Request) -> Response:
    """Refuse to change the models, and say how they get here."""
    raise RequestError(f"this server makes, copies and deletes no models: {HERE}")


def asks_whether_it_runs(request: Request) -> bool:
    """Whether `/` is asked for by a client of Ollama, which takes JSON, and not by a browser."""
    accepted = request.headers.get("accept", "")
    return "application/json" in accepted and "text/html" not in accepted


async def greet(request: Request) -> Response:
    """Tell Ollama's clients that the server runs; there is no page for others."""
    if not asks_whether_it_runs(request):
        raise no_route(request.scope["path"])
    return PlainTextResponse("Ollama is running")


# ---- Answers: a line of JSON for each piece, or one object. -------------------------------------------------------------

Said = dict[str, JsonValue]
"""Content, thinking or a tool call of an answer."""


class OllamaReply:
    """The replies of `/api/chat` and `/api/generate`. has_message: the text stands in a message. began: in s."""

    def __init__(self, envelope: ResponseMeta, began: float, has_message: bool) -> None:
        self.envelope, self._began, self._has_message = envelope, began, has_message
        self._reader = envelope.reader()
        self._probabilities = envelope.probabilities()
        self._unsent: list[Raw] = []  # tokens, for the next line
        self._call: tuple[CallStart, list[str]] | None = None  # that is not whole yet

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
        """Yield the parts that the fragments settle. A call is sent when it is whole; one that is cut is left out."""
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
        """Return an object of the answer. costs: of its last one."""
        said: Fields = {"content" if self._has_message else "response": part.get("content", "")}
        said |= {name: part[name] for name in ("thinking", "tool_calls") if part.get(name)}
        body: Fields = {"model": self.envelope.model, "created_at": _written()}
        body |= {"message": {"role": "assistant"} | said} if self._has_message else said
        if self._unsent:
            body["logprobs"], self._unsent = self._unsent, []
        return body | (costs or {"done": False})

    def _costs(self, end: End) -> Fields:
        """Return the end of an answer: times in ns, and our own `slotcache` beside them."""
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
    """Return what a stream begins with; None for a request that only loads the model."""
    has_message = isinstance(asked, OllamaChatRequest)
    if asked.stream is False or not (asked.messages if has_message else asked.prompt or asked.suffix):
        return None
    return OllamaReply(replace(early_meta(request, asked, ""), media_type=NDJSON), perf_counter(), has_message)


async def chat(request: Request, asked: OllamaChatRequest) -> Response | ReplyFormat:
    """Answer as Ollama's chat does."""
    began = perf_counter()
    name = _check_model(request, asked.model, service_of(request).model, "chat")
    if not asked.messages:
        return _keep_only(request, asked, name, {"message": {"role": "assistant", "content": ""}})
    made = await beside_others(request, asked.chat)
    _note(request, asked)
    return _reply(request, asked, submit(request, await accept(request, made)), began, name)


async def generate(request: Request, asked: GenerateRequest) -> Response | ReplyFormat:
    """Answer as Ollama's generate does."""
    began = perf_counter()
    name = _check_model(request, asked.model, service_of(request).model, "generate")
    if not (asked.prompt or asked.suffix):
        return _keep_only(request, asked, name, {"response": ""})
    made = await beside_others(request, asked.text if asked.is_text else asked.chat)
    _note(request, asked)
    if isinstance(made, TextRequest):
        return _reply(request, asked, await submit_text(request, made), began, name)
    return _reply(request, asked, submit(request, await accept(request, made)), began, name)


def _reply(request: Request, asked: OllamaFields, envelope: ResponseMeta, began: float, name: str) -> OllamaReply:
    """Return the reply of a request that was submitted, under the name that it gave its model."""
    if asked.keep_alive is not None:
        service_of(request).engine.sleep.keep(seconds_of(asked.keep_alive))
    envelope = replace(envelope, model=name, media_type=NDJSON)
    return OllamaReply(envelope, began, has_message=isinstance(asked, OllamaChatRequest))


def _keep_only(request: Request, asked: OllamaFields, name: str, said: Fields) -> Response:
    """Answer a request that asks nothing: it loads the model, or with a keep_alive of 0 lets it sleep."""
    asked.check()
    _note(request, asked)
    sleep, seconds = service_of(request).engine.sleep, None if asked.keep_alive is None else seconds_of(asked.keep_alive)
    if seconds != 0:
        sleep.bring()
    if seconds is not None:
        sleep.keep(seconds)
    body: Fields = {"model": name, "created_at": _written()} | said
    return JsonReply(body | {"done": True, "done_reason": "unload" if seconds == 0 else "load"} | _notes(request))


def _note(request: Request, asked: OllamaFields) -> None:
    """Warn of what a request does not get. Raises RequestError for a duration that is none."""
    service = service_of(request)
    limit, wanted = service.submitter.limit, asked.options.num_ctx if asked.options else None
    if wanted is not None and wanted > limit:
        warn(request, [f"options.num_ctx is {wanted:,}: a request may have {limit:,} tokens here, and -c sets how many"])
    if asked.keep_alive is not None:
        _warn_of_staying(request, seconds_of(asked.keep_alive), service.engine.sleep.can_sleep)


def _warn_of_staying(request: Request, seconds: float, can_sleep: bool) -> None:
    if seconds != inf and not can_sleep:
        warn(request, ["keep_alive has no effect: the model stays in memory, unless --sleep-idle-seconds lets it sleep"])


def _notes(request: Request) -> Fields:
    return {"warnings": request.state.warnings} if request.state.warnings else {}


async def embed(request: Request, asked: EmbedRequest) -> Response:
    """Return the vectors of texts as Ollama does."""
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    made = EmbeddingRequest(input=texts if asked.input else [], truncate=asked.truncate, dimensions=asked.dimensions or None)
    return await _embed(request, asked, made, b'"embeddings":[%b]')


async def embed_one(request: Request, asked: OldEmbedRequest) -> Response:
    """Return the vector of a text as Ollama's older route does, at the length that the model gave it."""
    made = EmbeddingRequest(input=[asked.prompt] if asked.prompt else [], truncate=True, embd_normalize=-1)
    return await _embed(request, asked, made, b'"embedding":%b')


async def _embed(request: Request, asked: EmbedRequest | OldEmbedRequest, made: EmbeddingRequest, field: bytes) -> Response:
    """Answer with the vectors of `made`. field: of the answer, which holds them."""
    began, worker = perf_counter(), pooled(vectors_of(request))
    name = _check_model(request, asked.model, worker.embedder.model, "embed")
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
