"""The waiting requests, and which of them is next.

The request with the highest ratio of cached to uncached tokens comes first (RAGCache, section 5.2). So requests with the
same cached prefix follow each other (RAGBoost, section 5.2), and short requests do not wait for long ones. If a request was
overtaken n times, its ratio is multiplied by n + 1, so that it is not overtaken without end. (This is highest response ratio
next, Brinch Hansen 1971, with overtakes instead of waiting time.) `Groups` finds the requests with the same prefix in a
queue of any length.
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
    """The prompt of a request cannot be laid out. The request has been removed from the queue."""

    def __init__(self, job: Job, cause: Exception) -> None:
        super().__init__(f"request {job.request.id} cannot be laid out: {cause}")
        self.job, self.cause = job, cause


class Queue:
    """The waiting requests.

    window: how many later requests may overtake a waiting request, and how many may follow a request whose KV they share.
    strategy: takes a request and the layout of its whole prompt, and returns how the request reuses KV.
    may_start: returns whether a request could start now if it fits.

    A request that waits for a certain slot, or for running prompts, does not block later requests, which overtake it
    if they are admitted first. If the next request does not fit on the device, the queue is blocked until cells are freed.
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
        """Put a paused request first in the queue.

        blocks: whether the queue is blocked until cells have been freed.
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
        """Return the next request to admit, with its prompt laid out. The request stays in the queue.

        Return None if no request may start, or if the queue is blocked. A request whose prompt cannot be laid out is
        rejected: see `take_rejected`.
        """
        while not self._is_blocked and (first := self._first()) is not None:
            try:
                return self._choose(first)
            except Rejected as rejection:
                self.reject(rejection.job, rejection.cause)
        return None

    def block(self) -> None:
        """Block the queue until cells have been freed, because the next request does not fit."""
        self._is_blocked = True

    def unblock(self) -> None:
        """Unblock the queue, since cells have been freed and the next request may fit."""
        self._is_blocked = False

    @property
    def suspect(self) -> Job | None:
        """The first waiting request that has to run alone, if there is one."""
        return next((job for job in self._waiting if job.num_failures and job.is_suspect), None)

    def restart(self, again: Sequence[Job] = (), paused: Sequence[Job] = ()) -> list[Job]:
        """Put requests back after the device has lost all KV, and with it the planned copies that were not made yet.

        again: requests without generated tokens. These requests are put at the head of the queue, after the requests of
            `paused`.
        paused: requests with generated tokens. These requests are put at the head of the queue, before the requests of
            `again`.

        Some waiting requests have generated tokens, but cannot continue because their layout is no longer valid. Remove them
        from the queue and return them.
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
        """End a request that cannot run. The request has left the queue already."""
        job.enter(Phase.DONE)
        self._rejected.append((job, cause))

    def take_rejected(self) -> list[tuple[Job, Exception]]:
        """Return the requests that were rejected since the last call, each with the cause.

        The returned requests are finished.
        """
        rejected, self._rejected = self._rejected, []
        return rejected

    def _first(self) -> Job | None:
        """Return the first request of the highest priority that may start; None if no request may start.

        If a request may start, but some waiting request has to run alone, return the request that has to run alone.
        """
        first: Job | None = None
        for job in self._waiting:
            if (first is None or job.request.priority > first.request.priority) and self._may_start(job):
                first = job
        return None if first is None else self.suspect or first

    def _choose(self, first: Job) -> Job:
        """Return the request with the best response ratio, with its prompt laid out. Raises Rejected.

        first: the first request that may start. The result is `first` if no other request has a better ratio. The result is
            also `first` if that request has been paused, has read a document for its prompt, or has to run alone. Once
            `first` has been overtaken `window` times, only a request that follows a leader may be returned instead (see
            `Groups`).
        """
        if first.has_started and first.keeps_layout:
            return first
        chosen = first if first.has_started or first.is_suspect else self.groups.choose(first, self._may_start)
        chosen.lay_out(self._lay_out(chosen))
        return chosen

    def take(self, job: Job) -> None:
        """Remove a request that is admitted, and count the requests before it as overtaken (see `Groups.take`)."""
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
