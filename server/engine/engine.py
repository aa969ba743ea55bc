"""The thread that owns the llama context: inbox, plan, run, commit, publish, and round again.

Everything others want of it is a callable in its inbox, run between two steps. What it has to say goes out once a step
for all streams together, as one call into the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from math import inf
from threading import Thread
from time import perf_counter
from typing import TypeVar

from ...models.errors import Interrupted, NoRoom
from ...models.model import Model
from ...models.runner import Runner
from ...models.sampling import GREEDY, Sampler
from ...models.state import cut
from ...slots.archive import Archive, Record
from ...slots.check import check
from ...slots.plan import Plan
from ...slots.scheduler import Scheduler
from ...slots.snapshots import Snapshots
from ...slots.tiers.tier import LowerTier
from ...slots.tiers.writing import WriteBehind
from ..errors import RequestError
from .background import Background
from .events import Failure
from .generation import Generation
from .inbox import Inbox
from .outbox import Outbox
from .roster import Roster

logger = logging.getLogger("slotcache.engine")
T = TypeVar("T")
ADOPT_SECONDS = 60.0  # that a record from disk may wait for the engine
LAST_SAVE = 5.0  # seconds to save idle KV in when the server ends


class Engine:
    """Runs generations. `submit` and `cancel` are for the event loop's thread, `ask` for any.

    checks: verify the cache's invariants when idle.
    """

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        runner: Runner,
        checks: bool = False,
        lower: Sequence[LowerTier] = (),
    ) -> None:
        self.scheduler = scheduler
        self.step_seconds = 0.0  # what the last step took, and how much of that was ours and not llama.cpp's
        self.host_seconds = 0.0
        self.num_failed_steps = 0
        self._model, self._runner = model, runner
        self._checks = checks
        self.archive = Archive(scheduler.tree, cut)
        self._behind = WriteBehind((self.archive, scheduler.snapshots), lower)
        self.failure: str | None = None  # why the thread has ended for good
        self._inbox = Inbox()
        self._outbox = Outbox()
        self._roster = Roster(scheduler, self._outbox, model.is_end)
        self._on_failure: Callable[[], None] = lambda: None
        self.background = Background(scheduler, self._roster.end)
        self._stopping = False
        self._thread = Thread(target=self._live, name="engine", daemon=True)

    # ---- from other threads ----------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[], None] = lambda: None) -> None:
        """Begin to run; events go to `loop`. on_failure: called there if the thread cannot go on."""
        self._outbox.loop, self._on_failure = loop, on_failure
        self._thread.start()

    def stop(self) -> None:
        """End every open generation with a Failure and the thread with it. Returns when it has ended."""
        self._inbox.close(self._stop)
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, generation: Generation) -> None:
        """Queue a generation. What may fail, fails here, in the caller's thread. Raises RequestError once it is stopped."""
        sampler = Sampler(self._model, generation.sampling)
        if not self._inbox.put(lambda: self._accept(generation, sampler)):
            sampler.close()
            raise RequestError(self.failure or "the server is shutting down", status=503)
        self._runner.interrupt.set()

    def submit_background(self, key: Hashable, generation: Generation) -> Future[bool]:
        """Compute a generation's prompt while there is nothing else to do; whether there is nothing else to do.

        It takes the place of an earlier one of the same key, and gives way, part computed, to whatever is submitted. Its
        events go nowhere, and its token is of no interest.
        """
        return self.ask(lambda: self._accept_background(key, generation))

    def drop_background(self, key: Hashable) -> Future[bool]:
        """Stop computing ahead for `key`; whether it was still being computed. What is done stays in the cache."""
        return self.ask(lambda: self.background.drop(key))

    def cancel(self, generation: Generation) -> Future[None]:
        """Let go of a generation whose client has gone, by the next step; done when that is so."""
        self._inbox.put(lambda: self._roster.end(generation))
        return self.ask(lambda: None)

    def carry_out(self) -> None:
        """Do what the cache has decided, now; in the engine's thread."""
        try:
            self._runner.run(Plan(self.scheduler.tree.take_operations()))
        except Exception:
            self._recover()  # the tree believes what was not done
            raise

    @property
    def host_tier(self) -> Archive | Snapshots:
        """The tier in host memory that takes records: states, where the model's memory cannot be cut."""
        return self.scheduler.snapshots if self.scheduler.snapshots.max_bytes else self.archive

    def adopt(self, record: Record, source: str = "disk", is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Put a record from elsewhere into the host tier; whether it is there then. Waits for the step that runs.

        is_wanted: asked in the engine's thread, at the last moment.
        """
        if not self._runner.accepts(record.data, record.start, len(record.tokens)):
            logger.warning("the KV of %d tokens in a file does not fit this model", len(record.tokens) - record.start)
            return False

        return self.ask(lambda: is_wanted() and self.host_tier.put(record, source)).result(ADOPT_SECONDS)

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Run a function between two steps, where nothing changes under it."""
        return self._inbox.ask(question)

    # ---- the engine's own thread -----------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._warm_up()
            while not self._stopping:
                self._take_turn()
            if self._behind.lower:
                self._use_idle_time(until=perf_counter() + LAST_SAVE)
        except BaseException as error:
            self._end_for_good(error)

    def _take_turn(self) -> None:
        try:
            self._read_inbox()
            if not self.scheduler.idle:
                self._step()
        except Exception:
            self._recover()
        self._outbox.send()

    def _recover(self) -> None:
        """Fail what runs and begin anew with an empty cache: after an error the tree and the memory may disagree."""
        self.num_failed_steps += 1
        logger.exception("a step failed; what ran ends with an error, and the cache is dropped")
        failed = self.scheduler.abandon()
        self._runner.clear()
        self._roster.fail(failed, RequestError("the engine failed while computing this", status=500))
        self._roster.fail_rejected()

    def _end_for_good(self, error: BaseException) -> None:
        """Fail every open generation, once: the last resort of a thread that cannot go on."""
        self.failure = f"the engine has ended: {type(error).__name__}: {error}"
        logger.critical("%s", self.failure, exc_info=error)
        self._inbox.close(lambda: None)
        self._stopping = True
        self._roster.give_up(RequestError(self.failure, status=500))
        while (act := self._inbox.take()) is not None:
            with contextlib.suppress(Exception):
                act()
        self._outbox.send()
        self._outbox.call(self._on_failure)

    def _warm_up(self) -> None:
        # Here, not where the model was loaded: OpenMP keeps workers for every thread that ever computed, and once these
        # are more than the cores, all of them sleep at each barrier instead of spinning (a token took 1.13 times
        # llama-server's time, and 1.03 times since).
        snapshots = self.scheduler.snapshots
        try:
            can_move = self._runner.warm_up()
            if snapshots.max_bytes:
                snapshots.fixed_bytes, snapshots.token_bytes = self._runner.measure_state()
        except Exception:
            logger.exception("the warm-up failed")
            can_move, snapshots.max_bytes = False, 0
            self._runner.clear()  # what it computed would stand in the way of the first request
        if not can_move:
            self.scheduler.tree.host.max_tokens = 0

    def _read_inbox(self) -> None:
        """Do what others asked for; with nothing to compute, use the time and then wait."""
        self._runner.interrupt.clear()
        if self.scheduler.idle:
            self._use_idle_time()
            if self._checks:
                check(self.scheduler)
            self._inbox.wait()()
        while (act := self._inbox.take()) is not None:
            act()

    def _use_idle_time(self, until: float = inf) -> None:
        """Copy idle KV to host memory, and from there to disk, while nobody wants anything."""
        while self._inbox.empty and perf_counter() < until and (work := self.scheduler.plan_idle_work()):
            self._runner.run(work)
            self._behind.write()

    def _step(self) -> None:
        began = perf_counter()
        plan = self.scheduler.plan()
        self._roster.fail_rejected()
        self._roster.admit(plan.admitted)
        planned = perf_counter()
        try:
            sampled = self._runner.run(plan, self._roster.samplers)
        except NoRoom:
            if not self.scheduler.refuse():
                raise
            return
        except Interrupted:
            return  # for what is in the inbox
        ran = perf_counter()
        self._behind.write()
        self.scheduler.observe(plan, ran - planned)
        self._commit(plan, sampled)
        self.step_seconds = perf_counter() - began
        self.host_seconds = self.step_seconds - (ran - planned)

    def _commit(self, plan: Plan, sampled: list[int]) -> None:
        for request, token in self.scheduler.commit(plan, sampled):
            self._roster.push(request, token)
        self._roster.report_progress()

    def _accept_background(self, key: Hashable, generation: Generation) -> bool:
        if self._stopping or not self.background.put(key, generation):
            return False
        self._roster.enter(generation, Sampler(self._model, GREEDY))
        return True

    def _accept(self, generation: Generation, sampler: Sampler) -> None:
        if self._stopping:
            sampler.close()
            self._outbox.put(generation, Failure(RequestError(self.failure or "the server is shutting down", status=503)))
            return
        self.background.give_way()
        self._roster.enter(generation, sampler)

    def _stop(self) -> None:
        self._stopping = True
        self._roster.fail_all(RequestError("the server is shutting down", status=503))
