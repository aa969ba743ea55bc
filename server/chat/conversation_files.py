"""Stored conversations on disk. A thread writes them, and the server reads them when it starts.

Each answer has a file. The file contains those entries of the answer's history that no earlier answer's file contains. A
file refers to an entry in another file by the entry's number.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from sys import intern
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ...ordering.document import Document
from ...ordering.policy import ORDERS
from ...slots.scope import MAX_NAME
from ...slots.store.private_folder import MOST_SERVERS, FolderError, places
from .chat_files import ChatFiles, DamagedFile, checked_content, with_checksum
from .chat_prompt import DocumentSet
from .history import HistoryMessage

MAGIC = b"slotcache answer 1\n"
SUFFIX = ".answer"

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
Length = Annotated[int, Meta(ge=0, lt=1 << 31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """An answer and its place in a conversation.

    A conversation numbers its answers, its history entries and the changes of its head in one series.

    number: the number of this answer in the conversation's series.
    headed: the number of the last change that made this answer the head; 0: the answer was never the head.
    parent: the id of the stored answer that this answer continues; empty: it continues no stored answer.
    history: the numbers of the entries in the answer's history, in order.
    entries: a mapping from number to entry, of the entries that were first stored with this answer.
    record: the answer's API object as JSON, for APIs that return the object again; None: there is none.
    """

    scope: str
    conversation: str
    created: float
    id: str
    number: int
    headed: int
    parent: str
    history: tuple[int, ...]
    entries: Mapping[int, HistoryMessage]
    record: bytes | None = None

    @property
    def file_name(self) -> str:
        return file_name(self.scope, self.id)


@dataclass(frozen=True, slots=True)
class HistoryVocabulary:
    """The parts of a model that stored histories need.

    num_tokens: the size of the vocabulary. tokenize: returns the tokens (int32) of a text, given a scope and the text.
    """

    num_tokens: int
    tokenize: Callable[[str, str], np.ndarray]


def file_name(scope: str, answer: str) -> str:
    """Return the name of an answer's file: a hash of the scope and the answer's id, which reveals neither."""
    return hashlib.blake2b(msgspec.msgpack.encode([scope, answer]), digest_size=16).hexdigest() + SUFFIX


# ---- the content of a file -------------------------------------------------------------------------------------------


class _Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Documents(_Strict, frozen=True, kw_only=True):
    """A `DocumentSet` in a file. Tokens are little-endian int32."""

    documents: tuple[tuple[str, str, str], ...]  # id, text, title
    tokens: tuple[bytes, ...]
    policy: str
    hinted: bool
    repeated: tuple[str, ...]
    location: bytes
    order: tuple[Length, ...] | None
    keep_first: Length
    keep_last: Length
    longest_hint: Length
    ranking: tuple[str, ...] = ()  # files of earlier versions lack this field and the next two fields
    in_text: bool = False
    number_of: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, shown: DocumentSet) -> _Documents:
        return cls(
            documents=tuple((document.id, document.text, document.title) for document in shown.documents),
            tokens=tuple(map(_bytes, shown.tokens)),
            hinted=shown.hint is not None,
            location=_bytes(shown.location),
            **_fields_of(shown, AS_THEY_ARE),
        )

    def read(self, scope: str, vocabulary: HistoryVocabulary) -> DocumentSet:
        ranks = list(range(len(self.documents)))
        fits = len(self.tokens) == len(ranks) and (self.order is None or sorted(self.order) == ranks)
        if not fits or self.policy not in ORDERS:
            raise DamagedFile("its documents contradict each other")
        return DocumentSet(
            tuple(Document(*document) for document in self.documents),
            tuple(_tokens(tokens, vocabulary) for tokens in self.tokens),
            hint=partial(vocabulary.tokenize, scope) if self.hinted else None,
            location=_tokens(self.location, vocabulary),
            **_fields_of(self, AS_THEY_ARE),
        )


AS_THEY_ARE = ("policy", "repeated", "order", "keep_first", "keep_last", "longest_hint", "ranking", "in_text", "number_of")
"""The fields of a `DocumentSet` that are in its file unchanged."""


class _Entry(_Strict, frozen=True, kw_only=True):
    """A `HistoryMessage` in a file."""

    said: bytes
    keys: tuple[str, ...]
    shown: _Documents | None
    sampled: bytes | None
    one_turn: bool

    @classmethod
    def of(cls, entry: HistoryMessage) -> _Entry:
        shown, sampled = entry.shown and _Documents.of(entry.shown), None if entry.sampled is None else _bytes(entry.sampled)
        return cls(said=entry.said, keys=entry.keys, shown=shown, sampled=sampled, one_turn=entry.one_turn)

    def read(self, scope: str, vocabulary: HistoryVocabulary) -> HistoryMessage:
        """Return the `HistoryMessage`. Raises DamagedFile or MsgspecError if the stored data is wrong."""
        return HistoryMessage(
            intern(MESSAGES.decode(self.said).role),
            self.said,
            self.keys,
            shown=self.shown and self.shown.read(scope, vocabulary),
            sampled=None if self.sampled is None else _tokens(self.sampled, vocabulary),
            one_turn=self.one_turn,
        )


class _Message(Struct, frozen=True):
    role: str


class _File(_Strict, frozen=True, kw_only=True):
    """A `StoredAnswer` in a file."""

    scope: Name
    conversation: Name
    created: Annotated[float, Meta(ge=0.0)]
    id: Name
    number: Number
    headed: Number = 0
    parent: Name = ""
    is_head: bool = False  # in files of earlier versions, which lack `headed` and `parent`
    history: tuple[Number, ...]
    entries: dict[Number, _Entry]
    record: bytes | None


MESSAGES, FILES = msgspec.json.Decoder(_Message), msgspec.msgpack.Decoder(_File)


def encode(stored: StoredAnswer) -> list[bytes]:
    """Return the parts of a stored answer's file."""
    entries = {number: _Entry.of(entry) for number, entry in stored.entries.items()}
    return with_checksum(MAGIC, msgspec.msgpack.encode(_File(**_fields_of(stored, STORED), entries=entries)))


