"""Decides who may send requests, by API key, host name and origin.

The API key keeps other people out. The other two checks protect against web pages, because a page in a browser can send
requests to localhost. A page may make a name of its site resolve to this machine (DNS rebinding), and the `Host` header then
shows that name. Or a page may send a request to an origin other than its own, and the `Origin` header then shows the page's
origin. Programs send no `Origin` header, and need none.
"""

from __future__ import annotations

import re
import secrets
import socket
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..config.settings import Settings, SettingsError, listed
from .api_errors import RequestError, refusal
from .threads import note_client

# ---- Keys ---------------------------------------------------------------------------------------------------------------
# The API keys of a server, from its command line and from a file. A warning if a server without keys is open to a network.


class Keys:
    """The API keys of a server. A server without keys admits all requests.

    The duration of a check reveals neither a key nor which key matches.
    """

    def __init__(self, keys: frozenset[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @classmethod
    def of(cls, settings: Settings) -> Keys:
        """Return the keys from --api-key and --api-key-file.

        Raises SettingsError if one of the flags is given without a key. If a flag without a key were allowed, a script with
        an empty variable would start a server that is open to everyone.
        """
        given = listed(settings.api_key)
        for flag, name, holds in (
            ("--api-key", "api_key", given),
            ("--api-key-file", "api_key_file", settings.api_key_file.strip()),
        ):
            if settings.is_given(name) and not holds:
                without = f"leave out the flag and SLOTCACHE_{name.upper()} for a server that anyone may use"
                raise SettingsError(f"{flag} is given but empty: expected one or more keys; {without}")
        return cls(given | _keys_in(settings.api_key_file) if settings.api_key_file else given)

    def admit(self, headers: Headers) -> bool:
        """Return whether a request may pass: it carries one of the server's keys, or the server has none."""
        return not self._digests or bool(self.used(headers))

    def used(self, headers: Headers) -> bytes:
        """Return the server's key that a request carries.

        Return empty bytes if the request carries none of the server's keys.
        """
        known = [key for key in _presented(headers) if self._has(key)]
        return known[0] if known else b""

    def _has(self, key: bytes) -> bool:
        presented = _digest(key)
        return any([secrets.compare_digest(presented, digest) for digest in self._digests])  # a list: compares all


def open_to(settings: Settings) -> str:
    """Return a warning about who may use the server.

    Return an empty text if the server has keys, or if only this machine can reach the server.
    """
    if settings.api_key or settings.api_key_file:
        return ""
    far = [host for host in settings.hosts if not _is_loopback(host)]
    if not far:
        return ""
    where = "any address of this machine" if any(map(_is_any, far)) else " or ".join(far)
    return (
        f"NO API KEY: everyone who can reach {where} over a network may use this server, read and delete what it stores, "
        "and see its settings. Set --api-key, or --host 127.0.0.1 to serve only programs on this machine"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_any(host: str) -> bool:
    return host.strip("[]") in ("0.0.0.0", "::")


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


def _presented(headers: Headers) -> list[bytes]:
    """Return the keys in a request's headers. Clients of OpenAI, llama-server and Anthropic send keys in different ways.

    A client of llama-server may send a key in `Authorization` without the word Bearer.
    """
    authorization = headers.get("authorization", "").strip()
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == "bearer":
        authorization = key.strip()
    return [key.encode("latin-1") for key in (authorization, headers.get("x-api-key", "").strip()) if key]


def _keys_in(path: str) -> frozenset[str]:
    """Return the keys in a file with one key a line. A line that starts with # is a comment."""
    try:
        lines = [line.strip() for line in Path(path).expanduser().read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--api-key-file {path} cannot be read: {error}") from None
    if not (keys := frozenset(line for line in lines if line and not line.startswith("#"))):
        raise SettingsError(f"--api-key-file {path} has no key: expected one key a line")
    return keys


# ---- Web pages of other origins: which may send requests, and the headers that tell browsers so (CORS). -----------------

ANY, LOCAL, OPAQUE = "*", "localhost", "null"
METHODS = ("GET", "POST", "DELETE", "OPTIONS")
SENDABLE = ("Authorization", "Content-Type", "X-Api-Key", "X-Request-Id")
READABLE = ("Retry-After", "X-Request-Id")  # headers of an answer that a page may read, beyond those that it always may


class Origins:
    """The origins in --cors-origins. The entry `localhost` means that name and all loopback addresses, at any port.

    Raises SettingsError for an entry that no browser sends as an origin.
    """

    def __init__(self, settings: Settings) -> None:
        self._listed = frozenset(origin.lower().rstrip("/") for origin in listed(settings.cors_origins))
        for origin in sorted(self._listed - {ANY, LOCAL, OPAQUE}):
            host = origin.partition("://")[2]
            if not host or "/" in host:
                raise SettingsError(f"--cors-origins {origin}: expected an origin such as https://chat.example.org")

    def __bool__(self) -> bool:
        return bool(self._listed)

    def allow(self, origin: str) -> bool:
        """Return whether pages of this origin may send requests."""
        if ANY in self._listed or origin.lower() in self._listed:
            return True
        return LOCAL in self._listed and _is_local(origin)


class CrossOrigin(CORSMiddleware):
    """Answers browsers' preflights, and marks the answers that a page of another origin may read (CORS).

    A page may send any header that its preflight lists. This layer gets a request before `Gate`, since preflights have no
    key.
    """

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        super().__init__(
            app,
            allow_methods=METHODS,
            allow_headers=(ANY,),
            allow_credentials=True,
            allow_private_network=True,
            expose_headers=READABLE,
        )
        self._origins = origins

    def is_allowed_origin(self, origin: str) -> bool:
        return self._origins.allow(origin)

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a preflight. If the preflight lists no headers, the answer allows the headers that a page usually sends."""
        response = super().preflight_response(request_headers)
        response.headers.setdefault("Access-Control-Allow-Headers", ", ".join(SENDABLE))
        return response


def _is_local(origin: str) -> bool:
    try:
        host = urlsplit(origin).hostname or ""
        return host == LOCAL or ip_address(host).is_loopback
    except ValueError:
        return False


def guards(settings: Settings) -> list[Middleware]:
    """Return the middleware that checks who sends a request, the outermost layer first. Raises SettingsError."""
    origins = Origins(settings)
    cross_origin = [Middleware(CrossOrigin, origins=origins)] if origins else []
    return [*cross_origin, Middleware(Gate, settings=settings, keys=Keys.of(settings), origins=origins)]


OPEN_PATHS = ("/health", "/v1/health")  # without checks: they reveal nothing, and probes may use any host name
PAGE = re.compile("/|/page/.*")  # the page's files are public, and the page itself asks for the key
JSON, BYTES = "application/json", "application/octet-stream"


def is_open(scope: Scope) -> bool:
    """Return whether a request passes without a check: a GET or HEAD of a path in OPEN_PATHS."""
    return scope["path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD")


class Gate:
    """Refuses requests with 401, 403 or 415 before they reach a route.

    Requests for which `is_open` is true are not checked.
    """

    def __init__(self, app: ASGIApp, settings: Settings, keys: Keys, origins: Origins) -> None:
        self._app, self._keys, self._origins = app, keys, origins
        self._names = frozenset(map(str.lower, listed(settings.allowed_hosts))).union(
            {"localhost"}, *map(names, settings.hosts)
        )
        self._any_address = any(map(_is_wildcard, settings.hosts))
        self._has_page = settings.ui

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_open(scope):
            headers = Headers(scope=scope)
            try:
                self._check(scope["method"], scope["path"], headers)
            except RequestError as error:
                scope["state"]["error"] = error
                await refusal(error, scope["path"])(scope, receive, send)
                return
            note_client(scope, self._keys.used(headers))
        await self._app(scope, receive, send)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        """Raise RequestError for a request that is not allowed."""
        host = headers.get("host", "").lower()
        if host and not self._is_ours(host):
            name = _name(host)[:80]
            raise RequestError(
                f"this server is not called {host[:80]!r}: start it with --allowed-hosts {name} if it is", status=403
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
        """Raise RequestError 403 for a page that may not send requests, and 415 for a page's body that is not JSON or bytes.

        A GET or HEAD without `Origin` may pass, since no page of another origin can read its answer.
        """
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is None:
            foreign = site == "cross-site" and method not in ("GET", "HEAD")
        else:
            foreign = not self._may_ask(origin, host)
        if foreign:
            page = "other sites" if origin is None else origin[:80]
            raise RequestError(f"pages of {page} may not send requests: --cors-origins can allow them", status=403)
        # A browser sends a preflight before a page's JSON or bytes to another origin, but none before text or forms. So a
        # page must send JSON or bytes. Programs need not: `curl -d` sends JSON but declares it as a form.
        kind = headers.get("content-type", JSON).partition(";")[0].strip().lower()
        if (origin or site) and kind not in (JSON, BYTES) and not kind.endswith("+json"):
            raise RequestError(f"the body is {kind[:80]}: expected {JSON} from a page", status=415)

    def _may_ask(self, origin: str, host: str) -> bool:
        own = bool(host) and origin.lower().partition("://")[2] == host
        return own or self._origins.allow(origin)


def names(host: str) -> frozenset[str]:
    """Return the host names that clients may use for a server that listens on `host`."""
    usual = {"localhost", host.strip("[]").lower()}
    return frozenset(usual | {socket.gethostname().lower()} if _is_wildcard(host) else usual)


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _name(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() else host).rstrip(".")
