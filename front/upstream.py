"""Sends requests to the upstream, reads its answers piece by piece, and reports its failures as OpenAI's errors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from ..server.http.api_errors import RequestError
from ..server.http.bodies import Reservation
from .settings import FrontSettings

STATUSES = range(200, 600)  # of answers; an upgrade to another protocol is not an answer
LOOK = 1.0  # seconds between two looks at a connection that is silent
SOON = 10.0  # seconds for a request of the front's own
MOST_FETCHED = 4 << 20  # bytes of the answer to such a request
PIECE = 64 << 10  # bytes of a body that are written at a time
LONGEST_LINE = 64 << 10  # bytes of a line of an answer's head: the status line or a header field
ANNOUNCED = (b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer", b"upgrade")
OF_THE_HOP = frozenset((b"connection", b"keep-alive", b"transfer-encoding", *ANNOUNCED))
"""Headers that belong to one connection."""
OURS = OF_THE_HOP | frozenset((b"host", b"content-length", b"content-encoding", b"expect"))  # request headers not copied
PAGES = (b"origin", b"referer", b"sec-fetch-", b"access-control-")
"""Prefixes of the headers of web pages. The front decides on pages: an upstream would compare origins with its own name."""
CREDENTIALS = frozenset((b"authorization", b"x-api-key"))
SILENT = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # headers that aiohttp would add by itself
Headers = Iterable[tuple[bytes, bytes]]


@dataclass(slots=True)
class Sent:
    """A request for the upstream.

    target: the path with the query.
    headers: all headers of the client; headers of its connection are not sent.
    has_key: whether the upstream's key is sent.
    reservation: the memory reserved for the body, which is freed once the upstream has the body.
    """

    method: str
    target: str
    headers: Headers
    body: bytes = b""
    has_key: bool = True
    reservation: Reservation | None = None

    def let_go(self) -> None:
        """Free the body, since the upstream has it."""
        self.body = b""
        if self.reservation is not None:
            self.reservation.reserve(0)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A whole answer."""

    status: int
    body: bytes


