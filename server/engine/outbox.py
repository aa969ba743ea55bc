"""Events on their way out of the engine: one call into the event loop a step, for all streams together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ..errors import RequestError
from .events import Event, Failure
from .generation import Generation

logger = logging.getLogger("slotcache.engine")


class Outbox:
    """Events of a step, in order. The engine's thread puts them in and sends them."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._events: list[tuple[Generation, Event]] = []

    def put(self, generation: Generation, event: Event) -> None:
        self._events.append((generation, event))

    def send(self) -> None:
        """Hand the events to the event loop, if any."""
        if not self._events:
            return
        events, self._events = self._events, []
        self.call(_deliver, events)

    def call(self, act: Callable[..., None], *arguments: object) -> None:
        """Have the event loop call a function."""
        assert self.loop is not None
        try:
            self.loop.call_soon_threadsafe(act, *arguments)
        except RuntimeError:  # the loop is closed: no stream is left
            logger.debug("%s after the loop closed", act)


def _deliver(events: Sequence[tuple[Generation, Event]]) -> None:
    """Hand events to their streams; runs in the event loop. A failure in one stream must not reach the next."""
    for generation, event in events:
        try:
            generation.deliver(event)
        except Exception:
            logger.exception("the end of a request could not be dealt with")
            generation.events.put(Failure(RequestError("the server failed at the end of this", status=500)))
