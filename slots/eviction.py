"""Eviction: what a run is worth to a tier. The run with the lowest priority is evicted first.

PGDSF is RAGCache's prefix-aware Greedy-Dual-Size-Frequency (section 5.1, formulas 2 to 4). The other policies are there for
comparison. To add a policy, write a function and enter it in POLICIES.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from .costs import Profile
from .radix import Node

Worth = Callable[[Node], float]
"""Returns a run's worth, to which `EvictionPolicy` adds its clock."""


def pgdsf(node: Node) -> float:
    """Return how often a run was used, times the cost to compute one of its tokens (RAGCache's cost over size)."""
    return node.frequency * node.token_cost


def gdsf(node: Node) -> float:
    """Return how often a run was used. Unlike `pgdsf`, this treats all tokens as equally expensive to compute."""
    return float(node.frequency)


def lfu(node: Node) -> float:
    return float(node.frequency)


def lru(node: Node) -> float:
    return float(node.last_use)


POLICIES: Mapping[str, Worth] = {"pgdsf": pgdsf, "gdsf": gdsf, "lru": lru, "lfu": lfu}
AGEING = frozenset({"pgdsf", "gdsf"})  # policies with a clock, so that a run that was popular once does not stay for ever


class EvictionPolicy:
    """The priorities of one tier. Raises ValueError for an unknown policy."""

    def __init__(self, policy: str = "pgdsf") -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown eviction policy {policy!r}: expected one of {', '.join(POLICIES)}")
        self.worth = POLICIES[policy]
        self._ages = policy in AGEING
        self._clock = 0.0

    def priority(self, node: Node) -> float:
        """Return the priority of a run that has just been used or moved to this tier.

        Pinned runs get the highest priority.
        """
        return math.inf if node.pinned_until else self._clock + self.worth(node)

    def on_evict(self, priority: float) -> None:
        """Advance the clock to the priority of an evicted run, so that runs that are used later get higher priorities."""
        if self._ages and priority < math.inf:
            self._clock = max(self._clock, priority)


def count_use(nodes: Sequence[Node], profile: Profile, *, continues: bool = False, counts_as_use: bool = True) -> None:
    """Count a request's use of a path: raise the frequency of its runs, and note the cost of the runs without KV.

    nodes: the runs of the path, last one first.
    continues: whether the request continues an earlier one. If the request continues an earlier one, runs that were used
        before are not counted again. If all turns counted, a conversation of many turns would make its history worth more
        than other histories.
    counts_as_use: whether the request raises frequencies at all, see `Kind`.
    """
    missing = [node for node in nodes if not node.is_cached]
    new = sum(len(node.tokens) for node in missing)
    if missing:
        token_cost = profile.cost(nodes[0].end - new, new)
        for node in missing:
            node.note_miss(token_cost)
    for node in nodes:
        node.frequency += counts_as_use and not (continues and node.frequency)


class Candidates:
    """A heap of the runs that may be evicted from a tier, with the next one to evict on top.

    Whenever a run's sort key may have changed, or a run has become evictable, `offer` adds a new entry, in O(log n). `pop`
    skips outdated entries.

    order: returns the sort key of a run. The run with the lowest key is evicted first.
    may_evict: returns whether a run can be evicted now.
    """

    def __init__(self, order: Callable[[Node], tuple[float, int]], may_evict: Callable[[Node], bool]) -> None:
        self._order, self._may_evict = order, may_evict
        self._heap: list[tuple[tuple[float, int], int, Node]] = []
        self._count = itertools.count()  # of runs with equal keys, the first one offered wins
        self._limit = 64

    def clear(self) -> None:
        """Forget all entries."""
        self._heap, self._limit = [], 64

    def offer(self, node: Node) -> None:
        """Add an entry for a run that may be evicted from now on, or that has a new sort key."""
        heapq.heappush(self._heap, (self._order(node), next(self._count), node))
        if len(self._heap) > self._limit:
            self._forget_outdated()

    def pop(self) -> Node | None:
        """Remove and return the run to evict next; None if no run may be evicted."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            if self._is_current(key, node):
                return node
        return None

    @property
    def nodes(self) -> set[Node]:
        """All runs that can be evicted now."""
        return {node for key, _, node in self._heap if self._is_current(key, node)}

    def _forget_outdated(self) -> None:
        """Remove outdated entries, and keep only the first current entry of each run."""
        kept: dict[Node, tuple[tuple[float, int], int, Node]] = {}
        for entry in sorted(self._heap, reverse=True):
            if self._is_current(entry[0], entry[2]):
                kept[entry[2]] = entry
        self._heap = sorted(kept.values())
        self._limit = 2 * len(self._heap) + 64

    def _is_current(self, key: tuple[float, int], node: Node) -> bool:
        return key == self._order(node) and self._may_evict(node)
