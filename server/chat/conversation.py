"""One conversation: a tree of answers, and the point of it that a request continues."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from sys import getsizeof

from ..wire.requests import HistoryKind
from .history import Entry
from .stored import StoredAnswer

OVERHEAD = 1000  # bytes that a conversation takes beside its answers, about
ANSWER = 300  # and an answer, beside its history
SHARE = 100  # and an entry, beside itself: its places in the tables of entries


@dataclass(slots=True, eq=False, weakref_slot=True)
class Conversation:
    """One conversation, from its first request on.

    answers: by id, the history up to and including each answer; empty before the first answer ends and after the store
    has dropped the conversation. records: of the answers that have one, their own objects as JSON. head: the answer that
    requests which name only the conversation continue. used: the time of its last use on the store's clock. num_bytes: of
    memory.
    """

    scope: str
    id: str
    created: float = field(default_factory=time.time)
    used: float = 0.0
    answers: dict[str, tuple[Entry, ...]] = field(default_factory=dict)
    records: dict[str, bytes] = field(default_factory=dict)
    head: str = ""
    num_bytes: int = 0
    forgotten: bool = False
    _numbers: dict[Entry, int] = field(default_factory=dict)  # of the entries, and below those of the answers
    _places: dict[str, int] = field(default_factory=dict)
    _first: dict[str, tuple[Entry, ...]] = field(default_factory=dict)  # by answer: entries that were first stored with it
    _next: int = 0

    def __post_init__(self) -> None:
        self.clear()

    def add(self, answer: str, entries: tuple[Entry, ...], is_head: bool) -> None:
        """Store a finished answer."""
        new = tuple(entry for entry in dict.fromkeys(entries) if entry not in self._numbers)
        self._numbers.update(zip(new, range(self._next, self._next + len(new)), strict=True))
        self._next += len(new) + 1
        self._add(answer, entries, new, place=self._next - 1)
        if is_head or not self.head:
            self.head = answer

    def attach(self, answer: str, record: bytes) -> None:
        """Store an answer's own object."""
        self.num_bytes += getsizeof(record) - getsizeof(self.records.get(answer, b"")) * (answer in self.records)
        self.records[answer] = record

    def stored(self, answer: str) -> StoredAnswer:
        """Return an answer as its file has it."""
        return StoredAnswer(
            scope=self.scope,
            conversation=self.id,
            created=self.created,
            id=answer,
            number=self._places[answer],
            is_head=answer == self.head,
            history=tuple(self._numbers[entry] for entry in self.answers[answer]),
            entries={self._numbers[entry]: entry for entry in self._first[answer]},
            record=self.records.get(answer),
        )

    def restore(self, found: Iterable[StoredAnswer]) -> tuple[list[str], list[str]]:
        """Store the answers that files have. Returns the answers to write again, and those whose history is not whole."""
        answers = sorted(found, key=lambda stored: stored.number)
        entries = {number: entry for stored in answers for number, entry in stored.entries.items()}
        self._numbers = {entry: number for number, entry in entries.items()}
        self._next = 1 + max((*entries, *(stored.number for stored in answers)))
        lost = [stored for stored in answers if any(number not in entries for number in stored.history)]
        for stored in answers:
            history = tuple(entries[number] for number in stored.history if number in entries)
            self._add(stored.id, history, tuple(stored.entries.values()), place=stored.number)
            if stored.record is not None:
                self.attach(stored.id, stored.record)
            if stored.is_head or not self.head:
                self.head, self.created = stored.id, stored.created
        heirs = [heir for stored in lost for heir in self.remove(stored.id)]
        return [heir for heir in dict.fromkeys(heirs) if heir in self.answers], [stored.id for stored in lost]

    def remove(self, answer: str) -> list[str]:
        """Drop one answer; return the answers whose files now have entries that its file had."""
        gone, entries = self._first.pop(answer), self.answers.pop(answer)
        del self._places[answer]
        self.num_bytes -= ANSWER + getsizeof(entries)
        if (record := self.records.pop(answer, None)) is not None:
            self.num_bytes -= getsizeof(record)
        heirs: list[str] = []
        for entry in gone:
            heir = next((other for other, history in self.answers.items() if entry in history), None)
            if heir is None:
                del self._numbers[entry]
                self.num_bytes -= SHARE + entry.num_bytes
            else:
                self._first[heir] += (entry,)
                heirs.append(heir)
        if self.head == answer:
            self.head = next(reversed(self.answers), "")
        return list(dict.fromkeys(heirs))

    def clear(self) -> None:
        """Drop all answers."""
        self.answers, self.records, self.head = {}, {}, ""
        self._numbers, self._places, self._first = {}, {}, {}
        self.num_bytes = OVERHEAD + getsizeof(self.scope) + getsizeof(self.id)

    def _add(self, answer: str, entries: tuple[Entry, ...], new: tuple[Entry, ...], place: int) -> None:
        self.num_bytes += ANSWER + getsizeof(entries) + sum(SHARE + entry.num_bytes for entry in new)
        self.answers[answer], self._first[answer], self._places[answer] = entries, new, place


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The point of a conversation that a request continues, as it was when the request came.

    answer: the id of the answer before it, empty for a new conversation. branches: the request named that answer and not
    the conversation. stores: whether the new answer is to be stored.
    """

    conversation: Conversation
    kind: HistoryKind = "auto"
    answer: str = ""
    entries: tuple[Entry, ...] = ()
    branches: bool = False
    stores: bool = False

    @property
    def id(self) -> str:
        """The conversation's id."""
        return self.conversation.id


def with_instructions(entries: tuple[Entry, ...], instructions: str | None) -> tuple[Entry, ...]:
    """Return a history with the instructions of the next turn in front, and without those of the turn before."""
    kept = tuple(entry for entry in entries if not entry.one_turn)
    if instructions is None:
        return kept
    new = Entry.of({"role": "system", "content": instructions}, one_turn=True)
    same = (entry for entry in entries if entry.one_turn and entry.said == new.said)  # the entry itself: it is stored once
    return (next(same, new), *kept)
