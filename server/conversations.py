"""Conversations that are remembered, so that a client need only send what is new: bounded in number, bytes and age.

A conversation is all answers that go on from each other; one that two requests go on from branches. What it holds of an
answer is its whole history, which branches share. Scopes never meet.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import RequestError
from .history import OVERHEAD, Entry
from .wire import MAX_SCOPE, ChatRequest

logger = logging.getLogger("slotcache.conversations")


@dataclass(slots=True, eq=False)
class Conversation:
    """One conversation. answers: the history up to and with each, by its id. head: the answer that `conversation` goes on
    from. used: when, on the store's clock. num_bytes: about what it takes."""

    scope: str
    id: str
    created: float = field(default_factory=time.time)
    used: float = 0.0
    answers: dict[str, tuple[Entry, ...]] = field(default_factory=dict)
    head: str = ""
    num_bytes: int = OVERHEAD
    forgotten: bool = False
    _entries: set[Entry] = field(default_factory=set)

    def add(self, answer: str, entries: tuple[Entry, ...], is_head: bool) -> None:
        """Take over a finished answer."""
        new = [entry for entry in entries if entry not in self._entries]
        self._entries.update(new)
        self.num_bytes += OVERHEAD + 8 * len(entries) + sum(entry.num_bytes for entry in new)
        self.answers[answer] = entries
        if is_head or not self.head:
            self.head = answer


@dataclass(frozen=True, slots=True)
class Origin:
    """What a request goes on from, as it was when the request came.

    id: of the conversation. answer: that it goes on from, empty where the conversation is new. branches: it was named by
    that answer, and not by the conversation. stores: whether the new answer shall be remembered.
    """

    scope: str
    id: str
    kind: Literal["auto", "whole", "new"] = "auto"
    answer: str = ""
    entries: tuple[Entry, ...] = ()
    branches: bool = False
    stores: bool = False
    conversation: Conversation | None = None


class Conversations:
    """The store. Not thread-safe: the event loop's. max_age: seconds since the last use; 0 for no end. clock: in seconds."""

    def __init__(self, max_number: int, max_bytes: int, max_age: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_bytes = 0
        self._max_number, self._max_bytes, self._max_age, self._clock = max_number, max_bytes, max_age, clock
        self._held: OrderedDict[tuple[str, str], Conversation] = OrderedDict()  # the least recently used first
        self._by_answer: dict[tuple[str, str], Conversation] = {}

    def __len__(self) -> int:
        return len(self._held)

    # ---- ask -------------------------------------------------------------------------------------------------------

    def find(self, scope: str, id: str) -> Conversation | None:
        """A conversation that is remembered, by its id."""
        self._expire()
        return self._held.get((scope, id))

    # ---- act -------------------------------------------------------------------------------------------------------

    def origin(self, asked: ChatRequest, caches: bool) -> Origin | None:
        """What a chat goes on from; None for one that has nothing to do with conversations.

        caches: whether it may leave anything behind. Raises RequestError: 404 for an answer that is not remembered.
        """
        scope, stores = asked.cache_scope, caches and asked.store is not False
        if asked.previous_response_id is not None:
            if asked.conversation is not None:
                raise RequestError("conversation and previous_response_id: give one of them", param="previous_response_id")
            return self._after_answer(scope, asked.previous_response_id, stores)
        if asked.conversation is None:
            return Origin(scope, f"conv-{secrets.token_hex(12)}", stores=True) if asked.store and stores else None
        name, kind = _named(asked)
        conversation = self.find(scope, name)
        if conversation is None:
            return Origin(scope, name, kind, stores=stores)
        self._use(conversation)
        head = conversation.head
        return Origin(scope, name, kind, head, conversation.answers[head], False, stores, conversation)

    def remember(self, origin: Origin, answer: str, entries: tuple[Entry, ...]) -> bool:
        """An answer is whole; whether it is remembered now.

        By `conversation` the one that ends last is gone on from. By `previous_response_id` it is only where the answer
        that it goes on from was; else it is a branch, which its own id finds.
        """
        if not origin.stores or (origin.conversation is not None and origin.conversation.forgotten):
            return False
        key = (origin.scope, origin.id)
        conversation = self._held.setdefault(key, Conversation(*key))
        before = conversation.num_bytes if conversation.answers else 0
        conversation.add(answer, entries, not origin.branches or conversation.head == origin.answer)
        self.num_bytes += conversation.num_bytes - before
        self._by_answer[origin.scope, answer] = conversation
        self._use(conversation)
        logger.debug(
            "conversation %r: %s goes on from %s, %d messages, %d bytes",
            origin.id,
            answer,
            origin.answer or "nothing",
            len(entries),
            conversation.num_bytes,
        )
        self._expire()
        if conversation.num_bytes > self._max_bytes:
            self._leave(conversation, "alone it takes more than there is room for")
        while self._held and (len(self._held) > self._max_number or self.num_bytes > self._max_bytes):
            self._leave(next(iter(self._held.values())), "there is no room")
        return key in self._held

    def forget(self, scope: str, id: str) -> Conversation | None:
        """Forget a conversation with all its answers; those under way will not be remembered. None: there was none."""
        conversation = self.find(scope, id)
        if conversation is not None:
            conversation.forgotten = True
            self._leave(conversation, "it was deleted")
        return conversation

    def _after_answer(self, scope: str, answer: str, stores: bool) -> Origin:
        self._expire()
        conversation = self._by_answer.get((scope, answer))
        if conversation is None:
            raise RequestError(
                f"no answer {answer[:MAX_SCOPE]!r} is remembered in this cache_scope: send the whole history without "
                "previous_response_id. Answers to requests with cache_prompt and conversation, previous_response_id or "
                "store are remembered, until they are too old or too many",
                status=404,
                param="previous_response_id",
                code="previous_response_not_found",
            )
        self._use(conversation)
        return Origin(scope, conversation.id, "auto", answer, conversation.answers[answer], True, stores, conversation)

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


def _named(asked: ChatRequest) -> tuple[str, Any]:
    """The conversation that a request names, and what its messages are. Raises RequestError."""
    named = asked.conversation
    id, kind = (named, "auto") if isinstance(named, str) else (named.id, named.history) if named else ("", "auto")
    if not 0 < len(id) <= MAX_SCOPE:
        raise RequestError(
            f"the conversation's id has {len(id):,} characters: expected 1 to {MAX_SCOPE}", param="conversation"
        )
    return id, kind
