"""Stored conversations in memory: find the point that a request continues, store its answer, and drop old conversations.

A conversation is a tree of answers: if two requests continue the same answer, the tree branches there. Each answer is
stored with its whole history. A history consists of entries. Two branches share the entries before the point where they
part. Conversations of different scopes share nothing.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from sys import getsizeof
from typing import Self
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from ...models.template import Message
from ...slots.request import Layout
from ...slots.scope import MAX_NAME
from ..formats.answer import message
from ..http.api_errors import RequestError
from .body import ChatRequest, ConversationReference, HistoryKind, ResponseChat
from .conversation_files import ConversationFiles, HistoryVocabulary, StoredAnswer, file_name, seconds_since
from .history import ChatHistory, HistoryMessage
from .tokens import answer_key

# ---- One conversation: a tree of answers, and the point in it that a request continues. ---------------------------------

OVERHEAD = 1000  # approximate bytes of a conversation without its answers
ANSWER = 300  # approximate bytes of an answer without its history
SHARE = 100  # approximate bytes of an entry in the tables of entries


@dataclass(slots=True, eq=False, weakref_slot=True)
class Conversation:
    """One conversation, from its first request on.

    answers: by the answer's id, the history up to and including the answer. There are no answers before the first one has
        ended, and after the store has dropped the conversation.
    records: by the answer's id, the answer's API object as JSON.
    head: the id of the answer that a request continues if it names only the conversation.
    used: the time of the last use, by the store's clock.
    num_bytes: the size in memory.
    forgotten: whether a client has deleted the conversation.
    """

    scope: str
    id: str
    created: float = field(default_factory=time.time)
    used: float = 0.0
    answers: dict[str, tuple[HistoryMessage, ...]] = field(default_factory=dict)
    records: dict[str, bytes] = field(default_factory=dict)
    head: str = ""
    num_bytes: int = 0
    forgotten: bool = False
    _numbers: dict[HistoryMessage, int] = field(default_factory=dict)  # the numbers of the entries
    _places: dict[str, int] = field(default_factory=dict)  # the numbers of the answers
    _first: dict[str, tuple[HistoryMessage, ...]] = field(
        default_factory=dict
    )  # by answer: the entries first stored with it
    _parents: dict[str, str] = field(default_factory=dict)  # by answer: the stored answer before it; empty: none
    _headed: dict[str, int] = field(default_factory=dict)  # by former head: the number of the change; later is higher
    _next: int = 0

    def __post_init__(self) -> None:
        self.clear()

    def add(self, answer: str, entries: tuple[HistoryMessage, ...], is_head: bool, parent: str = "") -> None:
        """Store a finished answer.

        is_head: whether the answer becomes the head; the first answer always does. parent: the id of the answer that
        this answer continues; empty: it continues none.
        """
        new = tuple(entry for entry in dict.fromkeys(entries) if entry not in self._numbers)
        self._numbers.update(zip(new, range(self._next, self._next + len(new)), strict=True))
        self._next += len(new) + 1
        self._add(answer, entries, new, place=self._next - 1, parent=parent if parent in self.answers else "")
        if is_head or not self.head:
            self._choose(answer)

    def attach(self, answer: str, record: bytes) -> None:
        """Store the API object of an answer, as JSON."""
        self.num_bytes += getsizeof(record) - getsizeof(self.records.get(answer, b"")) * (answer in self.records)
        self.records[answer] = record

    def stored(self, answer: str) -> StoredAnswer:
        """Return an answer in the form of its file."""
        return StoredAnswer(
            scope=self.scope,
            conversation=self.id,
            created=self.created,
            id=answer,
            number=self._places[answer],
            headed=self._headed.get(answer, 0),
            parent=self._parents[answer],
            history=tuple(self._numbers[entry] for entry in self.answers[answer]),
            entries={self._numbers[entry]: entry for entry in self._first[answer]},
            record=self.records.get(answer),
        )

    def restore(self, found: Iterable[StoredAnswer]) -> tuple[list[str], list[str]]:
        """Add the answers that were read from files. Return the ids of answers to write again, and of dropped answers.

        An answer is dropped if an entry of its history is missing.
        """
        answers = sorted(found, key=lambda stored: stored.number)
        entries = {number: entry for stored in answers for number, entry in stored.entries.items()}
        self._numbers = {entry: number for number, entry in entries.items()}
        self._next = 1 + max((*entries, *(max(stored.number, stored.headed) for stored in answers)))
        lost = [stored for stored in answers if any(number not in entries for number in stored.history)]
        for stored in answers:
            history = tuple(entries[number] for number in stored.history if number in entries)
            self._add(stored.id, history, tuple(stored.entries.values()), place=stored.number, parent=stored.parent)
            if stored.headed:
                self._headed[stored.id] = stored.headed
            if stored.record is not None:
                self.attach(stored.id, stored.record)
            self.created = stored.created
        self._parents = {answer: parent if parent in self.answers else "" for answer, parent in self._parents.items()}
        self.head = self._last_head()
        heirs = [heir for stored in lost for heir in self.remove(stored.id)]
        return [heir for heir in dict.fromkeys(heirs) if heir in self.answers], [stored.id for stored in lost]

    def remove(self, answer: str) -> list[str]:
        """Drop an answer. Return the ids of the answers whose files must be written again.

        An answer's file must be written again if the answer takes over entries of the dropped answer, gets another parent,
        or becomes the head. If the head is dropped, its parent becomes the head. If the dropped head has no parent, the
        answer that was the head most recently becomes the head again.
        """
        gone, entries, parent = self._first.pop(answer), self.answers.pop(answer), self._parents.pop(answer)
        del self._places[answer]
        self._headed.pop(answer, None)
        self.num_bytes -= ANSWER + getsizeof(entries)
        if (record := self.records.pop(answer, None)) is not None:
            self.num_bytes -= getsizeof(record)
        heirs: list[str] = []
        left = set(gone)
        for other, history in self.answers.items():
            if not left:
                break
            if inherited := left.intersection(history):
                self._first[other] += tuple(entry for entry in gone if entry in inherited)
                heirs.append(other)
                left -= inherited
        for entry in left:
            del self._numbers[entry]
            self.num_bytes -= SHARE + entry.num_bytes
        children = [other for other, above in self._parents.items() if above == answer]
        self._parents |= dict.fromkeys(children, parent)
        heirs += children
        if self.head == answer:
            self.head = ""
            if self.answers:
                self._choose(parent or self._last_head())
                heirs.append(self.head)
        return list(dict.fromkeys(heirs))

    def clear(self) -> None:
        self.answers, self.records, self.head = {}, {}, ""
        self._numbers, self._places, self._first, self._parents, self._headed = {}, {}, {}, {}, {}
        self.num_bytes = OVERHEAD + getsizeof(self.scope) + getsizeof(self.id)

    def _choose(self, head: str) -> None:
        self.head, self._headed[head] = head, self._next
        self._next += 1

    def _last_head(self) -> str:
        """Return the id of the stored answer that was the head most recently.

        If none was ever the head, return the newest one.
        """
        return max(self.answers, key=lambda answer: (self._headed.get(answer, 0), self._places[answer]))

    def _add(
        self, answer: str, entries: tuple[HistoryMessage, ...], new: tuple[HistoryMessage, ...], place: int, parent: str
    ) -> None:
        self.num_bytes += ANSWER + getsizeof(entries) + sum(SHARE + entry.num_bytes for entry in new)
        self.answers[answer], self._first[answer], self._places[answer] = entries, new, place
        self._parents[answer] = parent


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRef:
    """The point of a conversation that a request continues, fixed when the request arrives.

    answer: the id of the answer that the request continues; empty: the conversation is new. branches: whether the
    request names this answer; otherwise it names only the conversation. stores: whether to store the new answer.
    """

    conversation: Conversation
    kind: HistoryKind = "auto"
    answer: str = ""
    entries: tuple[HistoryMessage, ...] = ()
    branches: bool = False
    stores: bool = False

    @property
    def id(self) -> str:
        return self.conversation.id


def with_instructions(entries: tuple[HistoryMessage, ...], instructions: str | None) -> tuple[HistoryMessage, ...]:
    """Replace the one-turn instructions (which later turns drop) at the start of a history.

    instructions: the instructions for the next turn; None: the next turn has none.
    """
    kept = tuple(entry for entry in entries if not entry.one_turn)
    if instructions is None:
        return kept
    new = HistoryMessage.of({"role": "system", "content": instructions}, one_turn=True)
    same = (entry for entry in entries if entry.one_turn and entry.said == new.said)  # the same object is stored once
    return (next(same, new), *kept)


# ---- One turn of a chat, from the request to the history that is stored with its complete answer. -----------------------


@dataclass(frozen=True, slots=True)
class PendingTurn:
    """A request whose answer is not complete.

    id: the answer's id. options: the fields of the request as JSON, without its messages and documents. chat: the
    request's messages and documents. ref: the point of a conversation that the request continues; None: it belongs to no
    conversation.
    """

    id: str
    options: bytes
    chat: ChatHistory
    ref: ConversationRef | None

    @classmethod
    def of(cls, id: str, asked: ChatRequest, chat: ChatHistory, ref: ConversationRef | None) -> Self:
        """Make the turn of a request. chat: the messages and documents of the request."""
        return cls(id, msgspec.json.encode(asked.for_next_turn()), chat, ref)

    def read(self, text: str, is_cut: bool = False) -> tuple[Message, str, bool]:
        """Return the message of an answer, the key for the answer's ids, and whether the message has only content.

        The message includes the start of the answer that the request gave. If the message has only content, its ids
        contain no control token, and the key is the message's text. The key of any other message is its `answer_key`.
        text: the text that the model wrote. is_cut: whether the answer ended at a limit.
        """
        reader = self.chat.whole_reader()
        answer = message([*reader.push(text), *reader.finish(is_cut)])
        whole = self.chat.prefilled.content + text if self.chat.prefilled else text
        is_content = answer == {"role": "assistant", "content": whole} and not any(
            tag in text for tag in self.chat.form.spelt
        )
        return answer, whole if is_content else answer_key(answer), is_content

    def read_shown(self, text: str, is_cut: bool = False) -> Message:
        """Return the message of an answer as the client reads it: with its own numbers in place of the ids of documents."""
        reader = self.chat.cited_reader()
        return message([*reader.push(text), *reader.finish(is_cut)])

    def ids(self, sampled: np.ndarray) -> np.ndarray:
        """Return the ids (int32) of the whole answer, or of the generated part if the ids of the given part are unknown.

        sampled: the ids that the model generated.
        """
        return self.chat.prefilled.join(sampled) if self.chat.prefilled else sampled

    def entries(self, layout: Layout, answer: Message, sampled: np.ndarray | None) -> tuple[HistoryMessage, ...]:
        """Return the history, with the answer as its last entry.

        layout: the layout of the prompt, whose order of documents later turns keep. sampled: the ids (int32) of an
        answer that has only content; otherwise None.
        """
        return (*self.chat.place_entries(layout), HistoryMessage.of(answer, sampled=sampled))

    def report(self, remembered: bool) -> dict[str, object] | None:
        """Return the answer's field `conversation`; None: the request belongs to no conversation.

        remembered: whether the answer is stored.
        """
        if self.ref is None:
            return None
        return {
            "id": self.ref.id,
            "previous": self.ref.answer or None,
            "turns": sum(entry.role == "user" for entry in self.chat.entries),
            "messages": len(self.chat.entries),
            "messages_kept": self.chat.num_kept,
            "remembered": remembered,
        }


logger = logging.getLogger("slotcache.conversations")


class Conversations:
    """The store of conversations. For the event loop only; not thread-safe.

    max_age: the seconds from the last use of a conversation until it is dropped; 0: no limit.
    clock: returns the time in seconds.
    files: the files of the answers; None: the store is only in memory.
    turns: returns the turns that are running or waiting in the engine.
    num_evicted: how many conversations were dropped because there was no room for them.
    """

    def __init__(
        self,
        max_number: int,
        max_bytes: int,
        max_age: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        files: ConversationFiles | None = None,
        turns: Callable[[], Iterable[PendingTurn | None]] = tuple,
    ) -> None:
        self.num_bytes = self.num_evicted = 0
        self._stores: Sequence[Conversations] = (self,)
        self._turns, self._entering = turns, list[ConversationRef]()
        self._max_number, self._max_bytes, self._max_age, self._clock = max_number, max_bytes, max_age, clock
        self._files = files
        # `_stored`: the stored conversations, the least recently used first. `_known`: also conversations that only
        # unfinished requests refer to.
        self._stored: OrderedDict[tuple[str, str], Conversation] = OrderedDict()
        self._known: WeakValueDictionary[tuple[str, str], Conversation] = WeakValueDictionary()
        self._by_answer: dict[tuple[str, str], Conversation] = {}

    def __len__(self) -> int:
        return len(self._stored)

    # ---- ask -------------------------------------------------------------------------------------------------------

    def find(self, scope: str, id: str) -> Conversation | None:
        self._expire()
        return self._stored.get((scope, id))

    def known(self, scope: str, id: str) -> Conversation | None:
        """Return the conversation with an id, even while its first answer is unfinished; None: there is none."""
        return self._known.get((scope, id))

    def find_answer(self, scope: str, answer: str) -> Conversation | None:
        """Return the conversation of a stored answer; None: the answer is not stored."""
        self._expire()
        return self._by_answer.get((scope, answer))

    # ---- act -------------------------------------------------------------------------------------------------------

    def ref(self, asked: ChatRequest, caches: bool) -> ConversationRef | None:
        """Return the point of a conversation that a chat continues; None: the chat belongs to no conversation.

        With `store: false`, no answer is stored. With any other `store`, the answer of a response is always stored. The
        answer of a chat is stored only if the chat belongs to a conversation and may be cached. caches: whether the
        request may be cached. Raises RequestError, with status 404 if the request names an answer that is not stored.
        """
        if not isinstance(asked, ResponseChat):
            return self._ref(asked, caches and asked.store is not False)
        ref = self._ref(asked, asked.store is not False) or self._new_ref(asked.cache_scope, stores=False)
        return replace(ref, kind="new", entries=with_instructions(ref.entries, asked.instructions))

    def _ref(self, asked: ChatRequest, stores: bool) -> ConversationRef | None:
        scope = asked.cache_scope
        if asked.previous_response_id is not None:
            if asked.conversation is not None:
                raise RequestError("conversation and previous_response_id: give one of them", param="previous_response_id")
            return self._after_answer(scope, asked.previous_response_id, stores)
        if asked.conversation is None:
            return self._new_ref(scope, stores=True) if asked.store and stores else None
        name, kind = _read_reference(asked)
        conversation = self.find(scope, name)
        if conversation is None:
            return ConversationRef(conversation=self._begin(scope, name), kind=kind, stores=stores)
        self._use(conversation)
        head = conversation.head
        entries = conversation.answers[head]
        return ConversationRef(conversation=conversation, kind=kind, answer=head, entries=entries, stores=stores)

    def restore(self, vocabulary: HistoryVocabulary) -> None:
        """Load the conversations from the files. Call it once, before any other method."""
        if self._files is None:
            return
        groups: dict[tuple[str, str], list[tuple[StoredAnswer, float]]] = {}
        for stored, written in self._files.answers(vocabulary, self._max_bytes):
            groups.setdefault((stored.scope, stored.conversation), []).append((stored, written))
        for key, found in sorted(groups.items(), key=lambda group: max(written for _, written in group[1])):
            conversation = self._known[key] = self._stored[key] = Conversation(*key)
            conversation.used = self._clock() - seconds_since(max(written for _, written in found))
            changed, lost = conversation.restore(stored for stored, _ in found)
            self._by_answer |= {(key[0], answer): conversation for answer in conversation.answers}
            self.num_bytes += conversation.num_bytes
            self._write(conversation, changed)
            self._unwrite(key[0], lost)
            if not conversation.answers:
                self._remove(conversation, "its files are not whole")
        self._make_room()
        logger.info("%d conversations are back, with %d answers", len(self._stored), len(self._by_answer))

    def close(self) -> None:
        """Finish the queued writes, and close the files."""
        if self._files is not None:
            self._files.close()

    def settle(self) -> None:
        """Wait until the queued writes are done. Do not call this in the event loop's thread, since it blocks."""
        if self._files is not None:
            self._files.settle()

    def remember(self, ref: ConversationRef, answer: str, entries: tuple[HistoryMessage, ...]) -> bool:
        """Store a complete answer. Return whether the answer is stored now.

        If the request named only the conversation, the answer becomes the head. If several requests that named only the
        conversation ran at the same time, the answer that ends last stays the head. If the request named an earlier
        answer, the new answer becomes the head only if the named answer is the head. If the named answer is not the head,
        the new answer is a branch: only a request with the new answer's id continues this branch.
        """
        conversation = ref.conversation
        if not ref.stores or conversation.forgotten:
            return False
        key = (conversation.scope, conversation.id)
        before = conversation.num_bytes if key in self._stored else 0
        is_head = not ref.branches or conversation.head == ref.answer
        conversation.add(answer, entries, is_head, parent=ref.answer)
        self._stored[key] = conversation
        self.num_bytes += conversation.num_bytes - before
        self._by_answer[conversation.scope, answer] = conversation
        self._use(conversation)
        follows, size = ref.answer or "nothing", f"{len(entries)} messages, {conversation.num_bytes} bytes"
        logger.debug("conversation %r: %s, %s", conversation.id, f"{answer} continues {follows}", size)
        self._write(conversation, [answer])
        self._expire()
        self._make_room(conversation)
        return key in self._stored

    def attach(self, scope: str, answer: str, record: bytes) -> None:
        """Store the API object of an answer as JSON, if the answer is still stored."""
        conversation = self._by_answer.get((scope, answer))
        if conversation is None:
            return
        self.num_bytes -= conversation.num_bytes
        conversation.attach(answer, record)
        self.num_bytes += conversation.num_bytes
        self._write(conversation, [answer])
        self._make_room(conversation)

    def forget_answer(self, scope: str, answer: str) -> bool:
        """Drop an answer. Return whether the answer was stored.

        Answers that continue the dropped answer keep their whole history. If the dropped answer was the head, its parent
        becomes the head. If the dropped head has no parent, the stored answer that was the head most recently becomes the
        head again.
        """
        conversation = self.find_answer(scope, answer)
        if conversation is None:
            return False
        if len(conversation.answers) == 1:
            self._remove(conversation, "its last answer was deleted")
            return True
        self.num_bytes -= conversation.num_bytes
        self._write(conversation, conversation.remove(answer))
        self.num_bytes += conversation.num_bytes
        del self._by_answer[scope, answer]
        self._unwrite(scope, [answer])
        return True

    @contextmanager
    def entering(self, ref: ConversationRef | None) -> Iterator[None]:
        """Let `forget` find a request while its prompt is made.

        In this `with` block, the engine does not have the request yet.
        """
        entering = [] if ref is None else [ref]
        self._entering += entering
        try:
            yield
        finally:
            for one in entering:
                self._entering.remove(one)

    def forget(self, scope: str, id: str) -> bool:
        """Drop a conversation with all its answers. Return whether the conversation had a stored or unfinished answer.

        The unfinished answers of the dropped conversation will not be stored.
        """
        self._expire()
        conversation = self._known.pop((scope, id), None)
        if conversation is None:
            return False
        refs = (*self._entering, *(turn.ref for turn in self._turns() if turn is not None and turn.ref is not None))
        is_open = any(ref.conversation is conversation and ref.stores for ref in refs)
        is_stored = (scope, id) in self._stored
        conversation.forgotten = True
        if is_stored:
            self._remove(conversation, "it was deleted")
        return is_stored or is_open

    def _new_ref(self, scope: str, stores: bool) -> ConversationRef:
        return ConversationRef(conversation=self._begin(scope, f"conv-{secrets.token_hex(12)}"), stores=stores)

    def _begin(self, scope: str, id: str) -> Conversation:
        """Return the conversation with an id that is not stored.

        If no unfinished request has created the conversation, create it.
        """
        key = (scope, id)
        if (conversation := self._known.get(key)) is None:
            conversation = self._known[key] = Conversation(scope, id)
        return conversation

    def _after_answer(self, scope: str, answer: str, stores: bool) -> ConversationRef:
        conversation = self.find_answer(scope, answer)
        if conversation is None:
            raise RequestError(
                f"no answer {answer[:MAX_NAME]!r} is remembered in this cache_scope: send the whole history without "
                "previous_response_id. Answers to requests with cache_prompt and conversation, previous_response_id or "
                "store are remembered, until they are too old or too many",
                status=404,
                param="previous_response_id",
                code="previous_response_not_found",
            )
        self._use(conversation)
        entries = conversation.answers[answer]
        return ConversationRef(conversation=conversation, answer=answer, entries=entries, branches=True, stores=stores)

    def _use(self, conversation: Conversation) -> None:
        conversation.used = self._clock()
        self._stored.move_to_end((conversation.scope, conversation.id))

    def share(self, stores: Sequence[Conversations]) -> None:
        """Share the bounds with other stores. stores: all stores that share the bounds, including this one.

        If all stores together exceed a bound, the least recently used conversation of all of them is dropped.
        """
        self._stores = stores
        self._make_room()

    def _expire(self) -> None:
        oldest = self._clock() - self._max_age
        while self._max_age and self._stored and (first := self._oldest).used < oldest:
            self._remove(first, "it is too old")

    def _make_room(self, newest: Conversation | None = None) -> None:
        """Drop the least recently used conversations until the bounds hold.

        newest: a conversation that is dropped before all others if it is larger than the bound by itself.
        """
        if newest is not None and newest.num_bytes > self._max_bytes:
            self._evict(newest, "alone it takes more than there is room for")
        while any(self._stores) and (
            sum(map(len, self._stores)) > self._max_number or sum(one.num_bytes for one in self._stores) > self._max_bytes
        ):
            oldest = min((store for store in self._stores if store), key=lambda store: store._oldest.used)
            oldest._evict(oldest._oldest, "there is no room")

    @property
    def _oldest(self) -> Conversation:
        """The least recently used conversation. The store must not be empty."""
        return next(iter(self._stored.values()))

    def _evict(self, conversation: Conversation, why: str) -> None:
        self.num_evicted += 1
        self._remove(conversation, why)

    def _write(self, conversation: Conversation, answers: Iterable[str]) -> None:
        if self._files is not None:
            for answer in answers:
                self._files.put(conversation.stored(answer))

    def _unwrite(self, scope: str, answers: Iterable[str]) -> None:
        if self._files is not None:
            self._files.drop(file_name(scope, answer) for answer in answers)

    def _remove(self, conversation: Conversation, why: str) -> None:
        del self._stored[conversation.scope, conversation.id]
        for answer in conversation.answers:
            del self._by_answer[conversation.scope, answer]
        self._unwrite(conversation.scope, conversation.answers)
        self.num_bytes -= conversation.num_bytes
        logger.info("conversation %r leaves with %d answers: %s", conversation.id, len(conversation.answers), why)
        conversation.clear()


def _read_reference(asked: ChatRequest) -> tuple[str, HistoryKind]:
    """Return the id of the conversation that a request names, and whether its messages are the whole history.

    Raises RequestError.
    """
    named = asked.conversation
    if not isinstance(named, ConversationReference):
        named = ConversationReference(named or "")
    id = named.id
    if not 0 < len(id) <= MAX_NAME:
        raise RequestError(
            f"the conversation's id has {len(id):,} characters: expected 1 to {MAX_NAME}", param="conversation"
        )
    return id, named.history
