"""OpenAI's Responses: the input items become a chat, and the answer becomes output items and events."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import time
from typing import Literal

import msgspec
from msgspec import Raw
from msgspec import field as struct_field
from starlette.requests import Request
from starlette.responses import Response

from ..chat.body import ConversationReference, OpenAIFields, ResponseChat, TextConfig, TextFormat
from ..chat.content import INPUT
from ..chat.reasoning import Count, ReasoningField
from ..chat.sampling_fields import JsonValue
from ..chat.shortened_history import kept
from ..engine.generation import Delta, End, PromptProgress
from ..engine.usage import Fields
from ..formats.answer import CallArguments, CallStart, ContentText, Fragment, ReasoningText
from ..http.api_errors import TOO_LONG, RequestError
from ..service.submitter import Prepared
from .compaction import CUT, TRIGGER, CompactionOutput, compaction, kept_items, summarising, triggers
from .endpoint import (
    answer_service_of,
    begin_answer,
    beside_others,
    count_prompt,
    early_meta,
    not_stored,
    page,
    prepare,
    scope_of,
    service_of,
    stored_record,
    warn,
)
from .reply import JsonReply, ReplyFormat, ResponseMeta, WholeAnswer, accounts, encode, seal, sse_event
from .response_items import PREFIXES, items_of, take_items
from .response_tools import CalledTool, FreeText, ResponseTools
from .stream import early_of

INCLUDABLE = {
    "reasoning.encrypted_content",
    # Accepted without effect, since this server runs no tools that have such results:
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
}


class ReasoningConfig(ReasoningField, frozen=True):
    """The field `reasoning`. summary: if set, the reasoning is sent as a summary; None: it is sent as `reasoning_text`."""

    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # the former name of `summary`


class ResponseRequest(OpenAIFields, frozen=True, kw_only=True):
    """`POST /v1/responses`: OpenAI's fields, the fields of all completions, and this server's fields of a chat."""

    input: str | list[JsonValue]
    tools: list[JsonValue] | None = None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    context_management: list[JsonValue] | None = None
    background: bool | None = None
    prompt: dict[str, JsonValue] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None

    def check(self) -> None:
        super().check()
        unknown = next((name for name in self.include or () if name not in INCLUDABLE), None)
        for is_wrong, param, message in (
            (self.background, "background", "background is not supported: leave it out, and stream"),
            (self.prompt, "prompt", "prompt names a template that this server does not have: send input and instructions"),
            (self.logprobs or self.n_probs, "logprobs", "a response has no logprobs: leave them out"),
            ((self.n or 1) > 1, "n", "a response is one answer: leave n out"),
            (unknown, "include", f"include names {reprlib.repr(unknown)}: expected some of {', '.join(sorted(INCLUDABLE))}"),
        ):
            if is_wrong:
                raise RequestError(message, param=param)

    def warnings(self) -> Iterator[str]:
        yield from super().warnings()
        yield from ResponseTools.of(self.tools).warnings(self.tool_choice)
        if self.store and self.compacts:
            yield "store has no effect: a compaction is not stored; send its item with the next input"

    def unused(self) -> tuple[str, ...]:
        about = "context_management has no effect: nothing is left out of a prompt"
        return (*super().unused(), *[about] * bool(self.context_management))

    @property
    def compacts(self) -> bool:
        """Whether the request asks for a summary that shortens the input."""
        return triggers(self.input)

    @property
    def stores(self) -> bool:
        return self.store is not False and not self.compacts

    @property
    def summarises(self) -> bool:
        """Whether reasoning is sent as summaries."""
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)

    @property
    def seals(self) -> bool:
        """Whether reasoning is also sent as `encrypted_content`."""
        return "reasoning.encrypted_content" in (self.include or ())

    def chat(self) -> tuple[ResponseChat, tuple[str, ...]]:
        """Return the request as a chat, and warnings about input that the chat leaves out. Raises RequestError."""
        self.check()
        shared = {name: getattr(self, name) for name in OpenAIFields.__struct_fields__}
        if self.max_output_tokens is not None:
            shared["max_tokens"] = self.max_output_tokens
        if self.text and self.text.format:
            if self.response_format:
                raise RequestError("text.format and response_format: send one of them", param="response_format")
            shared["response_format"] = self.text.format.for_chat()
        taken = take_items([self.input] if isinstance(self.input, str) else self.input)
        if not taken.messages:
            raise RequestError("input has nothing for the model: expected at least one message or result", param="input")
        shared["messages"] = taken.messages
        shared |= {"conversation": self._conversation(), "store": self.stores}
        tools = ResponseTools.of(self.tools)
        shared |= {"tools": tools.functions, "tool_choice": tools.choice(self.tool_choice)}
        chat = ResponseChat(**shared, instructions=self.instructions)
        chat, warnings = summarising(chat) if self.compacts else (chat, ())
        return chat, (*taken.warnings(), *warnings)

    def echo(self) -> dict[str, Raw]:
        """Return the fields that a response repeats from its request, as JSON."""
        format = self.text.format if self.text and self.text.format else TextFormat("text")
        repeated: dict[str, JsonValue] = {
            "background": False,
            "conversation": {"id": named.id} if (named := self._conversation()) else None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {
                "effort": self.reasoning.effort if self.reasoning else None,
                "summary": (self.reasoning.summary or self.reasoning.generate_summary) if self.reasoning else None,
            },
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.stores,
            "temperature": self.temperature,
            "text": {"format": {name: value for name, value in msgspec.to_builtins(format).items() if value is not None}},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }
        return {name: Raw(msgspec.json.encode(value)) for name, value in repeated.items()}

    def _conversation(self) -> ConversationReference | None:
        """Return the conversation that the request names; None if it names none. The input continues the conversation."""
        if self.conversation is None:
            return None
        named = self.conversation
        return ConversationReference(named if isinstance(named, str) else named.id, "new")


class ResponseCountRequest(ResponseRequest, frozen=True, kw_only=True):
    """`POST /v1/responses/input_tokens`."""

    input: str | list[JsonValue] = struct_field(default_factory=list)


class CompactRequest(ResponseCountRequest, frozen=True, kw_only=True):
    """`POST /v1/responses/compact`. input: the items to shorten; they follow the history of `previous_response_id`."""


async def count(request: Request, asked: ResponseCountRequest) -> Response:
    """Count the tokens of a response's prompt."""
    chat, warnings = await beside_others(request, asked.chat)
    warn(request, warnings)
    return JsonReply({"object": "response.input_tokens"} | await count_prompt(request, chat))


