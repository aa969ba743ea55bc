"""Anthropic's Messages: a request becomes a chat, and the answer becomes content blocks and events."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar, Literal

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ...ordering.document import Document, DocumentError
from ...ordering.prompt import document_text
from ..chat.body import ChatFields, ChatRequest, OutputConfig
from ..chat.content import seconds_of
from ..chat.decode import ToolChoiceFields
from ..chat.parts import ROLES, read_part, texts_in, unsupported
from ..chat.reasoning import SWITCH
from ..chat.sampling_fields import JsonValue
from ..engine.generation import Delta, End, PromptProgress
from ..engine.usage import Fields
from ..formats.answer import CallArguments, CallStart, ContentText, Fragment, ReasoningText, decoded_arguments
from ..http.api_errors import RequestError
from .endpoint import begin_answer, beside_others, count_prompt, early_meta, prepare
from .reply import JsonReply, ReplyFormat, ResponseMeta, WholeAnswer, seal, sse_event, unseal
from .stream import early_of

# ---- Content blocks of Anthropic's Messages, and the chat messages made from them. --------------------------------------

ChatMessages = list[dict[str, JsonValue]]
FAILED = "Error: "  # precedes the result of a tool that failed, since templates have no field for failures


class CacheControl(Struct, frozen=True):
    """A point up to which a prompt may be cached. ttl: how long the prompt is pinned; None: it is not pinned."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class BlocksMessage(Struct, frozen=True):
    """A message of the user or of the model. A message of the user may have the results of tools.

    content: a text or content blocks. Another server may have made the blocks of an earlier answer.
    documents: as in a message of a chat.
    """

    role: JsonValue = None
    content: JsonValue = ""
    documents: list[JsonValue] | None = None


def messages_of(said: Sequence[BlocksMessage], orders_documents: bool) -> ChatMessages:
    """Return the messages in the form of a chat. Raises RequestError.

    Blocks that are not converted here, such as images, stay in the contents: `content.take` reads them later.

    orders_documents: if true, a block with a document becomes a document that may be reordered; if false, the block
        becomes a text.
    """
    messages: ChatMessages = []
    for at, message in enumerate(said):
        where = f"messages[{at}]"
        content = [message.content] if isinstance(message.content, dict) else message.content
        if at == len(said) - 1:
            _check_question(message.role, content, where)
        if not isinstance(content, list):
            made: ChatMessages = [{"role": message.role, "content": "" if content is None else content}]
        elif message.role == "assistant":
            made = [_answer(content)]
        else:
            made = list(_request(message.role, content, orders_documents))
        if made and isinstance(content, list):
            made[-1] |= _mark(content)
        messages += made if message.documents is None else _with_documents(made, message, where)
    return messages


def _check_question(role: JsonValue, content: JsonValue, where: str) -> None:
    """Raise RequestError if the last message has an unknown role, or if it is the user's and has an unreadable block."""
    if role not in ROLES:
        expected, got = ", ".join(ROLES), reprlib.repr(role)
        raise RequestError(f"{where}.role is {got}: expected one of {expected}", param=f"{where}.role")
    if role == "user" and not isinstance(content, str | list | None):
        raise RequestError(f"{where}.content: expected a text or a list of blocks", param=f"{where}.content")
    for at, block in enumerate(content if role == "user" and isinstance(content, list) else ()):
        place, kind = f"{where}.content[{at}]", _kind(block)
        document = _document(block)
        if document is not None:
            _parsed(document, place)
        elif kind != "tool_result" and read_part(block).kind:
            raise RequestError(f"{place}.type is {reprlib.repr(kind)}: {unsupported(str(kind))}", param=f"{place}.type")


def _kind(block: JsonValue) -> JsonValue:
    return block.get("type") if isinstance(block, dict) else None


def _with_documents(messages: ChatMessages, said: BlocksMessage, where: str) -> ChatMessages:
    """Add the `documents` of the message `said` to the chat's messages that were made from it. Raises RequestError.

    The documents go to the last of the made messages that has the role of `said`. If only tool results were made, the
    documents go to the last tool result.
    """
    messages = messages or [{"role": said.role, "content": ""}]
    carrier = next((message for message in reversed(messages) if message["role"] == said.role), messages[-1])
    if said.documents and carrier.get("documents"):
        raise RequestError(f"{where}.documents: blocks have documents, too: give one of them", param=f"{where}.documents")
    carrier["documents"] = said.documents or carrier.get("documents", [])
    return messages


