"""Requests of one token for what stands in front of the documents that a client still searches for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

MOST = 16  # under way at a time
LARGEST = 1 << 20  # bytes of a body that is held for one


class WarmUps:
    """Those that are under way. Used by one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def has_room(self, num_bytes: int) -> bool:
        """Return whether another one, with a body of so many bytes, may start."""
        return len(self._tasks) < MOST and num_bytes <= LARGEST

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Begin one; nobody waits for its end."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """End all of them."""
        for task in self._tasks:
            task.cancel()
