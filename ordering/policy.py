"""Ordering policies: `auto`, and the baselines it is measured against.

A policy orders the documents of a request that may move, and answers with their indices. It reads the index and
changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import permutations
from typing import Generic, Protocol

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
    waiting: Sequence[AbstractSet[str]] = ()

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


def cached_ranks(index: Index[P], position: P, ranks: Mapping[str, int]) -> list[int]:
    """Return the ranks of the documents that are cached right behind `position`, ascending.

    ranks: by key, ascending. Takes time in proportion to the shorter of `ranks` and what is cached there.
    """
    behind = index.behind(position)
    if len(behind) < len(ranks):
        return sorted(ranks[key] for key in tuple(behind) if key in ranks)
    return [rank for key, rank in ranks.items() if key in behind]


def auto(request: Request, index: Index[P]) -> Sequence[int]:
    """The order that saves the most tokens, of several the lexicographically smallest (nearest to retrieval rank).

    Exact, by depth-first search over the cached paths of this request's own documents: one visit for each cached node
    that the request can reach, none where the index says that nothing better is ahead. A document that is not cached
    keeps its rank, behind those that it shares with requests that wait.
    """
    keys, movable = request.keys, request.movable
    head = walk(index, index.start(), keys[: request.first])
    if head.end is None:
        return _shared_first(request, ())
    ranks = {keys[i]: i for i in movable}
    path: list[int] = []  # the ranks placed, in order
    placed: set[int] = set()
    best: list[int] = []
    same = 0  # leading ranks that `best` and `path` have in common
    most = 0.0
    # Paths are visited in the lexicographic order of the orders they lead to, so the first one with the most saved
    # wins a tie.
    stack = [(head.end, 0.0, iter(cached_ranks(index, head.end, ranks)))]
    while stack:
        position, saved, candidates = stack[-1]
        rank = next((rank for rank in candidates if rank not in placed), None)
        if rank is None:
            stack.pop()
            if path:
                placed.discard(path.pop())
                same = min(same, len(path))
            continue
        if (step := index.follow(position, keys[rank])) is None:
            continue
        path.append(rank)
        placed.add(rank)
        saved += step.saved
        whole = saved
        if len(path) == len(movable):
            whole += walk_to_end(index, step.position, keys[request.last :])
        if whole > most:
            best[same:], most, same = path[same:], whole, len(path)
        may_win = saved + step.ahead > most
        stack.append((step.position, saved, iter(cached_ranks(index, step.position, ranks) if may_win else ())))
    return _shared_first(request, best)


def _shared_first(request: Request, placed: Sequence[int]) -> Sequence[int]:
    """`placed`, then at each step the document that most of the waiting requests share which share all before it.

    So a cold start helps the next request (RAGBoost, 5.1); exact for one waiting request, greedy for several. Takes time
    in proportion to the documents of all these requests: a count only falls, when a request drops out.
    """
    rest = dict.fromkeys(request.movable)
    for i in placed:
        del rest[i]
    if not request.waiting:
        return [*placed, *rest]
    keys, before = request.keys, [request.keys[i] for i in (*range(request.first), *placed)]
    readers = [other for other in request.waiting if all(key in other for key in before)]
    shared = {at: [i for i in rest if keys[i] in other] for at, other in enumerate(readers)}
    counts = Counter(i for found in shared.values() for i in found)
    heap = [(-count, i) for i, count in counts.items()]
    heapify(heap)
    order = [*placed]
    while heap and shared:
        count, chosen = heappop(heap)
        if -count != counts[chosen]:
            heappush(heap, (-counts[chosen], chosen))
            continue
        if not count:
            break
        order.append(chosen)
        del rest[chosen]
        for at in [at for at in shared if keys[chosen] not in readers[at]]:
            counts.subtract(shared.pop(at))
    return [*order, *rest]


def greedy(request: Request, index: Index[P]) -> Sequence[int]:
    """At each step the best-ranked document that is cached there (CacheWeaver, Algorithm 1), until none is."""
    keys, ranks = request.keys, {request.keys[i]: i for i in request.movable}
    position = walk(index, index.start(), keys[: request.first]).end
    order: list[int] = []
    while position is not None and (found := cached_ranks(index, position, ranks)):
        if (step := index.follow(position, keys[found[0]])) is None:
            break
        position = step.position
        order.append(ranks.pop(keys[found[0]]))
    return [*order, *ranks.values()]


def oracle(request: Request, index: Index[P]) -> Sequence[int]:
    """The best of all permutations, found by trying each. ValueError beyond 8 movable documents."""
    keys, movable = request.keys, request.movable
    if len(movable) > ORACLE_LIMIT:
        raise ValueError(f"policy 'oracle' takes {ORACLE_LIMIT} documents, not {len(movable)}: 'auto' takes any number")
    head = walk(index, index.start(), keys[: request.first])
    tail = list(keys[request.last :])
    return max(permutations(movable), key=lambda order: walk_to_end(index, head.end, [keys[i] for i in order] + tail))


def retrieval(request: Request, index: Index[P]) -> Sequence[int]:
    """Retrieval rank, whatever is cached."""
    return request.movable


def by_name(request: Request, index: Index[P]) -> Sequence[int]:
    """By document name: equal sets meet in one order, whatever is cached (CacheWeaver's APC+Sorted)."""
    return sorted(request.movable, key=request.names.__getitem__)


def by_recency(request: Request, index: Index[P]) -> Sequence[int]:
    """Most recently used documents first, unknown ones behind them in rank; plain rank where the index cannot say."""
    if not isinstance(index, RecencyIndex):
        return request.movable
    used = [(index.recency(request.keys[i]), i) for i in request.movable]
    known = sorted((-when, i) for when, i in used if when is not None)
    return [i for _, i in known] + [i for when, i in used if when is None]


class Policy(Protocol):
    """Orders the documents of a request that may move: their indices."""

    def __call__(self, request: Request, index: Index[P], /) -> Sequence[int]: ...


POLICIES: Mapping[str, Policy] = {
    "auto": auto,
    "retrieval": retrieval,
    "sorted": by_name,
    "recency": by_recency,
    "greedy": greedy,
    "oracle": oracle,
}
