"""Prefill ahead of requests: prompts of disconnected clients, next turns, shortened histories, likely prompts.

Each kind of work makes its prompt and lets `Ahead` prefill it.
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
KEY = "idle"  # the key of the only background generation that this module submits


class AheadFailed(Exception):
    """A prefill ahead of time failed, and another try would fail as well."""


class Ahead:
    """Prefills prompts that no client waits for, one at a time, in the engine's background. For the event loop only."""

    def __init__(self, engine: Engine, view: View, builder: PromptBuilder, submitter: Submitter) -> None:
        self.view, self.builder = view, builder
        self._engine, self._submitter = engine, submitter

    def drop(self) -> None:
        """Take the current generation out of the engine. Its computed tokens stay cached."""
        self._engine.drop_background(KEY)

    async def prefill(
        self, prompt: Prompt, scope: Scope, kind: Kind = Kind.AHEAD, follows: int | None = None, session: str = ""
    ) -> bool:
        """Prefill a prompt into the cache. False: stop for now, since a request came or cells are missing.

        Raises AheadFailed. The result is also True for a prompt that is skipped because it cannot be cached: the next
        prompt may follow.
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
        """Make a prompt in a thread, and prefill it if there is one. False: stop for now. Raises AheadFailed.

        size: the bytes of the request, by which the threads bound the prompts that wait to be made.
        """
        try:
            # In the builder's threads, which end before the model is freed.
            prompt = await self.builder.threads.run(size, make)
            return prompt is None or await self.prefill(prompt, scope, follows=follows, session=session)
        except (RequestError, AheadFailed):
            raise
        except Exception:
            logger.exception("a prompt could not be computed ahead")
            return True


class Work(Protocol):
    """Work that waits for idle time. num_bytes: about how much memory the work takes."""

    @property
    def scope(self) -> Scope: ...
    @property
    def num_bytes(self) -> int: ...

    async def compute(self, ahead: Ahead) -> bool:
        """Do the work, or the rest of it. False: stop for now; the work stays in the backlog."""
        ...


@dataclass(frozen=True, slots=True)
class AbandonedPrompt:
    """A prompt whose client disconnected before all of it was computed. All choices of a request share one such prompt."""

    prompt: Prompt
    scope: Scope
    session: str

    @property
    def num_bytes(self) -> int:
        return 4 * self.prompt.num_tokens

    async def compute(self, ahead: Ahead) -> bool:
        """Prefill the rest of the prompt, if free cells suffice."""
        missing = await ahead.view.missing(self.prompt, self.scope)
        has_room = missing.fits or not missing.idle
        return not has_room or await ahead.prefill(self.prompt, self.scope, kind=Kind.PREFETCH, session=self.session)


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredChat:
    """A conversation up to and including an answer.

    request: the id of the answered request. options: the fields of the request without its messages, as JSON. entries:
    the messages. found: the ids of the documents that the server's search found; None: the request did not search.
    session: the client's name of the session.
    """

    request: int
    scope: Scope
    options: bytes
    entries: tuple[HistoryMessage, ...]
    found: Sequence[str] | None = None
    session: str = ""

    @property
    def num_bytes(self) -> int:
        """About how many bytes of memory the conversation takes."""
        return getsizeof(self.options) + getsizeof(self.entries) + sum(entry.num_bytes for entry in self.entries)

    async def compute(self, ahead: Ahead) -> bool:
        """Prefill what is known of the next turn's prompt."""
        # The backlog already bounds the bytes that wait. So an answer counts as the smallest large request at most, and the
        # room remains for the prompts of clients.
        size = min(self.num_bytes, LARGE)

        def make() -> ChatPrompt | None:
            return ahead.builder.ahead(decode(self.options, ChatRequest), self.entries)

        return await ahead.prefill_made(size, make, self.scope, follows=self.request, session=self.session)


@dataclass(frozen=True, slots=True, eq=False)
class ShortenedChat:
    """The likely next chat of a client that shortens its history."""

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
    """Prompts with which new chats of a scope may start, the likeliest first."""

    scope: Scope
    prompts: deque[ChatPrompt]
    num_bytes: int

    async def compute(self, ahead: Ahead) -> bool:
        while self.prompts:
            if not await ahead.prefill(self.prompts[0], self.scope, kind=Kind.PREFETCH):
                return False
            self.prompts.popleft()
        return True


def likely_prompts(prompt: ChatPrompt) -> Iterator[ChatPrompt]:
    """Yield prompts with some documents of the first set in `prompt`.

    First each document is alone, then there are pairs, then larger sets. Each prompt extends an earlier one by at most
    one document. There are no prompts if the documents are read separately or have a fixed order, since no chat would
    use such a set.
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
