"""Likely prefixes: the common start of chats that search the server's documents, followed by one document.

Only a prefix can be reused. A chat can therefore reuse a document that was read ahead only if this document is the chat's
first one, and the chat has the same system message as the likely prefix. The likely prefixes have the system message of the
newest chats that searched. Until a chat has searched, the likely prefixes have no system message.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import msgspec
import numpy as np

from ...retrieval.index import Index
from ...retrieval.store import count_uses, likeliest
from ...retrieval.writing import StoredChunk
from ...slots.radix import NO_TOKENS
from ...slots.request import Kind
from ...slots.scope import Scope
from ..chat.body import ChatRequest
from ..chat.builder import PromptBuilder
from ..chat.chat_prompt import ChatPrompt, DocumentSet, Fixed
from ..chat.decode import decode
from ..chat.history import INSTRUCTIONS, HistoryMessage
from ..chat.sampling_fields import JsonValue
from ..http.api_errors import RequestError
from .ahead import Ahead

logger = logging.getLogger("slotcache.docs")
QUESTION: Mapping[str, JsonValue] = {"role": "user", "content": "?"}  # a placeholder: a prefix ends before it
TRIES, AGAIN = 50, 0.1  # tries in a row while no document finds room, and seconds between two tries
MARGIN = 2  # documents are chosen for this many budgets, since the index only estimates their tokens


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The common start of chats that search.

    options: the fields of a request without its messages, as JSON.
    instructions: the messages with instructions at the start of the chat, such as the system message, as JSON.
    """

    scope: Scope
    options: bytes
    instructions: tuple[bytes, ...] = ()

    @classmethod
    def first(cls, scope: Scope) -> SharedPrefix:
        """Return the prefix to use until a chat has searched: the prefix of a chat whose only option is `retrieval`."""
        return cls(scope, msgspec.json.encode(ChatRequest(messages=[], retrieval=True, cache_scope=scope.name)))

    @classmethod
    def of(cls, scope: Scope, options: bytes, entries: Sequence[HistoryMessage]) -> SharedPrefix:
        first = takewhile(lambda entry: entry.role in INSTRUCTIONS, entries)
        return cls(scope, options, tuple(entry.said for entry in first))

    def is_like(self, other: SharedPrefix) -> bool:
        """Return whether both prefixes have the same scope and the same instructions."""
        return (self.scope, self.instructions) == (other.scope, other.instructions)

    def chat(self, chunks: Sequence[StoredChunk]) -> ChatRequest:
        """Return a chat with these documents and a placeholder question.

        Call this method in a thread: it takes time if the options or the instructions are large.
        """
        messages: list[dict[str, JsonValue]] = [*map(msgspec.json.decode, self.instructions), dict(QUESTION)]
        found: list[JsonValue] = [{"id": chunk.id, "title": chunk.title, "text": chunk.text} for chunk in chunks]
        # A document that is read separately attends only to the prefix, like the first document of any other chat. So these
        # prefixes also serve chats whose documents are read separately.
        options = decode(self.options, ChatRequest)
        return msgspec.structs.replace(options, messages=messages, documents=found, documents_attention="joint")


@dataclass(frozen=True, slots=True, eq=False)
class LikelyPrefix:
    """A prompt that ends with a document.

    number: the document's number in the index. num_tokens: the number of the document's tokens, without the prefix.
    """

    prompt: ChatPrompt
    scope: Scope
    number: int
    num_tokens: int


