"""A saved slot as a file: the records of its prompt, beginnings first, each behind its size."""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..archive import Record
from .provenance import Provenance
from .record import Torn, encode, open_file, read

SIZE = struct.Struct("<Q")  # of a record, in front of it


def write(path: Path, records: Sequence[Record], made_by: Provenance) -> int:
    """Write a file, whole or not at all, and return its size. Of two writers at once one wins. Raises OSError."""
    aside = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for record in records:
                parts = encode(record, made_by)
                file.write(SIZE.pack(sum(map(len, parts))))
                file.writelines(parts)
            written = file.tell()
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    return written


def check(path: Path, made_by: Provenance) -> None:
    """Read all of a file once, to find damage before any of it is used. Raises Torn, Foreign and OSError."""
    for _ in records(path, made_by):
        pass


def records(path: Path, made_by: Provenance) -> Iterator[Record]:
    """Yield a file's records one at a time, each checked. Raises Torn, Foreign and OSError."""
    with open_file(path) as file:
        left = os.fstat(file.fileno()).st_size
        while left:
            size = _size(file.read(SIZE.size))
            left -= SIZE.size + size
            if left < 0:
                raise Torn("it ends too early")
            yield read(file, size, made_by)


def _size(data: bytes) -> int:
    """Return the number in front of a record. Raises Torn."""
    if len(data) != SIZE.size:
        raise Torn("it ends too early")
    return SIZE.unpack(data)[0]
