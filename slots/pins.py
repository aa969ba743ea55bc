"""Prompts that a client asked to keep: what they consist of leaves a full tier last, until the time is over."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator

import numpy as np

from .node import Node
from .radix import path
from .scope import Scope
from .tree import PrefixTree


class Holds:
    """A hold never makes a request fail: where running requests need all the cells, what is held leaves, too.

    clock: seconds, as `time.monotonic` counts them.
    """

    def __init__(self, tree: PrefixTree, clock: Callable[[], float] = time.monotonic) -> None:
        self._tree, self._clock = tree, clock
        self._ends: list[tuple[float, int, Node]] = []  # when the hold on the path to a node is over
        self._count = itertools.count()

    def hold(self, scope: Scope, tokens: np.ndarray, seconds: float = math.inf) -> int:
        """Keep what is cached of a prompt (int32) for so long, from now on; how many tokens that is."""
        until = self._clock() + seconds
        nodes = self._path_of(scope, tokens)
        for node in nodes:
            node.held_until = max(node.held_until, until)
            self._tree.held.add(node)
            self._tree.price(node)
        if nodes and until < math.inf:
            self._note_end(until, nodes[0])
        return sum(len(node.tokens) for node in nodes)

    def release(self, scope: Scope, tokens: np.ndarray) -> int:
        """End the holds on a prompt, but for what held prompts share with it; how many tokens that were."""
        released = 0
        for node in self._path_of(scope, tokens):
            if node.held_until and not any(child.held_until for child in node.children.values()):
                released += len(node.tokens)
                self._end(node)
        return released

    def expire(self) -> None:
        """End the holds whose time is over."""
        while self._ends and self._ends[0][0] <= self._clock():
            until, _, tip = heapq.heappop(self._ends)
            for node in path(tip):
                if node.held_until and node.held_until <= until:
                    self._end(node)

    def held(self) -> Iterator[Node]:
        """Every run that is held."""
        return iter(self._tree.held)

    def _path_of(self, scope: Scope, tokens: np.ndarray) -> list[Node]:
        """The nodes that lie wholly in a prompt, the last one first."""
        match = self._tree.match(scope, tokens)
        return [node for node in path(match.node) if node.end <= match.length and node.is_cached]

    def _note_end(self, until: float, tip: Node) -> None:
        """Renewed holds and runs that have left make no entries for ever: with too many, only what is held keeps one."""
        heapq.heappush(self._ends, (until, next(self._count), tip))
        if len(self._ends) > 2 * len(self._tree.held) + 64:
            held = [node for node in self._tree.held if node.held_until < math.inf]
            self._ends = [(node.held_until, next(self._count), node) for node in held]
            heapq.heapify(self._ends)

    def _end(self, node: Node) -> None:
        node.held_until = 0.0
        self._tree.held.discard(node)
        self._tree.price(node)
