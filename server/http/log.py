"""Sets up the log, and writes a line for each request."""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import TextIO

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .api_errors import RequestError, refusal

# ---- The log of a command: lines of text or of JSON, on stderr or in a file. --------------------------------------------

FIELDS = "fields"  # the attribute of a log record with values for programs, in addition to the message
MAX_WAITING = 10_000  # unwritten lines; more are dropped, so that the server never waits for a stopped reader
LAST_LINES = 2.0  # seconds for the last lines when the process ends


class TextLines(logging.Formatter):
    """Formats a log record as text: the time, the message, and the id of the request if the record has one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        id = getattr(record, FIELDS, {}).get("request_id")
        return super().formatMessage(record) + (f" [{id}]" if id else "")


class JsonLines(logging.Formatter):
    """Formats a log record as a JSON object: time, level, logger, message, and the record's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


FORMATS: dict[str, type[logging.Formatter]] = {"text": TextLines, "json": JsonLines}


class QueuedHandler(logging.Handler):
    """Writes the log in a separate thread, so that a stopped terminal does not stop the server."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._thread = Thread(target=self._write, name="log", daemon=True)
        self._thread.start()
        atexit.register(self.finish)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except queue.Full:
            pass
        except Exception:
            self.handleError(record)

    def finish(self) -> None:
        """Write the remaining lines, but wait at most `LAST_LINES` seconds."""
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(LAST_LINES)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line)
                self._stream.flush()
            except (OSError, ValueError):
                return  # nobody reads the stream any more


def configure(form: str, path: str, verbose: bool) -> None:
    """Set up the log if there is none yet. Raises OSError.

    form: a key of `FORMATS`.
    path: the file of the log. Empty for stderr.
    """
    if not logging.root.handlers:
        handler = QueuedHandler(Path(path).expanduser().open("a", encoding="utf-8") if path else sys.stderr)
        handler.setFormatter(FORMATS[form]())
        logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("slotcache").setLevel(logging.DEBUG if verbose else logging.INFO)


logger = logging.getLogger("slotcache.requests")
HEADER = "X-Request-Id"
MAX_ID = 128  # the most characters of an id from a client
QUIET = ("/health", "/v1/health", "/metrics", "/slots", "/props")  # the page and monitors request these every few seconds
LOADING = "loading_model"  # the error code of these paths while a model is loaded
FILES = "/page/"  # a browser requests all files of the page at once
GONE = 499  # the status in the log if the client disconnected before its answer began

Fields = dict[str, object]


class RequestLog:
    """Middleware that logs a line for each request. This middleware surrounds the gate and all routes.

    A route may put a function `account` into the request's state, so that the line has the figures that `account` returns. A
    connection that is closed to make room for new ones puts `is_quiet` into the state of its request. The line of a request
    with `is_quiet` is logged at level DEBUG.

    At shutdown, uvicorn cancels the requests that are open after its grace time. `RequestLog` answers the cancelled requests
    with 503, because uvicorn itself would answer them with 500.

    The log contains no text of prompts or answers. But the log contains the paths of requests, and a path may have the id of
    a stored answer.
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
        except asyncio.CancelledError:
            if status == GONE:
                closed = refusal(RequestError("the server is shutting down", status=503), scope["path"])
                await closed(scope, receive, note_and_send)
        except Exception:
            status = 500
            raise
        finally:
            _write(scope, status, perf_counter() - began)


def _given(headers: Headers) -> str | None:
    """Return the id that the client gave to its request, if the id is suitable for a line of the log."""
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
    shown = ", ".join(f"{name} {on_one_line(str(value))}" for name, value in figures.items() if value is not None)
    line = f"{method} {on_one_line(path)} {status} in {spent} s{': ' if shown else ''}{shown}"
    is_quiet = scope["path"] in QUIET or scope["path"].startswith(FILES) or "is_quiet" in state
    is_failure = status >= 500 and not (is_quiet and figures.get("error") == LOADING)
    level = logging.WARNING if is_failure else logging.DEBUG if is_quiet else logging.INFO
    logger.log(level, "%s", line, extra={FIELDS: head | figures})


def on_one_line(text: str) -> str:
    """Return a text with escapes for unprintable characters, so that a client cannot forge lines of the log."""
    return text if text.isprintable() else repr(text)
