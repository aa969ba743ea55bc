"""The engine as routes, metrics and idle prefill see it: questions about the cache, and the values they get.

The cache belongs to the engine's thread. Every question runs in that thread, between two steps, where nothing else changes
the cache; the caller only waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...models.sampling import Chances
from ...slots.request import Prompt, Request
from ...slots.scope import Scope
from ...slots.tiers.disk import DiskTier
from ...slots.tiers.provenance import Provenance
from ...slots.tiers.tier import LowerTier
from .account import account
from .engine import Engine
from .events import Delta, End, Event, Failure, Progress
from .figures import Figures
from .generation import Generation
from .holdings import Holdings, LaneState, Prediction, scopes_of
from .lanestore import LaneStore
from .report import Fields, Report, document_reuse

__all__ = [
    "Chances",
    "Delta",
    "End",
    "Event",
    "Failure",
    "Fields",
    "Figures",
    "Generation",
    "Holdings",
    "LaneState",
    "Missing",
    "Prediction",
    "Progress",
    "Report",
    "View",
    "account",
    "document_reuse",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Missing:
    """The part of a prompt that is not cached. tokens: to compute. fits: free cells suffice.

    idle: the engine has no request, and the model is in memory: idle work wakes no model.
    """

    tokens: int
    fits: bool
    idle: bool


class View:
    """Safe from any thread. Scopes are given by the clients' names.

    lower: the tiers below host memory. token_bytes: of one token's KV. made_by: as in `LaneStore`. lane_store: the
    histories of lanes in files.
    """

    def __init__(self, engine: Engine, lower: Sequence[LowerTier], *, token_bytes: int, made_by: Provenance | None) -> None:
        self._engine, self._scheduler, self._lower = engine, engine.scheduler, lower
        self._disk = next((tier for tier in lower if isinstance(tier, DiskTier)), None)
        self._token_bytes = token_bytes
        self.lane_store = LaneStore(engine, made_by)

    @property
    def keeps_snapshots(self) -> bool:
        """Whether snapshots are kept: the model's state cannot be cut, and --cache-ram has room."""
        return self._scheduler.snapshots.max_bytes > 0

    @property
    def state_tokens(self) -> int:
        """The tokens whose KV takes as many bytes as one recurrent state; 0 for a model without."""
        return self._scheduler.snapshots.sizes.state // max(self._token_bytes, 1)

    @property
    def num_lanes(self) -> int:
        return len(self._scheduler.lanes)

    async def why_unmovable(self) -> str:
        """Return why saved KV cannot be moved to other positions; empty: it can."""
        found = await self._ask(lambda: self._engine.runner.states.rotation)
        return found if isinstance(found, str) else ""

    async def holdings(self, scope: str) -> Holdings:
        """Return the KV that a scope has cached."""
        found = await self._ask(lambda: Holdings.of(self._scheduler, scope))
        return await asyncio.to_thread(found.identified)

    async def predict(self, prompt: Prompt, scope: Scope) -> Prediction:
        """Lay out a prompt as if it were submitted now. A dry run: nothing changes."""
        return await self._ask(lambda: Prediction.of(self._scheduler, prompt, scope))

    async def missing(self, prompt: Prompt, scope: Scope) -> Missing:
        """Return the part of a prompt that idle prefill would compute. A dry run as well."""

        def question() -> Missing:
            is_idle = self._scheduler.idle and self._engine.sleep.is_awake
            return Missing(*self._scheduler.cells.forecast(prompt, scope), idle=is_idle)

        return await self._ask(question)

    async def make_room(self, prompt: Prompt, scope: Scope) -> bool:
        """Make room for a guess, if the engine is idle: see `Cells.make_room`."""
        scheduler, sleep = self._scheduler, self._engine.sleep
        return await self._ask(lambda: scheduler.idle and sleep.is_awake and scheduler.cells.make_room(prompt, scope))

    async def pin(self, generation: Generation, seconds: float) -> int:
        """Keep the prompt of a finished generation in the cache for `seconds`; return its tokens that are pinned now.

        So are documents that were read separately, where they were read.
        """
        pins, request = self._scheduler.pins, generation.request
        counts = await self._ask(lambda: [pins.pin(request.index_scope, text, seconds) for text in _pinned(request)])
        return counts[-1]

    async def unpin(self, generation: Generation) -> None:
        """End the pin of a finished generation's prompt."""
        pins, request = self._scheduler.pins, generation.request
        await self._ask(lambda: [pins.unpin(request.index_scope, text) for text in _pinned(request)])

    async def drop(self, scope: str) -> int:
        """Drop a scope from all tiers, except KV that running requests use; return the tokens dropped."""
        dropped = await self._ask(lambda: self._drop(scope))
        for tier in self._lower:
            await asyncio.to_thread(tier.drop, Scope.shared(scope))
            # Again: at the start of the server, `Arrivals.load` may have read a run before it was dropped from the tier.
            await self._ask(lambda: self._drop(scope))
        return dropped

    async def lanes(self) -> list[LaneState]:
        """Return the lanes, with the progress of the request on each."""
        return await self._ask(lambda: [LaneState.of(lane) for lane in self._scheduler.lanes])

    async def figures(self) -> Figures:
        """Return counters and gauges."""
        return await self._ask(lambda: Figures.of(self._engine, self._disk, self._token_bytes))

    async def _ask(self, question: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._engine.inbox.ask(question))

    def _drop(self, scope: str) -> int:
        """Runs in the engine's thread. The background ends first, or it would fill the scope again."""
        self._engine.background.drop_scope(scope)
        tree, snapshots = self._scheduler.tree, self._scheduler.snapshots
        return sum(tree.drop(one) + snapshots.drop(one) for one in scopes_of(self._scheduler, scope))


def _pinned(request: Request) -> list[np.ndarray]:
    """Return the texts that a pin keeps: the documents that were read for a prompt, and the prompt."""
    moved = request.layout.moved if request.layout is not None else ()
    return [*(document.text for document in moved), request.tokens[: request.num_prompt]]
