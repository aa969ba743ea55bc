"""uvicorn's HTTP protocol with time limits, and with capital letters in header names.

    phase    its time limit
    head     `Connection.head`, which includes the handshake of TLS
    body     `Bodies.patience` and `Bodies.rate`
    answer   `Connection.patience` and `Connection.rate`
    idle     uvicorn's limit for keep-alive

A kept-alive connection goes through the phases again and again. When a connection is closed, the handler of its request
sees that the client has disconnected, and cancels the work. Once the limit of connections is reached, connections that wait
for their clients may be closed early: see `connections.py`.

The parser is h11, and the event loop is asyncio's. httptools would save 0.1 ms a request, which is little compared with the
engine's time. But httptools accepts a head of any length (a head of 1 MiB got status 200), and would need its own code for
all limits of this module. uvloop accepts connections without a limit. docs/decisions.md has the figures.
"""

from __future__ import annotations

import asyncio
from ssl import SSLError
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .connections import Connections
from .tls import TlsFilter

KEEP_ALIVE = 20  # s until an idle connection is closed; not while httpx (for 5 s) or aiohttp (for 15 s) may reuse it
SHORTCUT = "shortcut"  # the key of the `Shortcut` in a request's state


class Shortcut:
    """Writes the pieces of one streamed answer directly to the connection. The pieces bypass h11 and the middleware.

    Without this bypass, h11 would be the slowest step in the sending of a piece. The middleware needs only the head of the
    answer, which is sent as usual. Each piece is an HTTP chunk, since the length of the answer is not known in advance.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._cycle = connection, connection.cycle
        self._has_chunks = connection.scope["http_version"] == "1.1"  # HTTP/1.0 has no chunks

    @property
    def is_open(self) -> bool:
        """Whether `write` may be used: the answer has begun and not ended, and no written bytes wait for the client."""
        cycle, connection = self._cycle, self._connection
        is_stopped = connection.flow.write_paused or cycle.disconnected or connection.transport.is_closing()
        return self._has_chunks and cycle.response_started and not (cycle.response_complete or is_stopped)

    def write(self, data: bytes) -> None:
        """Write a piece of the body. The piece must not be empty, since an empty chunk would end the body."""
        transport = self._connection.gathering
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        transport.flush()


MOST_GATHERED = 64 << 10  # bytes


class GatheringTransport:
    """A transport that joins the small writes of one turn of the event loop into one system call.

    Most of the time of a small write is the system call. An answer's head is sent together with the first event, and the
    last event together with the end of the body. All calls other than writes are passed on to `transport`.

    tls: the TLS layer; None for plain HTTP.
    """

    def __init__(
        self, transport: asyncio.WriteTransport, loop: asyncio.AbstractEventLoop, tls: TlsFilter | None = None
    ) -> None:
        self._transport, self._loop, self._tls = transport, loop, tls
        self._gathered = bytearray()
        self._flush: asyncio.Handle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def get_extra_info(self, name: str, default: object = None) -> Any:
        """Return information about the transport. uvicorn infers http or https from the presence of `sslcontext`."""
        if name == "sslcontext" and self._tls is not None:
            return self._tls.context
        return self._transport.get_extra_info(name, default)

    def write(self, data: bytes) -> None:
        self._gathered += data
        if len(self._gathered) >= MOST_GATHERED:
            self.flush()
        elif self._flush is None:
            self._flush = self._loop.call_soon(self.flush)

    def flush(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if self._transport.is_closing():
            return
        gathered, self._gathered = self._gathered, bytearray()
        if self._tls is not None:
            gathered = self._tls.sealed(gathered)
        if gathered:
            self._transport.write(gathered)

    def close(self) -> None:
        self.flush()
        if self._tls is not None and not self._transport.is_closing() and (last := self._tls.end()):
            self._transport.write(last)
        self._transport.close()


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """One HTTP/1.1 connection of uvicorn, with time limits and small reads.

    head: the most seconds until a request's head has arrived. If the body of a request still arrives after the answer has
    ended, the rest of the body must arrive within `head` seconds, too.
    patience: if written bytes wait for the client, the client must read all of these bytes within `patience` seconds, or
    must read at least `rate` bytes a second.
    bite: the most bytes of one read. The event loop waits while the bytes of a read are parsed, which takes 12 us even for a
    chunk of one byte.
    credit: the most seconds for which a body counts as making progress although no byte arrives. For every `rate` bytes that
    arrive, the body counts as making progress for one more second, up to `credit`.
    """

    server_state: Connections

    head = 20.0
    patience = 30.0
    rate = 10_000.0
    bite = 8 << 10
    credit = 2.0

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _progresses_until = 0.0  # the body counts as making progress until then, by the loop's clock

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._bite = bytearray(self.bite)
        self._tls = TlsFilter(context) if (context := self.server_state.tls) else None
        self.gathering = GatheringTransport(transport, self.loop, self._tls)
        super().connection_made(self.gathering)  # type: ignore[arg-type]
        transport.set_write_buffer_limits(0)  # so `pause_writing` is called as soon as the system accepts no more bytes
        self._expect_head()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.works(self)
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._bite

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._bite[:nbytes])
        if self._tls is None:
            self.data_received(data)
        else:
            self._unseal(data, self._tls)

    def _unseal(self, data: bytes, tls: TlsFilter) -> None:
        """Decrypt received bytes and parse them. Messages of TLS itself, such as a handshake, are answered."""
        try:
            for piece in tls.received(data, self.bite):
                if not piece:
                    self.transport.close()
                elif not self.transport.is_closing():
                    self.data_received(piece)
        except SSLError as error:
            self.server_state.log("TLS with a client failed: %s", error.reason or error)
            self.transport.close()
        self.gathering.flush()

    def data_received(self, data: bytes) -> None:
        if self._is_asked:  # bytes that arrive with the head do not count as progress
            now = self.loop.time()
            self._progresses_until = min(max(self._progresses_until, now) + len(data) / self.rate, now + self.credit)
        super().data_received(data)
        if self._is_asked:
            self._stop_head_timer()
        else:
            self._expect_head()
        self._note()

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None and SHORTCUT not in (state := self.scope.setdefault("state", {})):
            state[SHORTCUT] = Shortcut(self)

    def eof_received(self) -> None:
        """Treat a client that closes its sending side as disconnected.

        Only a write would show whether such a client still reads.
        """
        self.gathering.flush()  # asyncio closes the transport after this call

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # ---- early end --------------------------------------------------------------------------------------------------

    @property
    def _is_asked(self) -> bool:
        """Whether a request has begun and its answer has not ended."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def waits(self) -> bool:
        """Whether the connection waits for its client to send a head, the next request, or the rest of a body."""
        if self.flow.write_paused:
            return False  # the client has not read the whole last answer
        if not self._is_asked:
            return True
        return self.cycle.more_body and not self.cycle.response_started and not self.flow.read_paused

    @property
    def may_end(self) -> bool:
        return self.waits and not (self._is_asked and self.loop.time() < self._progresses_until)

    def end(self) -> None:
        if self.scope is not None:
            self.scope.setdefault("state", {})["is_quiet"] = True  # one line a minute reports all closed connections
        self.gathering.flush()  # the last bytes of an answer
        self.transport.abort()

    def _note(self) -> None:
        if self.waits and not self.transport.is_closing():
            self.server_state.waits(self)
        else:
            self.server_state.works(self)

    # ---- answers ----------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()
        self._note()

    def _expect_reading(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.patience, self._check_progress, left)

    def _check_progress(self, before: int) -> None:
        """Close the connection if the client reads too slowly. before: bytes that were unsent `patience` seconds ago."""
        if before - self.transport.get_write_buffer_size() < self.patience * self.rate:
            self.transport.abort()
        else:
            self._expect_reading()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


# ---- The header names of answers, spelt like llama-server's: `Content-Type`. --------------------------------------------
#
# HTTP ignores the case of these names, but scripts that search the head of an answer know only one spelling.

IRREGULAR = {b"etag": b"ETag", b"www-authenticate": b"WWW-Authenticate"}


class Spelling:
    """Capitalises each word of a header's name, as in `Content-Type`. `IRREGULAR` has the exceptions."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def spell_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [(_spelt(name), value) for name, value in message["headers"]]
            await send(message)

        await self._app(scope, receive, spell_and_send)


def _spelt(name: bytes) -> bytes:
    return IRREGULAR.get(name.lower()) or name.title()
