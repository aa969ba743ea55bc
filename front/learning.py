"""What answers teach: the tree is corrected, and reuse is counted, behind the clients' back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from .feedback import Told
from .metrics import Metrics
from .orders import Orders, Plan

logger = logging.getLogger("slotcache")


class Learning:
    """Learns from answers in threads. Used by one event loop."""

    def __init__(self, orders: Orders, metrics: Metrics) -> None:
        self._orders, self._metrics = orders, metrics
        self._is_told = self._has_warned = False

    def learn(self, plan: Plan, told: Told) -> None:
        """Learn from the answer to a prompt, at once or a little later."""
        _run(self._learn, plan, self._completed(plan, told))

    def take_back(self, plan: Plan) -> None:
        """Forget a prompt that the upstream did not take, so that a client that it refuses teaches nothing."""
        _run(self._orders.take_back, plan)

    def _completed(self, plan: Plan, told: Told) -> Told:
        """Return the figures, with a zero where an engine that tells cached tokens leaves it out, as vLLM does."""
        self._is_told |= told.cached_tokens is not None
        if told.cached_tokens is None and self._is_told and told.prompt_tokens is not None:
            return replace(told, cached_tokens=0)
        if not self._is_told and plan.num_expected and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the upstream tells no cached tokens, so its cache is guessed: vLLM tells them with "
                "--enable-prompt-tokens-details, SGLang with --enable-cache-report"
            )
        return told

    def _learn(self, plan: Plan, told: Told) -> None:
        cached, metrics = self._orders.learn(plan, told), self._metrics
        metrics.documents.inc(plan.num_documents)
        metrics.repeated.inc(sum(len(placed.repeated) for placed in plan.placed))
        metrics.expected.inc(plan.num_expected)
        metrics.prompt_tokens.inc(told.prompt_tokens or 0)
        if cached is None:
            metrics.untold.inc()
        else:
            metrics.cached.inc(plan.documents_in(cached))
            metrics.cached_tokens.inc(told.cached_tokens or 0)


def _run(work: Callable[..., None], *arguments: object) -> None:
    asyncio.get_running_loop().run_in_executor(None, work, *arguments).add_done_callback(_note_failure)


def _note_failure(learning: asyncio.Future[None]) -> None:
    if not learning.cancelled() and (error := learning.exception()) is not None:
        logger.error("an answer taught nothing", exc_info=error)
