"""Threads for work that takes processor time, so that requests which only wait for a file are not held up by it.

    client a   [a1] [a2] [a3]      One piece of work has the turn. It hands the turn on after `TURN` seconds, where it calls
    client b   [b1]                `give_way`: to the next client's first work, and then stands last among its client's.
    turns      a1 b1 a2 b1 a3 ...

So a client waits for a turn of each other client that has work, however large theirs is and however much of it waits. Work
that has begun keeps a thread: a client with some begins more only while half the threads are free, so that others may begin.
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
LARGE = 64 << 10  # bytes: prompts of bodies of this size or more are made in the thread for large ones
TURN = 0.05  # s
MOST_BEGUN = 64  # pieces of work, each in a thread of its own that sleeps while it is another one's turn
CLIENT: ContextVar[tuple[object, ...]] = ContextVar("client", default=())
"""Who sent the request that is handled: an address, and a key."""


def note_client(scope: Scope, key: bytes) -> None:
    """Note who sent a request, for the work that is done for it. key: the server's; by others a client would be many."""
    address = scope.get("client") or ("",)
    CLIENT.set((address[0], key))


class ClientLeft(BaseException):
    """Ends work whose result nobody waits for. No `Exception`: it would be taken for a failure of the template."""


def _closed() -> RequestError:
    return RequestError("the server is shutting down", status=503)


