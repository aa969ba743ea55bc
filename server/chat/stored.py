"""A stored answer as a file: the format, and the checks against damaged ones.

    magic | digest | msgpack

An entry of a history stands in the file of the answer that it was first stored with; the other answers of the conversation
refer to it by its number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from sys import intern
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ...ordering.document import Document
from ...slots.scope import MAX_NAME
from ..settings import ORDERS
from .history import Entry
from .parts import DocumentSet

MAGIC = b"slotcache answer 1\n"
DIGEST = 16  # bytes
SUFFIX = ".answer"

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
Length = Annotated[int, Meta(ge=0, lt=1 << 31)]


class Torn(ValueError):
    """A file with other content than was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """An answer with its place in a conversation.

    number: counts the answers and entries of the conversation. is_head: it was the head when it was stored. history: the
    numbers of its entries, in order. entries: those that were first stored with it, by number. record: the answer's own
    object, as JSON, for APIs that show it again.
    """

    scope: str
    conversation: str
    created: float
    id: str
    number: int
    is_head: bool
    history: tuple[int, ...]
    entries: Mapping[int, Entry]
    record: bytes | None = None

    @property
    def file_name(self) -> str:
        return file_name(self.scope, self.id)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model's part in a history: its number of tokens, and how a text of a scope becomes tokens (int32)."""

    num_tokens: int
    tokenize: Callable[[str, str], np.ndarray]


def file_name(scope: str, answer: str) -> str:
    """Return a name that is the same for the same answer of the same scope, and that reveals neither."""
    return hashlib.blake2b(msgspec.msgpack.encode([scope, answer]), digest_size=16).hexdigest() + SUFFIX


# ---- the content of a file -------------------------------------------------------------------------------------------


class _Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Documents(_Strict, frozen=True, kw_only=True):
    """A DocumentSet; tokens as little-endian int32."""

    documents: list[tuple[str, str, str]]  # id, text, title
    tokens: list[bytes]
    policy: str
    hinted: bool
    repeated: list[str]
    location: bytes
    order: list[Length] | None
    keep_first: Length
    keep_last: Length
    longest_hint: Length

    @classmethod
    def of(cls, shown: DocumentSet) -> _Documents:
        return cls(
            documents=[(document.id, document.text, document.title) for document in shown.documents],
            tokens=[_bytes(tokens) for tokens in shown.tokens],
            policy=shown.policy,
            hinted=shown.hint is not None,
            repeated=list(shown.repeated),
            location=_bytes(shown.location),
            order=None if shown.order is None else list(shown.order),
            keep_first=shown.keep_first,
            keep_last=shown.keep_last,
            longest_hint=shown.longest_hint,
        )

    def read(self, scope: str, vocabulary: Vocabulary) -> DocumentSet:
        """Raises Torn."""
        ranks = list(range(len(self.documents)))
        fits = len(self.tokens) == len(ranks) and (self.order is None or sorted(self.order) == ranks)
        if not fits or self.policy not in ORDERS:
            raise Torn("its documents contradict each other")
        return DocumentSet(
            tuple(Document(*document) for document in self.documents),
            tuple(_tokens(tokens, vocabulary) for tokens in self.tokens),
            policy=self.policy,
            hint=partial(vocabulary.tokenize, scope) if self.hinted else None,
            repeated=tuple(self.repeated),
            location=_tokens(self.location, vocabulary),
            order=None if self.order is None else tuple(self.order),
            keep_first=self.keep_first,
            keep_last=self.keep_last,
            longest_hint=self.longest_hint,
        )


class _Entry(_Strict, frozen=True, kw_only=True):
    """An Entry. said: JSON."""

    said: bytes
    keys: list[str]
    shown: _Documents | None
    sampled: bytes | None
    one_turn: bool

    @classmethod
    def of(cls, entry: Entry) -> _Entry:
        return cls(
            said=entry.said,
            keys=list(entry.keys),
            shown=None if entry.shown is None else _Documents.of(entry.shown),
            sampled=None if entry.sampled is None else _bytes(entry.sampled),
            one_turn=entry.one_turn,
        )

    def read(self, scope: str, vocabulary: Vocabulary) -> Entry:
        """Raises Torn and MsgspecError."""
        return Entry(
            intern(msgspec.json.decode(self.said, type=_Message).role),
            self.said,
            tuple(self.keys),
            shown=None if self.shown is None else self.shown.read(scope, vocabulary),
            sampled=None if self.sampled is None else _tokens(self.sampled, vocabulary),
            one_turn=self.one_turn,
        )


class _Message(Struct, frozen=True):
    """The field that every message has."""

    role: str


class _File(_Strict, frozen=True, kw_only=True):
    """A StoredAnswer."""

    scope: Name
    conversation: Name
    created: Annotated[float, Meta(ge=0.0)]
    id: Name
    number: Number
    is_head: bool
    history: list[Number]
    entries: dict[Number, _Entry]
    record: bytes | None


def encode(stored: StoredAnswer) -> list[bytes]:
    """Return a stored answer's file, in parts."""
    content = msgspec.msgpack.encode(
        _File(
            scope=stored.scope,
            conversation=stored.conversation,
            created=stored.created,
            id=stored.id,
            number=stored.number,
            is_head=stored.is_head,
            history=list(stored.history),
            entries={number: _Entry.of(entry) for number, entry in stored.entries.items()},
            record=stored.record,
        )
    )
    return [MAGIC, _digest(content), content]


def decode(data: bytes, vocabulary: Vocabulary) -> StoredAnswer:
    """Return the stored answer of a file. Raises Torn."""
    begin = len(MAGIC) + DIGEST
    if data[: len(MAGIC)] != MAGIC:
        raise Torn("it is not one of this server's files")
    content = memoryview(data)[begin:]
    if _digest(content) != data[len(MAGIC) : begin]:
        raise Torn("its checksum is wrong")
    try:
        file = msgspec.msgpack.decode(content, type=_File)
        entries = {number: entry.read(file.scope, vocabulary) for number, entry in file.entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Torn(f"it is not as expected: {error}") from None
    return StoredAnswer(
        scope=file.scope,
        conversation=file.conversation,
        created=file.created,
        id=file.id,
        number=file.number,
        is_head=file.is_head,
        history=tuple(file.history),
        entries=entries,
        record=file.record,
    )


def _bytes(tokens: np.ndarray) -> bytes:
    return tokens.astype("<i4").tobytes()


def _tokens(data: bytes, vocabulary: Vocabulary) -> np.ndarray:
    """Return tokens, int32. Raises Torn."""
    if len(data) % 4:
        raise Torn("its tokens are damaged")
    tokens = np.frombuffer(data, "<i4").astype(np.int32)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocabulary.num_tokens:
        raise Torn("it has tokens that the model does not know")
    return tokens


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST).digest()
