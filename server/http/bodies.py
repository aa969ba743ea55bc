"""Reads the bodies of requests, with limits on the size and speed of each body, and on the memory of all bodies together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BytesIO

from starlette.requests import ClientDisconnect, Request

from .api_errors import RequestError
from .encodings import Unpacking, encoding_of

FREE = 64 << 10  # bytes of each body that are not counted, since uvicorn buffers as much for any connection
LARGEST = 4  # how many bodies of the largest size may be in memory at a time


@dataclass(slots=True)
class Bodies:
    """Reads bodies. Only the event loop may use this object.

    most: the most bytes of one body.
    room: bytes of memory that are still free for bodies.
    patience: the most seconds without a received byte.
    rate: bytes a second that must arrive on average after the first `patience` seconds.
    """

    most: int
    room: int
    patience: float = 30.0
    rate: float = 10_000.0

    @classmethod
    def up_to(cls, most: int) -> Bodies:
        """Make a reader for bodies of at most `most` bytes each."""
        return cls(most, LARGEST * most)

    async def read(self, request: Request, reservation: Reservation | None = None) -> bytes:
        """Read a whole body, and decompress it. Raises ClientDisconnect and RequestError.

        The status of the error is 408 for a slow body, 413 for a large body, 503 if there is no room now, and 400 or 415
        if the body cannot be decompressed.

        reservation: reserves memory for the body until the caller frees it. If `reservation` is None, the memory is freed
        after the read.
        """
        if reservation is None:
            with Reservation(self) as reservation:
                return await self.read(request, reservation)
        encoding = encoding_of(request.headers)
        body = BytesIO()  # `getvalue` copies nothing
        async for chunk in self._chunks(request):
            body.write(chunk)
            if body.tell() > self.most:
                raise self._too_large()
            reservation.reserve(body.tell())
        return await self._unpacked(encoding, body.getvalue(), reservation) if encoding else body.getvalue()

    async def _unpacked(self, encoding: str, packed: bytes, reservation: Reservation) -> bytes:
        """Decompress a body, each piece in a thread. Raises RequestError."""
        unpacking, body = Unpacking(encoding, packed), BytesIO()
        while piece := await asyncio.to_thread(unpacking.piece):
            body.write(piece)
            if body.tell() > self.most:
                raise self._too_large(" when it is unpacked")
            reservation.reserve(len(packed) + body.tell())
        reservation.reserve(body.tell())
        return body.getvalue()

    def _too_large(self, when: str = "") -> RequestError:
        return RequestError(f"the body is larger than {self.most:,} bytes{when}, the server's --max-body", status=413)

    async def _chunks(self, request: Request) -> AsyncIterator[bytes]:
        """Yield the pieces of a body as they arrive. Raises ClientDisconnect, and RequestError 408 for a late piece."""
        clock, length, is_whole = asyncio.get_running_loop().time, 0, False
        began = clock()
        while not is_whole:
            try:
                async with asyncio.timeout_at(self.patience + min(clock(), began + length / self.rate)):
                    message = await request.receive()
            except TimeoutError:
                late = f"the body did not arrive: {length:,} bytes came in {clock() - began:.0f} s"
                raise RequestError(late, status=408, headers={"Connection": "close"}) from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk, is_whole = message.get("body", b""), not message.get("more_body", False)
            length += len(chunk)
            yield chunk


class Reservation:
    """The memory that is reserved for the body of one request. As a context manager it frees the memory at its end."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._bytes = bodies, 0

    def reserve(self, size: int) -> None:
        """Change the reservation to a body of `size` bytes. Raises RequestError 503 if too little memory is free."""
        more = max(size - FREE, 0) - self._bytes
        if more > self._bodies.room:
            raise RequestError("too many large bodies are being received: try again", status=503, retry_after=1)
        self._bodies.room -= more
        self._bytes += more

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *error: object) -> None:
        self.reserve(0)
