"""The order in which a request's documents stand in its prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from .index import Index, P
from .policy import POLICIES, Request, walk


@dataclass(frozen=True, slots=True)
class Arrangement:
    """An order of documents, and what it reuses: `order[0]` is the retrieval rank of the document that stands first.

    `reused_documents` is the length of the leading run that is cached, `reused_tokens` the tokens in it. What stands
    before the documents and behind them is not counted.
    """

    order: tuple[int, ...]
    reused_documents: int
    reused_tokens: int

    @property
    def is_rank(self) -> bool:
        """Whether no document moved."""
        return self.order == tuple(range(len(self.order)))


def arrange(
    keys: Sequence[str],
    index: Index[P],
    policy: str = "auto",
    keep_first: int = 0,
    keep_last: int = 0,
    names: Sequence[str] | None = None,
    waiting: Sequence[Collection[str]] = (),
) -> Arrangement:
    """Orders the documents `keys`, given in retrieval rank, for the most reuse (RAGBoost 5.1, CacheWeaver 3.3).

    The first `keep_first` and the last `keep_last` documents stay where they are. `names` are what the `sorted`
    policy sorts by, the keys where there are none. A document that is not reused keeps its rank among the others
    under `auto` and `greedy`. `waiting` are the documents of requests that come next: under `auto`, what they share with
    this one stands before what they do not.

    Raises ValueError for an unknown policy, a document given twice, a negative guard, names that do not match the
    keys, and more documents than the `oracle` can try.
    """
    request = _request(keys, keep_first, keep_last, keys if names is None else names, waiting)
    if policy not in POLICIES:
        raise ValueError(f"unknown ordering policy {policy!r}: expected one of {', '.join(POLICIES)}")
    middle = POLICIES[policy](request, index)
    order = (*range(request.first), *middle, *range(request.last, len(keys)))
    reused = walk(index, index.start(), [keys[i] for i in order])
    return Arrangement(order, reused.documents, reused.tokens)


def _request(
    keys: Sequence[str], keep_first: int, keep_last: int, names: Sequence[str], waiting: Sequence[Collection[str]]
) -> Request:
    if len(set(keys)) != len(keys):
        twice = next(key for key, count in Counter(keys).items() if count > 1)
        raise ValueError(f"document {twice!r} is given twice: a request names each document once")
    if keep_first < 0 or keep_last < 0:
        raise ValueError(f"keep_first and keep_last count documents, 0 or more: got {keep_first} and {keep_last}")
    if len(names) != len(keys):
        raise ValueError(f"expected one name for each of {len(keys)} documents, got {len(names)}")
    first = min(keep_first, len(keys))
    sets: list[AbstractSet[str]] = [other if isinstance(other, AbstractSet) else frozenset(other) for other in waiting]
    return Request(keys, names, first, max(first, len(keys) - keep_last), sets)
