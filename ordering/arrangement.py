"""The order of a request's documents in its prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from .policy import POLICIES, Index, OrderRequest, P, auto, walk


@dataclass(frozen=True, slots=True)
class Arrangement:
    """An order of documents and its reuse.

    order: retrieval ranks, from 0, in the order of the prompt; `order[0]` is the rank of the first document.
    reused_documents: the number of leading documents that are cached in this order. reused_tokens: the tokens of these
    documents. Text before and after the documents is not counted.
    """

    order: tuple[int, ...]
    reused_documents: int
    reused_tokens: int

    @property
    def is_rank(self) -> bool:
        """Whether all documents stand in retrieval rank."""
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
    """Return the order of documents that reuses the most cached tokens (RAGBoost 5.1, CacheWeaver 3.3).

    keys: of the documents, in retrieval rank. index: the cached documents. policy: one of `POLICIES`.
    keep_first, keep_last: the first and last documents that keep their place. names: sort keys of the `sorted` policy,
    by default `keys`. waiting: the documents of each request that comes next; `auto` puts documents that those requests
    share first. Under `auto` and `greedy`, documents that are not reused stay in retrieval rank.

    Raises ValueError for an unknown policy, a key given twice, a negative `keep_first` or `keep_last`, a number of
    `names` other than the number of keys, and more documents than `oracle` can try.
    """
    order_request = _order_request(keys, keys if names is None else names, (keep_first, keep_last), waiting)
    if policy not in POLICIES:
        raise ValueError(f"unknown ordering policy {policy!r}: expected one of {', '.join(POLICIES)}")
    middle = POLICIES[policy](order_request, index)
    order = (*range(order_request.first), *middle, *range(order_request.last, len(keys)))
    reused = walk(index, index.start(), [keys[i] for i in order])
    return Arrangement(order, reused.documents, reused.tokens)


def arrange_better(request: OrderRequest, index: Index[P], floor: float) -> Arrangement:
    """Return the order that reuses the most cached tokens, or retrieval rank if none reuses more than `floor` tokens.

    Much faster than `arrange` if the floor is high or much is cached: no document saves more than its tokens, so the search
    ends where the rest cannot win.
    """
    order = tuple(auto(request, index, floor))
    reused = walk(index, index.start(), [request.keys[i] for i in order])
    return Arrangement(order, reused.documents, reused.tokens)


def request_of(documents: Sequence[tuple[str, int]]) -> OrderRequest:
    """Return a request of documents, (key, tokens) in retrieval rank. Raises ValueError for a key given twice."""
    keys = [key for key, _ in documents]
    _check_once(keys)
    return OrderRequest(keys, keys, first=0, last=len(keys), tokens=[tokens for _, tokens in documents])


def _check_once(keys: Sequence[str]) -> None:
    if len(set(keys)) != len(keys):
        twice = next(key for key, count in Counter(keys).items() if count > 1)
        raise ValueError(f"document {twice!r} is given twice: a request names each document once")


def _order_request(
    keys: Sequence[str], names: Sequence[str], kept: tuple[int, int], waiting: Sequence[Collection[str]]
) -> OrderRequest:
    keep_first, keep_last = kept
    _check_once(keys)
    if keep_first < 0 or keep_last < 0:
        raise ValueError(f"keep_first and keep_last count documents, 0 or more: got {keep_first} and {keep_last}")
    if len(names) != len(keys):
        raise ValueError(f"expected one name for each of {len(keys)} documents, got {len(names)}")
    first = min(keep_first, len(keys))
    sets: list[AbstractSet[str]] = [other if isinstance(other, AbstractSet) else frozenset(other) for other in waiting]
    return OrderRequest(keys, names, first=first, last=max(first, len(keys) - keep_last), waiting=sets)
