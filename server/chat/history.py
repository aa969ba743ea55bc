"""A conversation's history: its messages as they stood in prompts, and how a new request continues it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from sys import getsizeof, intern
from typing import Self

import msgspec
import numpy as np

from ...models.chat.messages import Message
from ...ordering.document import Document
from ...slots.request import Layout, PlacedDocument
from ..wire.requests import HistoryKind
from .answer import Reader
from .begun import Begun
from .parts import DocumentSet
from .prompt import ChatPrompt
from .reading import PLAIN, Form

Documents = tuple[Document, ...]
INSTRUCTIONS = ("system", "developer")  # roles that a conversation begins with


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A message as it stood in a prompt.

    said: the message as the client sent it, without documents, as JSON: decoded it takes up to 20 times as much memory.
    keys: of all its documents, in retrieval rank. shown: the documents that stood in the prompt, with their hints.
    sampled: the ids (int32) of an answer, if they spell exactly its text. one_turn: these are instructions that later turns
    do not keep. num_bytes: of memory, for all of these.
    """

    role: str
    said: bytes
    keys: tuple[str, ...] = ()
    shown: DocumentSet | None = None
    sampled: np.ndarray | None = None
    one_turn: bool = False
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
        one_turn: bool = False,
    ) -> Self:
        """Make an entry of a decoded message."""
        role = intern(str(message["role"]))
        return cls(role, msgspec.json.encode(message), keys, shown=shown, sampled=sampled, one_turn=one_turn)

    @property
    def message(self) -> dict[str, object]:
        """Decode the message; it is not kept decoded."""
        return msgspec.json.decode(self.said)

    def public(self) -> dict[str, object]:
        """Return the message and the ids of its documents in prompt order, without their texts."""
        if self.shown is None:
            return self.message
        order = self.shown.order or ()
        documents = [self.shown.documents[at].id for at in order]
        return {**self.message, "documents": documents, "repeated": list(self.shown.repeated)}


@dataclass(frozen=True, slots=True)
class History:
    """All messages of a prompt: first the `kept` ones, as they stood in an earlier prompt, then the new ones.

    messages: kept and new, without documents. documents: of the new messages, by index. shift: an index here minus the
    index of the same message in the client's request.
    """

    messages: Sequence[Message]
    documents: Mapping[int, Documents]
    kept: Sequence[Entry] = ()
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as a prompt. entries: one for each message; the first `num_kept` come from the remembered history.

    form: of the text that the model writes. begun: the beginning of the answer, which is the last of the entries.
    """

    prompt: ChatPrompt
    entries: tuple[Entry, ...]
    num_kept: int = 0
    form: Form = PLAIN
    begun: Begun | None = None

    @property
    def shown_reader(self) -> Callable[[], Reader]:
        """Makes a reader of the part of its answer that the client gets."""
        return self.whole_reader if self.begun is None or self.begun.is_shown else self.form.reader

    @property
    def whole_reader(self) -> Callable[[], Reader]:
        return self.form.reader if self.begun is None else self.begun.read_whole(self.form.reader)

    def place_entries(self, layout: Layout) -> tuple[Entry, ...]:
        """Return the entries before the answer, with the order of documents that the layout chose; later turns keep it."""
        placed = iter(layout.documents)
        entries = self.entries[:-1] if self.begun else self.entries
        return tuple(_place_documents(entry, placed) for entry in entries)


def continue_history(
    messages: Sequence[Message],
    documents: Mapping[int, Documents],
    remembered: Sequence[Entry] = (),
    kind: HistoryKind = "auto",
) -> History:
    """Join the remembered history of a conversation with the messages that the client sent.

    documents: of the messages that have a `documents` field, by index. If the client sends its whole history, the
    remembered entries are kept up to the first message that differs. A message without the field keeps its documents.
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
    """Whether messages look like a conversation from its beginning: they have instructions or answers."""
    return messages[0]["role"] in INSTRUCTIONS or any(message["role"] == "assistant" for message in messages)


def _is_same(entry: Entry, message: Message, documents: Documents | None) -> bool:
    if documents is not None and entry.keys != tuple(document.key for document in documents):
        return False
    return entry.role == message["role"] and _filled_fields(entry.message) == _filled_fields(message)


def _filled_fields(message: Message) -> dict[str, object]:
    """Return the fields of a message that are not empty: some clients send empty ones, some leave them out."""
    return {name: value for name, value in message.items() if value is not None and value != []}


def _place_documents(entry: Entry, placed: Iterator[PlacedDocument]) -> Entry:
    """Give an entry's documents the order of the next placed ones, which are the same documents."""
    if entry.shown is None:
        return entry
    ranks = {key: rank for rank, key in enumerate(entry.shown.keys)}
    order = tuple(ranks[document.key] for document in islice(placed, len(ranks)))
    return entry if entry.shown.order == order else replace(entry, shown=replace(entry.shown, order=order))


def _size(entry: Entry) -> int:
    """Estimate the bytes of memory that an entry takes; parts shared with other entries count in each of them."""
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
