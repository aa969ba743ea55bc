"""The watchdog: it tells of a step that does not end."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from threading import Event, Thread
from time import perf_counter

logger = logging.getLogger("slotcache.engine")
TOKEN = 1.0  # s that each token of a step may take beside: no machine that serves a model is slower
OFTEN = 0.25  # of the patience: the watchdog's pause between two looks


class Watchdog:
    """Watches the steps of one thread. seconds: the patience with a step, beside a second for each of its tokens; 0: no end.

    Nothing else is watched: neither a load of the model nor the first tokens behind it, and no wait for requests.
    """

    def __init__(self, seconds: float) -> None:
        self.num_hangs = 0  # ever
        self._seconds = seconds or inf
        self._step: tuple[float, float] | None = None  # when the present one began, and when it counts as hanging
        self._ended = Event()
        self._thread: Thread | None = None

    @property
    def hanging(self) -> float:
        """For how many seconds the present step has run, if that is too long; else 0. From any thread."""
        step, now = self._step, perf_counter()
        return now - step[0] if step is not None and now > step[1] else 0.0

    @contextmanager
    def step(self, num_tokens: int) -> Iterator[None]:
        """Watch a step."""
        began = perf_counter()
        self._step = began, began + self._seconds + TOKEN * num_tokens
        try:
            yield
        finally:
            seconds, self._step = self.hanging, None
            if seconds:
                self.num_hangs += 1
                logger.warning("the step that hung has ended after %.0f s", seconds)

    def watch(self, thread: int | None) -> None:
        """Begin to write to the log where a thread hangs. thread: its number."""
        if self._seconds < inf:
            self._thread = Thread(target=self._look, args=(thread,), name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._ended.set()
        if self._thread:
            self._thread.join()

    def _look(self, thread: int | None) -> None:
        told: tuple[float, float] | None = None
        while not self._ended.wait(OFTEN * self._seconds):
            step, seconds = self._step, self.hanging
            if seconds and step is not told:
                told = step
                frame = sys._current_frames().get(thread or 0)
                where = "".join(traceback.format_stack(frame)) if frame else ""
                logger.error("a step hangs: it has taken %.0f s so far\n%s", seconds, where)