BILLING = re.compile(r"(x-anthropic-billing-header:)(?:[ \t]{0,8}\w{1,64}=[^;\s]{0,256}(?:;|(?=\s|$))){1,32}")


def system_text(system: str | list[JsonValue]) -> JsonValue:
    """Return the content of the system message."""
    if isinstance(system, str):
        return _same_bill(system)
    return _parts([block if (text := _text(block)) is None else _same_bill(text) for block in system])


def _same_bill(text: str) -> str:
    """Return a text of the system prompt. If the text starts with Claude Code's billing line, drop the values of this line.

    The values of the billing line change with each session and each request, so the KV of all later tokens could never be
    reused.
    """
    return BILLING.sub(r"\1", text, count=1) if BILLING.match(text) else text


def _mark(blocks: Sequence[JsonValue]) -> dict[str, JsonValue]:
    """Return the field that marks the end of a message for the cache, if any of its blocks has `cache_control`.

    If several blocks have a `cache_control`, return the one with the longest `ttl`.
    """
    results = (block.get("content") for block in blocks if isinstance(block, dict) and _kind(block) == "tool_result")
    within = [*blocks, *chain.from_iterable(content for content in results if isinstance(content, list))]
    longest = max(_controls(within), key=lambda control: seconds_of(control.get("ttl")), default=None)
    return {} if longest is None else {"cache_control": longest}


def _controls(blocks: Iterable[JsonValue]) -> Iterator[dict[str, JsonValue]]:
    for block in blocks:
        if not isinstance(block, dict):
            continue
        if isinstance(control := block.get("cache_control"), dict):
            yield control


def _answer(blocks: Sequence[JsonValue]) -> dict[str, JsonValue]:
    """Return the blocks of an answer as one message of the model."""
    parts: list[JsonValue] = []
    reasoning: list[str] = []
    calls: list[dict[str, JsonValue]] = []
    for block in blocks:
        match block:
            case {"type": "thinking"}:
                reasoning.append(_thought(block))
            case {"type": "tool_use"}:
                calls.append({name: value for name, value in block.items() if name != "cache_control"})
            case None | {"type": "redacted_thinking"}:
                pass
            case _:
                parts.append(block if (text := _text(block)) is None else text)
    message: dict[str, JsonValue] = {"role": "assistant", "content": _parts(parts) if any(parts) or not calls else None}
    if any(reasoning):
        message["reasoning_content"] = "\n\n".join(filter(None, reasoning))
    return message | ({"tool_calls": calls} if calls else {})


def _thought(block: dict[str, JsonValue]) -> str:
    """Return the reasoning in a block. If the block has no text, return the text that is sealed in its signature."""
    text, sealed = block.get("thinking"), block.get("signature")
    if isinstance(text, str) and text:
        return text
    return unseal(sealed) if isinstance(sealed, str) else texts_in(text)


def _is_lost(block: JsonValue) -> bool:
    """Return whether the reasoning of a block is lost: the block has no text, and its signature cannot be unsealed."""
    return isinstance(block, dict) and _kind(block) == "thinking" and bool(block.get("signature")) and not _thought(block)


def _request(role: JsonValue, blocks: Sequence[JsonValue], orders_documents: bool) -> Iterator[dict[str, JsonValue]]:
    """Yield a user's blocks as messages.

    Each tool result becomes a message, and so does each stretch of other blocks before, between or after the results.
    """
    parts: list[JsonValue] = []
    documents: list[dict[str, str]] = []

    def spoken() -> Iterator[dict[str, JsonValue]]:
        if parts or documents:
            said: dict[str, JsonValue] = {"role": role, "content": _parts(parts)}
            yield said | ({"documents": documents.copy()} if documents else {})
        parts.clear()
        documents.clear()

    for block in blocks:
        if isinstance(block, dict) and _kind(block) == "tool_result":
            yield from spoken()
            yield _result(block, orders_documents)
        else:
            _take(block, parts, documents if orders_documents else None)
    yield from spoken()


