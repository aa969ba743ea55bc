"""The store of conversations, so that a client need only send its new messages. Bounded in number, bytes and age.

A conversation is a tree of answers: an answer that two requests continue is the start of two branches. With each answer
its whole history is stored, in entries that branches share. Scopes never share a conversation.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from sys import getsizeof
from weakref import WeakValueDictionary

from ...slots.scope import MAX_NAME
from ..errors import RequestError
from ..wire.requests import ChatRequest, ConversationReference, HistoryKind
from .history import Entry

logger = logging.getLogger("slotcache.conversations")
OVERHEAD = 1000  # bytes that a conversation takes beside its answers, about
ANSWER = 300  # and an answer, beside its history
SHARE = 50  # and an entry, beside itself: its place in the set of entries


@dataclass(slots=True, eq=False, weakref_slot=True)
class Conversation:
    """One conversation, from its first request on.

    answers: by id, the history up to and including each answer; empty before the first answer ends and after the store
    has dropped the conversation. head: the answer that requests which name only the conversation continue. used: the
    time of its last use on the store's clock. num_bytes: of memory.
    """

    scope: str
    id: str
    created: float = field(default_factory=time.time)
    used: float = 0.0
    answers: dict[str, tuple[Entry, ...]] = field(default_factory=dict)
    head: str = ""
    num_bytes: int = 0
    forgotten: bool = False
    _entries: set[Entry] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.clear()

    def add(self, answer: str, entries: tuple[Entry, ...], is_head: bool) -> None:
        """Store a finished answer."""
        new = [entry for entry in entries if entry not in self._entries]
        self._entries.update(new)
        self.num_bytes += ANSWER + getsizeof(entries) + sum(SHARE + entry.num_bytes for entry in new)
        self.answers[answer] = entries
        if is_head or not self.head:
            self.head = answer

    def clear(self) -> None:
        """Drop all answers."""
        self.answers, self._entries, self.head = {}, set(), ""
        self.num_bytes = OVERHEAD + getsizeof(self.scope) + getsizeof(self.id)


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


class Conversations:
    """The store. Not thread-safe: the event loop's. max_age: seconds since the last use; 0: no limit. clock: in seconds."""

    def __init__(self, max_number: int, max_bytes: int, max_age: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_bytes = 0
        self._max_number, self._max_bytes, self._max_age, self._clock = max_number, max_bytes, max_age, clock
        # `held` are stored, the least recently used first. `known` are also those that only unfinished requests refer to.
        self._held: OrderedDict[tuple[str, str], Conversation] = OrderedDict()
        self._known: WeakValueDictionary[tuple[str, str], Conversation] = WeakValueDictionary()
        self._by_answer: dict[tuple[str, str], Conversation] = {}

    def __len__(self) -> int:
        return len(self._held)

    # ---- ask -------------------------------------------------------------------------------------------------------

    def find(self, scope: str, id: str) -> Conversation | None:
        """Return a stored conversation by its id."""
        self._expire()
        return self._held.get((scope, id))

    # ---- act -------------------------------------------------------------------------------------------------------

    def origin(self, asked: ChatRequest, caches: bool) -> Origin | None:
        """Return the point that a chat continues; None for a chat outside of conversations.

        caches: whether the request may be cached; if not, its answer is not stored either. Raises RequestError, with
        404 for an answer that is not stored.
        """
        scope, stores = asked.cache_scope, caches and asked.store is not False
        if asked.previous_response_id is not None:
            if asked.conversation is not None:
                raise RequestError("conversation and previous_response_id: give one of them", param="previous_response_id")
            return self._after_answer(scope, asked.previous_response_id, stores)
        if asked.conversation is None:
            new = f"conv-{secrets.token_hex(12)}"
            return Origin(conversation=self._begin(scope, new), stores=True) if asked.store and stores else None
        name, kind = _read_reference(asked)
        conversation = self.find(scope, name)
        if conversation is None:
            return Origin(conversation=self._begin(scope, name), kind=kind, stores=stores)
        self._use(conversation)
        head = conversation.head
        entries = conversation.answers[head]
        return Origin(conversation=conversation, kind=kind, answer=head, entries=entries, stores=stores)

    def remember(self, origin: Origin, answer: str, entries: tuple[Entry, ...]) -> bool:
        """Store a complete answer; whether it is stored now.

        An answer to a request that named the conversation becomes its head: of several, the last to end. An answer to a
        request that named an answer becomes the head only if that answer was the head; else it is a branch, found by its id.
        """
        conversation = origin.conversation
        if not origin.stores or conversation.forgotten:
            return False
        key = (conversation.scope, conversation.id)
        before = conversation.num_bytes if key in self._held else 0
        conversation.add(answer, entries, not origin.branches or conversation.head == origin.answer)
        self._held[key] = conversation
        self.num_bytes += conversation.num_bytes - before
        self._by_answer[conversation.scope, answer] = conversation
        self._use(conversation)
        follows, size = origin.answer or "nothing", f"{len(entries)} messages, {conversation.num_bytes} bytes"
        logger.debug("conversation %r: %s, %s", conversation.id, f"{answer} continues {follows}", size)
        self._expire()
        if conversation.num_bytes > self._max_bytes:
            self._leave(conversation, "alone it takes more than there is room for")
        while self._held and (len(self._held) > self._max_number or self.num_bytes > self._max_bytes):
            self._leave(next(iter(self._held.values())), "there is no room")
        return key in self._held

    def forget(self, scope: str, id: str) -> Conversation | None:
        """Drop a conversation with all its answers and return it, if it exists. Unfinished answers will not be stored."""
        self._expire()
        conversation = self._known.pop((scope, id), None)
        if conversation is not None:
            conversation.forgotten = True
            if (scope, id) in self._held:
                self._leave(conversation, "it was deleted")
        return conversation

    def _begin(self, scope: str, id: str) -> Conversation:
        """Return the conversation of this id that is not stored: not yet, or no longer. Requests may be running in it."""
        key = (scope, id)
        if (begun := self._known.get(key)) is None:
            begun = self._known[key] = Conversation(scope, id)
        return begun

    def _after_answer(self, scope: str, answer: str, stores: bool) -> Origin:
        self._expire()
        conversation = self._by_answer.get((scope, answer))
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
        return Origin(conversation=conversation, answer=answer, entries=entries, branches=True, stores=stores)

    def _use(self, conversation: Conversation) -> None:
        conversation.used = self._clock()
        self._held.move_to_end((conversation.scope, conversation.id))

    def _expire(self) -> None:
        oldest = self._clock() - self._max_age
        while self._max_age and self._held and (first := next(iter(self._held.values()))).used < oldest:
            self._leave(first, "it is too old")

    def _leave(self, conversation: Conversation, why: str) -> None:
        del self._held[conversation.scope, conversation.id]
        for answer in conversation.answers:
            del self._by_answer[conversation.scope, answer]
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