# ---- The output items of a response and their events, made from the fragments of an answer. -----------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemKind:
    """A kind of output item.

    text: the common prefix of the names of the events that send the item's text.
    field: the item's field for the text; for a kind with parts, the item's field for the parts.
    part: the type of the part with the text; empty: the item has no parts.
    parts: the common prefix of the names of the events that begin and end a part.
    """

    name: str
    text: str
    field: str
    part: str = ""
    parts: str = "response.content_part"

    @property
    def prefix(self) -> str:
        return PREFIXES[self.name]

    @property
    def index(self) -> str:
        """The name of the field that has the part's index in an event."""
        return f"{self.field}_index"


MESSAGE = ItemKind(name="message", text="response.output_text", field="content", part="output_text")
THOUGHT = ItemKind(name="reasoning", text="response.reasoning_text", field="content", part="reasoning_text")
SUMMARY = ItemKind(
    name="reasoning",
    text="response.reasoning_summary_text",
    field="summary",
    part="summary_text",
    parts="response.reasoning_summary_part",
)
CALL = ItemKind(name="function_call", text="response.function_call_arguments", field="arguments")
CUSTOM = ItemKind(name="custom_tool_call", text="response.custom_tool_call_input", field=INPUT)


@dataclass(slots=True)
class _Item:
    """One output item.

    named: the fields of a call except its arguments. seals: whether reasoning is also sent as a sealed copy.
    """

    kind: ItemKind
    id: str
    named: Fields
    seals: bool
    texts: list[str] = field(default_factory=list)

    def begin(self) -> Iterator[Fields]:
        yield {"type": "response.output_item.added", "item": self.shown("in_progress", parts=[])}
        if self.kind.part:
            yield self._event(f"{self.kind.parts}.added") | {"part": self._part("")}

    def add(self, text: str) -> Iterator[Fields]:
        self.texts.append(text)
        yield self._event(f"{self.kind.text}.delta") | {"delta": text} | self._logprobs()

    def end(self, status: str) -> Iterator[Fields]:
        text = "".join(self.texts)
        done: Fields = {"text" if self.kind.part else self.kind.field: text}
        if self.kind is CALL:
            done["name"] = self.named["name"]
        yield self._event(f"{self.kind.text}.done") | done | self._logprobs()
        if self.kind.part:
            yield self._event(f"{self.kind.parts}.done") | {"part": self._part(text)}
        yield {"type": "response.output_item.done", "item": self.shown(status, parts=[self._part(text)])}

    def shown(self, status: str, parts: list[Fields]) -> Fields:
        """Return the item as an object. parts: the item's parts with their text; empty when the item begins."""
        item: Fields = {"type": self.kind.name, "id": self.id, "status": status}
        if self.kind is MESSAGE:
            return item | {"role": "assistant", "content": parts}
        if self.kind in (CALL, CUSTOM):
            return item | self.named | {self.kind.field: "".join(self.texts)}
        sealed = {"encrypted_content": seal("".join(self.texts))} if self.seals and parts else {}
        return item | {"summary": [], "content": []} | {self.kind.field: parts} | sealed

    def _part(self, text: str) -> Fields:
        part: Fields = {"type": self.kind.part, "text": text}
        return part | {"annotations": [], "logprobs": []} if self.kind is MESSAGE else part

    def _event(self, name: str) -> Fields:
        event: Fields = {"type": name, "item_id": self.id}
        return event | {self.kind.index: 0} if self.kind.part else event

    def _logprobs(self) -> Fields:
        return {"logprobs": []} if self.kind is MESSAGE else {}


