"""A chat request as the front reads it: the messages with documents, the text between them, the options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from ..ordering.document import TOOLS, Document, DocumentError, beside_documents, check_number, find_documents
from ..ordering.policy import BestPlace, Order
from ..server.http.api_errors import RequestError
from ..server.http.json_body import as_unicode, check_elements

Fields = dict[str, Raw]
EMPTY = (b"null", b"[]", b'""')
NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions for bytes that are not JSON, not UTF-8, or nested too deeply."""
IN_FRONT = ("tools", "functions", "chat_template", "chat_template_kwargs", "system", "instructions")
"""Fields that come before the messages in a prompt."""
NO_OPENING = ("id", "documents", "n", "n_predict", "stream_options", "response_format", "logprobs", "top_logprobs")
"""Fields of a chat that are useless in a warm-up, which asks for one token after the prompt before the documents."""
APART = ("model", "cache_salt", "extra_key", "cache_scope", "lora")
"""Fields that separate prompts in the upstream's cache."""


class NamedConversation(Struct, frozen=True):
    """The field `conversation` of a request, which names a stored conversation of slotcache."""

    id: str
    history: Literal["auto", "whole", "new"] = "auto"


class FrontOptions(Struct, frozen=True):
    """The fields of a request that the front itself uses, and that it removes from chats with documents."""

    document_order: Order | None = None
    best: BestPlace | None = None
    best_price_ms: Annotated[float, Meta(ge=0.0)] | None = None
    dedup: Literal["auto", "in_place", "off"] | None = None
    tool_documents: Literal["auto", "off"] | None = None
    order_hint: bool | None = None
    keep_first: Annotated[int, Meta(ge=0)] = 0
    keep_last: Annotated[int, Meta(ge=0)] = 0
    conversation: str | NamedConversation | None = None

    @property
    def conversation_id(self) -> str:
        """The conversation's name; empty without one."""
        named = self.conversation
        return named.id if isinstance(named, NamedConversation) else named or ""


msgspec.json.Decoder(FrontOptions)  # lets msgspec learn the fields here, in one thread: see `slots.store.record_file.HEADS`


@dataclass(frozen=True, slots=True)
class PlainText:
    """A stretch of text in a prompt. A `PlainText` starts after a document or at the start of the prompt.

    key: a digest, 32 hexadecimal digits.
    """

    key: str
    chars: int


@dataclass(frozen=True, slots=True)
class DocumentTurn:
    """A message with documents.

    at: the message's index.
    before: the text of the prompt before the documents.
    name: a digest (32 hexadecimal digits) of all messages up to this one, with their documents.
    result: for a tool's result with a list of documents, the text of its other fields; None for any other message.
    """

    at: int
    before: PlainText
    documents: tuple[Document, ...]
    name: str
    result: str | None


@dataclass(frozen=True, slots=True)
class DocumentChat:
    """A decoded request.

    body: the whole body as Unicode.
    fields, messages: the fields of the request and of each message, by name. The values of the fields are JSON texts,
        unchanged from the body.
    names: for each message, a digest (32 hexadecimal digits) of all messages up to this one, without their documents.
    chars: the number of characters after the last document.
    before_last: the text before the last message.
    stream_options: the request's field, decoded.
    """

    body: bytes
    fields: Fields
    messages: list[Fields]
    options: FrontOptions
    turns: tuple[DocumentTurn, ...]
    names: tuple[str, ...]
    chars: int
    before_last: PlainText
    stream_options: object = None

    @property
    def is_stream(self) -> bool:
        return bytes(self.fields.get("stream", b"")) == b"true"

    @property
    def lacks_usage(self) -> bool:
        """Whether the client wants a stream, but no chunk with the usage.

        If `stream_options` are invalid, this is False: the front leaves them as they are, and the upstream refuses the
        request.
        """
        options = {} if self.stream_options is None else self.stream_options
        return self.is_stream and isinstance(options, Mapping) and options.get("include_usage") in (None, False)


def read_chat(body: bytes, tool_documents: str) -> DocumentChat:
    """Return the chat in a body; it has no turns if the request has no documents. Raises RequestError.

    tool_documents: the default of the request's field `tool_documents`.
    """
    check_elements(body)
    body = as_unicode(body)
    try:
        fields = msgspec.json.decode(body, type=Fields)
        messages = messages_of(fields)
        check_number(messages)  # before any message is read
        read = [{name: msgspec.json.decode(value) for name, value in message.items()} for message in messages]
        top = msgspec.json.decode(fields.get("documents", b"null"))
        asked, named, stream_options = (
            msgspec.json.decode(fields.get(name, b"null")) for name in ("tool_documents", "conversation", "stream_options")
        )
    except DocumentError as error:
        raise RequestError(str(error), param=error.where) from None
    except NO_JSON as error:
        raise RequestError(f"the body is not a chat: {error}") from None
    for message in read:
        message.setdefault("role", "")
    try:
        found = find_documents(read, top, takes_results=(asked or tool_documents) == "auto")
    except DocumentError as error:
        raise RequestError(str(error), param=error.where) from None
    found = {at: documents for at, documents in found.items() if documents}
    options = _options(fields) if found else FrontOptions(conversation=_conversation(named))
    cutter = Cutter(fields)
    for at, message in enumerate(messages):
        cutter.add(message, read[at], at, found.get(at, ()))
    return DocumentChat(
        body,
        fields,
        messages,
        options,
        turns=tuple(cutter.turns),
        names=tuple(cutter.names),
        chars=cutter.chars,
        before_last=cutter.before,
        stream_options=stream_options,
    )


