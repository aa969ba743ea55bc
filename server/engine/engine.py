"""The engine: the one thread that computes, its inbox, the model's sleep, and the watchdog.

Other threads put functions into the inbox, and the engine's thread runs them between two steps. After each step, the
engine's thread passes the new events of all generations to the event loop, in a single call.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread, get_ident
from time import perf_counter
from typing import TypeVar

from ...models.draft_model import DraftModel
from ...models.errors import ChangedFile, Interrupted, ModelError, NoRoom
from ...models.llama import before_abort
from ...models.runner import NO_SAMPLERS, Runner
from ...models.sampling import Sampler
from ...slots.check import check
from ...slots.job import Phase
from ...slots.plan import Plan
from ...slots.record import Record
from ...slots.request import Request
from ...slots.scheduler import Scheduler
from ...slots.store.fetches import Fetches
from ...slots.store.tier import LowerTier, WriteBehind
from ..http.api_errors import RequestError, not_loaded, reason_of
from .generation import Generation, Outbox
from .generations import Background, Generations

# ---- The engine thread's inbox: functions of other threads, run between two steps. --------------------------------------

T = TypeVar("T")
Act = Callable[[], None]


class Inbox:
    """Functions ("acts") that any thread queues for the engine's thread. If `put` returns True, the act will run."""

    def __init__(self) -> None:
        self._acts: SimpleQueue[Act] = SimpleQueue()
        self._lock = Lock()
        self._closed: str | None = None  # the reason, once the inbox is closed; guarded by the lock

    def put(self, act: Act) -> bool:
        """Queue an act, and return True. If the inbox is closed, return False: the act will not run."""
        with self._lock:  # nothing is queued after the last act
            if self._closed is None:
                self._acts.put(act)
            return self._closed is None

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Ask the engine's thread to run a function between two steps.

        The returned future gets the function's result or exception. If the inbox is already closed, the future gets a
        RequestError with status 503.
        """
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller cancelled it
            try:
                future.set_result(question())
            except Exception as error:
                future.set_exception(error)

        if not self.put(answer):
            future.set_exception(self.refusal())
        return future

    def refusal(self) -> RequestError:
        """Return the error for callers whose act comes after `close`."""
        return RequestError(self._closed or "the engine accepts nothing", status=503)

    def close(self, last: Act, why: str) -> None:
        """Queue `last` as the last act, and close the inbox.

        why: the reason, for the message of `refusal`. If the inbox is already closed, only the reason changes.
        """
        with self._lock:
            if self._closed is None:
                self._acts.put(last)
            self._closed = why

    @property
    def empty(self) -> bool:
        return self._acts.empty()

    def wait(self, seconds: float) -> Act | None:
        """Wait for the next act, and remove it from the inbox. Return None if no act comes within `seconds`."""
        try:
            return self._acts.get(timeout=None if seconds == inf else seconds)
        except Empty:
            return None

    def take(self) -> Act | None:
        """Remove and return the next act. Return None if the inbox is empty."""
        try:
            return self._acts.get_nowait()
        except Empty:
            return None


# ---- Sleep --------------------------------------------------------------------------------------------------------------
# A model is unloaded after some seconds without a request. The next request loads it again.

sleep_logger = logging.getLogger("slotcache")


@dataclass(frozen=True, slots=True)
class DeviceTurns:
    """The callbacks by which a model reports to the scheduler of a shared device.

    on_want: called when the model is needed but not on the device. on_load: called when the model is loaded, or with the
    error if its load failed. on_free: called when the model is unloaded. The engine's thread calls `on_want`, `on_load` and
    `on_free`.

    make_room: called in the loading thread after a load failed, maybe for lack of memory. `make_room` unloads other models
    if it can. If `make_room` returns True, another model was unloaded, and the load is tried once more.
    """

    on_want: Callable[[], None]
    on_load: Callable[[Exception | None], None]
    on_free: Callable[[], None]
    make_room: Callable[[], bool]


class Sleep:
    """Decides when the model is on the device.

    The methods from `is_asleep` to `keep` may be called in any thread. The methods from `seconds_left` on may be called
    only in the engine's thread.

    On a shared device the models take turns. The turn in this diagram ends because another model waits for the device:

        on_want, grant, load |-- steps --|-- lingers --| unload, on_free
                                     last_use

    After its last step the model lingers: it stays loaded for as long as its load took, but not beyond `_turn_end`. A
    request that arrives while the model lingers is answered without another load. Lingering was useless if no request
    arrived after the other model had begun to wait. After useless lingering, the model's next turns end right after their
    last step. If a request arrives soon after a turn without lingering, before `_linger_end`, lingering would have saved a
    load. From then on, the model lingers again.

    seconds: the model is unloaded after this time without a step; 0: never. on_wake: called in the engine's thread after
    each load, with the error if the load failed. is_awake: whether the model is loaded, so that steps can run. last_use:
    the time of the latest of these: the end of a step, the end of a load, and the arrival of a request.
    """

    def __init__(
        self,
        seconds: float,
        runner: Runner,
        inbox: Inbox,
        on_wake: Callable[[Exception | None], None],
        draft_model: DraftModel | None = None,
    ) -> None:
        self.is_awake, self._is_wanted = True, False
        self.last_use = perf_counter()
        self.num_wakes = 0
        self.failure = ""  # why the last load failed; empty if it succeeded
        self._default_seconds = self._seconds = seconds or inf
        self._runner, self._inbox, self._on_wake, self._draft_model = runner, inbox, on_wake, draft_model
        self._load: Thread | None = None  # the thread of the running load; None: no load runs
        self.device: DeviceTurns | None = None  # None: the device is not shared
        self._is_granted = True  # whether this model may be on the device
        self.is_used = True  # a step ran since the last load; until then a turn has a minimum length
        self._loaded_at = 0.0
        self._load_seconds = 0.0  # how long the last load took: the turn lingers for this time
        self._lingers = True  # False: the last turn lingered, and no request came after another model began to wait
        self._had_request = False  # a request came after another model began to wait
        self._linger_end = 0.0  # lingering would have caught a request before this time
        self._turn_end: float | None = None  # None: no other model waits

    # ---- from any thread -------------------------------------------------------------------------------------------

    @property
    def is_asleep(self) -> bool:
        """Whether the model is unloaded and no request needs it."""
        return not (self.is_awake or self._is_wanted)

    @property
    def can_sleep(self) -> bool:
        return self._default_seconds < inf or self.device is not None

    def share(self, device: DeviceTurns, seconds: float) -> None:
        """Share the device with other models: ask `device` before each load.

        Call `share` before the engine starts, while the model is loaded. seconds: how long the model's load took.
        """
        self.device, self._load_seconds, self.is_used = device, seconds, False

    def grant(self) -> None:
        """Give the model its turn on the device, and load it."""
        self._inbox.put(self._take_device)

    def refuse(self, error: Exception) -> None:
        """Report that the model gets no turn, so that its load cannot start. error: the reason."""
        self._inbox.put(lambda: self._end_load(error, 0))

    def end_turn(self, seconds: float) -> None:
        """End the model's turn after about `seconds`.

        The turn ends because another model waits for the device, or because this model is to be unloaded.

        The turn ends earlier once no request runs and the model no longer lingers (see the class). A turn that has not run
        a step lasts for at least as long as the model's load took. At the end of the turn, running requests are still
        finished, but waiting requests are answered in the model's next turn.
        """
        self._inbox.put(lambda: self._end_turn(seconds))

    def wake(self) -> None:
        """Load a sleeping model for a request that is about to be submitted. Restart the time until the model sleeps."""
        if self.can_sleep:
            self._is_wanted = True
            self._inbox.put(self._wake)

    def bring(self) -> None:
        """Load a sleeping model before a request needs it.

        A call of `bring` counts as a use of the model, unless the model's turn is ending.
        """
        if self.can_sleep:
            self._is_wanted = True
            self._inbox.put(self._bring)

    def expect(self) -> None:
        """Load a sleeping model for a likely request, unless other models share the device."""
        if self.device is None:
            self.bring()

    def keep(self, seconds: float) -> None:
        """Unload the model after `seconds` without a step. The next request restores the usual time.

        A model that never sleeps stays loaded.
        """
        if self.can_sleep:
            self._inbox.put(lambda: self._set_seconds(seconds))

    # ---- in the engine's thread ------------------------------------------------------------------------------------

    @property
    def seconds_left(self) -> float:
        """Seconds until the model is unloaded if no request comes."""
        if not self.is_awake:
            return inf
        end = self.last_use + self._seconds
        if self._turn_end is not None:
            wait = self._load_seconds if self._lingers or not self.is_used else 0
            last = self._turn_end if self.is_used else max(self._turn_end, self._loaded_at + self._load_seconds)
            end = min(end, self.last_use + wait, last)
        return max(end - perf_counter(), 0)

    @property
    def is_ending(self) -> bool:
        """Whether `end_turn` was called in this turn: another model waits for the device, or this one is to be unloaded."""
        return self._turn_end is not None

    @property
    def is_over(self) -> bool:
        """Whether the turn's time is up, so that it admits no further request. A turn without a step is never over."""
        return self._turn_end is not None and self.is_used and perf_counter() >= self._turn_end

    def _take_device(self) -> None:
        self._is_granted, self._turn_end = True, None
        self.load()

    def _end_turn(self, seconds: float) -> None:
        if self.is_awake:  # otherwise the model has fallen asleep in the meantime
            self._turn_end, self._had_request = perf_counter() + seconds, False

    def _set_seconds(self, seconds: float) -> None:
        self._seconds = seconds

    def _wake(self) -> None:
        self._had_request = True
        self._lingers |= not self.is_awake and perf_counter() < self._linger_end
        self.last_use = perf_counter()
        self._set_seconds(self._default_seconds)
        self.load()

    def _bring(self) -> None:
        if not self.is_ending:
            self.last_use = perf_counter()
            self._set_seconds(self._default_seconds)
        self.load()

    def begin(self) -> None:
        """Start to sleep: unload the model. The caller has already saved or dropped all KV."""
        self._is_wanted = False
        self._runner.unload()
        if self._draft_model is not None:
            self._draft_model.unload()
        self.is_awake = False  # set after the unload, so that a server that reports sleep has freed its memory
        if self._turn_end is None:
            sleep_logger.info("asleep after %g s without a request", self._seconds)
        elif perf_counter() < self._turn_end:
            self._lingers = self._had_request
        self._linger_end = self.last_use + self._load_seconds
        self._free_device()

    def _free_device(self) -> None:
        self._turn_end = None
        if self.device is not None:
            self._is_granted = False
            self.device.on_free()

    def load(self) -> None:
        """Start a load, unless the model is loaded or loading.

        If the model has no turn on a shared device, `load` only asks for a turn. The load starts when the turn is granted.
        """
        self._is_wanted = not self.is_awake
        if self.device is not None and not (self.is_awake or self._is_granted):
            self.device.on_want()
        elif not (self.is_awake or self._load):
            load = Thread(target=self._open, name="wake", daemon=True)
            try:
                load.start()
            except RuntimeError as error:  # the system cannot start a thread
                self._end_load(error, 0)
            else:
                self._load = load

    def close(self) -> None:
        """Wait until a running load has ended."""
        if self._load:
            self._load.join()

    def _open(self) -> None:
        """Load the model. The loading thread runs this method."""
        began = perf_counter()
        error: Exception | None = None
        try:
            try:
                self._runner.context.open()
            except ModelError:
                if self.device is None or not self.device.make_room():
                    raise
                self._runner.context.open()
            if self._draft_model is not None:
                self._draft_model.open()
        except Exception as failed:
            error = failed
            if self._runner.context.handle:  # otherwise the next load would leak this context
                self._runner.context.unload()
        self._inbox.put(lambda: self._end_load(error, perf_counter() - began))

    def _end_load(self, error: Exception | None, seconds: float) -> None:
        self._load = None
        self._is_wanted, self.is_awake = False, error is None
        self.last_use = self._loaded_at = perf_counter()
        self.failure = reason_of(error) if error else ""
        if error:
            sleep_logger.error("cannot wake up: %s", reason_of(error))
        else:
            self.num_wakes += 1
            self.is_used, self._load_seconds = False, seconds
            sleep_logger.info("awake again after %.1f s", seconds)
        if self.device is not None:
            self.device.on_load(error)
        if error:
            self._free_device()
        self._on_wake(error)  # called last: an error in it must not keep other models from the device


