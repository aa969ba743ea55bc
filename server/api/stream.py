"""Sends answers as streams of events, with pings during silence, and collects answers that are sent whole."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from ..engine.generation import Delta, End, Event, Failure, Generation, PromptProgress, account
from ..http.api_errors import RequestError, failed
from ..http.connection import SHORTCUT, Shortcut
from .reply import ReplyFormat, Spell, WholeAnswer

logger = logging.getLogger("slotcache")
EARLY = "slotcache.early"  # key in an ASGI scope: the reply of a stream that began before its model was loaded


def early_of(request: Request) -> ReplyFormat | None:
    """Return the reply of a stream that began before its model was loaded; None for any other request."""
    return request.scope.get(EARLY)


class EventStream(StreamingResponse):
    """Streams the events of generations. At the end or at a disconnect, `disconnect` is called for each generation.

    reply: makes the events. If `later` is given, `reply` has no generations and makes only pings.
    later: waits until the model is loaded, then returns the reply that makes all further events, or a response that is
        sent as it is; None: the model is loaded already.
    """

    def __init__(
        self, request: Request, reply: ReplyFormat, later: Callable[[], Awaitable[Response | ReplyFormat]] | None = None
    ) -> None:
        self._request, self._reply = request, reply
        pieces = self._pieces(reply) if later is None else self._pieces_later(reply, later)
        super().__init__(
            self._to_the_end(pieces), headers={"Cache-Control": "no-store"}, media_type=reply.envelope.media_type
        )
        asked = reply.envelope.options.sse_ping_interval
        self._ping_interval = request.app.state.app.settings.sse_ping_interval if asked is None else asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._pings = ping = SsePing(send, self._ping_interval, lambda: self._reply.ping())
        self._offer_text()
        try:
            await super().__call__(scope, receive, ping.send)
        finally:
            ping.stop()
            for generation in self._reply.envelope.generations:
                generation.events.take_now = None
                self._reply.envelope.disconnect(generation)

    def _offer_text(self) -> None:
        """Let generations write their text directly to the connection, if the connection allows this."""
        shortcut = self._request.scope.get("state", {}).get(SHORTCUT)
        if shortcut is not None:
            for index, generation in enumerate(self._reply.envelope.generations):
                generation.events.take_now = partial(self._write, shortcut, index)

    def _write(self, shortcut: Shortcut, index: int, delta: Delta) -> bool:
        """Write a piece of text directly to the connection. Return whether the piece was written.

        While a ping is being sent, or while the client reads too slowly, no piece is written.
        """
        if self._pings.is_sending or not shortcut.is_open:
            return False
        if sent := b"".join(self._reply.delta(index, delta)):
            shortcut.write(sent)
            self._pings.note()
        return True

    def _pieces(self, reply: ReplyFormat) -> AsyncIterator[bytes]:
        generations = reply.envelope.generations
        self._request.state.account = partial(account, generations)
        return _written(reply, _events(generations, reply.envelope.spell))

    async def _to_the_end(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the pieces of a stream. An error becomes the last event, since the status is already sent."""
        try:
            async for piece in pieces:
                yield piece
        except RequestError as error:
            self._request.state.error = error
        except Exception as error:
            logger.exception("a stream failed", extra={"fields": {"request_id": self._request.state.request_id}})
            self._request.state.error = failed(error)
        else:
            return
        yield b"".join(self._reply.fail(self._request.state.error))

    async def _pieces_later(
        self, early: ReplyFormat, later: Callable[[], Awaitable[Response | ReplyFormat]]
    ) -> AsyncIterator[bytes]:
        if self._ping_interval > 0:
            yield b"".join(early.ping())
        self._request.scope[EARLY] = early
        try:
            reply = await later()
        finally:
            del self._request.scope[EARLY]  # the early reply may contain texts of the request
        del early, later  # they hold the body in memory
        if isinstance(reply, Response):
            yield bytes(reply.body)
            return
        pieces = self._pieces(reply)
        self._reply = reply
        self._offer_text()
        async for piece in pieces:
            yield piece


async def _events(generations: Sequence[Generation], spell: Spell | None) -> AsyncIterator[tuple[int, Event]]:
    """Yield the events of all generations as they arrive, each with the index of its choice."""
    if len(generations) == 1:
        async for event in _events_of(generations[0], spell):
            yield 0, event
        return
    reading = {asyncio.ensure_future(_next(each, spell)): index for index, each in enumerate(generations)}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for read in sorted(done, key=lambda read: reading[read]):
                index, event = reading.pop(read), read.result()
                yield index, event
                if not isinstance(event, End | Failure):  # after this event is sent: `_write` could overtake it
                    reading[asyncio.ensure_future(_next(generations[index], spell))] = index
    finally:
        for read in reading:
            read.cancel()