def opening(body: bytes) -> bytes:
    """Make the body of a warm-up from a chat's body. The warm-up asks for one token, and its last message has no documents.

    Raises RequestError.
    """
    check_elements(body)
    body = as_unicode(body)
    try:
        fields = msgspec.json.decode(body, type=Fields)
        messages = messages_of(fields)
    except NO_JSON as error:
        raise RequestError(f"the body is not a chat: {error}") from None
    if messages:
        messages[-1].pop("documents", None)
    limit = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    left = {name: value for name, value in fields.items() if name not in NO_OPENING}
    left |= {"messages": Raw(msgspec.json.encode(messages)), limit: Raw(b"1"), "stream": Raw(b"false")}
    return msgspec.json.encode(left)


def messages_of(fields: Fields) -> list[Fields]:
    """Return the `messages` of a chat, or the `input` of a response.

    If the field is a text instead of a list, return one message of the user with this text.

    Raises msgspec.DecodeError.
    """
    said = next((value for name in ("messages", "input") if (value := bytes(fields.get(name, b"null"))) != b"null"), b"[]")
    said = b'[{"role":"user","content":%b}]' % said if said.startswith(b'"') else said
    return msgspec.json.decode(said, type=list[Fields])


def _options(fields: Fields) -> FrontOptions:
    try:
        options = msgspec.convert(_decoded(fields, FrontOptions.__struct_fields__), FrontOptions)
    except msgspec.ValidationError as error:
        what, _, path = str(error).rpartition(" - at `$")
        param = path.strip("`.") or None
        raise RequestError(f"{param}: {what}" if what else str(error), param=param) from None
    return options


def _decoded(fields: Fields, names: Sequence[str]) -> dict[str, object]:
    """Return the fields with these names that are not null."""
    return {name: value for name in names if name in fields and (value := msgspec.json.decode(fields[name])) is not None}


def _conversation(named: object) -> str | None:
    """Return the name of the conversation, if the request has one that can be read."""
    named = named.get("id") if isinstance(named, Mapping) else named
    return named if isinstance(named, str) else None


class Cutter:
    """Cuts messages at their documents.

    turns, names, chars: as in `DocumentChat`.
    before: the text before the last message.
    """

    def __init__(self, fields: Fields) -> None:
        self.turns: list[DocumentTurn] = []
        self.names: list[str] = []
        self.chars = sum(len(bytes(fields.get(name, b""))) for name in IN_FRONT)
        self._text = _digest()  # of the messages since the last document
        self.before = PlainText("", 0)
        for name in (*APART, *IN_FRONT):
            self._text.update(_framed(bytes(fields.get(name, b"null"))))
        self._whole = self._text.copy()  # of all messages, with their documents
        self._said = self._text.copy()  # of all messages, without their documents

    def add(self, said: Fields, read: Mapping[str, object], at: int, documents: tuple[Document, ...]) -> None:
        """Add the next message.

        said: the message's fields as they were sent.
        read: the message's fields, decoded.
        at: the message's index.
        """
        is_result = bool(documents) and read["role"] in TOOLS and read.get("documents") is None
        result = beside_documents(read) if is_result else None
        before = self.before = PlainText(self._text.hexdigest(), self.chars)
        if documents:
            self._text, self.chars = _digest(), 0
        hidden = ("documents", "content") if is_result else ("documents",)
        values: list[bytes] = []
        for name in sorted(said.keys() - set(hidden)):
            if (value := bytes(said[name])) not in EMPTY:
                values += (name.encode(), value)
        values += (b"", (result or "").encode("utf-8", "replace"))  # the end of a message
        framed = b"".join(map(_framed, values))
        for digest in (self._text, self._whole, self._said):
            digest.update(framed)
        self.chars += chars_of(read) if result is None else len(result)
        if documents:
            for document in documents:
                self._whole.update(_framed(document.key.encode()))
            self.turns.append(DocumentTurn(at, before, documents, name=self._whole.hexdigest(), result=result))
        self.names.append(self._said.hexdigest())


def chars_of(message: Mapping[str, object]) -> int:
    """Return about how many characters of a prompt a message takes."""
    content = message.get("content")
    calls = message.get("tool_calls")
    length = len(json.dumps(calls, ensure_ascii=False)) if calls else 0
    if isinstance(content, str):
        return length + len(content)
    parts = content if isinstance(content, list) else ()
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return length + sum(len(text) for text in texts if isinstance(text, str))


def _digest() -> blake2b:
    return blake2b(digest_size=16)


def _framed(value: bytes) -> bytes:
    """Return a value with its length, so that no two lists of values give the same digest."""
    return b"%d:%b" % (len(value), value)
