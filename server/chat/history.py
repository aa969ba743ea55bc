"""What a conversation was, message by message as it stood in prompts, and what of it a new request goes on with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from sys import getsizeof, intern
from typing import Self

import msgspec
import numpy as np

from ...models.chat import Message
from ...ordering.document import Document
from ...slots.request import Layout, PlacedDocument
from ..wire import HistoryKind
from .parts import DocumentSet
from .prompt import ChatPrompt

Documents = tuple[Document, ...]
INSTRUCTIONS = ("system", "developer")  # roles that a conversation begins with


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A message as it stood in a prompt.

    said: the message as the client has it, without documents, as JSON: decoded it takes up to 20 times as much. keys: of
    all documents it came with, in retrieval rank. shown: those that stood there, with their hints. sampled: the ids (int32)
    of an answer, where they spell exactly its text. num_bytes: of memory, with all of these.
    """

    role: str
    said: bytes
    keys: tuple[str, ...] = ()
    shown: DocumentSet | None = None
    sampled: np.ndarray | None = None
    num_bytes: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", _size(self))

    @classmethod
    def of(
        cls,
        message: Message,
        keys: tuple[str, ...] = (),
        shown: DocumentSet | None = None,
        sampled: np.ndarray | None = None,
    ) -> Self:
        """An entry of a decoded message."""
        return cls(intern(str(message["role"])), msgspec.json.encode(message), keys, shown, sampled)

    @property
    def message(self) -> dict[str, object]:
        """The message, decoded anew."""
        return msgspec.json.decode(self.said)

    def public(self) -> dict[str, object]:
        """The message, and the ids of its documents in the order in which they stand; not their text."""
        if self.shown is None:
            return self.message
        order = self.shown.order or ()
        documents = [self.shown.documents[at].id for at in order]
        return {**self.message, "documents": documents, "repeated": list(self.shown.repeated)}


@dataclass(frozen=True, slots=True)
class History:
    """All messages that a prompt is made of: first those that are `kept` as they stood, then others.

    messages: of both, without documents. documents: of the others, by index. shift: what to take from an index to get the
    one that the client knows.
    """

    messages: Sequence[Message]
    documents: Mapping[int, Documents]
    kept: Sequence[Entry] = ()
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as a prompt. entries: of its messages, the first `num_kept` as they are remembered."""

    prompt: ChatPrompt
    entries: tuple[Entry, ...]
    num_kept: int = 0

    def placed(self, layout: Layout) -> tuple[Entry, ...]:
        """The entries once the prompt is laid out: every set of documents keeps the order that it has there."""
        placed = iter(layout.documents)
        return tuple(_placed(entry, placed) for entry in self.entries)


def go_on(
    messages: Sequence[Message],
    documents: Mapping[int, Documents],
    remembered: Sequence[Entry] = (),
    kind: HistoryKind = "auto",
) -> History:
    """The whole of a conversation of which `remembered` is what was, and `messages` what the client sent.

    documents: of the messages that say which they have, by index. A history that is sent again is kept as far as it is
    the same; a message that does not speak of documents has those that it had.
    """
    plain = [{name: value for name, value in message.items() if name != "documents"} for message in messages]
    if kind == "new" or (kind == "auto" and not _is_whole(plain)):
        shift = len(remembered)
        moved = {at + shift: given for at, given in documents.items()}
        return History([*(entry.message for entry in remembered), *plain], moved, remembered, shift)
    same = 0
    while same < min(len(plain), len(remembered)) and _is_same(remembered[same], plain[same], documents.get(same)):
        same += 1
    return History(plain, {at: given for at, given in documents.items() if at >= same}, remembered[:same])


def _is_whole(messages: Sequence[Message]) -> bool:
    """Whether messages look like a conversation from its beginning: it has instructions, or answers."""
    return messages[0]["role"] in INSTRUCTIONS or any(message["role"] == "assistant" for message in messages)


def _is_same(entry: Entry, message: Message, documents: Documents | None) -> bool:
    if documents is not None and entry.keys != tuple(document.key for document in documents):
        return False
    return entry.role == message["role"] and _told(entry.message) == _told(message)


def _told(message: Message) -> dict[str, object]:
    """What a message says: clients send fields that are empty, too."""
    return {name: value for name, value in message.items() if value is not None and value != []}


def _placed(entry: Entry, placed: Iterator[PlacedDocument]) -> Entry:
    """An entry whose documents are the next ones of a layout."""
    if entry.shown is None:
        return entry
    ranks = {key: rank for rank, key in enumerate(entry.shown.keys)}
    order = tuple(ranks[document.key] for document in islice(placed, len(ranks)))
    return entry if entry.shown.order == order else replace(entry, shown=replace(entry.shown, order=order))


def _size(entry: Entry) -> int:
    """Bytes of memory that an entry takes; what is shared with other entries counts for each."""
    size = getsizeof(entry) + getsizeof(entry.said) + getsizeof(entry.keys)
    if entry.sampled is not None:
        size += getsizeof(entry.sampled)
    if entry.shown is None:
        return size + sum(map(getsizeof, entry.keys))
    held = {document.key for document in entry.shown.documents}
    return size + _set_size(entry.shown) + sum(getsizeof(key) for key in entry.keys if key not in held)


def _set_size(shown: DocumentSet) -> int:
    strings = (text for one in shown.documents for text in (one.id, one.text, one.title, one.key))
    tuples = (shown.documents, shown.tokens, shown.repeated, tuple(range(len(shown.documents))))
    arrays = (*shown.tokens, shown.location)
    return sum(map(getsizeof, (shown, *tuples, *shown.documents, *strings, *shown.repeated, *arrays)))
