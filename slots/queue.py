"""The waiting requests, and which of them is next.

The request with the highest ratio of cached to uncached tokens comes first (RAGCache, section 5.2). So requests with the
same cached prefix follow each other (RAGBoost, section 5.2), and short requests do not wait for long ones. The ratio of a
request that was overtaken n times is multiplied by n + 1, so no request is overtaken without end (highest response ratio
next, Brinch Hansen 1971, with overtakes in place of time). `Groups` finds the requests with the same prefix in a queue of
any length.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from .groups import Groups
from .host import PromptTree
from .job import Job, Phase, Strategy
from .request import Layout, Request

WINDOW = 8
"""The default window of a queue. A larger window shortens the median wait and lengthens the longest one."""


class Rejected(Exception):
    """A request whose prompt cannot be laid out. It is out of the queue."""

    def __init__(self, job: Job, cause: Exception) -> None:
        super().__init__(f"request {job.request.id} cannot be laid out: {cause}")
        self.job, self.cause = job, cause


class Queue:
    """The waiting requests.

    window: how many later requests may overtake a waiting one, and how many may follow a request whose KV they share.
    strategy: returns how a request with a given whole prompt reuses KV.
    may_start: returns whether a request could get a slot now.

    A request that waits for a busy slot, or for running prompts, blocks no other request. Requests that are admitted in the
    meantime count as overtakes. The queue is blocked while its next request does not fit and no cell has been freed.
    """

    def __init__(
        self,
        tree: PromptTree,
        window: int,
        may_start: Callable[[Job], bool],
        strategy: Callable[[Request, Layout], Strategy],
    ) -> None:
        self._tree, self._may_start, self._strategy = tree, may_start, strategy
        self._waiting: deque[Job] = deque()
        self.groups = Groups(tree, window)
        self._rejected: list[tuple[Job, Exception]] = []
        self._is_blocked = False
        self.num_overtakes = 0  # ever

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._waiting)

    def add(self, job: Job) -> None:
        """Append a new request."""
        if all(job.request.priority > other.request.priority for other in self._waiting):
            self._is_blocked = False  # the new request comes next and has not been tried
        self._waiting.append(job)
        self.groups.add(job)

    def resume(self, job: Job, *, blocks: bool) -> None:
        """Put a paused request first.

        blocks: the queue waits until cells have been freed.
        """
        job.enter(Phase.WAITING)
        self._is_blocked = blocks
        self._waiting.appendleft(job)

    def discard(self, job: Job) -> None:
        """Remove a request, if it is in the queue."""
        if job in self._waiting:
            self._waiting.remove(job)
            self.groups.remove(job)

    def next(self) -> Job | None:
        """Return the next request to admit, which stays in the queue; None if none may start or the queue is blocked.

        Its prompt is laid out. A request whose prompt cannot be laid out is rejected: see `take_rejected`.
        """
        while not self._is_blocked and (first := self._first()) is not None:
            try:
                return self._choose(first)
            except Rejected as rejection:
                self.reject(rejection.job, rejection.cause)
        return None

    def block(self) -> None:
        """Try no request until cells have been freed: the next one does not fit."""
        self._is_blocked = True

    def unblock(self) -> None:
        """Note that cells have been freed."""
        self._is_blocked = False

    @property
    def suspect(self) -> Job | None:
        """The first request that has to run alone."""
        return next((job for job in self._waiting if job.num_failures and job.is_suspect), None)

    def restart(self, again: Sequence[Job] = (), paused: Sequence[Job] = ()) -> list[Job]:
        """Note that the device has lost all KV, and with it the copies that were not made yet.

        again: requests without generated tokens to put first in the queue.
        paused: requests with generated tokens to put before the requests of `again`.

        Return the waiting requests with generated tokens that cannot continue, because their layout is no longer valid. They
        are removed from the queue.
        """
        for job in self._waiting:
            job.strategy_state.forget_unmade()
        lost = [job for job in self._waiting if job.num_generated and not job.keeps_layout]
        for job in lost:
            self.discard(job)
            job.enter(Phase.DONE)
        for job in reversed(again):
            job.enter(Phase.WAITING)
            self._waiting.appendleft(job)
            self.groups.add(job, first=True)
        for job in reversed(paused):
            self.resume(job, blocks=False)
        self.unblock()
        return lost

    def reject(self, job: Job, cause: Exception) -> None:
        """Note a request that cannot run and is out of the queue."""
        job.enter(Phase.DONE)
        self._rejected.append((job, cause))

    def take_rejected(self) -> list[tuple[Job, Exception]]:
        """Return the requests that could not be admitted since the last call, and why; they are finished."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def _first(self) -> Job | None:
        """Return the first request of the highest priority that may start, or instead the one that has to run alone."""
        first: Job | None = None
        for job in self._waiting:
            if (first is None or job.request.priority > first.request.priority) and self._may_start(job):
                first = job
        return None if first is None else self.suspect or first

    def _choose(self, first: Job) -> Job:
        """Return the request with the best response ratio, its prompt laid out. Of equal requests, the first is returned.

        Only a higher priority overtakes a request that has been paused, that has read a document for its prompt, or that was
        overtaken `window` times. Raises Rejected for a request whose prompt fails.
        """
        if first.has_started and first.keeps_layout:
            return first
        chosen = first if first.has_started or first.is_suspect else self.groups.choose(first, self._may_start)
        chosen.lay_out(self._lay_out(chosen))
        return chosen

    def take(self, job: Job) -> None:
        """Remove a request that is admitted; all requests before it are overtaken."""
        passed = list(itertools.takewhile(lambda other: other is not job, self._waiting))
        self.num_overtakes += len(passed)
        self.groups.take(job, (other for other in passed if other.request.priority == job.request.priority))
        self._waiting.remove(job)

    def _lay_out(self, job: Job) -> Layout:
        try:
            whole = job.request.prompt.arrange(self._tree, job.request.index_scope, self.groups.sharing(job))
            job.strategy = self._strategy(job.request, whole)
            return job.strategy.stage(job, whole)
        except Exception as error:
            self.discard(job)
            raise Rejected(job, error) from error