async def _events_of(generation: Generation, spell: Spell | None) -> AsyncIterator[Event]:
    while True:
        event = await _next(generation, spell)
        yield event
        if isinstance(event, End | Failure):
            return


async def _next(generation: Generation, spell: Spell | None) -> Event:
    event = await generation.events.get()
    return replace(event, prompt=await spell(generation)) if spell and isinstance(event, End) else event


async def collect(
    generations: Sequence[Generation], abandon: Callable[[Generation], None], spell: Spell | None = None
) -> list[WholeAnswer]:
    """Return the whole answers of all generations, in order. Raises the RequestError of a generation that fails.

    abandon: ends an open generation.
    """
    try:
        return [await _collect(generation, spell) for generation in generations]
    finally:
        for generation in generations:
            abandon(generation)


async def _collect(generation: Generation, spell: Spell | None) -> WholeAnswer:
    deltas: list[Delta] = []
    async for event in _events_of(generation, spell):
        match event:
            case Failure(error):
                raise error
            case Delta():
                deltas.append(event)
            case End():
                return WholeAnswer((*deltas, event.delta()), event)
    raise AssertionError("a generation ends with an end")


async def _written(reply: ReplyFormat, events: AsyncIterator[tuple[int, Event]]) -> AsyncIterator[bytes]:
    """Yield the server-sent events of an answer.

    events: the events of all choices, each with the index of its choice. A choice ends with an End or a Failure.
    """
    ends: dict[int, End] = {}
    if first := reply.begin():
        yield b"".join(first)
    async for index, event in events:
        match event:
            case PromptProgress():
                sent = reply.progress(index, event)
            case Delta():
                sent = reply.delta(index, event)
            case End(text, tokens=tokens):
                sent = reply.delta(index, event.delta()) if text or tokens else []
                sent += reply.end(index, event)
                ends[index] = event
            case Failure(error):
                sent = reply.fail(error)
        if sent:  # an empty piece would delay the next ping
            yield b"".join(sent)
        if isinstance(event, Failure):
            return
    yield b"".join(reply.close([ends[index] for index in sorted(ends)]))


# ---- Pings during a long silence in a stream, so that neither a proxy nor the client gives up. --------------------------


class SsePing:
    """Passes a response's messages on, and sends a ping whenever `interval` seconds have passed without a message.

    event: returns the ping. The ping should be an event rather than a comment: parsers drop comments, and a client that
    waits for events would disconnect.

    A message does not restart the timer; `send` only records the time of the message. While a client reads nothing, at
    most one ping is queued for it.
    """

    def __init__(self, send: Send, interval: float, event: Callable[[], Sequence[bytes]]) -> None:
        self._send, self._interval, self._event = send, interval, event
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._ping: asyncio.Future[None] | None = None

    async def send(self, message: Message) -> None:
        """Pass a message on. Pings start after the first message and end before the last message."""
        self._last = self._loop.time()
        if message["type"] == "http.response.start" and self._interval > 0:
            self._timer = self._loop.call_at(self._last + self._interval, self._beat)
        if self._ping is not None and self.is_sending:
            await asyncio.wait([self._ping])  # the ping goes first, since its sequence number is lower
        if not message.get("more_body") and message["type"] != "http.response.start":
            self.stop()
        await self._send(message)

    @property
    def is_sending(self) -> bool:
        return self._ping is not None and not self._ping.done()

    def note(self) -> None:
        """Record that a piece was sent without `send`. The next ping comes at least `interval` seconds after this piece."""
        self._last = self._loop.time()

    def stop(self) -> None:
        for waiting in (self._timer, self._ping):
            if waiting is not None:
                waiting.cancel()
        self._timer = self._ping = None

    def _beat(self) -> None:
        now = self._loop.time()
        if now >= self._last + self._interval:
            self._last = now
            if not self.is_sending:
                ping: Message = {"type": "http.response.body", "body": b"".join(self._event()), "more_body": True}
                self._ping = asyncio.ensure_future(self._send(ping))
                self._ping.add_done_callback(_look_at)
        self._timer = self._loop.call_at(self._last + self._interval, self._beat)


def _look_at(ping: asyncio.Future[None]) -> None:
    """Ignore the error of a ping to a disconnected client. The disconnect itself is detected by the stream."""
    if not ping.cancelled():
        ping.exception()
