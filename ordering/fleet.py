"""A fleet of replicas, each with a prefix cache: which replica gets a request, and the order of the request's documents."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

from .policy import Arrangement, OrderRequest, arrange_better, request_of
from .tree import KnowledgeTree

MAX_SESSIONS = 100_000
ROUNDING = 1e-6  # tokens; more than the rounding errors of their sums
GONE = ""  # the home of a session whose replica is gone
DISPLACING = 3.0
"""The cost of a computed token, in tokens of prefill: its own prefill, and the KV that the replica evicts for it.

In a simulation of 2, 4, 8, 16 and 64 replicas, the mean TTFT with this value was 0.91, 0.82, 0.69, 0.58 and 0.53 times the
mean TTFT with a value of 1 (the bench has been removed: `46caa70`).
"""


@dataclass(frozen=True, slots=True)
class Placement:
    """A replica that a request may be sent to, and the order of the request's documents there.

    cost: the tokens of prefill that wait at the replica, plus `DISPLACING` times the tokens of those documents of the
        request that are not cached there.
    stays: whether the replica has the history of the request's session.
    """

    replica: str
    arrangement: Arrangement
    cost: float
    stays: bool = False

    @property
    def why(self) -> str:
        """The reason for this choice, in one line."""
        if self.stays:
            return "the session has its history here"
        reused = self.arrangement
        return f"{reused.reused_documents} documents ({reused.reused_tokens} tokens) cached, cost {self.cost:.0f}"


@dataclass(frozen=True, slots=True)
class _Weighed:
    """A placement, and the number of documents in its replica's tree."""

    placement: Placement
    cached: int

    def worth(self) -> tuple[bool, float, int, str]:
        """Return a sort key. The best placement has the least key."""
        return (not self.placement.stays, self.placement.cost, self.cached, self.placement.replica)


class Fleet:
    """Predicts the cache of each replica from requests and answers. A fleet does no I/O, and is thread-safe.

    Each replica has a knowledge tree of at most `max_nodes` documents. A session stays with the replica that served it last.
    """

    def __init__(self, max_nodes: int = 10_000, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_nodes, self._max_sessions = max_nodes, max_sessions
        self._trees: dict[str, KnowledgeTree] = {}
        self._homes: OrderedDict[str, str] = OrderedDict()  # the replica of each session, the least recently served first
        self._lock = Lock()

    def replicas(self, names: Collection[str]) -> None:
        """Forget all replicas except those with these names. Sessions of forgotten replicas start anew elsewhere."""
        with self._lock:
            self._trees = {name: tree for name, tree in self._trees.items() if name in names}
            self._homes.update({session: GONE for session, home in self._homes.items() if home not in names})

    def home(self, session: str) -> str | None:
        """Return the replica that has a session's history; `GONE` if it was forgotten; None if the session is unknown."""
        return self._homes.get(session)

    def rank(
        self,
        documents: Sequence[tuple[str, int]],
        names: Iterable[str],
        busy: Callable[[str], float] = lambda _: 0.0,
        session: str | None = None,
    ) -> list[Placement]:
        """Return a placement for each replica of `names`, the best one first.

        documents: (key, tokens) of each document, in retrieval rank, with the same tokens as in `served`.
        busy: returns the work that waits at a replica, in tokens of prefill. The work should also count running answers. If
            running answers did not count, requests whose documents are all cached would pile up at one replica.
        session: the name of the request's session; None: it has none.

        The replica with the session's history comes first. The other replicas follow in the order of their cost, least cost
        first. Of replicas with the same cost, the one with the fewest cached documents comes first, so that empty caches
        fill. If the numbers of cached documents are equal, too, the order of the names decides. Raises ValueError for a key
        given twice.
        """
        request, home = request_of(documents), self._home(session)
        ranked = sorted((self._weighed(request, name, home, busy(name)) for name in names), key=_Weighed.worth)
        return [one.placement for one in ranked]

    def choose(
        self,
        documents: Sequence[tuple[str, int]],
        names: Iterable[str],
        busy: Callable[[str], float] = lambda _: 0.0,
        session: str | None = None,
    ) -> Placement:
        """Return the first placement of `rank`, in much less time: only trees of replicas that may be best are searched.

        The arguments are as in `rank`. Raises ValueError as `rank` does, and if `names` is empty.
        """
        request, home = request_of(documents), self._home(session)
        work = {name: busy(name) for name in names}
        if not work:
            raise ValueError("no replica to choose from: `names` is empty")
        if home in work:
            return self._weighed(request, home, home, work[home]).placement
        most = {name: self._most_reused(request, name) for name in work}
        first, *others = sorted(work, key=lambda name: work[name] - DISPLACING * most[name])
        best, whole = self._weighed(request, first, home, work[first]), sum(request.tokens)
        for name in others:
            # An equal cost may win by the size of the tree, so the floor is a little lower.
            floor = whole - (best.placement.cost - work[name]) / DISPLACING - ROUNDING
            if most[name] >= floor:
                best = min(best, self._weighed(request, name, home, work[name], floor=max(floor, 0.0)), key=_Weighed.worth)
        return best.placement

    def _home(self, session: str | None) -> str | None:
        return None if session is None else self._homes.get(session)

    def _most_reused(self, request: OrderRequest, name: str) -> float:
        """Return an upper bound on the tokens that a replica reuses, from the documents that its prompts begin with."""
        begins = self._tree(name).start().children
        steps = map(begins.get, request.keys)
        return max((step.saved + step.ahead for step in steps if step), default=0.0)

    def _weighed(self, request: OrderRequest, name: str, home: str | None, work: float, floor: float = 0.0) -> _Weighed:
        tree = self._tree(name)
        arrangement = arrange_better(request, tree, floor)
        cost = work + DISPLACING * (sum(request.tokens) - arrangement.reused_tokens)
        return _Weighed(Placement(name, arrangement, cost, stays=name == home), len(tree))

    def served(self, replica: str, order: Iterable[tuple[str, int]], session: str | None = None) -> None:
        """Remember that a request was sent to a replica.

        order: (key, tokens) of each document, in the order of the prompt.
        session: as in `rank`.
        """
        self._tree(replica).insert(order)
        if session is not None:
            with self._lock:
                self._homes[session] = replica
                self._homes.move_to_end(session)
                if len(self._homes) > self._max_sessions:
                    self._homes.popitem(last=False)

    def report(self, replica: str, order: Iterable[tuple[str, int]], cached_tokens: int) -> None:
        """Correct the tree of a replica by the cached tokens that its answer reports. The arguments are as in `served`."""
        self._tree(replica).report(order, cached_tokens)

    def _tree(self, name: str) -> KnowledgeTree:
        tree = self._trees.get(name)
        if tree is None:
            with self._lock:
                tree = self._trees.setdefault(name, KnowledgeTree(self._max_nodes))
        return tree
