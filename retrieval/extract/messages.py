"""The lines that go to the process that reads files, and those that come back."""

from __future__ import annotations

import msgspec

from ..chunks import Chunk

SECONDS = 60.0  # of processor time, for one file


class Task(msgspec.Struct):
    """A file to read: see `FoundFile`. known: its digest in the index; empty if it is new. tokens: of a chunk, about."""

    root: str
    parts: tuple[str, ...]
    suffix: str
    known: str
    tokens: int


class Digest(msgspec.Struct, tag="digest"):
    """The first line about a file. If the digest is the known one, the end follows."""

    digest: str


class Chunks(msgspec.Struct, tag="chunks"):
    """The next chunks of the file."""

    chunks: list[Chunk]


class End(msgspec.Struct, tag="end"):
    """The last line about a file. error: why it could not be read; empty if it was."""

    error: str = ""


Line = Digest | Chunks | End
