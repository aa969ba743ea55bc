"""The store of conversations, so that a client need only send its new messages. Bounded in number, bytes and age.

A conversation is a tree of answers: an answer that two requests continue is the start of two branches. With each answer
its whole history is stored, in entries that branches share. Scopes never share a conversation.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakValueDictionary

from ...slots.scope import MAX_NAME
from ..errors import RequestError
from ..wire.requests import ChatRequest, ConversationReference, HistoryKind
from ..wire.responses import ResponseChat
from .conversation import Conversation, Origin, with_instructions
from .history import Entry
from .shelf import Shelf, seconds_since
from .stored import StoredAnswer, Vocabulary, file_name
from .turn import Turn

logger = logging.getLogger("slotcache.conversations")


class Conversations:
    """The store. Not thread-safe: the event loop's. max_age: seconds since the last use; 0: no limit. clock: in seconds.

    shelf: the answers' files; None: they are held in memory only. turns: returns those that the engine has not ended yet.
    """

    def __init__(
        self,
        max_number: int,
        max_bytes: int,
        max_age: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        shelf: Shelf | None = None,
        turns: Callable[[], Iterable[Turn | None]] = tuple,
    ) -> None:
        self.num_bytes = 0
        self._turns, self._entering = turns, list[Origin]()
        self._max_number, self._max_bytes, self._max_age, self._clock = max_number, max_bytes, max_age, clock
        self._shelf = shelf
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

    def find_answer(self, scope: str, answer: str) -> Conversation | None:
        """Return the conversation of a stored answer."""
        self._expire()
        return self._by_answer.get((scope, answer))

    # ---- act -------------------------------------------------------------------------------------------------------

    def origin(self, asked: ChatRequest, caches: bool) -> Origin | None:
        """Return the point that a chat continues; None for a chat outside of conversations.

        caches: whether the request may be cached; if not, the answer of a chat is not stored either. A response is stored
        unless its request says otherwise. Raises RequestError, with 404 for an answer that is not stored.
        """
        if not isinstance(asked, ResponseChat):
            return self._origin(asked, caches and asked.store is not False)
        origin = self._origin(asked, asked.store is not False) or self._new_origin(asked.cache_scope, stores=False)
        return replace(origin, kind="new", entries=with_instructions(origin.entries, asked.instructions))

    def _origin(self, asked: ChatRequest, stores: bool) -> Origin | None:
        scope = asked.cache_scope
        if asked.previous_response_id is not None:
            if asked.conversation is not None:
                raise RequestError("conversation and previous_response_id: give one of them", param="previous_response_id")
            return self._after_answer(scope, asked.previous_response_id, stores)
        if asked.conversation is None:
            return self._new_origin(scope, stores=True) if asked.store and stores else None
        name, kind = _read_reference(asked)
        conversation = self.find(scope, name)
        if conversation is None:
            return Origin(conversation=self._begin(scope, name), kind=kind, stores=stores)
        self._use(conversation)
        head = conversation.head
        entries = conversation.answers[head]
        return Origin(conversation=conversation, kind=kind, answer=head, entries=entries, stores=stores)

    def restore(self, vocabulary: Vocabulary) -> None:
        """Take back the conversations of the shelf. Called once, before any other method."""
        if self._shelf is None:
            return
        groups: dict[tuple[str, str], list[tuple[StoredAnswer, float]]] = {}
        for stored, written in self._shelf.load(vocabulary, self._max_bytes):
            groups.setdefault((stored.scope, stored.conversation), []).append((stored, written))
        for key, found in sorted(groups.items(), key=lambda group: max(written for _, written in group[1])):
            conversation = self._known[key] = self._held[key] = Conversation(*key)
            conversation.used = self._clock() - seconds_since(max(written for _, written in found))
            changed, lost = conversation.restore(stored for stored, _ in found)
            self._by_answer |= {(key[0], answer): conversation for answer in conversation.answers}
            self.num_bytes += conversation.num_bytes
            self._write(conversation, changed)
            self._unwrite(key[0], lost)
            if not conversation.answers:
                self._leave(conversation, "its files are not whole")
        self._make_room()
        logger.info("%d conversations are back, with %d answers", len(self._held), len(self._by_answer))

    def close(self) -> None:
        """Write what waits for it."""
        if self._shelf is not None:
            self._shelf.close()

    def settle(self) -> None:
        """Wait until the files are as the store is. From any thread but the event loop's."""
        if self._shelf is not None:
            self._shelf.settle()

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
        self._write(conversation, [answer])
        self._expire()
        self._make_room(conversation)
        return key in self._held

    def attach(self, scope: str, answer: str, record: bytes) -> None:
        """Store a stored answer's own object, if the answer is still stored."""
        conversation = self._by_answer.get((scope, answer))
        if conversation is None:
            return
        self.num_bytes -= conversation.num_bytes
        conversation.attach(answer, record)
        self.num_bytes += conversation.num_bytes
        self._write(conversation, [answer])
        self._make_room(conversation)

    def forget_answer(self, scope: str, answer: str) -> bool:
        """Drop one answer; whether it was stored. Answers that continue it keep their whole history."""
        conversation = self.find_answer(scope, answer)
        if conversation is None:
            return False
        if len(conversation.answers) == 1:
            self._leave(conversation, "its last answer was deleted")
            return True
        self.num_bytes -= conversation.num_bytes
        self._write(conversation, conversation.remove(answer))
        self.num_bytes += conversation.num_bytes
        del self._by_answer[scope, answer]
        self._unwrite(scope, [answer])
        return True

    @contextmanager
    def entering(self, origin: Origin | None) -> Iterator[None]:
        """Count a request as unfinished while its prompt is made."""
        entering = [] if origin is None else [origin]
        self._entering += entering
        try:
            yield
        finally:
            for one in entering:
                self._entering.remove(one)

    def forget(self, scope: str, id: str) -> bool:
        """Drop a conversation with all its answers, unfinished ones included; whether there was any."""
        self._expire()
        conversation = self._known.pop((scope, id), None)
        if conversation is None:
            return False
        origins = (*self._entering, *(turn.origin for turn in self._turns() if turn is not None and turn.origin is not None))
        is_begun = any(origin.conversation is conversation and origin.stores for origin in origins)
        is_held = (scope, id) in self._held
        conversation.forgotten = True
        if is_held:
            self._leave(conversation, "it was deleted")
        return is_held or is_begun

    def _new_origin(self, scope: str, stores: bool) -> Origin:
        return Origin(conversation=self._begin(scope, f"conv-{secrets.token_hex(12)}"), stores=stores)

    def _begin(self, scope: str, id: str) -> Conversation:
        """Return the conversation of this id that is not stored: not yet, or no longer. Requests may be running in it."""
        key = (scope, id)
        if (begun := self._known.get(key)) is None:
            begun = self._known[key] = Conversation(scope, id)
        return begun

    def _after_answer(self, scope: str, answer: str, stores: bool) -> Origin:
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
        return Origin(conversation=conversation, answer=answer, entries=entries, branches=True, stores=stores)

    def _use(self, conversation: Conversation) -> None:
        conversation.used = self._clock()
        self._held.move_to_end((conversation.scope, conversation.id))

    def _expire(self) -> None:
        oldest = self._clock() - self._max_age
        while self._max_age and self._held and (first := next(iter(self._held.values()))).used < oldest:
            self._leave(first, "it is too old")

    def _make_room(self, newest: Conversation | None = None) -> None:
        """Let the least recently used leave. newest: leaves first if it alone takes more than there is room for."""
        if newest is not None and newest.num_bytes > self._max_bytes:
            self._leave(newest, "alone it takes more than there is room for")
        while self._held and (len(self._held) > self._max_number or self.num_bytes > self._max_bytes):
            self._leave(next(iter(self._held.values())), "there is no room")

    def _write(self, conversation: Conversation, answers: Iterable[str]) -> None:
        if self._shelf is not None:
            for answer in answers:
                self._shelf.put(conversation.stored(answer))

    def _unwrite(self, scope: str, answers: Iterable[str]) -> None:
        if self._shelf is not None:
            self._shelf.drop(file_name(scope, answer) for answer in answers)

    def _leave(self, conversation: Conversation, why: str) -> None:
        del self._held[conversation.scope, conversation.id]
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
