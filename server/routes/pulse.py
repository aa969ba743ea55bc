"""Comments in a stream that is silent for long, so that no proxy on its way closes it."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Send

PING: Message = {"type": "http.response.body", "body": b":\n\n", "more_body": True}


class Pulse:
    """Passes a response's messages on, and sends a comment whenever `interval` seconds have passed without one.

    One timer for the whole stream: a message costs no more than reading the clock.
    """

    def __init__(self, send: Send, interval: float) -> None:
        self._send, self._interval = send, interval
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Future[None] | None = None

    async def send(self, message: Message) -> None:
        """Pass a message on. Comments begin behind the first one and end in front of the last."""
        self._last = self._loop.time()
        if message["type"] == "http.response.start" and self._interval > 0:
            self._timer = self._loop.call_at(self._last + self._interval, self._beat)
        elif not message.get("more_body"):
            self.stop()
        await self._send(message)

    def stop(self) -> None:
        for waiting in (self._timer, self._ping):
            if waiting is not None:
                waiting.cancel()
        self._timer = self._ping = None

    def _beat(self) -> None:
        now = self._loop.time()
        if now >= self._last + self._interval:
            self._last, self._ping = now, asyncio.ensure_future(self._send(PING))
            self._ping.add_done_callback(_look_at)
        self._timer = self._loop.call_at(self._last + self._interval, self._beat)


def _look_at(ping: asyncio.Future[None]) -> None:
    """Drop the error of a client that has gone: the stream finds out by itself."""
    if not ping.cancelled():
        ping.exception()
