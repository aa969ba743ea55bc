"""Closes stalled HTTP connections: uvicorn alone waits forever for the end of a head and for a client that reads nothing.

    made -> head -> request -> answer -> (kept alive) -> head -> ...
            `head`  `Bodies`   `patience`  uvicorn's

A handler sees a closed connection as a client that has left, and cancels its work.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's HTTP/1.1 with time limits, which reads in small bites.

    head: seconds for a request's head, or for the rest of a body after its answer. patience: seconds in which a client must
    take all written bytes, or `rate` bytes a second. bite: bytes that are read at a time. A body may come in chunks of one
    byte, each of which takes 12 us to parse, and the event loop is blocked until all bytes of a bite are parsed.
    """

    head = 20.0
    patience = 30.0
    rate = 10_000.0
    bite = 8 << 10

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._bite = bytearray(self.bite)
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # `pause_writing` comes as soon as the system takes no more
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._bite

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._bite[:nbytes]))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_head()
        else:
            self._stop_head_timer()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # ---- answers ----------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _expect_reading(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.patience, self._check_progress, left)

    def _check_progress(self, before: int) -> None:
        """Close the connection if the client took too little since `before` bytes were left to send."""
        if before - self.transport.get_write_buffer_size() < self.patience * self.rate:
            self.transport.abort()
        else:
            self._expect_reading()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
