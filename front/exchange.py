"""A request that is relayed as it is, and the ground that it shares with chats."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from time import perf_counter

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ..server.errors import RequestError
from ..server.log.requests import HEADER
from .host import Host
from .relay import Bystander, Relay
from .upstream import Headers, Sent

REQUEST_ID = HEADER.lower().encode()
SEPARATOR = re.compile(r"[/\\]")


class Exchange:
    """Sends a request on, and its answer back. ASGI."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._host.bodies.read(Request(scope, receive))
        await _while_connected(receive, self.exchange(scope, send, body))

    async def exchange(self, scope: Scope, send: Send, body: bytes) -> None:
        """Send a request and relay its answer. Raises RequestError."""
        sent = Sent(scope["method"], target_of(scope), headers_of(scope), body)
        await self.relay(sent, Relay(self._host.upstream, send, scope["path"], Bystander()))

    async def relay(self, sent: Sent, relay: Relay) -> None:
        """Send a request and relay its answer. Raises RequestError."""
        metrics, began = self._host.metrics, perf_counter()
        try:
            async with self._host.upstream.ask(sent) as response:
                metrics.waiting.observe(perf_counter() - began)
                metrics.requests.labels(str(response.status)).inc()
                await relay.relay(response)
        except RequestError as error:
            relay.failure = error
            raise
        finally:
            if relay.failure is not None:
                metrics.failures.labels(str(relay.failure.code)).inc()


def target_of(scope: Scope) -> str:
    """Return the path and the query of a request, as they were sent. Raises RequestError for a path that leads elsewhere.

    It stands behind the upstream's address: one without its slash could name another host, and one that goes up could leave
    the part of a host that is the upstream.
    """
    path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
    target = f"{path}?{query}" if query else path
    if not path.startswith("/") or "#" in target or ".." in SEPARATOR.split(scope["path"]):
        raise RequestError(f"the path {target[:80]!r} is no path of the upstream: expected one such as /v1/models")
    return target


def headers_of(scope: Scope) -> Headers:
    """Return the headers of a request, with the id by which both logs name it."""
    headers: Headers = scope["headers"]
    if any(name == REQUEST_ID for name, _ in headers):
        return headers
    return [*headers, (REQUEST_ID, scope["state"]["request_id"].encode())]


async def _while_connected(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Work until it is done or the client leaves. Raises the errors of the work."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_leave(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
