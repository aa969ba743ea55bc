"""KV that comes back from files: each record is checked, then put into host memory by the engine's thread."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from ...slots.archive import Record
from ...slots.tiers.loading import load_records
from ...slots.tiers.tier import LowerTier
from ..errors import RequestError
from .engine import Engine

logger = logging.getLogger("slotcache.engine")
ADOPT_SECONDS = 60.0  # that a record may wait for the engine


class Arrivals:
    """For threads that may wait: not the engine's, and not the event loop's."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._is_warm = engine, False

    def adopt(self, record: Record, source: str = "disk", is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Put a record into host memory. True: it is in host memory now. Waits for the current step.

        is_wanted: asked in the engine's thread, at the last moment.
        """
        self._await_warm_up(ADOPT_SECONDS)
        engine, states, stop = self._engine, self._engine.runner.states, len(record.tokens)
        is_state = record.state is None or states.accepts_recurrent(record.state, stop)
        if not is_state or not states.accepts(record.data, record.start, stop):
            logger.warning("the KV of %d tokens in a file does not fit this model", stop - record.start)
            return False
        return engine.inbox.ask(lambda: is_wanted() and engine.host_tier.put(record, source)).result(ADOPT_SECONDS)

    def load(self, tiers: Sequence[LowerTier], token_bytes: int) -> None:
        """Fill host memory with the records that an earlier run of the server left. token_bytes: of a token's KV.

        KV computed since the start is never evicted for them.
        """
        engine = self._engine
        with contextlib.suppress(RequestError):
            self._await_warm_up()
        budget = engine.scheduler.tree.host.max_tokens * token_bytes + engine.scheduler.snapshots.max_bytes

        def adopt(tier: LowerTier, key: str, record: Record) -> bool:
            try:
                return self.adopt(record, tier.name, lambda: key in tier and engine.host_tier.has_room(record))
            except RequestError as error:  # the server is shutting down: no other record needs to be tried
                raise TimeoutError(str(error)) from None

        with contextlib.suppress(TimeoutError, RequestError):  # the server is shutting down
            for tier in tiers:
                began = perf_counter()
                count = load_records(tier, budget, partial(adopt, tier))
                logger.info("%d runs came back from %s in %.1f s", count, tier, perf_counter() - began)

    def _await_warm_up(self, timeout: float | None = None) -> None:
        """Wait until the engine takes acts: before, neither the layout of KV nor the budgets are known."""
        if not self._is_warm:
            self._engine.inbox.ask(lambda: None).result(timeout)
            self._is_warm = True
