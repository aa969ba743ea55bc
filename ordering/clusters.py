"""The order of requests that are all known ahead: those that share documents follow one another.

RAGBoost (section 4.1) merges the closest pair of document sets again and again: a tree from the bottom up, in time that
grows with the square of their number. This tree grows from the top down. The document that spares the most tokens comes
first, its requests are a cluster, and so on in each cluster; what is left of the set is split likewise:

    a b c      +-- a (3) --+-- b (2) --+-- c
    b a d      |           |           +-- d
    a e        |           +-- e
    f          +-- f

Requests in the order of its leaves walk a cache depth first: each prefix is computed once, and may go when its cluster ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(frozen=True, slots=True)
class Cluster:
    """Requests that share documents. placed: the keys of these."""

    requests: Sequence[int]
    placed: AbstractSet[str] = frozenset()


def depth_first(sets: Sequence[Mapping[str, float]]) -> list[int]:
    """Return the indices of document sets, so that those which share much follow one another.

    sets: of each request, the keys of its documents with their lengths, in any unit. Of equals the first comes first.
    Takes n log n for n documents of all sets, times those that most requests of a cluster share.
    """
    order: list[int] = []
    stack = [Cluster(range(len(sets)))]
    while stack:
        cluster = stack.pop()
        if len(cluster.requests) < 2:
            order += cluster.requests
        else:
            stack += reversed(list(_split(cluster, sets)))
    return order


def _split(cluster: Cluster, sets: Sequence[Mapping[str, float]]) -> Iterator[Cluster]:
    """Yield the clusters of a cluster: by the document that spares the most, then by the next one of what is left."""
    left = {at: [key for key in sets[at] if key not in cluster.placed] for at in cluster.requests}
    holders: dict[str, dict[int, None]] = {}
    for at, keys in left.items():
        for key in keys:
            holders.setdefault(key, {})[at] = None
    counts = Counter({key: len(found) for key, found in holders.items()})
    first = {key: place for place, key in enumerate(counts)}
    heap = [(-_spared(key, count, sets[next(iter(holders[key]))]), first[key], key) for key, count in counts.items()]
    heapify(heap)
    while heap:
        worth, place, key = heappop(heap)
        if counts[key] < 2:
            continue
        if worth != (now := -_spared(key, counts[key], sets[next(iter(holders[key]))])):
            heappush(heap, (now, place, key))
            continue
        found = [at for at in holders[key] if at in left]
        for at in found:
            counts.subtract(left.pop(at))
        yield Cluster(found, cluster.placed | {key})
    yield from (Cluster([at]) for at in left)


def _spared(key: str, count: int, lengths: Mapping[str, float]) -> float:
    """Return what is spared if a document is computed once for `count` requests."""
    return (count - 1) * lengths[key]
