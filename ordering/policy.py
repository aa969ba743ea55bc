"""Policies that order a request's documents, so that the request reuses more of a prefix cache.

A policy takes a request and an index of cached documents, and returns the ranks of the movable documents in their new order.
A policy does not change the index.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import permutations
from math import inf
from typing import Generic, Literal, Protocol, TypeVar, get_args, runtime_checkable

# ---- The questions that an ordering policy may ask a cache. -------------------------------------------------------------
#
# Two classes answer them: slotcache's own prefix tree, exactly, and `KnowledgeTree`, a prediction for other engines.

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Step(Generic[P]):
    """A step over one cached document: where it ends in the cache, and how many tokens its reuse saves.

    position: the end of the document in the cache.
    tokens: how many tokens can be reused.
    saved: `tokens` minus the cost of restoring them, in tokens of prefill; 0 or more. A document on the device saves all of
        its tokens. A document on a slower tier saves fewer tokens than it has.
    ahead: an upper bound on the tokens that any path after this document saves, including `Index.beyond`. This bound lets
        the search skip branches that cannot lead to the best order.
    """

    position: P
    tokens: int
    saved: float
    ahead: float = inf


class Index(Protocol[P]):
    """The cached documents, and the documents that follow each of them. A position, of type `P`, is a place in the cache.

    No method changes the cache.
    """

    def start(self) -> P | None:
        """Return the position where a request's documents begin; None if the text before them is not cached."""
        ...

    def after(self, position: P) -> Collection[str]:
        """Return the keys of the documents that are cached directly after `position`.

        This call must take constant time, and so must `in` on its result.
        """
        ...

    def follow(self, position: P, key: str) -> Step[P] | None:
        """Return the step over document `key`; None if the document is not cached directly after `position`."""
        ...

    def beyond(self, position: P) -> float:
        """Return the tokens that a request saves after its last document, if that document ends at `position`.

        For example, the documents of an earlier turn are followed by the rest of the conversation. A later request with the
        same order of documents reuses this text, too. The result is 0.0 if no cached text follows.
        """
        ...


@runtime_checkable
class RecencyIndex(Protocol):
    """An index that also knows the last use of a document. Only the `recency` policy needs such an index."""

    def recency(self, key: str) -> float | None:
        """Return a number that is greater the later the document was used; None for an unknown document."""
        ...


ORACLE_LIMIT = 8


@dataclass(frozen=True, slots=True)
class OrderRequest:
    """The documents of one request, in retrieval rank.

    keys: the keys of the documents.
    names: the sort keys of the documents for the `sorted` policy.
    first, last: the documents before rank `first`, and those from rank `last` on, keep their place. Ranks count from 0.
    waiting: for each waiting request that may reuse this order, the keys of its documents.
    tokens: for each document, the most tokens that it can save; empty: unknown.
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
    """The cached prefix of a sequence of documents.

    documents, tokens: the length of the cached prefix, in documents and in tokens.
    saved: how many tokens of prefill the reuse of the cached prefix saves.
    """

    documents: int
    tokens: int
    saved: float
    end: P | None  # the end of the sequence; None if one of its documents is not cached


def walk(index: Index[P], position: P | None, keys: Sequence[str]) -> Walk[P]:
    """Follow the documents `keys` from `position`, up to the first document that is not cached."""
    documents, tokens, saved = 0, 0, 0.0
    for key in keys:
        step = None if position is None else index.follow(position, key)
        if step is None:
            return Walk(documents, tokens, saved, None)
        position, documents, tokens, saved = step.position, documents + 1, tokens + step.tokens, saved + step.saved
    return Walk(documents, tokens, saved, position)


def walk_to_end(index: Index[P], position: P | None, keys: Sequence[str]) -> float:
    """Return how many tokens a request's last documents, `keys`, save.

    If all of them are cached, tokens that are saved after the last document are included (`Index.beyond`).
    """
    walked = walk(index, position, keys)
    return walked.saved if walked.end is None else walked.saved + index.beyond(walked.end)


def cached_ranks(index: Index[P], position: P, ranks: Mapping[str, int]) -> list[int]:
    """Return the ranks of the documents that are cached directly after `position`, ascending.

    The time is proportional to the length of `ranks` or the number of documents cached after `position`, whichever is less.

    ranks: the rank of each document that may come next, by key, ascending.
    """
    after = index.after(position)
    if 4 * len(after) < len(ranks):  # else the sort costs more than it saves
        return sorted(ranks[key] for key in tuple(after) if key in ranks)
    return [rank for key, rank in ranks.items() if key in after]


def auto(request: OrderRequest, index: Index[P], floor: float = 0.0) -> Sequence[int]:
    """Return the order that saves the most tokens.

    If several orders save the same, the lexicographically smallest one is returned, which is nearest to retrieval rank.

    floor: a number of tokens. Orders that save no more tokens than `floor` are ignored.

    The result is exact: a depth-first search visits every cached path that this request's documents can reach, and skips
    only branches that, by their bound (`Step.ahead`), cannot save more. Documents that are not cached follow the cached
    ones: first the documents that waiting requests share, then all others in retrieval rank.
    """
    keys, movable = request.keys, request.movable
    head = walk(index, index.start(), keys[: request.first])
    if head.end is None:
        return _shared_first(request, ())
    ranks = {keys[i]: i for i in movable}
    path: list[int] = []  # the ranks placed, in order
    placed: set[int] = set()
    best: list[int] = []
    same = 0  # length of the common prefix of `best` and `path`
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
    """Return `placed`, then the documents that the most waiting requests share, then all others in retrieval rank.

    A waiting request counts only as long as it has all documents placed so far, because it can only reuse a common prefix.
    In this way, a request that finds nothing cached still computes a prefix for waiting requests (RAGBoost, 5.1). For a
    single waiting request, the order is the best one; for several requests, it is found greedily. The time is proportional
    to the number of documents of all waiting requests: the number of requests that share a document only falls.
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
    """At each position, take the document of best rank that is cached there, if any is (CacheWeaver, Algorithm 1)."""
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
    """Return the documents in retrieval rank, whatever is cached."""
    return request.movable


