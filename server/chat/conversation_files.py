"""Stored conversations on disk: written behind, read at the start.

    magic | digest | msgpack

An entry of a history stands in the file of the answer that it was first stored with; the other answers of the conversation
refer to it by its number.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from sys import intern
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ...ordering.document import Document
from ...ordering.policy import ORDERS
from ...slots.scope import MAX_NAME
from ...slots.tier import MOST_SERVERS, FolderError, locked_folder, places, remove_stale, written_aside
from .chat_prompt import DocumentSet
from .history import HistoryMessage

MAGIC = b"slotcache answer 1\n"
DIGEST = 16  # bytes
SUFFIX = ".answer"

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
Length = Annotated[int, Meta(ge=0, lt=1 << 31)]


class CorruptConversation(ValueError):
    """A file with other content than was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAnswer:
    """An answer with its place in a conversation.

    number: counts the answers and entries of the conversation, and the heads that it has had. headed: the number with which
    it became the head, the last time; 0: it never was. parent: the id of the answer that it continues; empty: none that is
    stored. history: the numbers of its entries, in order. entries: those that were first stored with it, by number.
    record: the answer's own object, as JSON, for APIs that show it again.
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
    ranking: list[str] = []  # msgspec copies it; files of earlier versions lack it

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
            ranking=list(shown.ranking),
        )

    def read(self, scope: str, vocabulary: HistoryVocabulary) -> DocumentSet:
        """Raises CorruptConversation."""
        ranks = list(range(len(self.documents)))
        fits = len(self.tokens) == len(ranks) and (self.order is None or sorted(self.order) == ranks)
        if not fits or self.policy not in ORDERS:
            raise CorruptConversation("its documents contradict each other")
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
            ranking=tuple(self.ranking),
        )


class _Entry(_Strict, frozen=True, kw_only=True):
    """An Entry. said: JSON."""

    said: bytes
    keys: list[str]
    shown: _Documents | None
    sampled: bytes | None
    one_turn: bool

    @classmethod
    def of(cls, entry: HistoryMessage) -> _Entry:
        return cls(
            said=entry.said,
            keys=list(entry.keys),
            shown=None if entry.shown is None else _Documents.of(entry.shown),
            sampled=None if entry.sampled is None else _bytes(entry.sampled),
            one_turn=entry.one_turn,
        )

    def read(self, scope: str, vocabulary: HistoryVocabulary) -> HistoryMessage:
        """Raises CorruptConversation and MsgspecError."""
        return HistoryMessage(
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
    headed: Number = 0
    parent: Name = ""
    is_head: bool = False  # in files of earlier versions, which have neither of both
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
            headed=stored.headed,
            parent=stored.parent,
            history=list(stored.history),
            entries={number: _Entry.of(entry) for number, entry in stored.entries.items()},
            record=stored.record,
        )
    )
    return [MAGIC, _digest(content), content]


def decode(data: bytes, vocabulary: HistoryVocabulary) -> StoredAnswer:
    """Return the stored answer of a file. Raises CorruptConversation."""
    begin = len(MAGIC) + DIGEST
    if data[: len(MAGIC)] != MAGIC:
        raise CorruptConversation("it is not one of this server's files")
    content = memoryview(data)[begin:]
    if _digest(content) != data[len(MAGIC) : begin]:
        raise CorruptConversation("its checksum is wrong")
    try:
        file = msgspec.msgpack.decode(content, type=_File)
        entries = {number: entry.read(file.scope, vocabulary) for number, entry in file.entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptConversation(f"it is not as expected: {error}") from None
    return StoredAnswer(
        scope=file.scope,
        conversation=file.conversation,
        created=file.created,
        id=file.id,
        number=file.number,
        headed=file.headed or (file.number if file.is_head else 0),
        parent=file.parent,
        history=tuple(file.history),
        entries=entries,
        record=file.record,
    )


def _bytes(tokens: np.ndarray) -> bytes:
    return tokens.astype("<i4").tobytes()


def _tokens(data: bytes, vocabulary: HistoryVocabulary) -> np.ndarray:
    """Return tokens, int32. Raises CorruptConversation."""
    if len(data) % 4:
        raise CorruptConversation("its tokens are damaged")
    tokens = np.frombuffer(data, "<i4").astype(np.int32)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocabulary.num_tokens:
        raise CorruptConversation("it has tokens that the model does not know")
    return tokens


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST).digest()


# ---- Shelf --------------------------------------------------------------------------------------------------------------
# Stored answers in a folder, so that conversations outlive a restart: written behind the event loop's back.
#
# Each answer is a file of its own, written aside and renamed. Nothing is synchronised: the newest answers may be lost
# when the machine fails, and a file that is torn then is noticed when it is read.

logger = logging.getLogger("slotcache.conversations")


class ConversationFiles:
    """The folder and the thread that writes to it.

    Raises FolderError if the folder cannot be used, and BlockingIOError if other files have it: entries are numbered by the
    one that has them in memory. A change that waits is replaced by the next one of the same file, so no more waits than the
    conversations hold.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = locked_folder(folder)
        self._waiting: dict[str, StoredAnswer | None] = {}  # by the file's name; None: delete it
        self._changed = threading.Condition()  # guards what waits; never held during file access
        self._busy = self._closing = self._failing = False
        self._thread = threading.Thread(target=self._write_behind, name="conversations", daemon=True)
        self._thread.start()

    def put(self, stored: StoredAnswer) -> None:
        """Queue an answer to be written. From any thread."""
        self._queue({stored.file_name: stored})

    def drop(self, names: Iterable[str]) -> None:
        """Queue files to be deleted. From any thread."""
        self._queue(dict.fromkeys(names))

    def settle(self, seconds: float = 10.0) -> bool:
        """Wait until nothing waits; return whether that came about in time. From any thread but the event loop's."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._busy), seconds)

    def load(self, vocabulary: HistoryVocabulary, max_bytes: int) -> list[tuple[StoredAnswer, float]]:
        """Return the newest answers whose files have `max_bytes` together, each with the time of its file.

        Older files are deleted, and so are damaged ones, with one warning for all of them.
        """
        remove_stale(self.folder)
        found: list[tuple[StoredAnswer, float]] = []
        refused: list[str] = []
        for path, size, written in self._newest_first():
            max_bytes -= size
            if max_bytes < 0:
                self.drop([path.name])
                continue
            try:
                stored = decode(path.read_bytes(), vocabulary)
                if stored.file_name != path.name:
                    raise CorruptConversation("it has the name of another file")
            except (OSError, CorruptConversation) as error:
                refused.append(f"{path.name}: {error}")
                if isinstance(error, CorruptConversation):
                    self.drop([path.name])
                continue
            found.append((stored, written))
        if refused:
            logger.warning("%d stored answers in %s are not used, first %s", len(refused), self.folder, refused[0])
        return found

    def close(self, seconds: float = 10.0) -> None:
        """Carry out what waits, for `seconds` at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(seconds)
        if not self._thread.is_alive() and self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _newest_first(self) -> list[tuple[Path, int, float]]:
        """Return the answers' files with their sizes and times."""
        files: list[tuple[Path, int, float]] = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                about = path.stat()
                if stat.S_ISREG(about.st_mode):
                    files.append((path, about.st_size, about.st_mtime))
        return sorted(files, key=lambda file: file[2], reverse=True)

    def _queue(self, changes: dict[str, StoredAnswer | None]) -> None:
        with self._changed:
            self._waiting |= changes
            self._changed.notify_all()

    # ---- the writer's thread -----------------------------------------------------------------------------------------

    def _write_behind(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                name = next(iter(self._waiting))
                stored, self._busy = self._waiting.pop(name), True
            self._guarded(name, stored)

    def _guarded(self, name: str, stored: StoredAnswer | None) -> None:
        try:
            self._change(self.folder / name, stored)
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "cannot write to %s: %s; answers are stored in memory only", self.folder, error.strerror or error
                )
            self._failing = True
        except Exception:  # a thread that ends would never write again
            logger.exception("an answer could not be written; the next one may be")
        else:
            if self._failing:
                logger.warning("can write to %s again", self.folder)
            self._failing = False

    def _change(self, path: Path, stored: StoredAnswer | None) -> None:
        """Write a file aside and rename it, or delete it. Raises OSError."""
        if stored is None:
            path.unlink(missing_ok=True)
            return
        with written_aside(path) as file:
            file.writelines(encode(stored))


def free_conversation_files(folder: Path) -> ConversationFiles:
    """Return the files of a folder, or of the first one beside it that no other server has. Raises FolderError."""
    for place in places(folder):
        with contextlib.suppress(BlockingIOError):
            files = ConversationFiles(place)
            if place != folder:
                logger.warning("another server has the conversations in %s: ours are in %s", folder, files.folder)
            return files
    raise FolderError(f"{folder}: {MOST_SERVERS} servers have conversations here: expected another --cache-dir")


def seconds_since(written: float) -> float:
    """Return the age of a file; 0 for one of the future, which a clock that was set back has left."""
    return max(time.time() - written, 0.0)
