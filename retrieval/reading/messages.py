"""The lines that go to the process that reads files, and those that come back."""

from __future__ import annotations

import msgspec

from ..files import Stamp

SECONDS = 60.0  # of processor time, for one file


class Task(msgspec.Struct):
    """A file to read: see `FoundFile`. known: its digest in the index; empty if it is new. tokens: of a chunk, about."""

    root: str
    parts: tuple[str, ...]
    path: str
    stamp: Stamp
    known: str
    tokens: int


class Step(msgspec.Struct, tag="step"):
    """A line after each batch of chunks."""


class Stored(msgspec.Struct, tag="stored"):
    """The last line about a file that was read. num_new, gone: as in `Written`."""

    num_new: int = 0
    gone: list[int] = []


class Failed(msgspec.Struct, tag="failed"):
    """The last line about a file that cannot be read. reason: why."""

    reason: str


class Broken(msgspec.Struct, tag="broken"):
    """The last line about a file that cannot be stored. reason: the database's."""

    reason: str


Line = Step | Stored | Failed | Broken
