"""An order for requests that are all known in advance: requests that share documents follow one another.

RAGBoost (section 4.1) builds a tree from the bottom up: it merges the closest pair of document sets again and again, in time
that grows with the square of their number. In this module, the tree grows from the top down. The requests with the document
whose sharing saves the most tokens are the first cluster. The remaining requests are split in the same way, and so is each
cluster afterwards. In this example, a number says how many requests share a document:

    a b c      +-- a (3) --+-- b (2) --+-- c
    b a d      |           |           +-- d
    a e        |           +-- e
    f          +-- f

If the requests are answered in the order of the leaves, each prefix is computed once, and may be evicted after the last
request of its cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(frozen=True, slots=True)
class Cluster:
    """Requests that share documents.

    requests: the indices of the requests.
    placed: the keys of the documents that are placed first, all of which these requests share.
    """

    requests: Sequence[int]
    placed: AbstractSet[str] = frozenset()


def depth_first(sets: Sequence[Mapping[str, float]]) -> list[int]:
    """Return the indices of document sets, in an order in which sets that share many documents follow one another.

    Ties are decided in favour of the first set. If all sets together have n documents, the time is n log n times the largest
    number of documents that the requests of a cluster share.

    sets: for each request, the length of each of its documents, in any unit, by the document's key.
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
    """Yield the parts of a cluster. The first part shares the document that saves the most; the rest is split alike."""
    left = {at: [key for key in sets[at] if key not in cluster.placed] for at in cluster.requests}
    places: dict[str, dict[int, None]] = {}
    for at, keys in left.items():
        for key in keys:
            places.setdefault(key, {})[at] = None
    counts = Counter({key: len(found) for key, found in places.items()})
    first = {key: place for place, key in enumerate(counts)}
    heap = [(-_spared(key, count, sets[next(iter(places[key]))]), first[key], key) for key, count in counts.items()]
    heapify(heap)
    while heap:
        worth, place, key = heappop(heap)
        if counts[key] < 2:
            continue
        if worth != (now := -_spared(key, counts[key], sets[next(iter(places[key]))])):
            heappush(heap, (now, place, key))
            continue
        found = [at for at in places[key] if at in left]
        for at in found:
            counts.subtract(left.pop(at))
        yield Cluster(found, cluster.placed | {key})
    yield from (Cluster([at]) for at in left)


def _spared(key: str, count: int, lengths: Mapping[str, float]) -> float:
    """Return the length that is saved if a document is computed only once for `count` requests."""
    return (count - 1) * lengths[key]
