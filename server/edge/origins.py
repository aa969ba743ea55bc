"""Web pages of other origins: which may ask, and the headers by which their browsers know (CORS)."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..flags.setting import listed
from ..settings import Settings

ANY, LOCAL = "*", "localhost"
METHODS = "GET, POST, DELETE, OPTIONS"
READABLE = "Retry-After, X-Request-Id"  # headers of an answer that a page may read beside the usual ones


class Origins:
    """The origins of --cors-origins. `localhost` stands for each name of loopback, with any port."""

    def __init__(self, settings: Settings) -> None:
        self._listed = frozenset(origin.lower().rstrip("/") for origin in listed(settings.cors_origins))

    def __bool__(self) -> bool:
        return bool(self._listed)

    def allow(self, origin: str) -> bool:
        """Return whether pages of an origin may ask."""
        if ANY in self._listed or origin.lower() in self._listed:
            return True
        return LOCAL in self._listed and _is_local(origin)

    def headers_for(self, asked: Headers) -> str:
        """Return the headers that a page may send: any for any page, else the very ones that its browser asks for."""
        return ANY if ANY in self._listed else asked.get("access-control-request-headers", ANY)


class CrossOrigin:
    """Answers preflights, and marks the answers that a page may read.

    It stands in front of the gate: a preflight has no key.
    """

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app, self._origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if (origin := headers.get("origin")) is None:
            await self._app(scope, receive, send)
            return
        marks = {"Vary": "Origin"}
        if self._origins.allow(origin):
            marks |= {"Access-Control-Allow-Origin": origin, "Access-Control-Allow-Credentials": "true"}
        if scope["method"] == "OPTIONS":
            await Response(headers=marks | self._permissions(headers))(scope, receive, send)
            return

        async def mark_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(marks | {"Access-Control-Expose-Headers": READABLE})
            await send(message)

        await self._app(scope, receive, mark_and_send)

    def _permissions(self, asked: Headers) -> dict[str, str]:
        """Return the headers of a preflight's answer, which say what a page may send."""
        permissions = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": "600"}
        permissions["Access-Control-Allow-Headers"] = self._origins.headers_for(asked)
        if asked.get("access-control-request-private-network") == "true":
            permissions["Access-Control-Allow-Private-Network"] = "true"
        return permissions


def _is_local(origin: str) -> bool:
    try:
        host = urlsplit(origin).hostname or ""
        return host == LOCAL or ip_address(host).is_loopback
    except ValueError:
        return False
