"""What is computed ahead of requests: prompts whose clients left, next turns, shortened histories, likely prompts.

Each kind of work computes itself, with what `Ahead` gives it: it makes its prompt, and has the engine prefill it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Protocol

from ...slots.request import Kind, Prompt
from ...slots.scope import Scope
from ..chat.body import ChatRequest
from ..chat.builder import PromptBuilder
from ..chat.chat_prompt import ChatPrompt, DocumentSet, SeparatePrompt
from ..chat.decode import decode
from ..chat.history import HistoryMessage
from ..engine.engine import Engine
from ..engine.generation import End, Failure
from ..engine.generations import GAVE_WAY
from ..engine.view import View
from ..http.api_errors import RequestError
from ..http.threads import LARGE
from .submitter import Submitter

logger = logging.getLogger("slotcache.idle")
KEY = "idle"  # of the one generation that the engine has of it


class AheadFailed(Exception):
    """A step of work ahead has failed: it would fail again."""


class Ahead:
    """Computes prompts that nobody waits for, one at a time, in the engine's background. It belongs to the event loop."""

    def __init__(self, engine: Engine, view: View, builder: PromptBuilder, submitter: Submitter) -> None:
        self.view, self.builder = view, builder
        self._engine, self._submitter = engine, submitter

    def drop(self) -> None:
        """Take the current generation out of the engine. What it has computed stays cached."""
        self._engine.drop_background(KEY)

    async def prefill(
        self, prompt: Prompt, scope: Scope, kind: Kind = Kind.AHEAD, follows: int | None = None, session: str = ""
    ) -> bool:
        """Prefill `prompt` into the cache. False: stop for now (a request came, or it would evict). Raises AheadFailed.

        True where it can never be cached, too: then the next one has its turn.
        """
        if prompt.num_tokens >= self._submitter.limit:
            return True
        generation = self._submitter.idle_prefill(prompt, scope, kind, follows, session)
        missing = await self.view.missing(prompt, scope)
        if not missing.tokens or not (missing.fits or kind is Kind.PREFETCH):
            return True
        if not (missing.fits and missing.idle):
            return False
        if not await asyncio.wrap_future(self._engine.submit_background(KEY, generation)):
            return False
        while not isinstance(event := await generation.events.get(), End | Failure):
            pass
        if isinstance(event, Failure):
            if event.error.code == GAVE_WAY:
                return False
            raise AheadFailed
        logger.debug("%d tokens of %d computed ahead", missing.tokens, event.report.num_prompt)
        return True

    async def prefill_made(
        self, size: int, make: Callable[[], ChatPrompt | None], scope: Scope, follows: int | None = None, session: str = ""
    ) -> bool:
        """Prefill a prompt that is made first, if it can be. False: stop for now. Raises AheadFailed.

        size: bytes that it counts for among the prompts that are made.
        """
        try:
            # In the builder's threads, since those end before the model is freed.
            prompt = await self.builder.threads.run(size, make)
            return prompt is None or await self.prefill(prompt, scope, follows=follows, session=session)
        except (RequestError, AheadFailed):
            raise
        except Exception:
            logger.exception("a prompt could not be computed ahead")
            return True


class Work(Protocol):
    """Work that waits for idle time. num_bytes: of memory that it keeps, about."""

    @property
    def scope(self) -> Scope: ...
    @property
    def num_bytes(self) -> int: ...

    async def compute(self, ahead: Ahead) -> bool:
        """Compute it, or what is left of it. False: stop for now; it stays."""
        ...


@dataclass(frozen=True, slots=True)
class AbandonedPrompt:
    """A prompt whose client left while it was computed. The choices of a request have the same one."""

    prompt: Prompt
    scope: Scope
    session: str

    @property
    def num_bytes(self) -> int:
        """Memory that its tokens take."""
        return 4 * self.prompt.num_tokens

    async def compute(self, ahead: Ahead) -> bool:
        """Compute the rest of the prompt, unless it would evict."""
        missing = await ahead.view.missing(self.prompt, self.scope)
        has_room = missing.fits or not missing.idle
        return not has_room or await ahead.prefill(self.prompt, self.scope, kind=Kind.PREFETCH, session=self.session)


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredChat:
    """A conversation up to an answer. request: the one that was answered; options: as JSON, without its messages.

    found: the ids of the documents that the server found for it; None if the request did not ask for them. session: its
    name.
    """

    request: int
    scope: Scope
    options: bytes
    entries: tuple[HistoryMessage, ...]
    found: Sequence[str] | None = None
    session: str = ""

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return getsizeof(self.options) + getsizeof(self.entries) + sum(entry.num_bytes for entry in self.entries)

    async def compute(self, ahead: Ahead) -> bool:
        """Prefill the prefix of the turn after the answer."""
        # The backlog bounds the bytes that wait, so here an answer counts as the smallest large request, and leaves the room
        # to the prompts of clients.
        size = min(self.num_bytes, LARGE)

        def make() -> ChatPrompt | None:
            return ahead.builder.ahead(decode(self.options, ChatRequest), self.entries)

        return await ahead.prefill_made(size, make, self.scope, follows=self.request, session=self.session)


@dataclass(frozen=True, slots=True, eq=False)
class ShortenedChat:
    """A chat that a client is likely to ask when it has shortened its history."""

    scope: Scope
    chat: ChatRequest
    num_bytes: int

    async def compute(self, ahead: Ahead) -> bool:
        """Prefill the chat, unless it would be refused."""

        def make() -> ChatPrompt | None:
            try:
                return ahead.builder.chat(self.chat).prompt
            except RequestError:
                return None

        return await ahead.prefill_made(LARGE, make, self.scope, session=self.chat.session)


@dataclass(frozen=True, slots=True, eq=False)
class LikelyPrompts:
    """Prompts that new chats of a scope may begin with, the likeliest first."""

    scope: Scope
    prompts: deque[ChatPrompt]
    num_bytes: int

    async def compute(self, ahead: Ahead) -> bool:
        """Prefill what is left of the prompts."""
        while self.prompts:
            if not await ahead.prefill(self.prompts[0], self.scope, kind=Kind.PREFETCH):
                return False
            self.prompts.popleft()
        return True


def likely_prompts(prompt: ChatPrompt) -> Iterator[ChatPrompt]:
    """Yield prompts that begin with some of the first documents of `prompt`: each alone, then pairs, and larger sets.

    Each has at most one document more than an earlier one. Nothing where the order of documents may not be chosen, nor where
    they are read separately: no chat would use a set of them.
    """
    if isinstance(prompt, SeparatePrompt):
        return
    first = next((part for part in prompt.parts if isinstance(part, DocumentSet)), None)
    if first is None or first.policy != "auto" or first.keep_first or first.keep_last:
        return
    before, ranks = prompt.parts[: prompt.parts.index(first)], range(len(first.documents))
    for chosen in itertools.chain.from_iterable(itertools.combinations(ranks, size + 1) for size in ranks):
        documents, tokens = [first.documents[rank] for rank in chosen], [first.tokens[rank] for rank in chosen]
        yield ChatPrompt([*before, DocumentSet(tuple(documents), tuple(tokens), first.policy, hint=None)])
