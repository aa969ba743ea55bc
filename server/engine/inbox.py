"""The engine thread's inbox: callables from other threads, run between two steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TypeVar

from ..errors import RequestError

T = TypeVar("T")
Act = Callable[[], None]


class Inbox:
    """Any thread puts acts in, the engine's thread takes them out. An act that was taken in is always run."""

    def __init__(self) -> None:
        self._acts: SimpleQueue[Act] = SimpleQueue()
        self._lock = Lock()
        self._closed: str | None = None  # why, once it is; guarded by the lock

    def put(self, act: Act) -> bool:
        """Have an act run. False, and it is not, once the inbox is closed."""
        with self._lock:  # an act is queued before the last act, or not at all
            if self._closed is None:
                self._acts.put(act)
            return self._closed is None

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Run a function between two steps; the future has what it returns or raises. 503 once the inbox is closed."""
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
        """The error for a thread that comes too late."""
        return RequestError(self._closed or "the engine takes nothing in", status=503)

    def close(self, last: Act, why: str) -> None:
        """Take nothing more in behind `last`."""
        with self._lock:
            if self._closed is None:
                self._acts.put(last)
            self._closed = why

    @property
    def empty(self) -> bool:
        return self._acts.empty()

    def wait(self) -> Act:
        """Take the next act out, as soon as there is one."""
        return self._acts.get()

    def take(self) -> Act | None:
        """Take the next act out, if there is one."""
        try:
            return self._acts.get_nowait()
        except Empty:
            return None