class LikelyPrefixes:
    """The likely prefixes, the likeliest first. For the event loop only.

    prefix: the prefix to use until a chat has searched.
    most_tokens: the budget: the most tokens that all prefixes may have together.
    state_tokens: returns the number of tokens whose KV takes as much memory as one recurrent state. Before the model's
        warm-up, the size of a recurrent state is not known.
    num_documents, num_tokens: how many documents are computed so far, and how many tokens these documents have together.
    has_files: whether all files are read, so that the likeliest documents are known.
    """

    def __init__(
        self,
        index: Index,
        builder: PromptBuilder,
        prefix: SharedPrefix,
        most_tokens: int,
        *,
        state_tokens: Callable[[], int] = lambda: 0,
    ) -> None:
        self.most_tokens, self.has_files = most_tokens, False
        self.num_documents = self.num_tokens = 0
        self._index, self._builder, self._state_tokens = index, builder, state_tokens
        self._prefix = prefix  # the prefix in use
        self._last: SharedPrefix | None = None  # the prefix of the newest chat
        self._shared, self._shared_scope = NO_TOKENS, prefix.scope  # the tokens of the prefix, and its scope
        self._uses: Counter[str] = Counter()  # uses of documents, by id, that the index has not counted yet
        self._left: deque[int] | None = None  # the next documents; None: look them up
        self._tokens: dict[int, int] = {}  # the tokens of each document that was computed after this prefix

    @property
    def has_more(self) -> bool:
        """Whether there may be documents that are still to be computed."""
        return self.has_files and (self._left is None or bool(self._left))

    def note(self, prefix: SharedPrefix, found: Sequence[str]) -> None:
        """Learn from a chat that searched. found: the ids of the documents in its prompt.

        The prefixes get the instructions of the first chat that searched. After that, the prefixes get other instructions
        only when two successive chats have the same ones. So instructions that differ in each chat, for example by the time
        of day, do not replace the prefixes' instructions.
        """
        if self._last is None or self._last.is_like(prefix):
            self._prefix = prefix
        self._last = prefix
        self._uses.update(found)
        self.renew()

    def renew(self) -> None:
        """Look up the likeliest documents again. Called after a chat has used documents, and after files have changed."""
        self._left = None

    def forget(self, scope: str) -> None:
        """Handle the drop of a scope. If the likely prefixes have this scope, compute none until `renew` is called."""
        if scope == self._prefix.scope.name:
            self._left, self._tokens = deque(), {}
            self.num_documents = self.num_tokens = 0

    async def compute(self, ahead: Ahead) -> None:
        """Compute prefixes until the budget is used up, or until `TRIES` tries in a row have failed for lack of room.

        After each failed try another document is next, which may need less room.
        """
        tries = TRIES
        while tries and (likely := await self.next()):
            if await self._is_computed(likely, ahead):
                self._count(likely.number, likely.num_tokens)
                tries = TRIES
            else:  # host memory gets room when its copies are written to disk
                tries -= 1
                if self._left:
                    self._left.rotate(-1)
                await asyncio.sleep(AGAIN)

    async def next(self) -> LikelyPrefix | None:
        """Return the next prefix to compute; None if the budget is used up or no document remains.

        Each call returns a prefix of the same document until the caller counts the document as computed (`_count`), or puts
        the document last.
        """
        if not self.has_more:
            return None
        if self._left is None:
            self._left = await self._look_up()
        while self._left:
            number, likely = self._left[0], None
            tokens = self._tokens.get(number)
            if tokens is None:
                likely = await self._builder.threads.run(0, self._make, number)
                tokens = likely.num_tokens if likely else 0
            if not self._has_room_for(tokens):
                self._left.clear()
            elif likely is not None:
                return likely
            elif tokens:
                self._count(number, tokens)
            else:
                self._left.popleft()
        logger.debug("%d documents are read ahead: %d tokens", self.num_documents, self.num_tokens)
        return None

    async def _is_computed(self, likely: LikelyPrefix, ahead: Ahead) -> bool:
        """Compute a prefix, unless some tier has it already. Return whether the prefix is now computed.

        The result is False if there is no room for the prefix, or if `Ahead.prefill` returned False.
        """
        prompt, scope, view = likely.prompt, likely.scope, ahead.view
        if not (await view.missing(prompt, scope)).tokens:
            return True
        if not (await view.make_room(prompt, scope) and await ahead.prefill(prompt, scope, kind=Kind.PREFETCH)):
            return False
        await view.make_room(prompt, scope)  # saves the prefix, even if no other prefix follows
        return True

    def shown(self) -> dict[str, int | bool]:
        return {"documents": self.num_documents, "tokens": self.num_tokens, "done": self.has_files and not self.has_more}

    def _has_room_for(self, num_tokens: int) -> bool:
        """Return whether the budget has room for one more document, which has `num_tokens` tokens."""
        states = (self.num_documents + 1) * self._state_tokens()
        return len(self._shared) + self.num_tokens + num_tokens + states <= self.most_tokens

    def _count(self, number: int, tokens: int) -> None:
        assert self._left and self._left[0] == number
        self._left.popleft()
        self._tokens[number] = tokens
        self.num_documents += 1
        self.num_tokens += tokens

    async def _look_up(self) -> deque[int]:
        """Return the numbers of the likeliest documents, including those that are computed already.

        This sets the counts of computed documents to 0: `next` counts the documents again.
        """
        uses, self._uses = self._uses, Counter()
        numbers = await asyncio.to_thread(self._choose, uses)
        shared = await self._builder.threads.run(0, self._make_shared)
        is_same = self._prefix.scope == self._shared_scope and np.array_equal(shared, self._shared)
        self._shared, self._shared_scope = shared, self._prefix.scope
        self._tokens = {number: self._tokens[number] for number in numbers if is_same and number in self._tokens}
        self.num_documents = self.num_tokens = 0
        return deque(numbers)

    # ---- in threads ------------------------------------------------------------------------------------------------

    def _choose(self, uses: Counter[str]) -> list[int]:
        try:
            count_uses(self._index.store, uses)
            return likeliest(self._index.store, MARGIN * self.most_tokens)
        except sqlite3.Error as error:  # such as a full disk or a closed index: only time is lost
            logger.debug("no documents are read ahead: %s", error)
            return []

    def _make_shared(self) -> np.ndarray:
        """Return the tokens (int32) of the shared prefix; empty if the template refuses the chat."""
        try:
            parts = self._prompt(()).parts
        except RequestError as error:
            logger.debug("no documents are read ahead: %s", error)
            return NO_TOKENS
        return np.concatenate([NO_TOKENS, *(part.tokens for part in parts if isinstance(part, Fixed))])

    def _make(self, number: int) -> LikelyPrefix | None:
        """Make the prefix of a document; None if the document is gone or the template refuses the chat."""
        try:
            prompt = self._prompt(list(self._index.store.chunks([number]).values()))
        except (RequestError, sqlite3.Error) as error:
            logger.debug("a document is not read ahead: %s", error)
            return None
        last = prompt.parts[-1]
        if not isinstance(last, DocumentSet):
            return None
        return LikelyPrefix(prompt, self._prefix.scope, number, sum(map(len, last.tokens)))

    def _prompt(self, chunks: Sequence[StoredChunk]) -> ChatPrompt:
        """Make a prompt that ends with the documents. Raises RequestError."""
        return self._builder.chat(self._prefix.chat(chunks), open_turn=True).prompt
