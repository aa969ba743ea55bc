"""A line in the log for each request, and the id that names the request in it and in the answer's header."""

from __future__ import annotations

import logging
import secrets
from time import perf_counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RequestError
from .setup import FIELDS

logger = logging.getLogger("slotcache.requests")
HEADER = "X-Request-Id"
MAX_ID = 128  # characters of an id that a client may send
QUIET = ("/health", "/v1/health", "/metrics", "/slots")  # asked every few seconds by programs that watch
FILES = "/page/"  # a browser asks for all of them at once
GONE = 499  # the status, in the log, of a client that left before its answer began

Fields = dict[str, object]


class RequestLog:
    """A layer around the gate and the routes. Routes leave `account` in the request's state: a function that returns figures
    for the line.

    Nothing of a prompt or an answer reaches the log, and no id by which a client could go on from an answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = perf_counter(), GONE
        state = scope.setdefault("state", {})
        id = state["request_id"] = _given(Headers(scope=scope)) or f"req-{secrets.token_hex(8)}"

        async def note_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = id
            await send(message)

        try:
            await self._app(scope, receive, note_and_send)
        except Exception:
            status = 500
            raise
        finally:
            _write(scope, status, perf_counter() - began)


def _given(headers: Headers) -> str | None:
    """Return the client's id for its request, if it is one that a log can hold."""
    id = headers.get(HEADER, "")
    return id if 0 < len(id) <= MAX_ID and id.isascii() and id.isprintable() else None


def _write(scope: Scope, status: int, seconds: float) -> None:
    state = scope["state"]
    figures: Fields = dict(state["account"]()) if "account" in state else {}
    error = state.get("error")
    if isinstance(error, RequestError):
        figures |= {"error": error.code or error.status, "param": error.param}
    method, path, spent = scope["method"], scope["path"][:MAX_ID], round(seconds, 4)
    head: Fields = {"request_id": state["request_id"], "method": method, "path": path, "status": status, "seconds": spent}
    shown = ", ".join(f"{name} {_on_one_line(str(value))}" for name, value in figures.items() if value is not None)
    line = f"{method} {_on_one_line(path)} {status} in {spent} s{': ' if shown else ''}{shown}"
    is_quiet = scope["path"] in QUIET or scope["path"].startswith(FILES)
    level = logging.WARNING if status >= 500 else logging.DEBUG if is_quiet else logging.INFO
    logger.log(level, "%s", line, extra={FIELDS: head | figures})


def _on_one_line(text: str) -> str:
    """Return a text, which may be a client's, so that it makes no line of its own."""
    return text if text.isprintable() else repr(text)
