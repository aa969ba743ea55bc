"""Stored conversations in memory: where a turn continues, what it adds, and what is evicted.

A conversation is a tree of answers: two requests that continue the same answer start two branches. Each answer is
stored with its whole history. The history consists of entries, which branches share. Scopes never share a conversation.
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

OVERHEAD = 1000  # bytes of a conversation without its answers, about
ANSWER = 300  # bytes of an answer without its history, about
SHARE = 100  # bytes that an entry takes in the tables of entries, about


@dataclass(slots=True, eq=False, weakref_slot=True)
class Conversation:
    """One conversation, from its first request on.

    answers: for each answer's id, the history up to and including the answer. It is empty until the first answer ends,
    and after the store has dropped the conversation. records: the API objects of answers as JSON, by id. head: the
    answer that a request continues if it names only the conversation. If the head is deleted, the answer that
    it continues becomes the head. used: the time of the last use, by the store's clock. num_bytes: the size in memory.
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
    _headed: dict[str, int] = field(default_factory=dict)  # by former head: the number of the change, rising with time
    _next: int = 0

    def __post_init__(self) -> None:
        self.clear()

    def add(self, answer: str, entries: tuple[HistoryMessage, ...], is_head: bool, parent: str = "") -> None:
        """Store a finished answer. parent: the answer that this one continues; empty: none."""
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
        """Return an answer in the form that its file has."""
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
        """Store the answers that were read from files.

        Return the answers to write again, and the answers that were dropped because their history has gaps.
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
        """Drop an answer. Return the answers whose files change.

        These files change because the answers take over entries, get another parent, or become the head.
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
        """Return the stored answer that was the head most recently; if none was the head, the newest answer."""
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

    answer: the id of the answer before the request; empty in a new conversation. branches: the request named this
    answer, and not the conversation. stores: whether to store the new answer.
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
    """Return a history that starts with the instructions of the next turn.

    They replace the instructions of the previous turn.
    """
    kept = tuple(entry for entry in entries if not entry.one_turn)
    if instructions is None:
        return kept
    new = HistoryMessage.of({"role": "system", "content": instructions}, one_turn=True)
    same = (entry for entry in entries if entry.one_turn and entry.said == new.said)  # the same object: it is stored once
    return (next(same, new), *kept)


# ---- One turn of a chat, from the request to the history that is stored with its complete answer. -----------------------


