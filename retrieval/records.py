"""What an index knows of files and chunks, as values."""

from __future__ import annotations

from dataclasses import dataclass

from .files import NEVER_READ, Stamp

INDEXED, FAILED, SKIPPED = "indexed", "failed", "skipped"  # states of a file


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in the index. state: indexed, or, with the reason, failed (to be read) or skipped (not even opened).

    digest: of its bytes. num_chunks, num_vectors: its chunks, and those of them that have a vector.
    """

    path: str
    digest: str = ""
    state: str = INDEXED
    reason: str = ""
    num_chunks: int = 0
    num_vectors: int = 0
    stamp: Stamp = NEVER_READ


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk stands: in which file, the number in it, and the place as in `Chunk`."""

    path: str
    number: int
    page: int | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk in the index. number: of its row; id: of its content. places: of its text, maybe in several files."""

    number: int
    id: str
    title: str
    text: str
    tokens: int
    places: tuple[Place, ...]