def by_name(request: OrderRequest, index: object) -> Sequence[int]:
    """Sort by name, so that equal sets have equal orders, whatever is cached (CacheWeaver's APC+Sorted)."""
    return sorted(request.movable, key=request.names.__getitem__)


def by_recency(request: OrderRequest, index: object) -> Sequence[int]:
    """Put known documents first, starting with the most recently used one. Unknown documents follow in rank.

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
Order = Literal["auto", "retrieval", "sorted", "greedy"]
"""The policies that a request may name. The other policies are for benchmarks, and some take too much time."""

ORDERS: tuple[Order, ...] = get_args(Order)

BestPlace = Literal["free", "first", "last"]
"""The place of the document of rank 1: any place (`free`), before all other documents (`first`), or after them (`last`)."""

BEST_PLACES: tuple[BestPlace, ...] = get_args(BestPlace)


# ---- The order of a request's documents in its prompt, and how much of it is cached. ------------------------------------


@dataclass(frozen=True, slots=True)
class Arrangement:
    """An order of documents, and how much of a cache it reuses.

    order: the retrieval ranks, from 0, in the order of the prompt: `order[0]` is the rank of the prompt's first document.
    reused_documents: how many leading documents are cached in this order.
    reused_tokens: how many tokens of the reused documents are cached. Text before and after the documents is not counted.
    """

    order: tuple[int, ...]
    reused_documents: int
    reused_tokens: int

    @property
    def is_rank(self) -> bool:
        """Whether all documents are in retrieval rank."""
        return self.order == tuple(range(len(self.order)))


def arrange(
    keys: Sequence[str],
    index: Index[P],
    policy: str = "auto",
    keep_first: int = 0,
    keep_last: int = 0,
    names: Sequence[str] | None = None,
    waiting: Sequence[Collection[str]] = (),
    best: str = "free",
    pays: Callable[[float, float], bool] | None = None,
) -> Arrangement:
    """Return the order of documents that reuses the most cached tokens (RAGBoost, 5.1; CacheWeaver, 3.3).

    keys: the keys of the documents, in retrieval rank.
    index: the cached documents.
    policy: one of `POLICIES`. Under `auto` and `greedy`, documents that are not reused stay in retrieval rank.
    keep_first, keep_last: how many documents at the start and at the end keep their place.
    names: the sort keys for the `sorted` policy; None: `keys`.
    waiting: for each waiting request, the keys of its documents. Of the documents that are not cached, `auto` puts those
        that waiting requests share before all others.
    best: the place of the document of rank 1, one of `BEST_PLACES`. `last` is ignored if `keep_first` or `keep_last` is set.
    pays: decides between the best order with the document of rank 1 in a fixed place, and the best of all orders. `pays`
        takes the number of tokens that each of the two orders saves, and returns whether to use the second one. The fixed
        place is the last one if `best` is `last`, otherwise the first one. If `pays` is None, `best` alone decides.

    If `pays` is given, there may be two searches instead of one.

    Raises ValueError for an unknown policy or place, a key given twice, a negative `keep_first` or `keep_last`, `names` and
    `keys` of different lengths, and more documents than `oracle` can try.
    """
    request = _order_request(keys, keys if names is None else names, (keep_first, keep_last), waiting)
    for what, given, known in (("ordering policy", policy, POLICIES), ("place of the best document", best, BEST_PLACES)):
        if given not in known:
            raise ValueError(f"unknown {what} {given!r}: expected one of {', '.join(known)}")
    if best == "last" and (keep_first or keep_last):
        best, pays = "free", None
    if best == "free" and pays is None:
        return _arranged(request, index, policy)
    fixed = _with_fixed(request, index, policy, best)
    if pays is None:
        return fixed
    free = _arranged(request, index, policy)
    return free if pays(_saved(request, index, fixed), _saved(request, index, free)) else fixed


def _arranged(request: OrderRequest, index: Index[P], policy: str) -> Arrangement:
    middle = POLICIES[policy](request, index)
    order = (*range(request.first), *middle, *range(request.last, len(request.keys)))
    reused = walk(index, index.start(), [request.keys[i] for i in order])
    return Arrangement(order, reused.documents, reused.tokens)


def _with_fixed(request: OrderRequest, index: Index[P], policy: str, best: str) -> Arrangement:
    """Return the best order with the document of rank 1 in a fixed place.

    The fixed place is after all other documents if `best` is `last`, else before them.
    """
    size = len(request.keys)
    if best != "last":
        first = min(max(request.first, 1), size)
        return _arranged(replace(request, first=first, last=max(first, request.last)), index, policy)
    ranks = [*range(size)[1:], *range(size)[:1]]
    keys, names = [request.keys[i] for i in ranks], [request.names[i] for i in ranks]
    found = _arranged(replace(request, keys=keys, names=names, last=max(size - 1, 0)), index, policy)
    return replace(found, order=tuple(ranks[i] for i in found.order))


def _saved(request: OrderRequest, index: Index[P], arrangement: Arrangement) -> float:
    return walk_to_end(index, index.start(), [request.keys[i] for i in arrangement.order])


def arrange_better(request: OrderRequest, index: Index[P], floor: float) -> Arrangement:
    """Return the order that reuses the most cached tokens, or retrieval rank if no order reuses more than `floor` tokens.

    If the floor is high or much is cached, this takes much less time than `arrange`. No document saves more than its tokens,
    so the search stops where the remaining documents cannot save enough.
    """
    order = tuple(auto(request, index, floor))
    reused = walk(index, index.start(), [request.keys[i] for i in order])
    return Arrangement(order, reused.documents, reused.tokens)


def request_of(documents: Sequence[tuple[str, int]]) -> OrderRequest:
    """Return a request for documents, given as (key, tokens) in retrieval rank. Raises ValueError for a key given twice."""
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


# ---- Retrieval and prefill at the same time, for a search that finds its documents in stages. ---------------------------
#
# RAGCache, section 5.3 (dynamic speculative pipelining): the best documents of an early stage are often the final ones.
# Their prefill during the search costs other requests nothing while the machine is idle.

D = TypeVar("D")
Post = Callable[[str, dict[str, object]], Awaitable[object]]
"""Sends a JSON body to a path of the server. With httpx: `lambda path, body: client.post(path, json=body)`."""


async def read_along(post: Post, chat: Mapping[str, object], stages: AsyncIterable[list[D]]) -> list[D]:
    """Let the server prefill a chat while the search for its documents runs. Return the documents of the last stage.

    The documents of a stage are sent to the server, unless they are the same as those of the stage before. The search does
    not wait for the server: while one stage is being sent, only the newest later stage is kept, and none is sent once the
    search has ended. Errors of `post` are ignored, since without the prefill the chat only takes longer.

    post: sends a body to the server.
    chat: the body of the later chat completion, without documents.
    stages: yields the best documents so far after each stage of the search, in retrieval rank. The documents of the last
        stage are the result.
    """
    turn: dict[str, object] = {**chat, "id": secrets.token_hex(8), "stream": False}
    newest: dict[str, object] | None = turn
    documents: list[D] = []

    async def send() -> None:
        nonlocal newest
        while (body := newest) is not None:
            newest = None
            with contextlib.suppress(Exception):
                await post("/v1/speculate", body)

    sending = asyncio.create_task(send())
    await asyncio.sleep(0)  # the turn is opened first
    try:
        async for found in stages:
            if found != documents:
                documents, newest = found, turn | {"documents": found}
                if sending.done():
                    sending = asyncio.create_task(send())
    finally:
        sending.cancel()
        await asyncio.wait([sending])
    return documents
