"""Cuts a stream of bytes into server-sent events. Only whole events are passed on, byte for byte."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from ..server.http.api_errors import MESSAGES, RequestError

BLANK = re.compile(rb"(?>\r\n|\n|\r)(?:\r\n|\n|\r)")  # the end of a line, and an empty line: the end of an event
LONGEST_BLANK = 4
DATA = re.compile(rb"^data: ?(.*?)\r?$", re.M)
LARGEST_EVENT = 16 << 20  # bytes of an event
OPENAI = ("/chat/completions", "/v1/completions")  # paths whose streams end with `DONE`
DONE = b"data: [DONE]\n\n"


class EventError(Exception):
    """Bytes that are no events."""


class Events:
    """Keeps the bytes of an event until its end has arrived."""

    def __init__(self, largest: int = LARGEST_EVENT) -> None:
        self._largest = largest
        self._rest = bytearray()

    def push(self, data: bytes) -> bytes:
        """Take bytes, and return all events that are whole now. Raises EventError if an event is too large."""
        begin = max(len(self._rest) - LONGEST_BLANK + 1, 0)  # no blank line ends before it: each byte is searched once
        self._rest += data
        end = max((found.end() for found in BLANK.finditer(self._rest, begin)), default=0)
        whole = bytes(self._rest[:end])
        del self._rest[:end]
        if len(self._rest) > self._largest:
            raise EventError(f"an event of more than {self._largest:,} bytes")
        return whole

    @property
    def is_between(self) -> bool:
        """Whether all events so far are whole. Blank lines after an event do not count as the start of another event."""
        return not self._rest.strip()


def split(events: bytes) -> Iterator[bytes]:
    """Yield whole events one by one, with all their bytes."""
    begin = 0
    for found in BLANK.finditer(events):
        yield events[begin : found.end()]
        begin = found.end()


def is_done(end: bytes) -> bool:
    """Return whether a stream is complete: whether it ends with `data: [DONE]`, as OpenAI's streams do.

    end: the last bytes of the stream.
    """
    return end.rstrip().replace(b" ", b"").endswith(b"data:[DONE]")


def data_of(event: bytes) -> bytes:
    """Return the data of an event."""
    return b"\n".join(DATA.findall(event))


def closing(error: RequestError, path: str) -> bytes:
    """Return the last events of a stream that breaks off with this error.

    path: the path of the request. The API at this path decides the form of the events.
    """
    if path.startswith(MESSAGES):
        return b"event: error\ndata: " + msgspec.json.encode(error.message_body()) + b"\n\n"
    return b"data: " + msgspec.json.encode(error.body()) + b"\n\n" + (DONE if path.endswith(OPENAI) else b"")