# ---- The watchdog: it reports a step that does not end. -----------------------------------------------------------------

logger = logging.getLogger("slotcache.engine")
TOKEN_SECONDS = 1.0  # additional seconds for each token of a step: no machine that serves a model is slower
LOOK = 0.25  # how often the watchdog looks, as a share of its limit


class Watchdog:
    """Watches the steps of one thread, and reports each step that hangs.

    The watchdog does not watch loads, the warm-up or the wait for requests. seconds: the limit; 0: no limit. A step hangs if
    it takes longer than the limit plus `TOKEN_SECONDS` for each of its tokens.
    """

    def __init__(self, seconds: float) -> None:
        self.num_hangs = 0  # since the start
        self._seconds = seconds or inf
        self._step: tuple[float, float] | None = None  # the current step: its start, and when it begins to hang
        self._ended = Event()
        self._thread: Thread | None = None

    @property
    def hanging(self) -> float:
        """For how many seconds a hanging step has run so far; 0 if no step hangs. Any thread may read this value."""
        step, now = self._step, perf_counter()
        return now - step[0] if step is not None and now > step[1] else 0.0

    @contextmanager
    def step(self, num_tokens: int) -> Iterator[None]:
        began = perf_counter()
        self._step = began, began + self._seconds + TOKEN_SECONDS * num_tokens
        try:
            yield
        finally:
            seconds, self._step = self.hanging, None
            if seconds:
                self.num_hangs += 1
                logger.warning("the step that hung has ended after %.0f s", seconds)

    def watch(self, thread: int | None) -> None:
        """Start to log where a thread hangs. thread: the number of the watched thread (`get_ident`)."""
        if self._seconds < inf:
            self._thread = Thread(target=self._look, args=(thread,), name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()

    def _look(self, thread: int | None) -> None:
        logged: tuple[float, float] | None = None
        while not self._ended.wait(LOOK * self._seconds):
            step, seconds = self._step, self.hanging
            if seconds and step is not logged:
                logged = step
                frame = sys._current_frames().get(thread or 0)
                where = "".join(traceback.format_stack(frame)) if frame else ""
                logger.error("a step hangs: it has taken %.0f s so far\n%s", seconds, where)


LAST_SAVE = 5.0  # seconds to save idle KV when the server ends
LAST_WORDS, MOST_WORDS = 0.2, 3.0  # usual and most seconds for the last events before llama.cpp ends the process


def lost() -> RequestError:
    """Return an error for requests that end because a step failed.

    Each call makes a new error, because the traceback of one error would grow each time it is raised.
    """
    return RequestError("the engine failed while computing this", status=500)


class Engine:
    """Runs generations in one thread.

    Functions of other threads ("acts") run after the current step. Some acts interrupt a step that only does background
    work. Other threads read the state of the cache and the slots through a `View`.

    is_end: returns whether a token ends an answer. checks: whether to verify the cache's invariants when idle. lower: the
    tiers below host memory. sleep_after: the `seconds` of `Sleep`. hang_after: the `seconds` of `Watchdog`. failure: the
    reason if the thread has failed for good; otherwise None.
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
        hang_after: float = 0,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.draft_model = draft_model
        self.scheduler, self.runner = scheduler, runner
        self.inbox, self.outbox = Inbox(), Outbox()
        self.fetches = Fetches(scheduler, lower, hand_over=self.inbox.put, accepts=self.accepts)
        self.generations = Generations(scheduler, self.outbox, is_end, on_wait=self.fetches.expect)
        self.background = Background(scheduler, self.generations.drop)
        self.sleep = Sleep(sleep_after, runner, self.inbox, self._end_sleep, draft_model)
        self.watchdog = Watchdog(hang_after)
        self.failure: str | None = None
        self.step_seconds = 0.0  # of the last step
        self.host_seconds = 0.0  # of the last step, outside llama.cpp
        self.num_failed_steps = 0
        self._write_behind = WriteBehind(scheduler.index.host, lower)
        self._checks, self._stopping = checks, False
        self._failed_idle = False  # the last step failed without a running request; reset by a successful step
        self._on_failure: Callable[[], None] = lambda: None
        self._on_changed: Callable[[], None] = lambda: None
        self._thread = Thread(target=self._live, name="engine", daemon=True)

    # ---- from other threads ----------------------------------------------------------------------------------------

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[], None] = lambda: None,
        on_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the engine's thread, which sends its events to `loop`.

        on_failure: called in `loop` after the thread has failed for good. on_changed: called in `loop` if a load after a
        sleep finds that the model file has changed.
        """
        self.outbox.loop, self._on_failure, self._on_changed = loop, on_failure, on_changed
        self._thread.start()

    def stop(self, why: str = "the server is shutting down") -> None:
        """End every open generation with a Failure, then end the thread, and wait for its end."""
        self.inbox.close(partial(self._stop, why), why)
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue all of the generations.

        Raises RequestError if the engine is stopped or a parameter is bad. If `submit` raises, it queues none of the
        generations.

        The samplers are made here, so that a bad parameter raises in the caller's thread.
        """
        samplers: list[Sampler] = []
        try:
            for generation in generations:
                samplers.append(Sampler(self.runner.context.model, generation.sampling))
            if not self.inbox.put(lambda: self._enter(generations, samplers)):
                raise self.inbox.refusal()
        except Exception:
            for sampler in samplers:
                sampler.close()
            raise
        if not self._computes_for(generations[0].request):
            self.runner.interrupt.set()

    def _computes_for(self, request: Request) -> bool:
        """Return whether the current step only computes KV that this request can reuse.

        A background step that computes KV for the request need not be interrupted when the request arrives.
        """
        jobs = tuple(self.scheduler.step.jobs)
        present = all(job.phase is not Phase.DONE and not job.request.kind.is_client for job in jobs)
        return bool(jobs) and present and all(job.request.leads_to(request) for job in jobs)

    def cancel(self, generation: Generation) -> Future[None]:
        """End a generation before the next step, because its client has disconnected.

        The future is done once the generation has ended.
        """
        self.inbox.put(lambda: self.generations.end(generation))  # an error here concerns the engine, not the caller
        return self.inbox.ask(lambda: None)

    def submit_background(self, key: Hashable, generation: Generation, *, beside: bool = False) -> Future[bool]:
        """Compute a generation's prompt in idle time.

        The generation replaces an earlier generation with the same key. When a client's request arrives, the generation
        ends, but the tokens computed so far stay cached. With `beside`, the generation may go on while clients' requests
        run: see `Background.give_way`.

        The future is True if the generation was queued. The future is False if the generation may not run now, or if too
        many generations are unfinished: see `Background.put`.
        """
        sampler = Sampler(self.runner.context.model, generation.sampling)
        return self.inbox.ask(lambda: self._enter_background(key, generation, sampler, beside))

    def drop_background(self, key: Hashable) -> Future[bool]:
        """End the background generation of `key`. The tokens computed so far stay cached.

        The future is True if the generation was unfinished.
        """
        dropped = self.inbox.ask(lambda: self.background.drop(key))
        self.runner.interrupt.set()
        return dropped

    def resize_host(self, max_bytes: int) -> None:
        for tree in self.scheduler.trees:
            self.inbox.put(partial(tree.host.resize, max_bytes))

    def accepts(self, record: Record) -> bool:
        """Return whether a record has exactly the layout of this model's KV. Call it only after the engine's warm-up."""
        states, stop = self.runner.states, len(record.tokens)
        is_state = record.state is None or states.accepts_recurrent(record.state, stop)
        return is_state and states.accepts(record.data, record.start, stop)

    # ---- the engine's own thread -----------------------------------------------------------------------------------

    def carry_out(self) -> None:
        """Carry out the cache's pending memory operations. Raises RequestError if the engine has failed for good.

        Call it between two steps, in the engine's thread.
        """
        if self.failure is not None:
            raise RequestError(self.failure, status=503)
        if not self.sleep.is_awake:
            return  # the device has no KV
        try:
            self._run(Plan(self.scheduler.tree.device.take_operations()))
        except Exception:
            self._recover()  # the tree assumes that the failed operations were done
            raise

    def _run(self, plan: Plan, samplers: Mapping[int, Sampler] = NO_SAMPLERS) -> list[int]:
        with self.watchdog.step(plan.num_tokens):
            return self.runner.run(plan, samplers)

    def _live(self) -> None:
        lives_on = before_abort(self._abort)
        try:
            self.watchdog.watch(get_ident())
            self._warm_up()
            while not self._stopping:
                self._take_turn()
            if self._write_behind.lower:
                self._use_idle_time(until=perf_counter() + LAST_SAVE)
        except BaseException as error:
            self._end_for_good(error)
        finally:
            lives_on()
            self.sleep.close()
            self.watchdog.close()

    def _take_turn(self) -> None:
        try:
            self._read_inbox()
            if self._write_behind.lower or self.scheduler.index.host.overdraft:
                self.fetches.look()
            is_unloaded = self.sleep.is_ending and self._end_turn()
            if not (is_unloaded or self.scheduler.idle or self._fetch_wait is not None):
                self._step() if self.sleep.is_awake else self.sleep.load()
        except Exception:
            self._recover()
        self.outbox.send()

    def _end_turn(self) -> bool:
        """Unload the model if its turn is over and its running requests are finished.

        Return whether the model was unloaded.
        """
        self.background.drop_all()
        self.scheduler.admits = not self.sleep.is_over
        if self.scheduler.admits or self.scheduler.running:
            return False
        self._fall_asleep()
        if not self.scheduler.idle:  # waiting requests need another turn
            self.sleep.load()
        return True

    def _read_inbox(self) -> None:
        """Run the acts of other threads.

        If there is nothing to compute, do the idle work, then wait for an act or fall asleep.
        """
        self.runner.interrupt.clear()
        if self.scheduler.idle or not self.sleep.is_awake:
            self._use_idle_time()
            if self._checks and self.scheduler.idle:
                check(self.scheduler)
            seconds = self.sleep.seconds_left
            # At the end of a turn the model is unloaded at once: acts that need no device must not delay this.
            act = None if self.sleep.is_ending and not seconds else self.inbox.wait(seconds)
            act() if act else self._fall_asleep()
        elif (seconds := self._fetch_wait) is not None and (act := self.inbox.wait(seconds)) is not None:
            act()
        while (act := self.inbox.take()) is not None:
            act()

    @property
    def _fetch_wait(self) -> float | None:
        """The seconds to wait for KV from lower tiers.

        None means that the engine does not wait, because not all requests wait for KV from lower tiers.
        """
        return self.fetches.seconds_left if self._write_behind.lower else None

    def _step(self) -> None:
        began = perf_counter()
        with self.watchdog.step(0):  # a draft model computes here
            plan = self.scheduler.plan()
        self.generations.fail_rejected()
        self.generations.admit(plan.admitted)
        planned = perf_counter()
        try:
            sampled = self._run(plan, self.generations.samplers)
        except NoRoom:
            if not self.scheduler.refuse():
                raise
            return
        except Interrupted:
            return  # an act interrupted a step that no client waits for
        ran = perf_counter()
        self._write_behind.write()
        if self.sleep.is_used:  # the time of the first step after a load would mislead, since it also maps the weights
            self.scheduler.observe(plan, ran - planned)
        self.generations.send_prompts(plan.spans)
        for job, token in self.scheduler.commit(plan, sampled):
            self.generations.push(job, token)
        self.generations.report_progress()
        self._failed_idle = False
        self.sleep.is_used = True
        self.sleep.last_use = perf_counter()
        self.step_seconds = self.sleep.last_use - began
        self.host_seconds = self.step_seconds - (ran - planned) - self.scheduler.drafts.model_seconds

    def _use_idle_time(self, until: float = inf) -> None:
        """Copy idle KV to host memory and to the tiers below it.

        When all of this KV is copied, let a draft model read ahead.

        The idle work ends as soon as another thread puts an act into the inbox. until: the time at which the copying ends;
        if it is given, the draft model does not read ahead.
        """
        while self.inbox.empty and perf_counter() < until:
            work = self.scheduler.plan_idle_work() if self.sleep.is_awake else None
            if work is not None:
                self._run(work)
            self._write_behind.write()  # also writes the records that an act has read from a file
            if work is None and not (until == inf and self._read_ahead()):
                return

    def _read_ahead(self) -> bool:
        """Let a draft model compute a part of an idle slot's history. Return whether it computed something.

        Return False if nothing remains to be computed, the model is asleep, or its turn is ending.
        """
        if not self.sleep.is_awake or self.sleep.is_ending:
            return False
        with self.watchdog.step(0):
            return self.scheduler.read_ahead()

    def _warm_up(self) -> None:
        # The warm-up runs in this thread, because OpenMP keeps workers for every thread that ever computed. With more
        # workers than cores, the workers sleep at each barrier instead of spinning: a token took 1.13 times
        # llama-server's time after a warm-up in another thread, and 1.03 times after a warm-up in this thread.
        runs, *of_states = (tree.host for tree in self.scheduler.trees)
        try:
            can_move = self.runner.warm_up()
            for states in of_states:
                sizes = self.runner.measure_states()
                if sizes is None:
                    logger.warning("the states of this model do not come back as they were saved: it keeps no snapshots")
                    states.max_bytes = 0
                else:
                    states.sizes = sizes
            if 0 < self.runner.context.rollback < inf and not self.runner.goes_back():
                logger.warning("the states of this model do not go back to before a wrong token: it has no drafts")
                self._end_drafts()
        except Exception:
            logger.exception("the warm-up failed")
            can_move = False
            for states in of_states:
                states.max_bytes = 0
            self.runner.clear()  # otherwise the warm-up's cells, which the tree does not know, stay in use
            if self.runner.context.rollback < inf:
                self._end_drafts()
        if not can_move:
            runs.max_bytes = 0
        if self.draft_model is not None:
            self.draft_model.warm_up()

    def _end_drafts(self) -> None:
        self.runner.context.rollback = self.scheduler.drafts.longest = 0

    def _fall_asleep(self) -> None:
        """Move the device's KV to host memory, as far as it fits, and unload the model."""
        tree = self.scheduler.tree
        for one in self.scheduler.trees:
            for scope in [scope for scope in one.roots if not scope.is_lasting]:
                one.drop(scope)
        tree.evict(tree.device.num_ready)
        self._run(Plan(tree.device.take_operations()))
        self._write_behind.write()
        if tree.device.num_ready:  # waiting requests use this KV
            self.generations.fail(self.scheduler.recover().failed, lost())
        self.scheduler.admits = True
        self.sleep.begin()

    def _end_sleep(self, error: Exception | None) -> None:
        """Handle the end of a load, which also ends the model's sleep.

        If the load failed, fail the waiting requests; the next request starts another load.

        A later load needs no warm-up, because what the warm-up found out at the start stays valid.
        """
        if error is not None:
            self.generations.fail(list(self.scheduler.waiting), not_loaded(error))
        if isinstance(error, ChangedFile) and self.sleep.device is None:
            self.outbox.call(self._on_changed)

    # ---- ends ------------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Empty the device after an error, because the prefix tree and the device may disagree. See `Scheduler.recover`.

        The copies of KV in host memory usually stay. If two failures in a row happened while no request was running, the
        copies themselves may be the cause, so the copies are dropped, too.
        """
        self.num_failed_steps += 1
        is_idle = not self.scheduler.running
        found = self.scheduler.recover(not (is_idle and self._failed_idle), self.generations.goes_on)
        self._failed_idle = is_idle
        logger.exception(
            "a step failed: %d requests end with an error, %d begin again, %d go on, and %d tokens stay in host memory",
            len(found.failed),
            len(found.again),
            len(found.paused),
            self.scheduler.index.host.num_tokens,
        )
        self.runner.clear()
        self.generations.fail(found.failed, lost())
        self.generations.restart(found.again)
        self.generations.fail_rejected()

    def _stop(self, why: str) -> None:
        """Fail all open generations, and end the thread's loop. `stop` queues this method as the inbox's last act."""
        self._stopping = True
        self.generations.close(why)

    def _end_for_good(self, error: BaseException) -> None:
        """Fail every open generation, because the thread cannot continue after this error."""
        logger.critical("%s", why := f"the engine has ended: {type(error).__name__}: {error}", exc_info=error)
        self._give_up(why)
        self.outbox.call(self._on_failure)

    def _give_up(self, why: str) -> None:
        """Send a Failure to each open generation, and to each generation that still waits in the inbox."""
        self.failure = why
        self.inbox.close(lambda: None, why)
        self._stopping = True
        self.generations.give_up(why)
        self.outbox.send()
        while (act := self.inbox.take()) is not None:  # callers wait for their futures
            with suppress(Exception):
                act()
        self.outbox.send()

    def _abort(self, reason: str) -> None:
        """Tell clients that llama.cpp is about to end the process. Any thread may call `_abort`."""
        self._give_up(f"llama.cpp has ended the server: {reason}")
        if loop := self.outbox.loop:
            sent = Event()
            self.outbox.call(loop.call_later, LAST_WORDS, sent.set)
            sent.wait(MOST_WORDS)

    def _enter(self, generations: Sequence[Generation], samplers: Sequence[Sampler]) -> None:
        self.background.give_way(generations)
        for generation, sampler in zip(generations, samplers, strict=True):
            self.generations.enter(generation, sampler)

    def _enter_background(self, key: Hashable, generation: Generation, sampler: Sampler, beside: bool) -> bool:
        if self.generations.is_closed or not self.background.put(key, generation, beside=beside):
            sampler.close()
            return False
        self.generations.enter(generation, sampler)
        return True