def _result(block: dict[str, JsonValue], orders_documents: bool) -> dict[str, JsonValue]:
    """Return the message for a tool result, with the result's documents."""
    content = block.get("content")
    documents, parts = list[dict[str, str]](), list[JsonValue]()
    for one in content if isinstance(content, list) else [content]:
        _take(one, parts, documents if orders_documents else None)
    if block.get("is_error") is True:
        first = parts[0] if parts and isinstance(parts[0], str) else ""
        parts = [FAILED + first, *parts[bool(first) :]]
    message = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _parts(parts)}
    return message | ({"documents": documents} if documents else {})


def _take(block: JsonValue, parts: list[JsonValue], documents: list[dict[str, str]] | None) -> None:
    """Add a block to the parts of its message, or a document to the list `documents`.

    If `documents` is None, a document is added to the parts, as text.
    """
    if block is None:
        return
    document = _document(block)
    shown = None if document is None else _shown(document)
    if shown is None:
        parts.append(block if (text := _text(block)) is None else text)
    elif documents is None:
        parts.append(shown)
    else:
        assert document is not None
        documents.append(document)


def _text(block: JsonValue) -> str | None:
    """Return the text of a block of type text; None for any other block."""
    match block:
        case str(text) | {"type": "text", "text": str(text)}:
            return text
    return None


def _document(block: JsonValue) -> dict[str, str] | None:
    """Return the document in a block; None if the block has none, or if the document is not text."""
    match block:
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            pass
        case {"type": "document", "source": {"type": "content", "content": content}}:
            text = _joined(content)
        case {"type": "search_result", "content": content}:
            text = _joined(content)
        case _:
            return None
    title, context, source = (block.get(name) for name in ("title", "context", "source"))
    text = f"{context}\n\n{text}" if isinstance(context, str) else text
    made = {"text": text, "title": title if isinstance(title, str) else ""}
    return made | ({"id": source} if isinstance(source, str) else {})


def _joined(content: JsonValue) -> str:
    parts = content if isinstance(content, list) else [content]
    return "\n".join(text for part in parts if (text := read_part(part).text))


def _shown(document: dict[str, str]) -> str | None:
    """Return the text that a document has in a prompt; None if the document is invalid."""
    try:
        return document_text(Document.parse(document))
    except DocumentError:
        return None


def _parsed(document: dict[str, str], where: str) -> None:
    """Raise RequestError if a document is invalid."""
    try:
        Document.parse(document, where)
    except DocumentError as error:
        raise RequestError(str(error), param=error.where) from None


def _parts(parts: Sequence[JsonValue]) -> JsonValue:
    """Return the content of a message that consists of `parts`, each of which is a text or another part.

    If `parts` is empty or a single text, the content is a text. Any other content is a list of parts.
    """
    if not parts or (len(parts) == 1 and isinstance(parts[0], str)):
        return parts[0] if parts else ""
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


class ClientTool(Struct, frozen=True, kw_only=True):
    """A tool that the client runs."""

    name: str = ""
    input_schema: dict[str, JsonValue] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None

    def for_chat(self, where: str) -> dict[str, JsonValue]:
        """Return the tool in the form of a chat. Raises RequestError.

        If Anthropic's servers run the tool, return only its type: a tool of this kind has a type but no schema.
        """
        if self.input_schema is None:
            if self.type in (None, "custom"):
                raise RequestError(f"{where}.input_schema: expected a JSON schema", param=f"{where}.input_schema")
            return {"type": self.type}
        given = {"name": self.name, "description": self.description, "parameters": self.input_schema, "strict": self.strict}
        mark = {} if self.cache_control is None else {"cache_control": msgspec.to_builtins(self.cache_control)}
        return {"type": "function", "function": {name: value for name, value in given.items() if value is not None}} | mark


class MessagesChoiceFields(ToolChoiceFields):
    """The fields of `tool_choice` in Messages. `disable_parallel_tool_use` allows only one call in an answer."""

    disable_parallel_tool_use: JsonValue = None


