"""The engine thread's inbox: callables from other threads, run between two steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TypeVar

from ..errors import RequestError

T = TypeVar("T")
Act = Callable[[], None]


class Inbox:
    """Any thread puts acts in, the engine's thread takes them out. An act that was accepted is always run."""

    def __init__(self) -> None:
        self._acts: SimpleQueue[Act] = SimpleQueue()
        self._lock = Lock()
        self._closed: str | None = None  # why, once it is; guarded by the lock

    def put(self, act: Act) -> bool:
        """Queue an act. False: the inbox is closed, and the act will not run."""
        with self._lock:  # an act is queued before the last act, or not at all
            if self._closed is None:
                self._acts.put(act)
            return self._closed is None

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Run a function between two steps; its result or exception goes to the future. 503 once the inbox is closed."""
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the asker has cancelled it
            try:
                future.set_result(question())
            except Exception as error:
                future.set_exception(error)

        if not self.put(answer):
            future.set_exception(self.refusal())
        return future

    def refusal(self) -> RequestError:
        """Return the error for callers that come after `close`."""
        return RequestError(self._closed or "the engine accepts nothing", status=503)

    def close(self, last: Act, why: str) -> None:
        """Accept nothing more after `last`. A later call only changes the reason."""
        with self._lock:
            if self._closed is None:
                self._acts.put(last)
            self._closed = why

    @property
    def empty(self) -> bool:
        return self._acts.empty()

    def wait(self, seconds: float) -> Act | None:
        """Wait for the next act and take it out. None: none came in time."""
        try:
            return self._acts.get(timeout=None if seconds == inf else seconds)
        except Empty:
            return None

    def take(self) -> Act | None:
        """Take the next act out; None: the inbox is empty."""
        try:
            return self._acts.get_nowait()
        except Empty:
            return None
