"""Checks each request's key, its host name, and the web page that sent it.

The key keeps other people out. The two other checks are for browsers, in which any page may send requests to localhost: by
a name of its own that now resolves to this machine (DNS rebinding), which the `Host` header shows, or across origins, which
`Origin` shows. Programs send no Origin and need none.
"""

from __future__ import annotations

import re
import socket
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import RequestError
from ..flags.setting import listed
from ..settings import Settings
from .keys import Keys
from .origins import ANY, Origins
from .refusal import refusal

OPEN_PATHS = ("/health", "/v1/health")  # without checks: they reveal nothing, and probes use any address
PAGE = re.compile("/|/page/.*")  # the files of the page: they hold nothing of this server, and ask for its key themselves
JSON = "application/json"


class Gate:
    """Answers 401, 403 and 415 in front of all routes except OPEN_PATHS."""

    def __init__(self, app: ASGIApp, settings: Settings, keys: Keys, origins: Origins) -> None:
        self._app, self._keys, self._origins = app, keys, origins
        self._names = frozenset(map(str.lower, listed(settings.allowed_hosts))).union(*map(names, settings.hosts))
        self._any_address = any(map(_is_wildcard, settings.hosts))
        self._has_page = settings.ui

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                self._check(scope["method"], scope["path"], Headers(scope=scope))
            except RequestError as error:
                scope["state"]["error"] = error
                await refusal(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        """Raise RequestError for a request that is not allowed."""
        host = headers.get("host", "").lower()
        if host and not self._is_ours(host):
            raise RequestError(
                f"this server is not called {host[:80]!r}: --allowed-hosts names hosts that it is", status=403
            )
        self._check_page(method, headers, host)
        if not self._keys.admit(headers) and not (self._has_page and PAGE.fullmatch(path)):
            raise RequestError(
                "expected `Authorization: Bearer <key>` or `X-Api-Key: <key>` with a key of the server's --api-key",
                status=401,
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _is_ours(self, host: str) -> bool:
        if ANY in self._names or (name := _name(host)) in self._names:
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or self._any_address

    def _check_page(self, method: str, headers: Headers, host: str) -> None:
        """Refuse requests from pages of other origins, except a GET without Origin: the page cannot read its answer."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is None:
            foreign = site == "cross-site" and method not in ("GET", "HEAD")
        else:
            foreign = not self._may_ask(origin, host)
        if foreign:
            page = "other sites" if origin is None else origin[:80]
            raise RequestError(f"pages of {page} may not ask: --cors-origins names origins that may", status=403)
        # Before a page sends JSON to another origin, its browser asks the server (a preflight); for text and forms it does
        # not. So a page must send JSON. Programs may say otherwise: `curl -d` declares a form and sends JSON.
        kind = headers.get("content-type", JSON).partition(";")[0].strip().lower()
        if (origin or site) and kind != JSON and not kind.endswith("+json"):
            raise RequestError(f"the body is {kind[:80]}: expected {JSON} from a page", status=415)

    def _may_ask(self, origin: str, host: str) -> bool:
        own = bool(host) and origin.lower().partition("://")[2] == host
        return own or self._origins.allow(origin)


def names(host: str) -> frozenset[str]:
    """Return the names of a server that listens on `host`."""
    usual = {"localhost", host.strip("[]").lower()}
    return frozenset(usual | {socket.gethostname().lower()} if _is_wildcard(host) else usual)


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return not host


def _name(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() else host).rstrip(".")
