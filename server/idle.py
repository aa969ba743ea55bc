"""Computes ahead, while there is nothing else to do, what the next turn of a conversation will start with.

That is its history as the template shows it then, up to what the user will say: the answer's last token, the tokens that
end it, and all of the answer where the template shows it otherwise than it was sampled (without its reasoning, say).

On request also what the next chat may start with. A prompt reuses leading documents only: of five that were read, the
first is of use to whoever asks about it, the others are not. So they are computed again as beginnings of their own: each
alone, then in pairs, and so on, as far as the server is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ..models.model import Model
from ..models.sampling import Sampling
from ..models.text import TextStream
from ..slots.request import Request
from .builder import PromptBuilder
from .engine import Engine
from .errors import RequestError
from .generation import End, Failure, Generation
from .history import Entry
from .prompt import ChatPrompt
from .wire import ChatRequest

logger = logging.getLogger("slotcache.idle")
MAX_WAITING = 64  # answers whose next turn is to be computed: of more the oldest are let go


@dataclass(frozen=True, slots=True)
class Ahead:
    """A conversation up to an answer."""

    asked: ChatRequest
    entries: tuple[Entry, ...]


class IdlePrefill:
    """One try for each answer, one after the other, in the engine's background. The event loop's.

    limit: tokens a prompt may have. starts: documents that are computed for other chats after an answer. ids: numbers for
    requests, shared with those of clients.
    """

    def __init__(
        self, model: Model, engine: Engine, builder: PromptBuilder, limit: int, starts: int, ids: Iterator[int]
    ) -> None:
        self._model, self._engine, self._builder, self._limit, self._ids = model, engine, builder, limit, ids
        self._starts = starts
        self._waiting: deque[Ahead] = deque(maxlen=MAX_WAITING)
        self._task: asyncio.Task[None] | None = None

    def add(self, ahead: Ahead) -> None:
        """An answer is whole."""
        self._waiting.append(ahead)

    def go_on(self) -> None:
        """Nobody else needs the engine."""
        if self._waiting and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    def stop(self) -> None:
        """Somebody does. What runs gives way to it in the engine; what it has computed stays."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _work(self) -> None:
        try:
            with contextlib.suppress(RequestError):  # the server is shutting down
                while self._waiting:
                    await self._use(self._waiting.popleft())
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    async def _use(self, ahead: Ahead) -> None:
        """What one answer makes worth computing."""
        scope, given = ahead.asked.cache_scope, (ahead.asked, ahead.entries)
        if prompt := await asyncio.to_thread(self._builder.ahead, *given):
            await self._compute(prompt, scope)
        starts = self._builder.fresh_starts(*given)
        left = self._starts
        while left and (prompt := await asyncio.to_thread(next, starts, None)):
            left -= await self._compute(prompt, scope)

    async def _compute(self, prompt: ChatPrompt, scope: str) -> bool:
        """Whether something of it was not cached and is now."""
        if prompt.num_tokens >= self._limit:
            return False
        generation = self._generation(prompt, scope)
        scheduler, root = self._engine.scheduler, generation.request.scope
        if not await asyncio.wrap_future(self._engine.ask(lambda: scheduler.can_compute_ahead(prompt, root))):
            return False
        if not await asyncio.wrap_future(self._engine.submit_background("next turn", generation)):
            return False
        while not isinstance(event := await generation.events.get(), End | Failure):
            pass
        if isinstance(event, End):
            report = event.report
            logger.debug("%d tokens of %d computed ahead", report.num_prompt - report.num_cached, report.num_prompt)
        return isinstance(event, End)

    def _generation(self, prompt: ChatPrompt, scope: str) -> Generation:
        request = Request(next(self._ids), prompt, 1, ("shared", scope), background=True)
        request.owner = Generation(request, Sampling(temperature=0.0), TextStream((), self._model.piece), 0, scope)
        return request.owner
