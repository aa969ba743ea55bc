"""Relays an upstream's answer to the client. Events are sent whole or not at all.

JSON is also sent whole or not at all, unless it is too large to be kept in memory. All other bodies are sent in pieces, as
they arrive.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Sequence
from io import BytesIO
from typing import Protocol

import aiohttp
from starlette.types import Send

from ..server.http.api_errors import RequestError
from ..server.http.bodies import Reservation
from .events import EventError, Events, closing, is_done
from .state import FrontState
from .upstream import OF_THE_HOP, headers_of

logger = logging.getLogger("slotcache")
JSON, EVENTS = "application/json", "text/event-stream"
TAG = re.compile("<[^<>]*>")
TAIL = 32  # bytes, enough for the last event of a stream
MOST_SAID = 1000  # bytes of a page that an error quotes
LARGEST = 16 << 20  # bytes of JSON that are kept until they are whole
Headers = Sequence[tuple[bytes, bytes]]


class StreamReader(Protocol):
    """Reads an answer while it is relayed, and decides which events the client gets."""

    def events(self, events: bytes) -> bytes:
        """Take whole events, and return the events that the client gets."""
        ...

    def body(self, status: int, body: bytes) -> None:
        """Read a whole answer that is not a stream."""
        ...


class Bystander:
    """Reads nothing. The client gets all events."""

    def events(self, events: bytes) -> bytes:
        return events

    def body(self, status: int, body: bytes) -> None:
        pass


class Relay:
    """The relay of one answer.

    path: the path of the request.
    more: headers that the client gets in addition to the upstream's, unless the upstream refuses the request.
    failure: the error with which the upstream's answer failed or broke off; None for an answer without such an error.
    is_refused: whether the upstream's status is an error.
    """

    def __init__(self, state: FrontState, send: Send, path: str, reader: StreamReader, *, more: Headers = ()) -> None:
        self._state, self._send, self._path, self._reader, self._more = state, send, path, reader, more
        self._has_started = self.is_refused = False
        self.failure: RequestError | None = None

    async def relay(self, response: aiohttp.ClientResponse) -> None:
        """Send the answer. Raises RequestError if the upstream fails before anything was sent."""
        self.is_refused = response.status >= 400
        pieces = self._state.upstream.pieces(response)
        is_plain = response.headers.get("Content-Encoding", "identity") == "identity"
        if is_plain and response.content_type == EVENTS:
            await self._relay_events(response, pieces)
        elif is_plain and response.content_type == JSON:
            await self._relay_json(response, pieces)
        elif is_plain and self.is_refused and self._is_chat:
            raise await _refusal(response, pieces)
        else:
            await self._relay_pieces(response, pieces)

    async def _relay_events(self, response: aiohttp.ClientResponse, pieces: AsyncIterator[bytes]) -> None:
        """Send whole events. If the stream breaks off, the last event is an error that says so."""
        events, end = Events(), b""
        try:
            async for piece in pieces:
                if whole := events.push(piece):
                    end = (end + whole)[-TAIL:]
                    if shown := self._reader.events(whole):
                        await self._begin(response, OF_THE_HOP | {b"content-length"})
                        await self._write(shown)
            if not events.is_between or (_ends_by_close(response) and self._is_chat and not is_done(end)):
                raise RequestError("the upstream broke off", status=502, code="upstream_broke_off")
        except (RequestError, EventError) as error:
            if not is_done(end):
                garbage = RequestError(f"the upstream sent {error}", status=502, code="upstream_garbage")
                await self._fail(error if isinstance(error, RequestError) else garbage)
        await self._begin(response, OF_THE_HOP | {b"content-length"})
        await self._write(b"", more=False)

    async def _relay_json(self, response: aiohttp.ClientResponse, pieces: AsyncIterator[bytes]) -> None:
        """Send a body once it is whole, so that an answer that breaks off becomes an error. Send a large body in pieces."""
        body = BytesIO()
        with Reservation(self._state.room.bodies) as room:
            async for piece in pieces:
                body.write(piece)
                if not _takes_room(room, body.tell()):
                    break
            else:
                self._reader.body(response.status, body.getvalue())
                await self._begin(response)
                await self._write(body.getvalue(), more=False)
                return
        await self._begin(response)
        await self._write(body.getvalue())
        del body
        await self._relay_pieces(response, pieces)

    async def _relay_pieces(self, response: aiohttp.ClientResponse, pieces: AsyncIterator[bytes]) -> None:
        """Send the pieces of a body.

        If the body breaks off after its first piece, the connection to the client is closed.
        """
        try:
            async for piece in pieces:
                await self._begin(response)
                await self._write(piece)
        except RequestError as error:
            if not self._has_started:
                raise
            self._note(error)
            return  # without its end: uvicorn closes the connection
        await self._begin(response)
        await self._write(b"", more=False)

    async def _begin(self, response: aiohttp.ClientResponse, without: frozenset[bytes] = OF_THE_HOP) -> None:
        """Send the answer's head to the client, unless it was sent before."""
        if self._has_started:
            return
        self._has_started = True
        headers = [*headers_of(response, without), *(() if self.is_refused else self._more)]
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def _write(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _fail(self, error: RequestError) -> None:
        """End a stream with an error."""
        if not self._has_started:
            raise error
        self._note(error)
        await self._write(closing(error, self._path))

    def _note(self, error: RequestError) -> None:
        """Record and log a failure that the client's status does not show."""
        self.failure = error
        logger.warning("%.128r: %s", self._path, error.message)

    @property
    def _is_chat(self) -> bool:
        return self._path.endswith("/chat/completions")


def _takes_room(room: Reservation, length: int) -> bool:
    """Reserve memory for the `length` bytes that an answer has so far.

    If there is no room for so many bytes, or if `length` is above `LARGEST`, return False.
    """
    try:
        room.reserve(length)
    except RequestError:
        return False
    return length <= LARGEST


def _ends_by_close(response: aiohttp.ClientResponse) -> bool:
    """Return whether an answer does not state its length, so that only the end of the connection ends the answer.

    An answer without a length looks complete even if it broke off because the upstream died.
    """
    return (
        "Content-Length" not in response.headers and "chunked" not in response.headers.get("Transfer-Encoding", "").lower()
    )


async def _refusal(response: aiohttp.ClientResponse, pieces: AsyncIterator[bytes]) -> RequestError:
    """Return an error page, such as that of a router without a backend, as a RequestError.

    Raises RequestError if the page breaks off.
    """
    said = b""
    async for piece in pieces:
        said += piece
        if len(said) > MOST_SAID:
            break
    text = " ".join(TAG.sub(" ", said[:MOST_SAID].decode("utf-8", "replace")).split())
    wait = response.headers.get("Retry-After", "")
    headers = {"Retry-After": wait} if wait.isascii() and wait.isprintable() and wait else None
    return RequestError(f"the upstream answered {response.status}: {text}", status=response.status, headers=headers)
