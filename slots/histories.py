"""The prompts that lanes ran last: saved as records, restored, and erased."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import numpy as np

from .archive import Archive, Record
from .lanes import Lane
from .node import Blob
from .plan import Save
from .radix import path
from .scheduler import Scheduler
from .scope import Scope


class Histories:
    """Acts on idle lanes, between two steps.

    carry_out: performs the operations that the tree has decided, at once. If it raises, the state of memory is unknown, and
    only `Scheduler.abandon` sets that right.
    """

    def __init__(self, scheduler: Scheduler, archive: Archive, carry_out: Callable[[], None]) -> None:
        self._tree, self._snapshots = scheduler.tree, scheduler.snapshots
        self._archive, self._carry_out = archive, carry_out

    def save(self, lane: Lane) -> list[Record]:
        """Return the records of a lane's history as far as it has KV; each begins where the one before it ends.

        Runs without a copy get one outside the host tier: to make room in the tier could drop the runs before them. Without
        a host tier nothing can be copied, and the list is empty.
        """
        if self._snapshots.max_bytes:
            self._carry_out()
            node = self._snapshots.longest(lane.scope, lane.history)
            runs = reversed(list(path(node))) if node else ()
            return list(takewhile(bool, map(self._snapshots.get, runs)))  # type: ignore[arg-type]
        if not self._tree.host.max_tokens:
            return []
        runs = self._archive.cached(lane.scope, lane.history)
        blobs = [node.blob or Blob(node.start, stop) for node, stop in runs]
        for (node, _), blob in zip(runs, blobs, strict=True):
            if blob is not node.blob:
                self._tree.ledger.perform(Save(node.longest_holder().id, blob))
        self._carry_out()
        made = [self._archive.part(node, blob, stop) for (node, stop), blob in zip(runs, blobs, strict=True)]
        return list(takewhile(bool, made))  # type: ignore[arg-type]

    def remember(self, lane: Lane, scope: Scope, tokens: np.ndarray) -> int:
        """Make these tokens a lane's history, as far as they are cached. Return how many that are."""
        if self._snapshots.max_bytes:
            node = self._snapshots.longest(scope, tokens)
            length = node.end if node else 0
        else:
            length = self._archive.length(scope, tokens)
        lane.remember(scope, tokens[:length], length)
        return length

    def erase(self, lane: Lane) -> int:
        """Forget KV that only a lane's history and the start of its next turn need. Return how many tokens that were."""
        known = (lane.ahead, lane.history)
        if self._snapshots.max_bytes:
            return sum(self._snapshots.discard(lane.scope, tokens) for tokens in known)
        return sum(self._discard(lane.scope, tokens) for tokens in known)

    def _discard(self, scope: Scope | None, tokens: np.ndarray) -> int:
        runs = self._archive.cached(scope, tokens)
        return self._tree.discard([node for node, stop in reversed(runs) if stop == node.end])
