"""The engine's open generations, and the prompts that it computes in idle time.

Only the engine's thread may use this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from time import perf_counter

from ...models.sampling import Logprobs, Sampler
from ...slots.job import Job
from ...slots.plan import Span
from ...slots.scheduler import Scheduler
from ..http.api_errors import RequestError
from .generation import Delta, End, Failure, Generation, Outbox

logger = logging.getLogger("slotcache.engine")

# ---- Prompts that are computed in idle time, ahead of their requests. ---------------------------------------------------

MAX_GENERATIONS = 64
GAVE_WAY = "gave_way"  # the error code of a generation that ended in favour of a request


class Background:
    """Generations that compute prompts ahead of their requests, at most one generation for each key.

    end: ends a generation in the engine; the tokens computed so far stay cached. max_generations: the largest number of
    unfinished generations.
    """

    def __init__(self, scheduler: Scheduler, end: Callable[[Generation], None]) -> None:
        self._scheduler, self._end = scheduler, end
        self._generations: dict[Hashable, Generation] = {}
        self._beside: set[Hashable] = set()  # keys of generations that may run beside clients' requests
        self.max_generations = MAX_GENERATIONS
        self.num_dropped = 0

    def __len__(self) -> int:
        self._forget_done()
        return len(self._generations)

    def put(self, key: Hashable, generation: Generation, *, beside: bool = False) -> bool:
        """Add the generation of a key, and return True. In any case, drop the key's earlier generation.

        The generation is not added, and the result is False, in three cases: a client's request runs or waits, the model's
        turn on a shared device is over, or too many generations are unfinished. With `beside`, the generation may be added
        while clients' requests run, if a slot is idle and all of these requests use the same LoRA adapters as the
        generation.
        """
        self.drop(key)
        if not self._may_run(generation, beside):
            return False
        if len(self) >= self.max_generations:
            return False
        self._generations[key] = generation
        if beside:
            self._beside.add(key)
        return True

    def drop(self, key: Hashable) -> bool:
        """End the generation of a key. Return True if the key had an unfinished generation."""
        generation = self._generations.pop(key, None)
        self._beside.discard(key)
        if generation is None or generation.done:
            return False
        self._end(generation)
        self.num_dropped += 1
        return True

    def drop_scope(self, scope: str) -> None:
        for key in [key for key, generation in self._generations.items() if generation.scope == scope]:
            self.drop(key)

    def drop_all(self) -> None:
        for key in list(self._generations):
            self.drop(key)

    def give_way(self, new: Sequence[Generation]) -> None:
        """End the generations that would slow down clients' requests. new: the requests that arrive now.

        A generation ends unless it was added with `beside`. A generation that was added with `beside` also ends if the
        clients' requests need its slot, if it computes the prompt of a new request, or if a new request uses other LoRA
        adapters.
        """
        clients = [job.request for job in (*self._scheduler.running, *self._scheduler.waiting) if job.request.kind.is_client]
        left = len(self._scheduler.slots) - len(clients) - len(new)
        for key, generation in list(self._generations.items()):
            adapters = generation.request.scope.adapters
            is_alone = any(one.request.scope.adapters != adapters for one in new)
            if generation.done:
                continue
            if left <= 0 or is_alone or key not in self._beside or any(map(generation.is_turn_of, new)):
                self.drop(key)
            else:
                left -= 1

    def _may_run(self, generation: Generation, beside: bool) -> bool:
        running = [job.request for job in self._scheduler.running if job.request.kind.is_client]
        if not (self._scheduler.admits and not any(job.request.kind.is_client for job in self._scheduler.waiting)):
            return False
        # Requests with other adapters would take turns with the generation.
        adapters = {generation.request.scope.adapters, *(request.scope.adapters for request in running)}
        return not running or (beside and len(running) < len(self._scheduler.slots) and len(adapters) == 1)

    def _forget_done(self) -> None:
        for key in [key for key, generation in self._generations.items() if generation.done]:
            self.drop(key)


# ---- The open generations. Each ends once, with a final event unless its client has disconnected. -----------------------


class Generations:
    """Open generations and their samplers, by request id.

    is_end: returns whether a token ends an answer. on_wait: called with the job of each request that enters the queue.
    samplers: the samplers by request id; callers make them, and this class closes them. is_closed: whether `close` or
    `give_up` was called, so that each new generation ends at once with a Failure.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        outbox: Outbox,
        is_end: Callable[[int], bool],
        on_wait: Callable[[Job], None] = lambda job: None,
    ) -> None:
        self.samplers: dict[int, Sampler] = {}
        self.is_closed = False
        self._why = ""  # the reason, once it is closed
        self._scheduler, self._outbox, self._is_end, self._on_wait = scheduler, outbox, is_end, on_wait
        self._open: dict[int, Generation] = {}

    def enter(self, generation: Generation, sampler: Sampler) -> None:
        """Queue a generation. If this object is closed, send the generation a Failure instead."""
        if self.is_closed:
            sampler.close()
            self._outbox.put(generation, Failure(RequestError(self._why, status=503)))
            return
        self._open[generation.request.id] = generation
        self.samplers[generation.request.id] = sampler
        generation.job = self._scheduler.submit(generation.request)
        self._on_wait(generation.job)

    def admit(self, ids: Iterable[int]) -> None:
        """Note that requests were admitted: set their times of admission, and show the samplers their prompts.

        A preempted request that is admitted again keeps the time of its first admission.
        """
        now = perf_counter()
        for id in ids:
            generation = self._open[id]
            if not generation.admitted:
                generation.admitted = now
                self._report_progress(generation, now)
                if generation.request.scores_prompt:
                    self._outbox.put(
                        generation, generation.send_prompt(0, [Logprobs.unknown(int(generation.job.tokens[0]))])
                    )
            if not generation.is_primed and not generation.job.is_reading:
                generation.is_primed = True
                self.samplers[id].prime(generation.job.ids(0, generation.job.num_prompt))

    def push(self, job: Job, token: int) -> None:
        """Add to a job's generation the tokens that the job got from one step.

        The first of these tokens is `token`. The accepted drafted tokens come next, then the tokens that a grammar
        determines. An error ends only this generation.
        """
        generation, sampler = self._open[job.request.id], self.samplers[job.request.id]
        if not generation.first_token:
            self._report_progress(generation, perf_counter())  # the prompt is complete
        try:
            if sampler.error:
                raise RequestError(sampler.error, code="invalid_grammar")
            self._push(generation, token, sampler.take_logprobs())
            for further, logprobs in sampler.take_further():
                if generation.done:
                    break
                job.accept(further)
                self._scheduler.counters.count_accepted()
                self._push(generation, further, logprobs)
            for forced in sampler.take_forced():
                if generation.done:
                    break
                job.force(forced)
                self._scheduler.counters.count_forced()
                self._push(generation, forced)
        except Exception as error:
            self._fail_alone(generation, error)

    def _push(self, generation: Generation, token: int, logprobs: Logprobs | None = None) -> None:
        event = generation.push(token, self._is_end(token), logprobs)
        if isinstance(event, Delta) and generation.is_whole:
            event = generation.collect(event)
        elif isinstance(event, End):
            self.end(generation)
            if unsent := generation.take_unsent():
                self._outbox.put(generation, unsent)
        if event is not None:
            self._outbox.put(generation, event)

    def send_prompts(self, spans: Sequence[Span]) -> None:
        """Send the logprobs of the prompt tokens that a step computed, if requests want them."""
        for span in spans:
            if span.scored is not None:
                generation = self._open[span.request]
                logprobs = self.samplers[span.request].take_scored()
                self._outbox.put(generation, generation.send_prompt(span.start + 1, logprobs))

    def report_progress(self) -> None:
        """Send the progress of unfinished prompts, if requests want it."""
        now = perf_counter()
        for job in self._scheduler.running:
            if job.num_tokens == job.num_prompt:
                self._report_progress(self._open[job.request.id], now)

    def _report_progress(self, generation: Generation, now: float) -> None:
        if generation.wants_progress and not generation.job.is_reading:
            self._outbox.put(generation, generation.progress(now))

    def end(self, generation: Generation) -> None:
        """End a generation in the engine, unless it has already ended. Send its client no event.

        Close the generation's sampler, and finish its request in the scheduler.
        """
        if generation.done:
            return
        generation.done = True
        is_open = self._open.pop(generation.request.id, None) is not None
        if sampler := self.samplers.pop(generation.request.id, None):
            sampler.close()
        if is_open:
            self._scheduler.finish(generation.job)

    def goes_on(self, job: Job) -> bool:
        """Return whether a request can go on after a failed step.

        The request can go on if the failure lost none of the tokens that the request's sampler chose.
        """
        if (generation := self._open.get(job.request.id)) is None:
            return False
        return self.samplers[job.request.id].num_chosen == generation.num_pushed == job.num_generated

    def drop(self, generation: Generation) -> None:
        """End a background generation with a Failure whose code is `GAVE_WAY`."""
        if not generation.done:
            self._fail(generation, RequestError("it gave way", status=503, code=GAVE_WAY))

    def restart(self, jobs: Iterable[Job]) -> None:
        """Prepare requests to start over: give each a new sampler, because its old sampler has already chosen tokens."""
        for job in jobs:
            id = job.request.id
            if generation := self._open.get(id):
                generation.is_primed = False
                self.samplers[id] = self.samplers[id].anew()
            else:  # the generation has ended, but its end failed
                self._scheduler.finish(job)

    def fail(self, jobs: Iterable[Job], error: RequestError) -> None:
        """End the open generations of these requests with a Failure."""
        for generation in [self._open[job.request.id] for job in jobs if job.request.id in self._open]:
            self._fail(generation, error)

    def fail_rejected(self) -> None:
        """Fail the requests that the scheduler has rejected since the last call."""
        for job, error in self._scheduler.take_rejected():
            if job.request.id in self._open:
                self._fail_alone(self._open[job.request.id], error)

    def close(self, why: str) -> None:
        """End every open generation with a Failure."""
        self.is_closed, self._why = True, why
        for generation in list(self._open.values()):
            self._fail(generation, RequestError(why, status=503))

    def give_up(self, why: str) -> None:
        """Send a Failure to every open generation. Do not touch the scheduler, since the scheduler may be in any state."""
        self.is_closed, self._why = True, why
        error = RequestError(why, status=500)
        for generation in self._open.values():
            generation.done = True
            self._outbox.put(generation, Failure(error))
        self._open.clear()

    def _fail(self, generation: Generation, error: RequestError) -> None:
        try:
            self.end(generation)
        finally:  # the client waits for the Failure, even if the end fails
            self._outbox.put(generation, Failure(error))

    def _fail_alone(self, generation: Generation, error: Exception) -> None:
        """Fail a generation because of an error that concerns no other generation.

        An unexpected error is logged, and its client gets a general message.
        """
        if not isinstance(error, RequestError):
            logger.error("request %d failed", generation.request.id, exc_info=error)
            error = RequestError("the server failed on this request", status=500)
        self._fail(generation, error)
