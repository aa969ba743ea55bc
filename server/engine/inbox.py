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
        self._door = Lock()
        self._closed = False  # guarded by the door

    def put(self, act: Act) -> bool:
        """Have an act run. False, and it is not, once the inbox is closed."""
        with self._door:  # an act is in the queue before the last one is, or not at all
            if not self._closed:
                self._acts.put(act)
            return not self._closed

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Have a function run, and get what it returns or raises. RequestError 503 once the inbox is closed."""
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the asker has gone
            try:
                future.set_result(question())
            except Exception as error:
                future.set_exception(error)

        if not self.put(answer):
            future.set_exception(RequestError("the server is shutting down", status=503))
        return future

    def close(self, last: Act) -> None:
        """Take nothing more in behind `last`."""
        with self._door:
            if not self._closed:
                self._closed = True
                self._acts.put(last)

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
