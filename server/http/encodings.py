"""Decompresses bodies with a `Content-Encoding` of gzip, deflate or zstd, piece by piece.

    packed     [member 1][member 2]
    unpacked   [piece][piece][piece]

A body of deflate is one member. A body of gzip or zstd may be several members in a row (`cat a.gz b.gz`, or several frames
of zstd). Each call of `Unpacking.piece` returns a piece of at most `PIECE` bytes. A kilobyte may unpack to gigabytes, so
the caller decides after each piece whether to continue.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Protocol

from starlette.datastructures import Headers

from .api_errors import RequestError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE, BITE = 256 << 10, 64 << 10  # bytes
MOST_MEMBERS = 1024  # each member takes time in addition to that of its bytes
WINDOW_LOG = 23  # zstd data may refer up to 8 MiB back, the most that senders may rely on (RFC 9659)


class Stream(Protocol):
    """Unpacks one member.

    eof: whether the member has ended.
    unused_data: input after the member's end.
    needs_input: whether `decompress` needs more input before it can return more bytes.
    """

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def needs_input(self) -> bool: ...
    def decompress(self, data: bytes, max_length: int = ...) -> bytes: ...


class Inflating:
    """A zlib stream that behaves like a zstd stream: it stores the input that it has not unpacked yet."""

    def __init__(self, window_bits: int) -> None:
        self._stream = zlib.decompressobj(window_bits)

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._stream.unconsumed_tail

    def decompress(self, data: bytes, max_length: int = PIECE) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail + data, max_length)


def _gzip(packed: bytes) -> Stream:
    return Inflating(16 + zlib.MAX_WBITS)


def _deflate(packed: bytes) -> Stream:
    """Return a stream for deflate. The standard demands zlib's frame around the data, but some clients omit it."""
    is_framed = len(packed) > 1 and packed[0] & 15 == zlib.DEFLATED and (packed[0] << 8 | packed[1]) % 31 == 0
    return Inflating(zlib.MAX_WBITS if is_framed else -zlib.MAX_WBITS)


def _zstd(packed: bytes) -> Stream:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG})


STREAMS: Mapping[str, Callable[[bytes], Stream]] = {"gzip": _gzip, "deflate": _deflate, "zstd": _zstd}
ALIASES, IDENTITY = {"x-gzip": "gzip"}, "identity"


def encoding_of(headers: Headers) -> str:
    """Return the encoding of a request's body, or an empty text if the body is not compressed.

    Raises RequestError 415 for an encoding that is not supported, and for more than one encoding.
    """
    given = [name.strip() for value in headers.getlist("content-encoding") for name in value.split(",")]
    names = [ALIASES.get(name.lower(), name.lower()) for name in given if name.lower() not in ("", IDENTITY)]
    if not names:
        return ""
    if len(names) > 1 or names[0] not in STREAMS:
        wanted = f"expected one of {', '.join(STREAMS)}, or none"
        message = f"Content-Encoding: {', '.join(given)[:80]} is not supported: {wanted}"
        raise RequestError(message, status=415, headers={"Accept-Encoding": ", ".join(STREAMS)})
    return names[0]


class Unpacking:
    """Unpacks one body. Any thread may use it, but only one thread at a time."""

    def __init__(self, encoding: str, packed: bytes) -> None:
        self._encoding, self._packed, self._given = encoding, packed, 0
        self._stream, self._num_members = STREAMS[encoding](packed), 1

    def piece(self) -> bytes:
        """Return the next unpacked bytes, at most `PIECE`. Return no bytes at the end of the body.

        Raises RequestError 400 for a damaged body.
        """
        if not self._packed:
            return b""
        try:
            while not self._is_over:
                if unpacked := self._next():
                    return unpacked
        except (zlib.error, zstd.ZstdError) as error:
            raise self._wrong(str(error)) from None
        return b""

    @property
    def _is_over(self) -> bool:
        return self._stream.eof and self._given == len(self._packed)

    def _next(self) -> bytes:
        """Pass input to the stream if it needs any. Return the bytes that the stream unpacks."""
        if self._stream.eof:
            self._begin_member()
        bite = self._packed[self._given : self._given + BITE] if self._stream.needs_input else b""
        self._given += len(bite)
        unpacked = self._stream.decompress(bite, PIECE)
        if self._stream.eof:
            self._given -= len(self._stream.unused_data)
        elif not unpacked and self._given == len(self._packed):
            raise self._wrong("it is incomplete: its end is missing")
        return unpacked

    def _begin_member(self) -> None:
        if self._encoding == "deflate":
            raise self._wrong(f"it continues after its end, at byte {self._given:,}")
        self._num_members += 1
        if self._num_members > MOST_MEMBERS:
            raise self._wrong(f"it has more than {MOST_MEMBERS:,} members")
        self._stream = STREAMS[self._encoding](b"")

    def _wrong(self, why: str) -> RequestError:
        return RequestError(f"the body cannot be unpacked as Content-Encoding: {self._encoding}: {why}")
