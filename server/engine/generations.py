"""The open generations of the engine, and those whose prompts are computed in idle time. All belong to its thread."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from ...models.sampling import Logprobs, Sampler
from ...models.sampling_params import Sampling
from ...slots.plan import Span
from ...slots.request import Job
from ...slots.scheduler import Scheduler
from ...slots.scope import Scope
from ..http.api_errors import RequestError
from .generation import Delta, End, Failure, Generation, Outbox

logger = logging.getLogger("slotcache.engine")

# ---- Prompts that are computed in idle time, ahead of their requests. It belongs to the engine's thread. ----------------

MAX_GENERATIONS = 64
MAX_FIRST_TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class FirstToken:
    """The first token of an answer, and the sampler that chose it and goes on from there. prompt: token ids (int32)."""

    scope: Scope
    prompt: np.ndarray
    sampling: Sampling
    token: int
    sampler: Sampler


class FirstTokens:
    """Those of turns whose whole prompts were computed ahead, the newest ones: where there are too many, the oldest of the
    scope with the most leaves, so that no other one pushes out those of a scope with few.

    A request for such a turn starts with its token, if its KV is still on the device (RAGCache, section 5.3).
    """

    def __init__(self) -> None:
        self._kept: deque[FirstToken] = deque()

    def keep(self, first: FirstToken) -> None:
        """Keep one; an equal one leaves for it, else another one if there are too many."""
        for old in [old for old in self._kept if _begins(old, first.scope, first.prompt, first.sampling)]:
            self._kept.remove(old)
            old.sampler.close()
        self._kept.append(first)
        if len(self._kept) > MAX_FIRST_TOKENS:
            counts = Counter(one.scope.name for one in self._kept)
            oldest = max(self._kept, key=lambda one: counts[one.scope.name])  # of equals the first one
            self._kept.remove(oldest)
            oldest.sampler.close()

    def take(self, generation: Generation) -> FirstToken | None:
        """Return that of a generation whose prompt is laid out, and forget it."""
        if not generation.limit or generation.request.background:
            return None
        scope, prompt = generation.request.scope, generation.job.tokens[: generation.job.num_prompt]
        found = next((first for first in self._kept if _begins(first, scope, prompt, generation.sampling)), None)
        self._kept = deque(first for first in self._kept if first is not found)
        return found

    def drop(self, name: str | None = None) -> None:
        """Forget those of the scopes of a name; None: all."""
        for first in [*self._kept]:
            if name in (None, first.scope.name):
                self._kept.remove(first)
                first.sampler.close()


def _begins(first: FirstToken, scope: Scope, prompt: np.ndarray, sampling: Sampling) -> bool:
    """Return whether an answer to this prompt could begin with it."""
    return first.scope == scope and sampling.chooses_as(first.sampling) and np.array_equal(first.prompt, prompt)


class Background:
    """One generation for each key: a later one of the same key replaces it.

    end: takes a generation out of the engine; what of it is computed stays in the cache. max_generations: that are not
    done yet. first_tokens: of those that are done.
    """

    def __init__(self, scheduler: Scheduler, end: Callable[[Generation], None], first_tokens: FirstTokens) -> None:
        self._scheduler, self._end = scheduler, end
        self._generations: dict[Hashable, Generation] = {}
        self._beside: set[Hashable] = set()  # the keys of those that may run beside requests of clients
        self.first_tokens = first_tokens
        self.max_generations = MAX_GENERATIONS
        self.num_dropped = 0

    def __len__(self) -> int:
        """Generations that are not done yet."""
        self._forget_done()
        return len(self._generations)

    def put(self, key: Hashable, generation: Generation, *, beside: bool = False) -> bool:
        """Replace the generation of a key. False: requests of clients run or wait, or too many are not done.

        beside: it may run while those of clients do, if an idle slot is left and none waits.
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
        """End the generation of a key. True: it was not done yet."""
        generation = self._generations.pop(key, None)
        self._beside.discard(key)
        if generation is None or generation.done:
            return False
        self._end(generation)
        self.num_dropped += 1
        return True

    def drop_scope(self, scope: str) -> None:
        """End the generations of a scope."""
        for key in [key for key, generation in self._generations.items() if generation.scope == scope]:
            self.drop(key)
        self.first_tokens.drop(scope)

    def drop_all(self) -> None:
        """End all."""
        for key in list(self._generations):
            self.drop(key)

    def give_way(self, new: Sequence[Generation]) -> None:
        """End those that are in the way of requests of clients. new: those that come now.

        What may run beside them goes on while it has a slot, unless its turn has come.
        """
        clients = [job.request for job in (*self._scheduler.running, *self._scheduler.waiting) if not job.request.background]
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
        running = [job.request for job in self._scheduler.running if not job.request.background]
        if not (self._scheduler.admits and all(job.request.background for job in self._scheduler.waiting)):
            return False
        # Requests of other adapters would take turns with it.
        adapters = {generation.request.scope.adapters, *(request.scope.adapters for request in running)}
        return not running or (beside and len(running) < len(self._scheduler.slots) and len(adapters) == 1)

    def _forget_done(self) -> None:
        for key in [key for key, generation in self._generations.items() if generation.done]:
            self.drop(key)


# ---- The open generations of the engine: each ends once, with a final event unless its client has gone. -----------------