class _Work(Generic[T]):
    """Work for one client. begun: it has a thread. has_left: its client has gone. ends: when its turn does."""

    def __init__(self, turns: Turns, client: tuple[object, ...], call: Callable[[], T]) -> None:
        self.turns, self.client, self.call = turns, client, call
        self.future: Future[T] = Future()
        self.turn = Semaphore(0)  # free once for each turn behind the first
        self.begun = self.has_left = False
        self.ends = 0.0

    def leave(self) -> None:
        """Do not begin it, or end it at its next call of `give_way`."""
        self.has_left = True
        if self.future.cancel():
            self.turns.drop(self)

    def end(self, error: BaseException) -> None:
        """End it before it has begun."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

    def give_way(self) -> None:
        if perf_counter() >= self.ends and not self.has_left:
            self.turns.pass_on(self)
        if self.has_left:
            raise ClientLeft


_running = local()


def give_way() -> None:
    """Let other work have its turn, if this thread's has lasted. Work calls it every few milliseconds, where it can wait.

    Raises ClientLeft if nobody waits for the result. In any other thread it does nothing.
    """
    if (work := getattr(_running, "work", None)) is not None:
        work.give_way()


class Turns:
    """Does the work of many clients, one piece at a time, in turns. Safe from any thread."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(MOST_BEGUN, name)
        self._lock = Lock()
        self._waiting: OrderedDict[tuple[object, ...], deque[_Work]] = OrderedDict()  # the client whose turn is next first
        self._begun: set[_Work] = set()
        self._current: _Work | None = None
        self._closed = False

    def submit(self, call: Callable[[], T], client: tuple[object, ...] = ()) -> _Work[T]:
        """Queue work; its future has the result."""
        work = _Work(self, client, call)
        with self._lock:
            if self._closed:
                raise _closed()
            self._queue(work)
            if self._current is None:
                self._next()
        return work

    def drop(self, work: _Work) -> None:
        """Take work out of the queue that has not begun."""
        with self._lock:
            if (queue := self._waiting.get(work.client)) is not None and work in queue:
                queue.remove(work)

    def pass_on(self, work: _Work) -> None:
        """Return when it is this work's turn again: at once if no other waits."""
        with self._lock:
            if not any(self._waiting.values()):
                work.ends = perf_counter() + TURN
                return
            self._queue(work)
            self._next()
        work.turn.acquire()

    def close(self) -> None:
        """End running work where it gives way, and return when it has ended; what has not begun is not done.

        The futures of both have ClientLeft.
        """
        with self._lock:
            self._closed = True
            refused = [work for queue in self._waiting.values() for work in queue if not work.begun]
            for work in refused:
                self._waiting[work.client].remove(work)
            for work in self._begun:
                work.has_left = True
        for work in refused:
            work.end(ClientLeft())
        self._threads.shutdown()

    def _queue(self, work: _Work) -> None:
        self._waiting.setdefault(work.client, deque()).append(work)

    def _next(self) -> None:
        """Give the turn to the next client's work. The lock is held."""
        while (work := self._pick()) is not None and not self._goes_on(work):
            pass
        self._current = work

    def _goes_on(self, work: _Work) -> bool:
        """Give work the turn. False: it needs a thread and the system gives none, so the turn is the next one's."""
        work.ends = perf_counter() + TURN
        if work.begun:
            work.turn.release()
            return True
        work.begun = True
        self._begun.add(work)
        try:
            self._threads.submit(self._do, work)
        except RuntimeError:
            work.begun = False  # for a thread that finds it in the pool's queue
            self._begun.discard(work)
            work.end(RequestError("the system gives no more threads: try again", status=503, retry_after=1))
        return work.begun

    def _pick(self) -> _Work | None:
        num_begun, clients = len(self._begun), {work.client for work in self._begun}
        for client, queue in list(self._waiting.items()):
            may_begin = num_begun < (MOST_BEGUN // 2 if client in clients else MOST_BEGUN)
            work = next((work for work in queue if work.begun or may_begin), None)
            if work is not None:
                queue.remove(work)
                self._waiting.move_to_end(client)
            if not queue:
                del self._waiting[client]
            if work is not None:
                return work
        return None

    def _do(self, work: _Work[T]) -> None:
        with self._lock:  # not before `_goes_on` has returned
            if not work.begun:
                return
        try:
            if work.future.set_running_or_notify_cancel():
                _running.work = work
                try:
                    if work.has_left:
                        raise ClientLeft
                    result = work.call()
                except BaseException as error:
                    work.future.set_exception(error)
                    del error  # it would hold the request with its traceback
                else:
                    work.future.set_result(result)
                    del result
        finally:
            _running.work = None
            with self._lock:
                self._begun.discard(work)
                self._next()


class PromptThreads:
    """Small requests take turns, and so do large ones, which may take a second each. The event loop's.

    room: bytes of requests that may still wait: a waiting request is held in memory. num_open: prompts that are being
    made or wait for their turn.
    """

    def __init__(self, room: int) -> None:
        self.room, self.num_open = room, 0
        self._small, self._large = (Turns(f"{size}-prompts") for size in ("small", "large"))

    async def run(self, num_bytes: int, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run `work` in a thread and return its result. num_bytes: of the request.

        If the caller is cancelled, work that waits is not begun, and work that runs ends where it gives way. Raises
        RequestError 503 for a large request if the waiting ones leave no room for it.
        """
        is_large = num_bytes >= LARGE
        if is_large and num_bytes > self.room:
            raise RequestError("too many large requests wait to be read: try again", status=503, retry_after=1)
        turns = self._large if is_large else self._small
        begun = turns.submit(partial(work, *arguments, **named), CLIENT.get())
        self.num_open += 1
        self.room -= num_bytes
        try:
            return await asyncio.wrap_future(begun.future)
        except ClientLeft:
            raise _closed() from None
        finally:
            begun.leave()  # no effect on work that has ended
            self.num_open -= 1
            self.room += num_bytes

    def close(self) -> None:
        """End running work; waiting work is not done."""
        for turns in (self._small, self._large):
            turns.close()


class WaitingThread:
    """One thread for requests that wait for a disk or for the engine: however many there are, they take no other thread.

    What has begun goes on when its caller is cancelled, and what waits for its thread is not run then. Any thread's.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._lock, self._closed = Lock(), False

    async def run(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run `work` behind all that came before, and return its result. Raises RequestError 503 once it is closed."""
        with self._lock:
            if self._closed:
                raise _closed()
            waiting = self._executor.submit(self._do, partial(work, *arguments, **named))
        return await asyncio.wrap_future(waiting)

    def close(self) -> None:
        """Wait for running work to end; waiting work is not run."""
        with self._lock:
            self._closed = True
        self._executor.shutdown()

    def _do(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise _closed()
        return work()
