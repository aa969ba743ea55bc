"""Ordering policies: `auto`, and the baselines of the benchmarks.

A policy takes a request and an index, and returns the ranks of the movable documents in their new order. It does not
change the index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import permutations
from math import inf
from typing import Generic, Protocol

from .index import Index, P, RecencyIndex

ORACLE_LIMIT = 8


@dataclass(frozen=True, slots=True)
class OrderRequest:
    """The documents of one request, in retrieval rank.

    names: the sort keys of the `sorted` policy. Documents before rank `first`, and from rank `last` on, keep their place.
    waiting: the documents of each request that comes next and can reuse this order. tokens: the most that each document
    saves; empty: unknown.
    """

    keys: Sequence[str]
    names: Sequence[str]
    first: int
    last: int
    waiting: Sequence[AbstractSet[str]] = ()
    tokens: Sequence[float] = ()

    @property
    def movable(self) -> range:
        return range(self.first, self.last)


@dataclass(frozen=True, slots=True)
class Walk(Generic[P]):
    """The cached beginning of a sequence of documents: its documents, its tokens, and the tokens of prefill saved."""

    documents: int
    tokens: int
    saved: float
    end: P | None  # the end of the sequence; None if one of its documents is not cached


def walk(index: Index[P], position: P | None, keys: Sequence[str]) -> Walk[P]:
    """Follow `keys` in order from `position` up to the first document that is not cached."""
    documents, tokens, saved = 0, 0, 0.0
    for key in keys:
        step = None if position is None else index.follow(position, key)
        if step is None:
            return Walk(documents, tokens, saved, None)
        position, documents, tokens, saved = step.position, documents + 1, tokens + step.tokens, saved + step.saved
    return Walk(documents, tokens, saved, position)


def walk_to_end(index: Index[P], position: P | None, keys: Sequence[str]) -> float:
    """Return the tokens saved by `keys`, the last documents of a request.

    If all of them are cached, the saving after the documents counts, too.
    """
    walked = walk(index, position, keys)
    return walked.saved if walked.end is None else walked.saved + index.beyond(walked.end)


def cached_ranks(index: Index[P], position: P, ranks: Mapping[str, int]) -> list[int]:
    """Return the ranks of the documents that are cached directly after `position`, ascending.

    ranks: by key, ascending. The time is proportional to the smaller of `ranks` and the documents cached at `position`.
    """
    behind = index.behind(position)
    if 4 * len(behind) < len(ranks):  # else the sort costs more than it saves
        return sorted(ranks[key] for key in tuple(behind) if key in ranks)
    return [rank for key, rank in ranks.items() if key in behind]


def auto(request: OrderRequest, index: Index[P], floor: float = 0.0) -> Sequence[int]:
    """Return the order that saves the most tokens; of equal orders the lexicographically smallest, nearest to rank.

    floor: tokens; an order that saves no more is not worth finding.

    Exact: a depth-first search visits every cached path that this request's documents can reach, and skips a branch
    whose bound (`Step.ahead`) cannot win. Documents that are not cached follow: first the documents that waiting
    requests share, then the rest in retrieval rank.
    """
    keys, movable = request.keys, request.movable
    head = walk(index, index.start(), keys[: request.first])
    if head.end is None:
        return _shared_first(request, ())
    ranks = {keys[i]: i for i in movable}
    path: list[int] = []  # the ranks placed, in order
    placed: set[int] = set()
    best: list[int] = []
    same = 0  # length of the common beginning of `best` and `path`
    most = floor
    tokens = request.tokens or [0.0] * len(keys)
    # The search visits orders in lexicographic order, so the first order with the greatest saving wins a tie.
    left = sum(tokens[request.first :]) if request.tokens else inf  # the most that is still to be saved
    stack = [(head.end, 0.0, left, iter(cached_ranks(index, head.end, ranks)))]
    while stack:
        position, saved, left, candidates = stack[-1]
        for rank in candidates if saved + left > most else ():
            if rank not in placed and (step := index.follow(position, keys[rank])) is not None:
                break
        else:
            stack.pop()
            if path:
                placed.discard(path.pop())
                same = min(same, len(path))
            continue
        path.append(rank)
        placed.add(rank)
        saved, left = saved + step.saved, left - tokens[rank]
        whole = saved
        if len(path) == len(movable):
            whole += walk_to_end(index, step.position, keys[request.last :])
        if whole > most:
            best[same:], most, same = path[same:], whole, len(path)
        if saved + min(step.ahead, left) > most:
            stack.append((step.position, saved, left, iter(cached_ranks(index, step.position, ranks))))
        else:
            placed.discard(path.pop())
            same = min(same, len(path))
    return _shared_first(request, best)


def _shared_first(request: OrderRequest, placed: Sequence[int]) -> Sequence[int]:
    """Return `placed`, then the documents shared with the most waiting requests, then the rest in rank.

    A waiting request counts only while it has all documents before: it reuses a common beginning, and a cold start
    then helps it (RAGBoost, 5.1). Exact for one waiting request, greedy for several. The time is proportional to the
    number of documents of all these requests, because counts only fall.
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


def greedy(request: OrderRequest, index: Index[P]) -> Sequence[int]:
    """Take the best-ranked document cached at each position, until no document is cached (CacheWeaver, Algorithm 1)."""
    keys, ranks = request.keys, {request.keys[i]: i for i in request.movable}
    position = walk(index, index.start(), keys[: request.first]).end
    order: list[int] = []
    while position is not None and (found := cached_ranks(index, position, ranks)):
        if (step := index.follow(position, keys[found[0]])) is None:
            break
        position = step.position
        order.append(ranks.pop(keys[found[0]]))
    return [*order, *ranks.values()]


def oracle(request: OrderRequest, index: Index[P]) -> Sequence[int]:
    """Return the best of all permutations. Raises ValueError for more than 8 movable documents."""
    keys, movable = request.keys, request.movable
    if len(movable) > ORACLE_LIMIT:
        raise ValueError(f"policy 'oracle' takes {ORACLE_LIMIT} documents, not {len(movable)}: 'auto' takes any number")
    head = walk(index, index.start(), keys[: request.first])
    tail = list(keys[request.last :])
    return max(permutations(movable), key=lambda order: walk_to_end(index, head.end, [keys[i] for i in order] + tail))


def retrieval(request: OrderRequest, index: object) -> Sequence[int]:
    """Return retrieval rank; the cache does not matter."""
    return request.movable


def by_name(request: OrderRequest, index: object) -> Sequence[int]:
    """Sort by name, so that equal sets have equal orders; the cache does not matter (CacheWeaver's APC+Sorted)."""
    return sorted(request.movable, key=request.names.__getitem__)


def by_recency(request: OrderRequest, index: object) -> Sequence[int]:
    """Put the most recently used documents first, then unknown documents in rank.

    If the index is not a `RecencyIndex`, all documents are unknown.
    """
    if not isinstance(index, RecencyIndex):
        return request.movable
    used = [(index.recency(request.keys[i]), i) for i in request.movable]
    known = sorted((-when, i) for when, i in used if when is not None)
    return [i for _, i in known] + [i for when, i in used if when is None]


class Policy(Protocol):
    """A function that returns the ranks of a request's movable documents in their new order."""

    def __call__(self, request: OrderRequest, index: Index[P]) -> Sequence[int]: ...


POLICIES: Mapping[str, Policy] = {
    "auto": auto,
    "retrieval": retrieval,
    "sorted": by_name,
    "recency": by_recency,
    "greedy": greedy,
    "oracle": oracle,
}