class Generations:
    """Open generations and their samplers, by request id. It belongs to the engine's thread.

    is_end: whether a token ends an answer. samplers: made by callers, closed here. is_closed: new generations only fail.
    """

    def __init__(
        self, scheduler: Scheduler, outbox: Outbox, is_end: Callable[[int], bool], first_tokens: FirstTokens
    ) -> None:
        self._first_tokens = first_tokens
        self._begun: dict[int, FirstToken] = {}  # of requests that may start with it
        self.samplers: dict[int, Sampler] = {}
        self.is_closed = False
        self._why = ""  # it is closed
        self._scheduler, self._outbox, self._is_end = scheduler, outbox, is_end
        self._open: dict[int, Generation] = {}
        self.on_wait: Callable[[Job], None] = lambda job: None  # told of each request that begins to wait

    def enter(self, generation: Generation, sampler: Sampler) -> None:
        """Queue a generation. Once the generations are closed it only gets its Failure."""
        if self.is_closed:
            sampler.close()
            self._outbox.put(generation, Failure(RequestError(self._why, status=503)))
            return
        self._open[generation.request.id] = generation
        self.samplers[generation.request.id] = sampler
        generation.job = self._scheduler.submit(generation.request)
        self.on_wait(generation.job)

    def admit(self, ids: Iterable[int]) -> None:
        """Start the clock of requests that left the queue, unless they were preempted and only come back."""
        now = perf_counter()
        for id in ids:
            generation = self._open[id]
            if not generation.admitted:
                generation.admitted = now
                self._report_progress(generation, now)
                if generation.request.tells_prompt:
                    self._outbox.put(generation, generation.tell(0, [Logprobs.unknown(int(generation.job.tokens[0]))]))
            if not generation.is_primed and not generation.job.is_reading:
                generation.is_primed = True
                self.samplers[id].prime(generation.job.ids(0, generation.job.num_prompt))

    def first_token(self, job: Job) -> int | None:
        """Return the first token of an answer whose prompt was computed ahead; its sampler goes on from there."""
        first = self._first_tokens.take(self._open[job.request.id])
        if first is None:
            return None
        self._drop_begun(job.request.id)
        self._begun[job.request.id] = first
        return first.token

    def _drop_begun(self, id: int) -> None:
        if first := self._begun.pop(id, None):
            first.sampler.close()

    def begin(self, job: Job, token: int) -> None:
        """Begin an answer with this token, and tell its client at once."""
        id, generation = job.request.id, self._open[job.request.id]
        self.samplers[id].close()
        first = self._begun.pop(id)
        self.samplers[id], generation.is_primed = first.sampler, True
        if first.sampling.is_seeded:
            generation.sampling = first.sampling  # the seed that the client is told is the one that chose
        self.admit([id])
        self.push(job, token)
        self._outbox.send()

    def push(self, job: Job, token: int) -> None:
        """Give a generation its next token, which may end it, and those that must follow. An error ends only this one."""
        generation, sampler = self._open[job.request.id], self.samplers[job.request.id]
        if not generation.first_token:
            self._report_progress(generation, perf_counter())  # the whole prompt
        try:
            if sampler.error:
                raise RequestError(sampler.error, code="invalid_grammar")
            if generation.is_ahead:  # nothing of the sampler is taken: the answer's generation will
                del self.samplers[job.request.id]
                prompt = job.tokens[: job.num_prompt]
                self._first_tokens.keep(FirstToken(job.request.scope, prompt, generation.sampling, token, sampler))
                self._push(generation, token)
                return
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
                job.append(forced)
                self._scheduler.counters.count_forced()
                self._push(generation, forced)
        except Exception as error:
            self._fail_alone(generation, error)

    def _push(self, generation: Generation, token: int, logprobs: Logprobs | None = None) -> None:
        event = generation.push(token, self._is_end(token), logprobs)
        if isinstance(event, Delta) and generation.is_whole:
            event = generation.hold(event)
        elif isinstance(event, End):
            self.end(generation)
            if held := generation.take_held():
                self._outbox.put(generation, held)
        if event is not None:
            self._outbox.put(generation, event)

    def tell_prompts(self, spans: Sequence[Span]) -> None:
        """Send the logprobs of prompt tokens that were computed, to the clients that want them."""
        for span in spans:
            if span.told is not None:
                generation = self._open[span.request]
                told = self.samplers[span.request].take_told()
                self._outbox.put(generation, generation.tell(span.start + 1, told))

    def report_progress(self) -> None:
        """Send the progress of unfinished prompts to the clients that want it."""
        now = perf_counter()
        for job in self._scheduler.running:
            if job.num_tokens == job.num_prompt:
                self._report_progress(self._open[job.request.id], now)

    def _report_progress(self, generation: Generation, now: float) -> None:
        if generation.wants_progress and not generation.job.is_reading:
            self._outbox.put(generation, generation.progress(now))

    def end(self, generation: Generation) -> None:
        """Take a generation out of the engine, once."""
        if generation.done:
            return
        generation.done = True
        is_open = self._open.pop(generation.request.id, None) is not None
        if sampler := self.samplers.pop(generation.request.id, None):
            sampler.close()
        self._drop_begun(generation.request.id)
        if is_open:
            self._scheduler.finish(generation.job)

    def restart(self, jobs: Iterable[Job]) -> None:
        """Let the samplers of requests that run again from their start forget what they have seen and chosen."""
        for job in jobs:
            id = job.request.id
            if generation := self._open.get(id):
                generation.is_primed = False
                self.samplers[id] = self.samplers[id].anew()
            else:  # it has ended, and only its end failed
                self._scheduler.finish(job)

    def fail(self, jobs: Iterable[Job], error: RequestError) -> None:
        """End the open generations among these requests with a Failure."""
        for generation in [self._open[job.request.id] for job in jobs if job.request.id in self._open]:
            self._fail(generation, error)

    def fail_rejected(self) -> None:
        """Fail the requests that the last plan could not admit."""
        for job, error in self._scheduler.take_rejected():
            if job.request.id in self._open:
                self._fail_alone(self._open[job.request.id], error)

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
