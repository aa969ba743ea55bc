"""Threads for work that takes processor time, and a thread for work that only waits for a disk or the engine.

    queue of client a   a1 a2 a3
    queue of client b   b1
    turns               a1 b1 a2 b1 a3 ...

One piece of work has the turn. After `TURN` seconds, its next call of `give_way` passes the turn to the first piece in the
queue of the next client. The interrupted piece goes to the end of its own client's queue. Before its own turn, a client
waits for at most one turn of each other client. The number and the size of the other clients' pieces do not matter.

A piece keeps its thread from its first turn to its end. If a client has already started a piece, it may start another piece
only while half of the threads are free. So other clients can start their work.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from threading import Lock, Semaphore, local
from time import perf_counter
from typing import Generic, ParamSpec, TypeVar

from starlette.types import Scope

from .api_errors import RequestError

P = ParamSpec("P")
T = TypeVar("T")
LARGE = 64 << 10  # bytes: a request of this size or more takes its turns among the large requests
TURN = 0.05  # s
MOST_STARTED = 64  # pieces of work that have a thread; each thread sleeps while other pieces have the turn
CLIENT: ContextVar[tuple[object, ...]] = ContextVar("client", default=())
"""The sender of the current request: its address, and its API key."""


def note_client(scope: Scope, key: bytes) -> None:
    """Set the sender of the current request. The work of the request waits in the queue of this sender.

    key: a valid API key of the server, or empty. If invalid keys counted, one client could pretend to be many.
    """
    address = scope.get("client") or ("",)
    CLIENT.set((address[0], key))


class Disconnected(BaseException):
    """Ends work whose result nobody waits for.

    `Disconnected` is no `Exception`, because code around a chat template would take an `Exception` for a failure of the
    template.
    """


def _closed() -> RequestError:
    return RequestError("the server is shutting down", status=503)


class _Work(Generic[T]):
    """A piece of work for one client.

    started: whether the work has a thread.
    is_disconnected: whether the client has disconnected.
    ends: the time at which the work's turn ends.
    """

    def __init__(self, turns: Turns, client: tuple[object, ...], call: Callable[[], T]) -> None:
        self.turns, self.client, self.call = turns, client, call
        self.future: Future[T] = Future()
        self.turn = Semaphore(0)  # released once for each turn after the first
        self.started = self.is_disconnected = False
        self.ends = 0.0

    def disconnect(self) -> None:
        """Mark the client as disconnected.

        Work that has not started is dropped. Started work ends at its next `give_way`.
        """
        self.is_disconnected = True
        if self.future.cancel():
            self.turns.drop(self)

    def end(self, error: BaseException) -> None:
        """End work that has not started, so that its `future` raises the error."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

    def give_way(self) -> None:
        if perf_counter() >= self.ends and not self.is_disconnected:
            self.turns.pass_on(self)
        if self.is_disconnected:
            raise Disconnected


_running = local()


def give_way() -> None:
    """Pass the turn on if the turn of this thread's work is over. Return when the work has the turn again.

    Work calls this every few milliseconds, at places where it can pause. Raises Disconnected if nobody waits for the
    result. In a thread without turns, it does nothing.
    """
    if (work := getattr(_running, "work", None)) is not None:
        work.give_way()


