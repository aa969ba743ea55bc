"""The open generations of the engine: each ends once, with a final event unless its client has gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from time import perf_counter

from ...models.sampling import Chances, Sampler
from ...slots.request import Request
from ...slots.scheduler import Scheduler
from ..errors import RequestError
from .events import End, Failure
from .generation import Generation
from .outbox import Outbox

logger = logging.getLogger("slotcache.engine")


class Roster:
    """Open generations and their samplers, by request id. It belongs to the engine's thread.

    is_end: whether a token ends an answer. samplers: made by callers, closed here. is_closed: new generations only fail.
    """

    def __init__(self, scheduler: Scheduler, outbox: Outbox, is_end: Callable[[int], bool]) -> None:
        self.samplers: dict[int, Sampler] = {}
        self.is_closed = False
        self._why = ""  # it is closed
        self._scheduler, self._outbox, self._is_end = scheduler, outbox, is_end
        self._open: dict[int, Generation] = {}

    def enter(self, generation: Generation, sampler: Sampler) -> None:
        """Queue a generation. Once the roster is closed it only gets its Failure."""
        if self.is_closed:
            sampler.close()
            self._outbox.put(generation, Failure(RequestError(self._why, status=503)))
            return
        self._open[generation.request.id] = generation
        self.samplers[generation.request.id] = sampler
        self._scheduler.submit(generation.request)

    def admit(self, ids: Iterable[int]) -> None:
        """Start the clock of requests that left the queue, unless they were preempted and only come back."""
        now = perf_counter()
        for id in ids:
            generation = self._open[id]
            if not generation.admitted:
                generation.admitted = now
                self._report_progress(generation, now)
            if not generation.is_primed and not generation.request.is_reading:
                generation.is_primed = True
                self.samplers[id].prime(generation.request.ids(0, generation.request.num_prompt))

    def push(self, request: Request, token: int) -> None:
        """Give a generation its next token, which may end it, and those that must follow. An error ends only this one."""
        generation, sampler = self._open[request.id], self.samplers[request.id]
        if not generation.first_token:
            self._report_progress(generation, perf_counter())  # the whole prompt
        try:
            if sampler.error:
                raise RequestError(sampler.error, code="invalid_grammar")
            self._push(generation, token, sampler.take_chances())
            for further, chances in sampler.take_further():
                if generation.done:
                    break
                request.accept(further)
                self._scheduler.counters.count_accepted()
                self._push(generation, further, chances)
            for forced in sampler.take_forced():
                if generation.done:
                    break
                request.append(forced)
                self._scheduler.counters.count_forced()
                self._push(generation, forced)
        except Exception as error:
            self._fail_alone(generation, error)

    def _push(self, generation: Generation, token: int, chances: Chances | None = None) -> None:
        event = generation.push(token, self._is_end(token), chances)
        if isinstance(event, End):
            self.end(generation)
        if event is not None:
            self._outbox.put(generation, event)

    def report_progress(self) -> None:
        """Send the progress of unfinished prompts to the clients that want it."""
        now = perf_counter()
        for request in self._scheduler.running:
            if request.num_tokens == request.num_prompt:
                self._report_progress(self._open[request.id], now)

    def _report_progress(self, generation: Generation, now: float) -> None:
        if generation.wants_progress and not generation.request.is_reading:
            self._outbox.put(generation, generation.progress(now))

    def end(self, generation: Generation) -> None:
        """Take a generation out of the engine, once."""
        if generation.done:
            return
        generation.done = True
        self._open.pop(generation.request.id, None)
        if sampler := self.samplers.pop(generation.request.id, None):
            sampler.close()
        self._scheduler.finish(generation.request)

    def fail(self, requests: Iterable[Request], error: RequestError) -> None:
        """End the open generations among these requests with a Failure."""
        for generation in [self._open[request.id] for request in requests if request.id in self._open]:
            self._fail(generation, error)

    def fail_rejected(self) -> None:
        """Fail the requests that the last plan could not admit."""
        for request, error in self._scheduler.take_rejected():
            if request.id in self._open:
                self._fail_alone(self._open[request.id], error)

    def close(self, why: str) -> None:
        """End every open generation with a Failure."""
        self.is_closed, self._why = True, why
        for generation in list(self._open.values()):
            self._fail(generation, RequestError(why, status=503))

    def give_up(self, why: str) -> None:
        """Send every open generation its Failure, and touch nothing else: the scheduler may be in any state."""
        self.is_closed, self._why = True, why
        error = RequestError(why, status=500)
        for generation in self._open.values():
            generation.done = True
            self._outbox.put(generation, Failure(error))
        self._open.clear()

    def _fail(self, generation: Generation, error: RequestError) -> None:
        self.end(generation)
        self._outbox.put(generation, Failure(error))

    def _fail_alone(self, generation: Generation, error: Exception) -> None:
        """Fail one generation for its own error."""
        if not isinstance(error, RequestError):
            logger.error("request %d failed", generation.request.id, exc_info=error)
            error = RequestError("the server failed on this request", status=500)
        self._fail(generation, error)
