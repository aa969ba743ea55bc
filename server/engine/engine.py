"""The thread that owns the llama context: inbox, plan, run, commit, publish, and round again.

Other threads put callables into its inbox, which run between two steps. Its events go out once a step for all streams
together, as one call into the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from math import inf
from threading import Thread
from time import perf_counter

from ...models.errors import Interrupted, NoRoom
from ...models.runner import Runner
from ...slots.archive import Archive
from ...slots.check import check
from ...slots.hybrids.snapshots import Snapshots
from ...slots.plan import Plan
from ...slots.scheduler import Scheduler
from ...slots.tiers.tier import LowerTier
from ...slots.tiers.writing import WriteBehind
from ..errors import RequestError, not_loaded
from .background import Background
from .inbox import Inbox
from .outbox import Outbox
from .roster import Roster
from .sleep import Sleep

logger = logging.getLogger("slotcache.engine")
LAST_SAVE = 5.0  # seconds to save idle KV in when the server ends


class Engine:
    """Runs generations. Other threads use `start`, `stop` and the inbox, most of them through `Door` and `View`.

    is_end: whether a token ends an answer. checks: verify the cache's invariants when idle. sleep_after: as in `Sleep`.
    failure: why the thread has ended for good.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        is_end: Callable[[int], bool],
        *,
        checks: bool = False,
        lower: Sequence[LowerTier] = (),
        sleep_after: float = 0,
    ) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.inbox, self.outbox = Inbox(), Outbox()
        self.roster = Roster(scheduler, self.outbox, is_end)
        self.background = Background(scheduler, self.roster.end)
        self.sleep = Sleep(sleep_after, runner, self.inbox, self._end_sleep)
        self.archive = Archive(scheduler.tree, runner.states.cut)
        self.failure: str | None = None
        self.step_seconds = 0.0  # of the last step
        self.host_seconds = 0.0  # of the last step, outside llama.cpp
        self.num_failed_steps = 0
        self._behind = WriteBehind((self.archive, scheduler.snapshots), lower)
        self._checks, self._stopping = checks, False
        self._on_failure: Callable[[], None] = lambda: None
        self._thread = Thread(target=self._live, name="engine", daemon=True)

    # ---- from other threads ----------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[], None] = lambda: None) -> None:
        """Begin to run; events go to `loop`. on_failure: called there if the thread cannot continue."""
        self.outbox.loop, self._on_failure = loop, on_failure
        self._thread.start()

    def stop(self) -> None:
        """End every open generation with a Failure and the thread with it. Returns when it has ended."""
        self.inbox.close(self._stop, "the server is shutting down")
        if self._thread.is_alive():
            self._thread.join()

    # ---- the engine's own thread -----------------------------------------------------------------------------------

    def carry_out(self) -> None:
        """Carry out the operations that the cache has decided, before the next step."""
        if not self.sleep.is_awake:
            return  # none touches KV: all of it has left the device
        try:
            self.runner.run(Plan(self.scheduler.tree.ledger.take_operations()))
        except Exception:
            self._recover()  # the tree counts operations as done that were not
            raise

    @property
    def host_tier(self) -> Archive | Snapshots:
        """The tier in host memory that takes records."""
        return self.scheduler.snapshots if self.scheduler.snapshots.max_bytes else self.archive

    def _live(self) -> None:
        try:
            self._warm_up()
            while not self._stopping:
                self._take_turn()
            if self._behind.lower:
                self._use_idle_time(until=perf_counter() + LAST_SAVE)
        except BaseException as error:
            self._end_for_good(error)
        finally:
            self.sleep.close()

    def _take_turn(self) -> None:
        try:
            self._read_inbox()
            if not self.scheduler.idle:
                self._step() if self.sleep.is_awake else self.sleep.wake()
        except Exception:
            self._recover()
        self.outbox.send()

    def _read_inbox(self) -> None:
        """Run the acts of other threads. With nothing to compute, save idle KV, then wait for an act, or fall asleep."""
        self.runner.interrupt.clear()
        if self.scheduler.idle or not self.sleep.is_awake:
            self._use_idle_time()
            if self._checks and self.scheduler.idle:
                check(self.scheduler)
            act = self.inbox.wait(self.sleep.seconds_left)
            act() if act else self._fall_asleep()
        while (act := self.inbox.take()) is not None:
            act()

    def _step(self) -> None:
        began = perf_counter()
        plan = self.scheduler.plan()
        self.roster.fail_rejected()
        self.roster.admit(plan.admitted)
        planned = perf_counter()
        try:
            sampled = self.runner.run(plan, self.roster.samplers)
        except NoRoom:
            if not self.scheduler.refuse():
                raise
            return
        except Interrupted:
            return  # a background step ended early for an act in the inbox
        ran = perf_counter()
        self._behind.write()
        self.scheduler.observe(plan, ran - planned)
        for request, token in self.scheduler.commit(plan, sampled):
            self.roster.push(request, token)
        self.roster.report_progress()
        self.sleep.last_use = perf_counter()
        self.step_seconds = self.sleep.last_use - began
        self.host_seconds = self.step_seconds - (ran - planned)

    def _use_idle_time(self, until: float = inf) -> None:
        """Copy idle KV to host memory, and from host memory to disk, until an act arrives."""
        while (
            self.sleep.is_awake and self.inbox.empty and perf_counter() < until and (work := self.scheduler.plan_idle_work())
        ):
            self.runner.run(work)
            self._behind.write()

    def _warm_up(self) -> None:
        # Here, not where the model was loaded: OpenMP keeps workers for every thread that ever computed, and once these
        # are more than the cores, all of them sleep at each barrier instead of spinning (a token took 1.13 times
        # llama-server's time, and 1.03 times since).
        snapshots = self.scheduler.snapshots
        try:
            can_move = self.runner.warm_up()
            if snapshots.max_bytes:
                snapshots.sizes = self.runner.measure_states()
        except Exception:
            logger.exception("the warm-up failed")
            can_move, snapshots.max_bytes = False, 0
            self.runner.clear()  # or its cells would stay in use, unknown to the tree
        if not can_move:
            self.scheduler.tree.host.max_tokens = 0

    def _fall_asleep(self) -> None:
        """Move the KV on the device to host memory, as far as that has room, and free the device."""
        tree, snapshots = self.scheduler.tree, self.scheduler.snapshots
        for scope in [scope for scope in {*tree.roots, *snapshots.roots} if not scope.is_lasting]:
            tree.drop(scope)
            snapshots.drop(scope)
        tree.evict(tree.ledger.num_ready)
        self.carry_out()
        self._behind.write()
        self.sleep.begin()

    def _end_sleep(self, error: Exception | None) -> None:
        """Compute what waits; without the model, it fails, and the next request tries again."""
        if error is None:
            self._warm_up()
        else:
            self.roster.fail(list(self.scheduler.waiting), not_loaded(error))

    # ---- ends ------------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Fail the running requests and start with an empty cache: after an error, tree and memory may disagree."""
        self.num_failed_steps += 1
        logger.exception("a step failed; what ran ends with an error, and the cache is dropped")
        failed = self.scheduler.abandon()
        self.runner.clear()
        self.roster.fail(failed, RequestError("the engine failed while computing this", status=500))
        self.roster.fail_rejected()

    def _stop(self) -> None:
        """Fail all open generations and leave the loop; the inbox's last act."""
        self._stopping = True
        self.roster.close("the server is shutting down")

    def _end_for_good(self, error: BaseException) -> None:
        """Fail every open generation, once: the last resort of a thread that cannot continue."""
        self.failure = f"the engine has ended: {type(error).__name__}: {error}"
        logger.critical("%s", self.failure, exc_info=error)
        self.inbox.close(lambda: None, self.failure)
        self._stopping = True
        self.roster.give_up(self.failure)
        while (act := self.inbox.take()) is not None:  # callers wait for their futures
            with contextlib.suppress(Exception):
                act()
        self.outbox.send()
        self.outbox.call(self._on_failure)
