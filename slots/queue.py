"""The waiting requests, and which of them is next.

They are ordered by their cached tokens over their uncached ones (RAGCache, section 5.2): requests of one prefix follow each
other where much of it is cached (RAGBoost, section 5.2), and short ones do not wait for long ones. A request that has been
overtaken n times counts n + 1 times as much (highest response ratio next, Brinch Hansen 1971, with overtakes for time), so
none is overtaken without end.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .host import PromptTree
from .request import Job, Layout, Request, Strategy

LOOK_AHEAD = 16  # requests at the head of the queue that are compared, so that an admission takes bounded time


class Rejected(Exception):
    """A request whose prompt cannot be laid out. It has left the queue."""

    def __init__(self, job: Job, cause: Exception) -> None:
        super().__init__(f"request {job.request.id} cannot be laid out: {cause}")
        self.job, self.cause = job, cause


class Queue:
    """Waiting requests. window: how many later requests may be admitted before a waiting one.

    strategy: chooses the way in which a request reuses KV, by its whole prompt.
    may_start: whether a request could have a slot now. One that waits for a busy slot holds up no other; when the slot is
    idle, it counts as overtaken by all that went before it. Blocked: the next request did not fit, and no cell has been
    freed since.
    """

    def __init__(
        self,
        tree: PromptTree,
        window: int,
        may_start: Callable[[Job], bool],
        strategy: Callable[[Request, Layout], Strategy],
    ) -> None:
        self._tree, self._may_start, self._strategy = tree, may_start, strategy
        self._window = window
        self._waiting: deque[Job] = deque()
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
            self._is_blocked = False  # it is the next one now, and was not tried yet
        self._waiting.append(job)

    def resume(self, job: Job, *, blocks: bool) -> None:
        """Put a paused request first. blocks: it waits until cells have been freed."""
        self._is_blocked = blocks
        self._waiting.appendleft(job)

    def discard(self, job: Job) -> None:
        """Remove a request, if it is in the queue."""
        if job in self._waiting:
            self._waiting.remove(job)

    def next(self) -> Job | None:
        """Return the next request to admit, which stays in the queue; None if none may start or the queue is blocked.

        Its prompt is laid out. A request whose prompt fails leaves the queue: see `take_rejected`.
        """
        while not self._is_blocked:
            ready = [job for job in self._waiting if self._may_start(job)]
            if not ready:
                break
            try:
                return self._choose([suspect] if (suspect := self.suspect) is not None else ready)
            except Rejected as rejection:
                self.reject(rejection.job, rejection.cause)
        return None

    def block(self) -> None:
        """The next request does not fit: try none until cells have been freed."""
        self._is_blocked = True

    def unblock(self) -> None:
        """Cells have been freed."""
        self._is_blocked = False

    @property
    def suspect(self) -> Job | None:
        """The first request that has to run alone."""
        return next((job for job in self._waiting if job.is_suspect), None)

    def restart(self, again: Sequence[Job] = ()) -> None:
        """The device has lost all KV, and with it the copies that were not made yet. again: requests to put first."""
        for job in self._waiting:
            job.readings.forget_unmade()
            job.taken = None  # its run may have gone without a trace: a tree that is cleared leaves its nodes as they are
        self._waiting.extendleft(reversed(again))
        self.unblock()

    def reject(self, job: Job, cause: Exception) -> None:
        """Note a request that has left the queue and cannot run."""
        self._rejected.append((job, cause))

    def take_rejected(self) -> list[tuple[Job, Exception]]:
        """Return the requests that could not be admitted since the last call, and why; they are finished."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def _choose(self, ready: list[Job]) -> Job:
        """Return the request with the best response ratio, its prompt laid out. Of equals the first.

        A request that has been paused, has read a document for its prompt, or was overtaken `window` times, is overtaken no
        more, but by a higher priority. Each candidate takes about 100 us. Raises Rejected for a request whose prompt fails.
        """
        highest = max(job.request.priority for job in ready)
        equals = (job for job in ready if job.request.priority == highest)
        candidates = list(itertools.islice(equals, LOOK_AHEAD))
        if candidates[0].has_begun:
            if not candidates[0].keeps_layout:
                candidates[0].lay_out(self._lay_out(candidates[0], candidates))
            return candidates[0]
        last = next((at for at, job in enumerate(candidates) if job.reuse.num_overtaken >= self._window), LOOK_AHEAD)
        layouts = {job: self._lay_out(job, candidates) for job in candidates[: last + 1]}
        chosen = max(layouts, key=lambda job: self._response_ratio(job, layouts[job].tokens))
        chosen.lay_out(layouts[chosen])
        return chosen

    def take(self, job: Job) -> None:
        """Remove a request that is admitted; all before it are overtaken."""
        for passed in itertools.takewhile(lambda other: other is not job, self._waiting):
            passed.reuse.num_overtaken += passed.request.priority == job.request.priority
            self.num_overtakes += 1
        self._waiting.remove(job)

    def _lay_out(self, job: Job, waiting: list[Job]) -> Layout:
        prompt, scope = job.request.prompt, job.request.index_scope
        rivals = [other.request.prompt for other in waiting if other is not job and other.request.index_scope == scope]
        try:
            whole = prompt.arrange(self._tree, scope, rivals)
            job.strategy = self._strategy(job.request, whole)
            return job.strategy.stage(job, whole)
        except Exception as error:
            self._waiting.remove(job)
            raise Rejected(job, error) from error

    def _response_ratio(self, job: Job, tokens: np.ndarray) -> float:
        """Return known tokens (cached, or about to be computed by a running request) over unknown ones, times the weight
        of its overtakes.

        A known token is added, so that of two requests with nothing cached the shorter comes first.
        """
        known = self._tree.reusable(job.request.index_scope, tokens)
        return (1 + job.reuse.num_overtaken) * (1 + known) / max(len(tokens) - known, 1)
