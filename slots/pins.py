"""Pins: prompts that a client asked to keep. Their runs leave a full tier last, until the pin ends."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator

import numpy as np

from .node import Node
from .radix import PromptTree, path
from .scope import Scope


class Pins:
    """A pin never makes a request fail: where running requests need all the cells, pinned runs leave, too.

    clock: seconds, as `time.monotonic` counts them.
    """

    def __init__(self, tree: PromptTree, clock: Callable[[], float] = time.monotonic) -> None:
        self._tree, self._clock = tree, clock
        self._ends: list[tuple[float, int, Node]] = []  # when the pin on the path to a node ends
        self._count = itertools.count()

    def pin(self, scope: Scope, tokens: np.ndarray, seconds: float = math.inf) -> int:
        """Pin the cached runs of a prompt (int32) for some seconds from now. Return how many tokens they have."""
        until = self._clock() + seconds
        nodes = self._path_of(scope, tokens)
        for node in nodes:
            node.pinned_until = max(node.pinned_until, until)
            self._tree.pinned.add(node)
            self._tree.price(node)
        if nodes and until < math.inf:
            self._note_end(until, nodes[0])
        return sum(len(node.tokens) for node in nodes)

    def unpin(self, scope: Scope, tokens: np.ndarray) -> int:
        """End the pins on a prompt, but not on runs that other pinned prompts share. Return how many tokens that were."""
        released = 0
        for node in self._path_of(scope, tokens):
            if node.pinned_until and not any(child.pinned_until for child in node.children.values()):
                released += len(node.tokens)
                self._end(node)
        return released

    def expire(self) -> None:
        """End the pins whose time is over."""
        while self._ends and self._ends[0][0] <= self._clock():
            until, _, tip = heapq.heappop(self._ends)
            for node in path(tip):
                if node.pinned_until and node.pinned_until <= until:
                    self._end(node)

    def runs(self) -> Iterator[Node]:
        """Iterate over the pinned runs."""
        return iter(self._tree.pinned)

    def _path_of(self, scope: Scope, tokens: np.ndarray) -> list[Node]:
        """Return the cached runs that lie wholly in a prompt, the last one first."""
        match = self._tree.match(scope, tokens)
        return [node for node in path(match.node) if node.end <= match.length and node.is_cached]

    def _note_end(self, until: float, tip: Node) -> None:
        """Remember when a pin ends.

        Renewed pins and evicted runs leave outdated entries. When they are too many, only pinned runs keep an entry.
        """
        heapq.heappush(self._ends, (until, next(self._count), tip))
        if len(self._ends) > 2 * len(self._tree.pinned) + 64:
            pinned = [node for node in self._tree.pinned if node.pinned_until < math.inf]
            self._ends = [(node.pinned_until, next(self._count), node) for node in pinned]
            heapq.heapify(self._ends)

    def _end(self, node: Node) -> None:
        node.pinned_until = 0.0
        self._tree.pinned.discard(node)
        self._tree.price(node)
