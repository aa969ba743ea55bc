"""Threads of their own for work that takes processor time, so that it holds up nothing that waits for a file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from ..errors import RequestError

P = ParamSpec("P")
T = TypeVar("T")
LARGE = 64 << 10  # bytes of a body from which its prompt is made in the thread for large ones


class PromptThreads:
    """One thread for small requests and one for large ones, which may take a second each.

    room: bytes of requests that may still wait; a request that waits is held in memory. num_open: prompts that are made or
    wait for it. The event loop's.
    """

    def __init__(self, room: int) -> None:
        self.room, self.num_open = room, 0
        self._small, self._large = (ThreadPoolExecutor(1, f"{size}-prompts") for size in ("small", "large"))

    async def run(self, num_bytes: int, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What `work` returns. Cancelled while it waits for the thread, it is not run. num_bytes: of the request.

        Raises RequestError 503 where there is no room for one that is large.
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
        """Returns when what runs is done; what waits is not run."""
        for executor in (self._small, self._large):
            executor.shutdown(cancel_futures=True)