class Output:
    """Builds the items of one response.

    suffix: the part of the items' ids before their number.
    summarises: whether reasoning is sent as summaries.
    seals: whether reasoning is also sent as a sealed copy.
    called: a mapping from a function's name in the chat to its tool, of the tools whose calls are no function calls in this
        API.
    """

    def __init__(
        self, suffix: str, *, summarises: bool, seals: bool, called: Mapping[str, CalledTool] | None = None
    ) -> None:
        self.items: list[Fields] = []
        self._suffix, self._seals, self._called = suffix, seals, called or {}
        self._free_text = FreeText()  # the free text of the open call
        self._reasoning = SUMMARY if summarises else THOUGHT
        self._open: _Item | None = None

    def status(self, end: End) -> str:
        """Return the final status of the response."""
        return "incomplete" if end.reason == "length" else "completed"

    def push(self, fragment: Fragment) -> Iterator[Fields]:
        match fragment:
            case ContentText(text):
                yield from self._write(MESSAGE, text)
            case ReasoningText(text):
                yield from self._write(self._reasoning, text)
            case CallStart(_, id, name):
                tool = self._called.get(name) or CalledTool(name)
                self._free_text = FreeText()
                yield from self._begin(CUSTOM if tool.is_custom else CALL, {"call_id": id} | tool.named())
            case CallArguments(_, text) if self._open is not None and self._open.kind is CUSTOM:
                if said := self._free_text.push(text):
                    yield from self._write(CUSTOM, said)
            case CallArguments(_, text):
                yield from self._write(CALL, text)

    def finish(self, status: str) -> Iterator[Fields]:
        """Yield the last events. If there are no items, add an empty message. status: the status of the last item."""
        if self._open is None and not self.items:
            yield from self._begin(MESSAGE)
        yield from self._end(status)

    def _write(self, kind: ItemKind, text: str) -> Iterator[Fields]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        assert self._open is not None
        yield from self._numbered(self._open.add(text))

    def _begin(self, kind: ItemKind, named: Fields | None = None) -> Iterator[Fields]:
        yield from self._end("completed")
        self._open = _Item(kind, f"{kind.prefix}_{self._suffix}_{len(self.items)}", named or {}, self._seals)
        yield from self._numbered(self._open.begin())

    def _end(self, status: str) -> Iterator[Fields]:
        if self._open is None:
            return
        if self._open.kind is CUSTOM and (rest := self._free_text.finish()):
            yield from self._numbered(self._open.add(rest))
        for event in self._numbered(self._open.end(status)):
            yield event
        self.items.append(event["item"])  # pyright: ignore
        self._open = None

    def _numbered(self, events: Iterator[Fields]) -> Iterator[Fields]:
        for event in events:
            yield event | {"output_index": len(self.items)}


# ---- OpenAI's `response`, whole and as a stream of events. --------------------------------------------------------------


