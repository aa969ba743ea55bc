"""Sleep: after some seconds without a request the model leaves memory, and the next request brings it back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from threading import Thread
from time import perf_counter

from ...models.runner import Runner
from .inbox import Inbox

logger = logging.getLogger("slotcache")


class Sleep:
    """Belongs to the engine's thread, but for `rouse` and `is_asleep`. A load has a thread of its own: acts run meanwhile.

    seconds: without a step until sleep; 0: never. on_wake: called in the engine's thread behind a load; with its error, if
    it failed. is_awake: whether steps can be computed. last_use: when one ended, or the model was asked for.
    """

    def __init__(self, seconds: float, runner: Runner, inbox: Inbox, on_wake: Callable[[Exception | None], None]) -> None:
        self.is_awake, self._is_wanted = True, False
        self.last_use = perf_counter()
        self.num_wakes = 0
        self._seconds, self._runner, self._inbox, self._on_wake = seconds or inf, runner, inbox, on_wake
        self._load: Thread | None = None  # until its end is noted

    # ---- from any thread -------------------------------------------------------------------------------------------

    @property
    def is_asleep(self) -> bool:
        """Whether the model has left memory and no request wants it back."""
        return not (self.is_awake or self._is_wanted)

    def rouse(self) -> None:
        """Load the model, if it is asleep, for a request that will want it; keep it for another `seconds`."""
        if self._seconds < inf:
            self._is_wanted = True
            self._inbox.put(self.wake)

    # ---- in the engine's thread ------------------------------------------------------------------------------------

    @property
    def seconds_left(self) -> float:
        """Seconds until sleep, if no request comes."""
        return max(self.last_use + self._seconds - perf_counter(), 0) if self.is_awake else inf

    def begin(self) -> None:
        """Free the memory of the device, where nothing is left to save."""
        self._is_wanted = False
        self._runner.rest()
        self.is_awake = False  # last: who sees a server asleep finds its memory free
        logger.info("asleep after %g s without a request", self._seconds)

    def wake(self) -> None:
        """Begin to load the model, unless it is awake or on its way."""
        self.last_use = perf_counter()
        self._is_wanted = not self.is_awake
        if not (self.is_awake or self._load):
            self._load = Thread(target=self._open, name="wake", daemon=True)
            self._load.start()

    def close(self) -> None:
        """Wait for the end of a load."""
        if self._load:
            self._load.join()

    def _open(self) -> None:
        """Runs in the load's thread."""
        began = perf_counter()
        error: Exception | None = None
        try:
            self._runner.context.open()
        except Exception as failed:
            error = failed
        self._inbox.put(lambda: self._end_load(error, perf_counter() - began))

    def _end_load(self, error: Exception | None, seconds: float) -> None:
        self._load = None
        self._is_wanted, self.is_awake = False, error is None
        self.last_use = perf_counter()
        if error:
            logger.error("cannot wake up: %s", error)
        else:
            self.num_wakes += 1
            logger.info("awake again after %.1f s", seconds)
        self._on_wake(error)
