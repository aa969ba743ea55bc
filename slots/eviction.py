"""What a run is worth to the tier that holds it: the one worth least leaves first.

PGDSF is RAGCache's prefix-aware Greedy-Dual-Size-Frequency (section 5.1, formulas 2 to 4). The others are what it is
measured against.
"""

from __future__ import annotations

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


class Replacement:
    """One tier's priorities. Raises ValueError for an unknown policy."""

    def __init__(self, policy: str = "pgdsf") -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown replacement policy {policy!r}: expected one of {', '.join(POLICIES)}")
        self._worth = POLICIES[policy]
        self._ages = policy in AGEING
        self._clock = 0.0

    def priority(self, node: Node) -> float:
        """A node's priority, as of now: it is used, or it comes to this tier. What is held leaves last."""
        return math.inf if node.held_until else self._clock + self._worth(node)

    def left(self, priority: float) -> None:
        """A node of this priority has left: whatever is used from now on counts for more."""
        if self._ages and priority < math.inf:
            self._clock = max(self._clock, priority)