class MessagesCountRequest(ChatFields, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`: the fields that determine the prompt."""

    OPEN: ClassVar[Mapping[str, type[Struct]]] = {"tool_choice": MessagesChoiceFields}

    messages: list[BlocksMessage]
    system: str | list[JsonValue] = ""
    tools: list[ClientTool] | None = None
    tool_choice: str | dict[str, JsonValue] | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    stop_sequences: list[str] | None = None
    context_management: dict[str, JsonValue] | None = None
    container: JsonValue = None
    metadata: dict[str, JsonValue] | None = None
    service_tier: str | None = None

    def check(self) -> None:
        super().check()
        for is_wrong, param, message in (
            ((self.n or 1) > 1, "n", "an answer is one message: leave n out"),
            (self.logprobs or self.n_probs, "logprobs", "a message has no logprobs: leave them out"),
            (self.container, "container", "containers are not supported: leave it out"),
        ):
            if is_wrong:
                raise RequestError(message, param=param)

    def warnings(self) -> Iterator[str]:
        yield from super().warnings()
        contents = (said.content for said in self.messages if said.role == "assistant" and isinstance(said.content, list))
        if lost := sum(map(_is_lost, chain.from_iterable(contents))):
            yield f"messages: reasoning with a damaged seal, or another server's seal, was left out: thinking ({lost})"

    def unused(self) -> tuple[str, ...]:
        edits = (self.context_management or {}).get("edits") or []
        if isinstance(edits, list) and all(map(_is_about_reasoning, edits)):
            return super().unused()
        about = "context_management has no effect: the chat template decides which reasoning a prompt has; all else stays"
        return (*super().unused(), about)

    def chat(self) -> ChatRequest:
        """Return the request as a chat. Raises RequestError."""
        self.check()
        shared = {name: getattr(self, name) for name in ChatFields.__struct_fields__}
        shared["chat_template_kwargs"] = self._variables() | self.chat_template_kwargs
        if self.thinking:
            shared["thinking"] = msgspec.structs.replace(self.thinking, display=None)  # `MessagesReply` seals it
        if self.stop_sequences:
            shared["stop"] = [*self.stops(), *self.stop_sequences]
        if self.output_config and self.output_config.format:
            if self.response_format:
                raise RequestError("output_config.format and response_format: send one of them", param="response_format")
            schema = {"name": "answer", "schema": self.output_config.format.schema}
            shared["response_format"] = {"type": "json_schema", "json_schema": schema}
        mark = _mark(self.system) if isinstance(self.system, list) else {}
        system = [{"role": "system", "content": system_text(self.system)} | mark] if self.system else []
        messages = messages_of(self.messages, self._orders_documents)
        if not messages:
            raise RequestError("messages is empty: expected at least one", param="messages")
        return ChatRequest(
            **shared,
            messages=[*system, *messages],
            echo=False,
            cache_control=msgspec.to_builtins(self.cache_control),
            tools=[tool.for_chat(f"tools[{at}]") for at, tool in enumerate(self.tools or ())] or None,
            tool_choice=self.tool_choice,
            parallel_tool_calls=False if self._calls_one else None,
        )

    def _variables(self) -> dict[str, JsonValue]:
        """Return variables for the chat template.

        As in Anthropic's API, reasoning is off unless the request asks for it.
        """
        asked, config = self.asked_reasoning, self.output_config
        is_silent = (asked.is_on, asked.effort, asked.most) == (None, None, None)
        effort = {"reasoning_effort": config.effort} if config and config.effort else {}
        return ({SWITCH: False} if is_silent else {}) | effort

    @property
    def shows_reasoning(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"

    @property
    def _calls_one(self) -> bool:
        return isinstance(self.tool_choice, dict) and self.tool_choice.get("disable_parallel_tool_use") is True

    @property
    def _orders_documents(self) -> bool:
        """Whether blocks with documents become documents that may be reordered.

        True if the request sets a field that has an effect only on documents, such as `document_order`.
        """
        given = (self.document_order, self.best, self.best_price_ms)
        return self.documents_attention == "separate" or any(one is not None for one in given)


class MessagesRequest(MessagesCountRequest, frozen=True, kw_only=True):
    def check(self) -> None:
        super().check()
        if self.max_tokens is None or self.max_tokens < 1:
            raise RequestError("max_tokens: expected a number of tokens, 1 or more", param="max_tokens")


def _is_about_reasoning(edit: JsonValue) -> bool:
    return isinstance(edit, dict) and str(edit.get("type", "")).startswith("clear_thinking")


async def count(request: Request, asked: MessagesCountRequest) -> Response:
    """Count the tokens of the prompt of Anthropic's Messages."""
    return JsonReply(await count_prompt(request, await beside_others(request, asked.chat)))


# ---- Anthropic's `message`, whole and as a stream of events. ------------------------------------------------------------

DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The type of a block's deltas and the field that has their text, by the type of the block."""


@dataclass(slots=True)
class _OpenBlock:
    """One block of the answer's content.

    named: the id and the name of a call; empty for other blocks.
    sealed: if true, only the block's signature has the text.
    """

    type: str
    named: Fields = field(default_factory=dict)
    sealed: bool = False
    texts: list[str] = field(default_factory=list)

    def start(self) -> Fields:
        """Return the block without its text."""
        return self._with({}, "", "")

    def whole(self) -> Fields | None:
        """Return the block; None if it is a call that was cut, so that its input is incomplete."""
        text = "".join(self.texts)
        input = decoded_arguments(text) if self.type == "tool_use" else {}
        return None if input is None else self._with(input, "" if self.sealed else text, self.signature())

    def signature(self) -> str:
        return seal("".join(self.texts)) if self.sealed else ""

    def _with(self, input: object, text: str, signature: str) -> Fields:
        fields: dict[str, Fields] = {
            "text": {"text": text},
            "thinking": {"thinking": text, "signature": signature},
            "tool_use": self.named | {"input": input},
        }
        return {"type": self.type} | fields[self.type]


class MessagesReply:
    """The replies of `/v1/messages`.

    num_prompt: the number of the prompt's tokens, which the event `message_start` shows. The number of cached tokens is
        known only later, so the event `message_delta` shows it.
    shows_reasoning: if false, reasoning is sent only inside the signature, which the client sends back with the history.
    has_started: whether the event `message_start` was sent before the model was loaded.
    """

    def __init__(self, envelope: ResponseMeta, num_prompt: int, shows_reasoning: bool, *, has_started: bool = False) -> None:
        self.envelope, self._reader = envelope, envelope.reader()
        self.has_started = has_started
        self._late_notes: Fields = envelope.notes() if has_started else {}  # otherwise `message_start` has the notes
        self._num_prompt, self._shows_reasoning = num_prompt, shows_reasoning
        self._blocks: list[_OpenBlock] = []
        self._is_open = False  # whether the last block is open

    def begin(self) -> list[bytes]:
        return [] if self.has_started else self.ping()

    def ping(self) -> list[bytes]:
        first: list[Fields] = []
        if not self.has_started:
            usage = _parted(self._num_prompt, num_cached=0, num_created=0, num_generated=0)
            first, self.has_started = [{"type": "message_start", "message": self._message([]) | {"usage": usage}}], True
        return self._sent([*first, {"type": "ping"}])

    def progress(self, index: int, progress: PromptProgress) -> list[bytes]:
        return self.ping()

    def delta(self, index: int, delta: Delta) -> list[bytes]:
        return self._read(self._reader.push(delta.text))

    def end(self, index: int, end: End) -> list[bytes]:
        rest = self._read(self._reader.finish(end.is_cut))
        first = [] if self._blocks else self._sent(self._begin(_OpenBlock("text")))
        return [*rest, *first, *self._sent(self._end())]

    def close(self, ends: Sequence[End]) -> list[bytes]:
        (end,) = ends
        changed: Fields = {"type": "message_delta", "delta": self._reason(end)}
        return self._sent([changed | self._costs(end) | self._late_notes, {"type": "message_stop"}])

    def fail(self, error: RequestError) -> list[bytes]:
        return self._sent([error.message_body()])

    def whole(self, answers: Sequence[WholeAnswer]) -> Fields:
        (answer,) = answers
        self.delta(0, Delta(answer.text))
        self.end(0, answer.end)
        shown = {at: made for at, block in enumerate(self._blocks) if (made := block.whole())}
        self._blocks = [self._blocks[at] for at in shown]
        message = self._message(list(shown.values()) or [_OpenBlock("text").start()])
        return message | self._reason(answer.end) | self._costs(answer.end)

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def _read(self, fragments: Sequence[Fragment]) -> list[bytes]:
        return self._sent(event for fragment in fragments for event in self._push(fragment))

    def _push(self, fragment: Fragment) -> Iterator[Fields]:
        match fragment:
            case ContentText(text):
                yield from self._write("text", text)
            case ReasoningText(text):
                yield from self._write("thinking", text)
            case CallStart(_, id, name):
                yield from self._begin(_OpenBlock("tool_use", {"id": id, "name": name}))
            case CallArguments(_, text):
                yield from self._write("tool_use", text)

    def _write(self, type: str, text: str) -> Iterator[Fields]:
        if not self._is_open or self._blocks[-1].type != type:
            yield from self._begin(_OpenBlock(type, sealed=type == "thinking" and not self._shows_reasoning))
        block = self._blocks[-1]
        block.texts.append(text)
        if not block.sealed:
            kind, name = DELTAS[type]
            yield self._change({"type": kind, name: text})

    def _begin(self, block: _OpenBlock) -> Iterator[Fields]:
        yield from self._end()
        self._blocks.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block.start()}

    def _end(self) -> Iterator[Fields]:
        if not self._is_open:
            return
        if self._blocks[-1].type == "thinking":
            yield self._change({"type": "signature_delta", "signature": self._blocks[-1].signature()})
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
        self._is_open = False

    def _change(self, delta: Fields) -> Fields:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    # ---- the message -------------------------------------------------------------------------------------------------

    def _message(self, content: list[Fields]) -> Fields:
        envelope = self.envelope
        about: Fields = {"id": envelope.id, "type": "message", "role": "assistant", "model": envelope.model}
        return about | {"content": content, "stop_reason": None, "stop_sequence": None} | envelope.notes()

    def _reason(self, end: End) -> Fields:
        if end.reason == "length":
            is_full = end.report.num_generated < self.envelope.options.limit()
            return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}
        if end.report.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": end.report.stop}
        calls = any(block.type == "tool_use" for block in self._blocks)
        return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}

    def _costs(self, end: End) -> Fields:
        """Return the field `usage` for the whole answer, and this server's own field `slotcache`."""
        report = end.report
        # The last token of a prompt is always computed, so it counts as neither read nor written.
        num_created = max(report.num_prompt - report.num_cached - 1, 0) if self.envelope.caches else 0
        usage = _parted(
            report.num_prompt, num_cached=report.num_cached, num_created=num_created, num_generated=report.num_generated
        )
        return {"usage": usage, "slotcache": report.slotcache()}

    def _sent(self, events: Iterator[Fields] | list[Fields]) -> list[bytes]:
        return [sse_event(body, str(body["type"])) for body in events]


def _parted(num_prompt: int, *, num_cached: int, num_created: int, num_generated: int) -> Fields:
    """Return the usage in Anthropic's form.

    Each token of the prompt is counted once: as read from the cache, as written to the cache, or else as input.
    """
    return {
        "input_tokens": num_prompt - num_cached - num_created,
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": num_created,
        "output_tokens": num_generated,
    }


# ---- Anthropic's Messages. ----------------------------------------------------------------------------------------------


def opening(request: Request, asked: MessagesRequest) -> ReplyFormat | None:
    return MessagesReply(early_meta(request, asked, "msg_"), 0, asked.shows_reasoning) if asked.stream else None


async def create(request: Request, asked: MessagesRequest) -> ReplyFormat:
    """Answer a request of Anthropic's Messages."""
    chat = await beside_others(request, asked.chat)
    envelope = begin_answer(request, await prepare(request, chat, kind="msg_"))
    (answered, *_) = envelope.generations
    early = early_of(request)
    num_prompt, has_started = answered.request.prompt.num_tokens, isinstance(early, MessagesReply) and early.has_started
    return MessagesReply(envelope, num_prompt, asked.shows_reasoning, has_started=has_started)
