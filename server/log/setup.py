"""The log of a command: lines of text or of JSON, on stderr or in a file."""

from __future__ import annotations

import atexit
import logging
import queue
import sys
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import TextIO

import msgspec

FIELDS = "fields"  # of a record: values for programs, beside the message
MAX_WAITING = 10_000  # lines; more are dropped, so that nothing waits for a reader that has stopped
LAST_LINES = 2.0  # seconds for them when the process ends


class TextLines(logging.Formatter):
    """A time, the message, and the id of the request that it is about."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        id = getattr(record, FIELDS, {}).get("request_id")
        return super().formatMessage(record) + (f" [{id}]" if id else "")


class JsonLines(logging.Formatter):
    """An object a line: time, level, logger, message, and the fields of the record."""

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


class WriteBehind(logging.Handler):
    """Writes lines in a thread of its own: a terminal that was stopped must not stop the server."""

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
        """Write the lines that are left, if their reader takes them in time."""
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
                return  # the reader has gone


def configure(form: str, path: str, verbose: bool) -> None:
    """Begin to log, unless a log is there. form: of `FORMATS`. path: of the file; empty: stderr. Raises OSError."""
    if not logging.root.handlers:
        handler = WriteBehind(Path(path).expanduser().open("a", encoding="utf-8") if path else sys.stderr)
        handler.setFormatter(FORMATS[form]())
        logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("slotcache").setLevel(logging.DEBUG if verbose else logging.INFO)
