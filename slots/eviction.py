"""What a run is worth to the tier that holds it: the one worth least leaves first.

PGDSF is RAGCache's prefix-aware Greedy-Dual-Size-Frequency (section 5.1, formulas 2 to 4). The others are what it is
measured against.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping

from .node import Node

Worth = Callable[[Node], float]
"""Without the clock; a request more, or a dearer token, makes it larger."""


def pgdsf(node: Node) -> float:
    """How often it is used, times what one of its tokens costs to compute where it stands (cost over size)."""
    return node.frequency * node.token_cost


def gdsf(node: Node) -> float:
    """The same where every token costs the same."""
    return float(node.frequency)


def lfu(node: Node) -> float:
    return float(node.frequency)


def lru(node: Node) -> float:
    return float(node.last_use)


POLICIES: Mapping[str, Worth] = {"pgdsf": pgdsf, "gdsf": gdsf, "lru": lru, "lfu": lfu}
AGEING = frozenset({"pgdsf", "gdsf"})  # with a clock, so that what was used often, once, does not stay for ever


class EvictionPolicy:
    """One tier's priorities. Raises ValueError for an unknown policy."""

    def __init__(self, policy: str = "pgdsf") -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown eviction policy {policy!r}: expected one of {', '.join(POLICIES)}")
        self._worth = POLICIES[policy]
        self._ages = policy in AGEING
        self._clock = 0.0

    def priority(self, node: Node) -> float:
        """A node's priority, as of now: it is used, or it comes to this tier. What is held leaves last."""
        return math.inf if node.pinned_until else self._clock + self._worth(node)

    def on_evict(self, priority: float) -> None:
        """A node of this priority has left: whatever is used from now on counts for more."""
        if self._ages and priority < math.inf:
            self._clock = max(self._clock, priority)


class Candidates:
    """Runs that may leave a tier, the first to leave on top of a heap.

    `offer` adds an entry whenever a run's place may have changed or it may leave again, in O(log n); entries that are no
    longer true stay, and are passed over by `pop`. place: what runs are sorted by. may_leave: whether a run can leave now.
    """

    def __init__(self, place: Callable[[Node], tuple[float, int]], may_leave: Callable[[Node], bool]) -> None:
        self._place, self._may_leave = place, may_leave
        self._heap: list[tuple[tuple[float, int], int, Node]] = []
        self._count = itertools.count()  # of equals, the one that was offered first
        self._limit = 64

    def clear(self) -> None:
        """Forget all."""
        self._heap = []

    def offer(self, node: Node) -> None:
        """A run may leave from now on, or its place has changed."""
        heapq.heappush(self._heap, (self._place(node), next(self._count), node))
        if len(self._heap) > self._limit:
            self._forget_outdated()

    def pop(self) -> Node | None:
        """The run that leaves next, which has no entry then; None where none may leave."""
        while self._heap:
            place, _, node = heapq.heappop(self._heap)
            if self._is_true(place, node):
                return node
        return None

    @property
    def nodes(self) -> set[Node]:
        """Runs that `pop` would find, sooner or later."""
        return {node for place, _, node in self._heap if self._is_true(place, node)}

    def _forget_outdated(self) -> None:
        """Keep one entry a run: the first one that is true."""
        kept: dict[Node, tuple[tuple[float, int], int, Node]] = {}
        for entry in sorted(self._heap, reverse=True):
            if self._is_true(entry[0], entry[2]):
                kept[entry[2]] = entry
        self._heap = sorted(kept.values())
        self._limit = 2 * len(self._heap) + 64

    def _is_true(self, place: tuple[float, int], node: Node) -> bool:
        return place == self._place(node) and self._may_leave(node)
