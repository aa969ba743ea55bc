"""The generations that the engine has accepted: each ends once, with a final event unless its client has gone."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from time import perf_counter

from ...models.sampling import Sampler
from ...slots.request import Request
from ...slots.scheduler import Scheduler
from ..errors import RequestError
from .generation import Failure, Generation
from .outbox import Outbox

logger = logging.getLogger("slotcache.engine")


class Accepted:
    """Lives in the engine's thread. samplers: the runner's, by request id; they are made by callers and closed here."""

    def __init__(self, scheduler: Scheduler, samplers: dict[int, Sampler], outbox: Outbox) -> None:
        self._scheduler, self._samplers, self._outbox = scheduler, samplers, outbox
        self._open: dict[int, Generation] = {}  # by request id

    def enter(self, generation: Generation, sampler: Sampler) -> None:
        """Queue a generation."""
        self._open[generation.request.id] = generation
        self._samplers[generation.request.id] = sampler
        self._scheduler.submit(generation.request)

    def note_admissions(self) -> None:
        """Begin to count for the requests that the last plan admitted: the newest ones that run."""
        now = perf_counter()
        for request in reversed(self._scheduler.running):
            if request.owner.admitted:
                return
            request.owner.admitted = now
            self._samplers[request.id].prime(request.tokens[: request.num_prompt])

    def end(self, generation: Generation) -> None:
        """Take a generation out of the engine, once."""
        if generation.done:
            return
        generation.done = True
        self._open.pop(generation.request.id, None)
        self._scheduler.finish(generation.request)
        if sampler := self._samplers.pop(generation.request.id, None):
            sampler.close()

    def fail(self, requests: Iterable[Request], error: RequestError) -> None:
        """End these with a Failure."""
        for request in requests:
            self.end(request.owner)
            self._outbox.put(request.owner, Failure(error))

    def fail_alone(self, request: Request, error: Exception) -> None:
        """Fail one request for what it is; the others go on."""
        if not isinstance(error, RequestError):
            logger.error("request %d failed", request.id, exc_info=error)
            error = RequestError("the server failed on this request", status=500)
        self.fail([request], error)

    def fail_all(self, error: RequestError) -> None:
        """End every open generation with a Failure."""
        self.fail([generation.request for generation in self._open.values()], error)

    def give_up(self, error: RequestError) -> None:
        """Send every open generation its Failure, and touch nothing else: the scheduler may be in any state."""
        for generation in self._open.values():
            generation.done = True
            self._outbox.put(generation, Failure(error))
        self._open.clear()
