"""Threads for work that takes processor time, so that requests which only wait for a file are not held up by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from .api_errors import RequestError

P = ParamSpec("P")
T = TypeVar("T")
LARGE = 64 << 10  # bytes: prompts of bodies of this size or more are made in the thread for large ones


class PromptThreads:
    """One thread for small requests and one for large ones, which may take a second each. The event loop's.

    room: bytes of requests that may still wait: a waiting request is held in memory. num_open: prompts that are being
    made or wait for a thread.
    """

    def __init__(self, room: int) -> None:
        self.room, self.num_open = room, 0
        self._small, self._large = (ThreadPoolExecutor(1, f"{size}-prompts") for size in ("small", "large"))

    async def run(self, num_bytes: int, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run `work` in a thread and return its result. num_bytes: of the request.

        If the caller is cancelled while the work waits for its thread, the work is not run. Raises RequestError 503 for a
        large request if the waiting ones leave no room for it.
        """
        is_large = num_bytes >= LARGE
        if is_large and num_bytes > self.room:
            raise RequestError("too many large requests wait to be read: try again", status=503, retry_after=1)
        executor = self._large if is_large else self._small
        self.num_open += 1
        self.room -= num_bytes
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, partial(work, *arguments, **named))
        finally:
            self.num_open -= 1
            self.room += num_bytes

    def close(self) -> None:
        """Wait for running work to end; waiting work is not run."""
        for executor in (self._small, self._large):
            executor.shutdown(cancel_futures=True)


class WaitingThread:
    """One thread for requests that wait for a disk or for the engine: however many there are, they take no other thread.

    What has begun goes on when its caller is cancelled, and what waits for its thread is not run then. Any thread's.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)

    async def run(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run `work` behind all that came before, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(work, *arguments, **named))

    def close(self) -> None:
        """Wait for running work to end; waiting work is not run."""
        self._executor.shutdown(cancel_futures=True)