class ResponsesReply:
    """The replies of `/v1/responses`.

    echo: the fields that a response repeats from its request. num_events: the number of events sent so far.
    """

    def __init__(
        self,
        envelope: ResponseMeta,
        echo: Mapping[str, Raw],
        output: Output | CompactionOutput,
        *,
        num_events: int = 0,
    ) -> None:
        self.envelope, self._reader, self._echo = envelope, envelope.reader(), echo
        self._output, self.num_events = output, num_events
        self._length = self._reasoning = 0  # characters of the answer so far, and of its reasoning

    def begin(self) -> list[bytes]:
        return [] if self.num_events else self.ping()

    def ping(self) -> list[bytes]:
        first = [] if self.num_events else [self._event({"type": "response.created"} | self._now("in_progress"))]
        return [*first, self._event({"type": "response.in_progress"} | self._now("in_progress"))]

    def progress(self, index: int, progress: PromptProgress) -> list[bytes]:
        event = {"type": "response.in_progress"} | self._now("in_progress") | self.envelope.progress(progress)
        return [self._event(event)]

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        self._length += len(delta.text)
        events = self._read(self._reader.push(delta.text))
        if events:
            events[-1] |= self.envelope.times(index, delta)
        return self._events(events)

    def end(self, index: int, end: End) -> list[bytes]:
        return self._events([*self._read(self._reader.finish(end.is_cut)), *self._output.finish(self._output.status(end))])

    def close(self, ends: Sequence[End]) -> list[bytes]:
        (end,) = ends
        response, status = self._finished(end), self._output.status(end)
        self.envelope.keep(encode(response))
        return [self._event({"type": f"response.{status}", "response": response, "timings": response["timings"]})]

    def fail(self, error: RequestError) -> list[bytes]:
        reason = {"code": error.code if error.code == TOO_LONG else error.type, "message": error.message}
        failed = self._response("failed") | {"error": reason}
        return [self._event({"type": "response.failed", "response": failed})]

    def whole(self, answers: Sequence[WholeAnswer]) -> Fields:
        (answer,) = answers
        for delta in answer.deltas:
            self.delta(0, delta)
        self.end(0, answer.end)
        return self._finished(answer.end)

    def _read(self, fragments: Sequence[Fragment]) -> list[Fields]:
        self._reasoning += sum(len(fragment.text) for fragment in fragments if isinstance(fragment, ReasoningText))
        return [event for fragment in fragments for event in self._output.push(fragment)]

    def _finished(self, end: End) -> Fields:
        report, status = end.report, self._output.status(end)
        usage = {
            "input_tokens": report.num_prompt,
            "input_tokens_details": {
                "cached_tokens": report.num_cached,
                "cache_write_tokens": (report.num_prompt - report.num_cached) * self.envelope.caches,
            },
            "output_tokens": report.num_generated,
            # An estimate from the share of reasoning in the text: it is unknown which token wrote which part.
            "output_tokens_details": {"reasoning_tokens": report.num_generated * self._reasoning // max(self._length, 1)},
            "total_tokens": report.num_prompt + report.num_generated,
        }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        done = {"completed_at": int(time()) if status == "completed" else None, "incomplete_details": details}
        return self._response(status) | done | {"usage": usage} | accounts(report) | self.envelope.notes()

    def _now(self, status: str) -> Fields:
        return {"response": self._response(status)}

    def _response(self, status: str) -> Fields:
        envelope = self.envelope
        return {
            "id": envelope.id,
            "object": "response",
            "created_at": envelope.created,
            "completed_at": None,
            "model": envelope.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._output.items,
            "usage": None,
            **self._echo,
        }

    def _events(self, events: Iterable[Fields]) -> list[bytes]:
        return [self._event(body) for body in events]

    def _event(self, body: Fields) -> bytes:
        self.num_events += 1
        return sse_event(body | {"sequence_number": self.num_events - 1}, str(body["type"]))


class CompactionReply(ResponsesReply):
    """The reply to a compaction.

    kept: the messages that precede the summary in the body of `/v1/responses/compact`; None for `/v1/responses`, whose
        body has only the summary.
    num_documents: the number of documents in the stored messages among `kept`. The body has the texts of the kept
        messages, but not these documents.
    """

    kept: Sequence[Fields] | None = None
    num_documents = 0

    def whole(self, answers: Sequence[WholeAnswer]) -> Fields:
        response = super().whole(answers)
        return response if self.kept is None else compaction(response, self.kept)

    def _finished(self, end: End) -> Fields:
        more = [CUT] if end.reason == "length" else []
        if self.num_documents:
            more.append(
                f"{self.num_documents} documents of the stored history are not in its shortened form: send them again"
            )
        return super()._finished(end) | ({"warnings": (*self.envelope.warnings, *more)} if more else {})


# ---- The routes that create, show and delete responses. -----------------------------------------------------------------


def opening(request: Request, asked: ResponseRequest) -> ReplyFormat | None:
    if not asked.stream:
        return None
    meta = early_meta(request, asked, "resp_")
    return ResponsesReply(meta, asked.echo(), _output(asked, meta.id))


def _output(asked: ResponseRequest, id: str, called: Mapping[str, CalledTool] | None = None) -> Output | CompactionOutput:
    """Return an output without items, for the response with this id. called: see `Output`."""
    suffix = id.removeprefix("resp_")
    if asked.compacts:
        return CompactionOutput(suffix)
    return Output(suffix, summarises=asked.summarises, seals=asked.seals, called=called)


async def create(request: Request, asked: ResponseRequest) -> ReplyFormat:
    """Answer a request of OpenAI's Responses. The answer is stored unless `store` is false."""
    return (await _submitted(request, asked))[0]


async def _submitted(request: Request, asked: ResponseRequest) -> tuple[ResponsesReply, Prepared]:
    (chat, warnings), echo = await beside_others(request, lambda: (asked.chat(), asked.echo()))
    warn(request, warnings)
    prepared = await prepare(request, chat, kind="resp_")
    keep = partial(service_of(request).conversations.attach, chat.cache_scope, prepared.id)
    envelope = replace(begin_answer(request, prepared), keep=keep)
    output = _output(asked, envelope.id, ResponseTools.of(asked.tools).called)
    early = early_of(request)
    kind = CompactionReply if asked.compacts else ResponsesReply
    num_events = early.num_events if isinstance(early, ResponsesReply) else 0
    return kind(envelope, echo, output, num_events=num_events), prepared


async def compact(request: Request, asked: CompactRequest) -> ReplyFormat:
    """Shorten a history: keep its user and system messages, and summarise it.

    Later requests send the kept messages and the summary instead of the whole history.
    """
    if asked.stream:
        wrong = f"stream: this route does not stream; /v1/responses streams a compaction if its input ends with a {TRIGGER}"
        raise RequestError(wrong, param="stream")
    items = [asked.input] if isinstance(asked.input, str) else asked.input
    asked = asked if asked.compacts else msgspec.structs.replace(asked, input=[*items, {"type": TRIGGER}])
    reply, prepared = await _submitted(request, asked)
    assert isinstance(reply, CompactionReply) and prepared.turn is not None
    chat, suffix = prepared.turn.chat, prepared.id.removeprefix("resp_")
    stored = list(kept(chat.entries[: chat.num_kept]))
    reply.kept = [*items_of([entry.message for entry in stored], suffix), *kept_items(items, suffix)]
    reply.num_documents = len({key for entry in stored for key in entry.keys})
    return reply


async def show(request: Request) -> Response:
    """Show a stored response (`?scope=`)."""
    id, scope = request.path_params["id"], scope_of(request)
    return JsonReply(stored_record(answer_service_of(request, scope, id), scope, id, "resp_"))


async def forget(request: Request) -> Response:
    """Delete a stored response. Responses that continue the deleted response keep its text in their history."""
    id, scope = request.path_params["id"], scope_of(request)
    service = answer_service_of(request, scope, id)
    if not service.conversations.forget_answer(scope, id):
        raise not_stored(id)
    await service.view.disk_thread.run(service.conversations.settle)
    return JsonReply({"id": id, "object": "response", "deleted": True})


async def cancel(request: Request) -> Response:
    """Refuse to cancel a response. Only background responses can be cancelled, and this server has none.

    A client cancels a response by closing the connection.
    """
    raise RequestError("this response is not in the background: close its connection to cancel it", param="id")


async def input_items(request: Request) -> Response:
    """List the input items of a stored response, including the items of earlier turns."""
    id, scope = request.path_params["id"], scope_of(request)
    conversation = answer_service_of(request, scope, id).conversations.find_answer(scope, id)
    if conversation is None:
        raise not_stored(id)
    *before, _ = conversation.answers[id]
    messages = [entry.message for entry in before if not entry.one_turn]
    record = msgspec.json.decode(conversation.records.get(id, b"{}"))
    items = items_of(messages, id.removeprefix("resp_"), ResponseTools.of(record.get("tools")).called)
    return JsonReply(page(items, request))
