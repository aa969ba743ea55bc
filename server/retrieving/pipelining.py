"""The leading documents of a search, computed while it goes on (RAGCache, section 5.3: dynamic speculative pipelining)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from ...retrieval import Hit
from ..errors import RequestError

logger = logging.getLogger("slotcache.docs")
MOST_AHEAD = 3  # documents: a later stage keeps fewer of those behind them in their place

Prefill = Callable[[Sequence[Hit]], Awaitable[object]]
"""Computes a prompt with documents ahead, if the server is idle."""


class Ahead:
    """Hands the first documents of a stage to `prefill` where another one leads than before. A later stage wins.

    delay: seconds that a stage has to last: a prompt is not worth its making for a search that is about to end.
    """

    def __init__(self, prefill: Prefill, delay: float = 0.0) -> None:
        self._prefill, self._delay = prefill, delay
        self._leader: str | None = None
        self._task: asyncio.Task[None] | None = None

    def show(self, hits: Sequence[Hit]) -> None:
        """Take the documents of the newest stage."""
        if not hits or hits[0].chunk.id == self._leader:
            return
        self.stop()
        self._leader = hits[0].chunk.id
        self._task = asyncio.ensure_future(self._run(hits[:MOST_AHEAD]))

    def stop(self) -> None:
        """Hand over nothing more. Prompts that were handed over are still computed."""
        if self._task is not None:
            self._task.cancel()

    async def settled(self) -> None:
        """Return when the newest documents have been handed over."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, hits: Sequence[Hit]) -> None:
        await asyncio.sleep(self._delay)
        try:
            await self._prefill(hits)
        except RequestError as error:  # only a head start is lost
            logger.debug("documents could not be computed ahead: %s", error)
