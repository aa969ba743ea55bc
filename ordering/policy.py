"""Ordering policies: `auto`, and the baselines it is measured against.

A policy orders the documents of a request that may move, and answers with their indices. It reads the index and
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import inf
from typing import Any, Generic

from .index import Index, P, RecencyIndex

ORACLE_LIMIT = 8


@dataclass(frozen=True, slots=True)
class Request:
    """Documents in retrieval rank. Those before index `first` and those from `last` on stay where they are.

    `waiting` are the documents of requests that come next and would read this one's order.
    """

    keys: Sequence[str]
    names: Sequence[str]
    first: int
    last: int
    waiting: Sequence[Collection[str]] = ()

    @property
    def movable(self) -> range:
        return range(self.first, self.last)


@dataclass(frozen=True, slots=True)
class Walk(Generic[P]):
    """The leading run of a sequence of documents that is cached."""

    documents: int
    tokens: int
    saved: float
    end: P | None  # behind the last document, None when one of them is not cached


def walk(index: Index[P], position: P | None, keys: Sequence[str]) -> Walk[P]:
    """Follows `keys` in order from `position` until one of them is not cached there."""
    documents, tokens, saved = 0, 0, 0.0
    for key in keys:
        step = None if position is None else index.follow(position, key)
        if step is None:
            return Walk(documents, tokens, saved, None)
        position, documents, tokens, saved = step.position, documents + 1, tokens + step.tokens, saved + step.saved
    return Walk(documents, tokens, saved, position)


def walk_to_end(index: Index[P], position: P | None, keys: Sequence[str]) -> float:
    """Tokens saved by `keys` as the last documents of a request: behind a fully cached set, what follows counts too."""
    walked = walk(index, position, keys)
    return walked.saved if walked.end is None else walked.saved + index.beyond(walked.end)


def auto(request: Request, index: Index[P]) -> Sequence[int]:
    """The order that saves the most tokens, of several the lexicographically smallest (nearest to retrieval rank).

    Exact, by depth-first search over the cached paths of this request's own documents: at most one visit per cached
    node that the request can reach, with one lookup per remaining document, none at all where the index says that
    nothing better is ahead. What is not cached keeps its rank, behind what requests that wait have in common with it.
    """
    keys, movable, follow = request.keys, request.movable, index.follow
    head = walk(index, index.start(), keys[: request.first])
    if head.end is None:
        return _shared_first(request, ())
    backwards = [(i, keys[i]) for i in reversed(movable)]
    best: tuple[int, ...] = ()
    most = 0.0
    # Paths are visited in the lexicographic order of the orders they lead to, so the first one with the most saved
    # wins a tie.
    stack: list[tuple[tuple[int, ...], P, float, float]] = [((), head.end, 0.0, inf)]
    while stack:
        path, position, saved, ahead = stack.pop()
        if len(path) == len(movable):
            saved += walk_to_end(index, position, keys[request.last :])
        if saved > most:
            best, most = path, saved
        if saved + ahead <= most:
            continue
        for i, key in backwards:
            if (step := follow(position, key)) is not None and i not in path:
                stack.append(((*path, i), step.position, saved + step.saved, step.ahead))
    return _shared_first(request, best)


def _shared_first(request: Request, placed: Sequence[int]) -> Sequence[int]:
    """`placed`, then at each step the document that most of the waiting requests share which share all before it.

    So a cold start helps whoever comes next (RAGBoost, 5.1); exact for one waiting request, greedy for several.
    """
    keys = request.keys
    before = [*range(request.first), *placed]
    readers = [other for other in request.waiting if all(keys[i] in other for i in before)]
    order, rest = [*placed], [i for i in request.movable if i not in placed]
    while readers and rest:
        shared = [sum(keys[i] in other for other in readers) for i in rest]
        if not (most := max(shared)):
            break
        order.append(chosen := rest.pop(shared.index(most)))
        readers = [other for other in readers if keys[chosen] in other]
    return order + rest


def greedy(request: Request, index: Index[P]) -> Sequence[int]:
    """At each step the best-ranked document that is cached there (CacheWeaver, Algorithm 1), until none is."""
    keys, rest = request.keys, list(request.movable)
    position = walk(index, index.start(), keys[: request.first]).end
    order: list[int] = []
    while position is not None:
        steps = ((i, index.follow(position, keys[i])) for i in rest)
        i, step = next(((i, step) for i, step in steps if step is not None), (-1, None))
        if step is None:
            break
        position = step.position
        order.append(i)
        rest.remove(i)
    return order + rest


def oracle(request: Request, index: Index[P]) -> Sequence[int]:
    """The best of all permutations, found by trying each. ValueError beyond 8 movable documents."""
    keys, movable = request.keys, request.movable
    if len(movable) > ORACLE_LIMIT:
        raise ValueError(f"policy 'oracle' takes {ORACLE_LIMIT} documents, not {len(movable)}: 'auto' takes any number")
    head = walk(index, index.start(), keys[: request.first])
    tail = list(keys[request.last :])
    return max(permutations(movable), key=lambda order: walk_to_end(index, head.end, [keys[i] for i in order] + tail))


def retrieval(request: Request, index: Index[Any]) -> Sequence[int]:
    """Retrieval rank, whatever is cached."""
    return request.movable


def by_name(request: Request, index: Index[Any]) -> Sequence[int]:
    """By document name: equal sets meet in one order, whatever is cached (CacheWeaver's APC+Sorted)."""
    return sorted(request.movable, key=request.names.__getitem__)


def by_recency(request: Request, index: Index[Any]) -> Sequence[int]:
    """Most recently used documents first, unknown ones behind them in rank; plain rank where the index cannot say."""
    if not isinstance(index, RecencyIndex):
        return request.movable
    used = [(index.recency(request.keys[i]), i) for i in request.movable]
    known = sorted((-when, i) for when, i in used if when is not None)
    return [i for _, i in known] + [i for when, i in used if when is None]


Policy = Callable[[Request, Index[Any]], Sequence[int]]

POLICIES: Mapping[str, Policy] = {
    "auto": auto,
    "retrieval": retrieval,
    "sorted": by_name,
    "recency": by_recency,
    "greedy": greedy,
    "oracle": oracle,
}