def decode(data: bytes, vocabulary: HistoryVocabulary) -> StoredAnswer:
    """Return the stored answer in a file. Raises DamagedFile."""
    try:
        file = FILES.decode(checked_content(MAGIC, data))
        entries = {number: entry.read(file.scope, vocabulary) for number, entry in file.entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedFile(f"it is not as expected: {error}") from None
    stored = StoredAnswer(**_fields_of(file, STORED), entries=entries)
    return replace(stored, headed=file.number) if file.is_head and not file.headed else stored


STORED = [field.name for field in fields(StoredAnswer) if field.name != "entries"]


def _fields_of(value: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _bytes(tokens: np.ndarray) -> bytes:
    return tokens.astype("<i4").tobytes()


def _tokens(data: bytes, vocabulary: HistoryVocabulary) -> np.ndarray:
    """Return the tokens (int32) that a file contains as bytes. Raises DamagedFile."""
    if len(data) % 4:
        raise DamagedFile("its tokens are damaged")
    tokens = np.frombuffer(data, "<i4").astype(np.int32)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocabulary.num_tokens:
        raise DamagedFile("it has tokens that the model does not know")
    return tokens


# ---- Conversation files -------------------------------------------------------------------------------------------------

logger = logging.getLogger("slotcache.conversations")


class ConversationFiles(ChatFiles):
    """The stored answers in a folder, one file for each answer, so that conversations survive a restart.

    Only one server may use the folder: to give a number to a new entry, a server must have all earlier entries in memory.
    """

    def put(self, stored: StoredAnswer) -> None:
        """Queue an answer to be written. Any thread may call this."""
        self.write(stored.file_name, partial(encode, stored))

    def answers(self, vocabulary: HistoryVocabulary, max_bytes: int) -> list[tuple[StoredAnswer, float]]:
        """Return the newest answers, each with the time of its file. Delete older answers: see `ChatFiles.load`.

        max_bytes: the most bytes of the files that are loaded.
        """
        read = partial(decode, vocabulary=vocabulary)
        return self.load(SUFFIX, max_bytes, read, lambda stored: stored.file_name)


def free_conversation_files(folder: Path) -> ConversationFiles:
    """Return the conversation files in a folder. Raises FolderError.

    If another server uses the folder, return the files in the first free folder next to it.
    """
    for place in places(folder):
        with contextlib.suppress(BlockingIOError):
            files = ConversationFiles(place)
            if place != folder:
                logger.warning("another server has the conversations in %s: ours are in %s", folder, files.folder)
            return files
    raise FolderError(f"{folder}: {MOST_SERVERS} servers have conversations here: expected another --cache-dir")


def seconds_since(written: float) -> float:
    """Return the age of a file in seconds. If `written` is in the future, return 0: the clock may have been set back."""
    return max(time.time() - written, 0.0)