class Upstream:
    """One upstream, as an async context manager. For one event loop only.

    has_keys: whether clients send keys of the front, not of the upstream.
    """

    def __init__(self, settings: FrontSettings, has_keys: bool = False) -> None:
        self._settings, self._has_keys = settings, has_keys
        self._is_closed = False

    async def __aenter__(self) -> Upstream:
        # A new connection for each request: an upstream may close an idle one just as a request is on its way, and a request
        # must not be sent twice.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout or None)
        self._http = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=SILENT,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all connections. Callers that wait for an answer, or for the rest of an answer, get an error."""
        self._is_closed = True
        await self._http.close()

    @asynccontextmanager
    async def ask(self, sent: Sent) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and yield its answer once the head has arrived. Raises RequestError."""
        url = URL(self._settings.base + sent.target, encoded=True)
        request = self._http.request(
            sent.method,
            url,
            headers=self._headers(sent),
            # aiohttp writes all bytes at once, and asyncio copies the bytes that the upstream does not take at once.
            data=_pieces(sent.body) if len(sent.body) > PIECE else sent.body or None,
            allow_redirects=False,
            max_line_size=LONGEST_LINE,
            max_field_size=LONGEST_LINE,
        )
        with self._failures(self._settings.answer_timeout):
            async with asyncio.timeout(self._settings.answer_timeout or None):
                response = await request
        try:
            if response.status not in STATUSES:
                raise RequestError(f"the upstream answered {response.status}", status=502, code="upstream_garbage")
            yield response
        finally:
            response.close()

    async def fetch(self, method: str, path: str, headers: Headers, body: bytes = b"") -> Fetched:
        """Return the whole answer to a request of the front's own. Raises RequestError, also if the answer takes too long.

        headers: the headers of a client, whose credentials are sent along.
        """
        own = [*credentials_of(headers), *([(b"content-type", b"application/json")] if body else [])]
        received = bytearray()
        with self._failures(SOON):
            async with asyncio.timeout(SOON), self.ask(Sent(method, path, own, body)) as response:
                async for piece in self.pieces(response):
                    received += piece
                    if len(received) > MOST_FETCHED:
                        raise RequestError("the upstream sent too much", status=502, code="upstream_garbage")
        return Fetched(response.status, bytes(received))

    async def pieces(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Yield an answer's body as it arrives. Raises RequestError."""
        while True:
            with self._failures(self._settings.stall_timeout):
                piece = await self._piece(response)
            if not piece:
                return
            yield piece

    async def _piece(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the next bytes of a body; no bytes at its end. Raises TimeoutError and aiohttp.ClientError.

        If a chunk is malformed, aiohttp closes the connection without an error, so this method checks the connection every
        `LOOK` seconds.
        """
        patience = self._settings.stall_timeout or math.inf
        while patience > 0:
            try:
                async with asyncio.timeout(min(LOOK, patience)):
                    return await response.content.readany()
            except TimeoutError:
                if _is_lost(response):
                    raise aiohttp.ClientPayloadError("its answer is malformed") from None
            patience -= LOOK
        raise TimeoutError

    def _headers(self, request: Sent) -> CIMultiDict[str]:
        dropped = OURS | CREDENTIALS if self._settings.upstream_key or self._has_keys else OURS
        sent = CIMultiDict((name.decode("latin-1"), _text(value)) for name, value in without_hop(request.headers, dropped))
        if request.body:
            sent["Content-Length"] = str(len(request.body))
        if self._settings.upstream_key and request.has_key:
            sent["Authorization"] = f"Bearer {self._settings.upstream_key}"
        return sent

    @contextmanager
    def _failures(self, patience: float) -> Iterator[None]:
        """Turn the failures of a connection into RequestError."""
        try:
            if self._is_closed:
                raise aiohttp.ClientError  # no session
            yield
        except (aiohttp.ClientError, TimeoutError) as error:
            if self._is_closed:
                raise RequestError("the front is shutting down", status=503) from None
            raise _failure(error, patience) from None


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), PIECE):
        yield body[at : at + PIECE]


def _failure(error: Exception, patience: float) -> RequestError:
    """Return the failure of a connection as an error for the client.

    patience: for how many seconds the connection was allowed to be silent.
    """
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | aiohttp.InvalidURL):
        problem = f"the upstream cannot be reached: {_said(error)}"
        return RequestError(problem, status=502, code="upstream_unreachable")
    if isinstance(error, TimeoutError):
        return RequestError(f"the upstream was silent for {patience:g} s", status=504, code="upstream_timeout")
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | aiohttp.ClientPayloadError):
        return RequestError(f"the upstream broke off: {_said(error)}", status=502, code="upstream_broke_off")
    return RequestError(f"the upstream does not speak HTTP: {_said(error)}", status=502, code="upstream_garbage")


def credentials_of(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers of a request that identify its sender."""
    return [(name, value) for name, value in headers if name in CREDENTIALS]


def headers_of(response: aiohttp.ClientResponse, without: frozenset[bytes] = OF_THE_HOP) -> list[tuple[bytes, bytes]]:
    """Return an answer's headers as they were sent, without headers of the connection and headers meant for web pages."""
    return without_hop([(name.lower(), value) for name, value in response.raw_headers], without)


def without_hop(headers: Headers, others: frozenset[bytes] = OF_THE_HOP) -> list[tuple[bytes, bytes]]:
    """Return the headers that may be passed on.

    Left out are `others`, headers that `Connection` names, and headers that are meant for web pages.

    headers: with names in small letters.
    """
    headers = [*headers]
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    gone = others | named
    return [(name, value) for name, value in headers if name not in gone and not name.startswith(PAGES)]


def _text(value: bytes) -> str:
    """Return a header's value as text. aiohttp sends a UTF-8 value unchanged, and any other value as UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _is_lost(response: aiohttp.ClientResponse) -> bool:
    connection = response.connection
    return connection is not None and (connection.protocol is None or not connection.protocol.connected)


def _said(error: Exception) -> str:
    """Return an error in a few words, in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
