"""Who waits, and who of them is next.

Requests are ordered by what is cached of them over what is left to compute (RAGCache, section 5.2): those of one prefix
follow each other where much of it is cached (RAGBoost, section 5.2), and short ones do not wait for long ones. Whoever has
been overtaken n times counts n + 1 times as much (highest response ratio next, Brinch Hansen 1971, with overtakes for time),
and nobody is overtaken without end.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import numpy as np

from .request import Layout, Request
from .tree import PrefixTree

LOOK_AHEAD = 16  # requests at the head of the queue that are compared, so that an admission takes bounded time


class Rejected(Exception):
    """A request whose prompt cannot be laid out: it waits no more."""

    def __init__(self, request: Request, cause: Exception) -> None:
        super().__init__(f"request {request.id} cannot be laid out: {cause}")
        self.request, self.cause = request, cause


class Queue:
    """Waiting requests. window: how many later requests may be admitted before one that waits."""

    def __init__(self, tree: PrefixTree, window: int = 32) -> None:
        self._tree = tree
        self._window = window
        self._waiting: deque[Request] = deque()
        self.num_overtakes = 0  # ever

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def add(self, request: Request) -> None:
        """A new request, behind all others."""
        self._waiting.append(request)

    def resume(self, request: Request) -> None:
        """A request that has been paused, in front of all others."""
        self._waiting.appendleft(request)

    def discard(self, request: Request) -> None:
        """A request that waits no more, if it did."""
        if request in self._waiting:
            self._waiting.remove(request)

    def next(self) -> Request:
        """Who is admitted next, with its prompt laid out; it stays in the queue. Of equals the first.

        A request that has been paused, or overtaken `window` times, is overtaken no more, but by a higher priority. Each
        candidate takes about 100 us. Raises Rejected for a request whose prompt fails.
        """
        highest = max(request.priority for request in self._waiting)
        equals = (request for request in self._waiting if request.priority == highest)
        candidates = list(itertools.islice(equals, LOOK_AHEAD))
        if candidates[0].num_preempted:
            return candidates[0]
        last = next((at for at, request in enumerate(candidates) if request.num_overtaken >= self._window), LOOK_AHEAD)
        layouts = {request: self._arranged(request, candidates) for request in candidates[: last + 1]}
        chosen = max(layouts, key=lambda request: self._response_ratio(request, layouts[request].tokens))
        chosen.lay_out(layouts[chosen])
        return chosen

    def take(self, request: Request) -> None:
        """Let a request leave, past all that stand before it."""
        for passed in itertools.takewhile(lambda other: other is not request, self._waiting):
            passed.num_overtaken += passed.priority == request.priority
            self.num_overtakes += 1
        self._waiting.remove(request)

    def _arranged(self, request: Request, waiting: list[Request]) -> Layout:
        others = [other.prompt for other in waiting if other is not request and other.scope == request.scope]
        try:
            return request.prompt.arrange(self._tree, request.scope, others)
        except Exception as error:
            self._waiting.remove(request)
            raise Rejected(request, error) from error

    def _response_ratio(self, request: Request, tokens: np.ndarray) -> float:
        """Tokens that are cached, or that somebody is computing, over those that are left to compute, and that once
        more for each time it was overtaken.

        One more than are cached, so that of two with nothing cached the shorter comes first.
        """
        known = self._tree.match(request.scope, tokens).length
        return (1 + request.num_overtaken) * (1 + known) / max(len(tokens) - known, 1)