class Turns:
    """Runs the work of many clients in turns, one piece at a time. Any thread may use this object."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(MOST_STARTED, name)
        self._lock = Lock()
        self._waiting: OrderedDict[tuple[object, ...], deque[_Work]] = OrderedDict()  # the next client first
        self._started: set[_Work] = set()
        self._current: _Work | None = None
        self._closed = False

    def submit(self, call: Callable[[], T], client: tuple[object, ...] = ()) -> _Work[T]:
        """Queue a piece of work, and return it. The `future` of the returned work gets the result.

        Raises RequestError 503 after `close`.
        """
        work = _Work(self, client, call)
        with self._lock:
            if self._closed:
                raise _closed()
            self._queue(work)
            if self._current is None:
                self._next()
        return work

    def drop(self, work: _Work) -> None:
        """Remove work from the queue of its client."""
        with self._lock:
            if (queue := self._waiting.get(work.client)) is not None and work in queue:
                queue.remove(work)

    def pass_on(self, work: _Work) -> None:
        """Pass the turn on, and return when this work has the turn again. If no other work waits, `work` keeps the turn."""
        with self._lock:
            if not any(self._waiting.values()):
                work.ends = perf_counter() + TURN
                return
            self._queue(work)
            self._next()
        work.turn.acquire()

    def close(self) -> None:
        """Drop work that has not started, and end started work at its next `give_way`. Wait until all threads have ended.

        The futures of the dropped and the ended work raise Disconnected.
        """
        with self._lock:
            self._closed = True
            refused = [work for queue in self._waiting.values() for work in queue if not work.started]
            for work in refused:
                self._waiting[work.client].remove(work)
            for work in self._started:
                work.is_disconnected = True
        for work in refused:
            work.end(Disconnected())
        self._threads.shutdown()

    def _queue(self, work: _Work) -> None:
        self._waiting.setdefault(work.client, deque()).append(work)

    def _next(self) -> None:
        """Give the turn to the work of the next client. The caller holds the lock."""
        while (work := self._pick()) is not None and not self._goes_on(work):
            pass
        self._current = work

    def _goes_on(self, work: _Work) -> bool:
        """Give a piece of work its turn. Return False if the work needs a thread and the system cannot start one."""
        work.ends = perf_counter() + TURN
        if work.started:
            work.turn.release()
            return True
        work.started = True
        self._started.add(work)
        try:
            self._threads.submit(self._do, work)
        except RuntimeError:
            work.started = False  # the pool may have queued the work, and no thread must run it
            self._started.discard(work)
            work.end(RequestError("the system has no more threads: try again", status=503, retry_after=1))
        return work.started

    def _pick(self) -> _Work | None:
        num_started, clients = len(self._started), {work.client for work in self._started}
        for client, queue in list(self._waiting.items()):
            may_begin = num_started < (MOST_STARTED // 2 if client in clients else MOST_STARTED)
            work = next((work for work in queue if work.started or may_begin), None)
            if work is not None:
                queue.remove(work)
                self._waiting.move_to_end(client)
            if not queue:
                del self._waiting[client]
            if work is not None:
                return work
        return None

    def _do(self, work: _Work[T]) -> None:
        with self._lock:  # waits until `_goes_on` has returned
            if not work.started:
                return
        try:
            if work.future.set_running_or_notify_cancel():
                _running.work = work
                try:
                    if work.is_disconnected:
                        raise Disconnected
                    result = work.call()
                except BaseException as error:
                    work.future.set_exception(error)
                    del error  # its traceback keeps the request in memory
                else:
                    work.future.set_result(result)
                    del result
        finally:
            _running.work = None
            with self._lock:
                self._started.discard(work)
                self._next()


class PromptThreads:
    """Makes prompts in threads, for the event loop. Small and large prompts have separate turns.

    room: how many more bytes of requests may be added. Requests take memory while they wait, so a large request that exceeds
    `room` is refused. Small requests are never refused for lack of `room`.
    num_open: the number of prompts that wait or are being made.
    """

    def __init__(self, room: int) -> None:
        self.room, self.num_open = room, 0
        self._small, self._large = (Turns(f"{size}-prompts") for size in ("small", "large"))

    async def run(self, num_bytes: int, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run `work` in a thread, and return its result.

        If the caller is cancelled, work that has not started is dropped, and started work ends at its next `give_way`.
        Raises RequestError 503 if a large request exceeds `room`, if the system has no more threads, or after `close`.

        num_bytes: the size of the request.
        """
        is_large = num_bytes >= LARGE
        if is_large and num_bytes > self.room:
            raise RequestError("too many large requests are waiting: try again", status=503, retry_after=1)
        turns = self._large if is_large else self._small
        started = turns.submit(partial(work, *arguments, **named), CLIENT.get())
        self.num_open += 1
        self.room -= num_bytes
        try:
            return await asyncio.wrap_future(started.future)
        except Disconnected:
            raise _closed() from None
        finally:
            started.disconnect()  # no effect on work that has ended
            self.num_open -= 1
            self.room += num_bytes

    def close(self) -> None:
        """End all work: see `Turns.close`."""
        for turns in (self._small, self._large):
            turns.close()


class WaitingThread:
    """One thread for work that only waits for a disk or for the engine. Even many requests share this one thread.

    If a caller is cancelled, its work is dropped if it is still queued, and continues if it already runs. Any thread may use
    the object.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._lock, self._closed = Lock(), False

    async def run(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run `work` after all earlier work, and return its result. Raises RequestError 503 after `close`."""
        with self._lock:
            if self._closed:
                raise _closed()
            waiting = self._executor.submit(self._do, partial(work, *arguments, **named))
        return await asyncio.wrap_future(waiting)

    def close(self) -> None:
        """Wait until the running work has ended. All queued work fails with RequestError 503."""
        with self._lock:
            self._closed = True
        self._executor.shutdown()

    def _do(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise _closed()
        return work()