@dataclass(frozen=True, slots=True)
class PendingTurn:
    """A request whose answer is not complete.

    id: the answer's id. ref: the place in a conversation; None: the request belongs to no conversation. options: the
    fields of the request as JSON, without its messages and documents, which are in `chat`.
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
        """Return the whole message of an answer, the key for its ids, and whether the message is content alone.

        text: what the model wrote. is_cut: the answer ended at its limit. If the message is content alone, the key is
        its text, since its ids have no control token.
        """
        reader = self.chat.whole_reader()
        answer = message([*reader.push(text), *reader.finish(is_cut)])
        whole = self.chat.prefilled.content + text if self.chat.prefilled else text
        is_content = answer == {"role": "assistant", "content": whole} and not any(
            tag in text for tag in self.chat.form.spelt
        )
        return answer, whole if is_content else answer_key(answer), is_content

    def read_shown(self, text: str, is_cut: bool = False) -> Message:
        """Return the whole message of an answer as the client reads it, with the numbers of the client's program."""
        reader = self.chat.cited_reader()
        return message([*reader.push(text), *reader.finish(is_cut)])

    def ids(self, sampled: np.ndarray) -> np.ndarray:
        """Return the ids (int32) of the whole answer, as far as they are known.

        sampled: the ids that the model generated.
        """
        return self.chat.prefilled.join(sampled) if self.chat.prefilled else sampled

    def entries(self, layout: Layout, answer: Message, sampled: np.ndarray | None) -> tuple[HistoryMessage, ...]:
        """Return the history with the answer at its end.

        sampled: the ids (int32) of the answer, if it is content alone.
        """
        return (*self.chat.place_entries(layout), HistoryMessage.of(answer, sampled=sampled))

    def report(self, remembered: bool) -> dict[str, object] | None:
        """Return the field `conversation` of the answer; None outside of conversations.

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

    max_age: the seconds after the last use until a conversation is dropped; 0: no limit. clock: returns the time in
    seconds. files: the files of the answers; None: the store is in memory only. turns: returns the turns that the
    engine has not ended yet. num_evicted: how many conversations were dropped for lack of room.
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
        # `_stored`: stored ones, the least recently used first. `_known`: also those that only unfinished requests refer to.
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
        """Return a conversation by its id. The conversation may be stored, or still in its first request."""
        return self._known.get((scope, id))

    def find_answer(self, scope: str, answer: str) -> Conversation | None:
        """Return the conversation that a stored answer belongs to."""
        self._expire()
        return self._by_answer.get((scope, answer))

    # ---- act -------------------------------------------------------------------------------------------------------

    def ref(self, asked: ChatRequest, caches: bool) -> ConversationRef | None:
        """Return the point of a conversation that a chat continues; None for a chat outside of conversations.

        caches: whether the request may be cached. The answer of a chat that may not be cached is not stored; the answer
        of a response is stored unless its request forbids it. Raises RequestError; its status is 404 for an answer that
        is not stored.
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
        """Load the conversations from the files. Must be called once, before any other method."""
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
        """Finish the writes that are queued."""
        if self._files is not None:
            self._files.close()

    def settle(self) -> None:
        """Wait until the files match the store. Not for the event loop's thread."""
        if self._files is not None:
            self._files.settle()

    def remember(self, ref: ConversationRef, answer: str, entries: tuple[HistoryMessage, ...]) -> bool:
        """Store a complete answer. Return whether it is stored now.

        If the request named only the conversation, the answer becomes the head; of several such answers the last to end
        is the head. If the request named an answer, the new answer becomes the head only if the named one was the head.
        Otherwise the new answer is a branch, which only its id finds.
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
        """Drop an answer. Return whether it was stored.

        Answers that continue the dropped answer keep their whole history. If it was the head, the answer
        that it continues becomes the head; if there is none, the answer that was the head most recently.
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
        """Count a request as unfinished while a `with` block makes its prompt."""
        entering = [] if ref is None else [ref]
        self._entering += entering
        try:
            yield
        finally:
            for one in entering:
                self._entering.remove(one)

    def forget(self, scope: str, id: str) -> bool:
        """Drop a conversation with all its answers, including unfinished ones. Return whether there was an answer."""
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
        """Return the conversation of this id, which is not stored. If there is none, make one.

        It may have running requests.
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
        """Share the bounds with these stores, which include this one.

        The least recently used conversation of all is dropped first.
        """
        self._stores = stores
        self._make_room()

    def _expire(self) -> None:
        oldest = self._clock() - self._max_age
        while self._max_age and self._stored and (first := self._oldest).used < oldest:
            self._remove(first, "it is too old")

    def _make_room(self, newest: Conversation | None = None) -> None:
        """Drop the least recently used conversations. newest: dropped first if it alone exceeds the bound."""
        if newest is not None and newest.num_bytes > self._max_bytes:
            self._evict(newest, "alone it takes more than there is room for")
        while any(self._stores) and (
            sum(map(len, self._stores)) > self._max_number or sum(one.num_bytes for one in self._stores) > self._max_bytes
        ):
            oldest = min((store for store in self._stores if store), key=lambda store: store._oldest.used)
            oldest._evict(oldest._oldest, "there is no room")

    @property
    def _oldest(self) -> Conversation:
        """The least recently used conversation; the store must have one."""
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
    """Return the id of the conversation that a request names, and the kind of its messages. Raises RequestError."""
    named = asked.conversation
    if not isinstance(named, ConversationReference):
        named = ConversationReference(named or "")
    id = named.id
    if not 0 < len(id) <= MAX_NAME:
        raise RequestError(
            f"the conversation's id has {len(id):,} characters: expected 1 to {MAX_NAME}", param="conversation"
        )
    return id, named.history
