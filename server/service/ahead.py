"""Prefill ahead of requests: prompts of disconnected clients, next turns, shortened histories and likely prompts.

Each kind of prompt has a class that makes the prompts. The class `Ahead` prefills the prompts of all kinds.
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
    """A prefill ahead of requests failed, and would fail again."""


class Ahead:
    """Prefills prompts that no client waits for, one at a time, in the engine's background. For the event loop only."""

    def __init__(self, engine: Engine, view: View, builder: PromptBuilder, submitter: Submitter) -> None:
        self.view, self.builder = view, builder
        self._engine, self._submitter = engine, submitter

    def drop(self) -> None:
        """Take the current generation out of the engine. The tokens that the generation has computed stay cached."""
        self._engine.drop_background(KEY)

    async def prefill(
        self, prompt: Prompt, scope: Scope, kind: Kind = Kind.AHEAD, follows: int | None = None, session: str = ""
    ) -> bool:
        """Prefill a prompt into the cache. Return whether the caller may go on with its next prompt. Raises AheadFailed.

        Return True if the prompt is now cached, or if it was skipped. A prompt is skipped if it is too long. A prompt of
        kind AHEAD is also skipped if too few cells are free. Return False if a request arrived, if the model sleeps, or if
        too few cells are free for a prompt of kind PREFETCH.

        kind, follows, session: as in `Request`.
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
        """Make a prompt in a thread, prefill it, and return the result of `prefill`. Raises AheadFailed, RequestError.

        make: returns the prompt, or None if there is nothing to prefill.
        size: the request's memory in bytes. The threads accept only a limited number of bytes at a time.
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
    """Work that waits for idle time. num_bytes: the memory that the work takes, in bytes (an estimate)."""

    @property
    def scope(self) -> Scope: ...
    @property
    def num_bytes(self) -> int: ...

    async def compute(self, ahead: Ahead) -> bool:
        """Do the work, or the rest of it. If the work is interrupted, return False: the work then stays in the backlog."""
        ...


@dataclass(frozen=True, slots=True)
class AbandonedPrompt:
    """A prompt whose client disconnected during the prefill.

    If a request has several choices, the objects of all choices are equal, so a backlog has their prompt only once.
    """

    prompt: Prompt
    scope: Scope
    session: str

    @property
    def num_bytes(self) -> int:
        return 4 * self.prompt.num_tokens

    async def compute(self, ahead: Ahead) -> bool:
        """Prefill the rest of the prompt. If too few cells are free, skip the prompt."""
        missing = await ahead.view.missing(self.prompt, self.scope)
        has_room = missing.fits or not missing.idle
        return not has_room or await ahead.prefill(self.prompt, self.scope, kind=Kind.PREFETCH, session=self.session)


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredChat:
    """A conversation up to and including an answer.

    request: the id of the answered request.
    options: the fields of the request without its messages, as JSON.
    entries: the messages and the answer.
    found: the ids of the documents that the server's search found; None if the request wanted no search.
    session: the client's name for the session.
    """

    request: int
    scope: Scope
    options: bytes
    entries: tuple[HistoryMessage, ...]
    found: Sequence[str] | None = None
    session: str = ""

    @property
    def num_bytes(self) -> int:
        """The memory that the conversation takes, in bytes (an estimate)."""
        return getsizeof(self.options) + getsizeof(self.entries) + sum(entry.num_bytes for entry in self.entries)

    async def compute(self, ahead: Ahead) -> bool:
        """Prefill the part of the next turn's prompt that is known before the user's message."""
        # A chat of any size counts as at most `LARGE` bytes, so that the threads keep their room for clients' requests. The
        # backlog already bounds the bytes of waiting chats.
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
        """Prefill the chat. If a request with this chat would be refused, do nothing."""

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
    """Yield prompts with which other chats about the same documents may start.

    Each yielded prompt ends with one or more documents of the first set in `prompt`. The prompts with one document come
    first, then the prompts with two documents, and so on. A prompt with several documents extends an earlier prompt by one
    document.

    If the documents are read separately or have a fixed order, yield nothing: no other chat would start with such a
    prompt.
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
