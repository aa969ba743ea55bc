"""The file format of records and of saved slots, and the provenance of KV. A record's file consists of these parts:

    magic | length of the head | digest of the head | head (JSON) | tokens | KV | recurrent state, if any

The head has the sizes and digests of the parts after it. Digests (XXH3, 128 bits) reveal damage, but no forgery, since
anyone can compute them.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import xxhash
from msgspec import Meta, Struct

from ..record import Record
from ..scope import MAX_TEXT, Scope
from .private_folder import written_aside

FORMAT = 3  # of records in files
MAGIC = b"slotcache KV %d\n" % FORMAT
MOST_HEAD = 1 << 20  # bytes
WITHOUT_WAITING = getattr(os, "O_NONBLOCK", getattr(os, "O_BINARY", 0))  # Windows: text is the default; no pipes in folders
LENGTH, DIGEST = 4, 16  # bytes of the two numbers before the head
AT_ONCE = 1 << 20  # bytes that are digested before another thread may have the interpreter

HexDigest = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Position = Annotated[int, Meta(ge=0, lt=1 << 31)]
Large = Annotated[int, Meta(ge=0, lt=1 << 53)]
Cost = Annotated[float, Meta(ge=0.0, le=1e6)]
MOST_USES, MOST_COST = 1 << 10, 1e3  # limits on the worth that a file states: no file keeps its record for ever


# ---- Provenance ---------------------------------------------------------------------------------------------------------
# The model and the settings that computed a run's KV. Only the same model with the same settings may use it.


@dataclass(frozen=True, slots=True)
class Provenance:
    """The model and everything else that KV depends on, as two digests of 32 hexadecimal digits each.

    model: the digest of the model's files.
    settings: the digest of everything else that changes KV: settings, build and CPU.
    """

    model: str
    settings: str

    @property
    def folder(self) -> str:
        """The name of the folder for KV of this provenance, in the current file format."""
        return self.folder_of(FORMAT)

    def folder_of(self, version: int) -> str:
        """Return the name of the folder for KV of this provenance, in a certain version of the file format."""
        parts = self.model + self.settings + (str(version) if version > 2 else "")
        return hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()


# ---- File ---------------------------------------------------------------------------------------------------------------


class CorruptFile(ValueError):
    """The content of a file is not what was written."""


class ForeignFile(CorruptFile):
    """A file has KV of another model, or of other settings."""


class Head(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The head of a record's file.

    model, settings: the provenance of the KV.
    start: the position of the first token with KV.
    tokens: the number of tokens, from position 0 on.
    size: the bytes of the KV and the state together.
    path: the digest of the tokens.
    data: the digest of the KV and the state.
    state: the bytes of the recurrent state; 0: no state.
    """

    model: HexDigest
    settings: HexDigest
    scope: Annotated[str, Meta(max_length=MAX_TEXT)]
    start: Position
    tokens: Position
    size: Large
    documents: tuple[tuple[str, Position], ...]
    frequency: Large
    token_cost: Cost
    path: HexDigest
    data: HexDigest
    state: Large = 0

    def check(self, made_by: Provenance) -> None:
        """Check that the head does not contradict itself, and has this provenance. Raises CorruptFile and ForeignFile."""
        if self.start >= self.tokens or self.state > self.size or any(at > self.start for _, at in self.documents):
            raise CorruptFile("its positions contradict each other")
        if self.model != made_by.model:
            raise ForeignFile("it is of another model")
        if self.settings != made_by.settings:
            raise ForeignFile("it was computed with other settings")


HEADS = msgspec.json.Decoder(Head)
"""Made when the module is loaded: msgspec 0.22 learns the fields of a struct at its first use, and the process crashes if
two threads, such as those that read the disk, do this at once."""


def encode(record: Record, made_by: Provenance) -> list[bytes | memoryview]:
    """Return the content of a record's file, in parts."""
    tokens, data = record.tokens.astype("<i4").tobytes(), [record.data.data]
    if record.state is not None:
        data.append(record.state.data)
    head = Head(
        model=made_by.model,
        settings=made_by.settings,
        scope=record.scope.text,
        start=record.start,
        tokens=len(record.tokens),
        size=record.num_bytes,
        documents=record.documents,
        frequency=min(record.frequency, MOST_USES),
        token_cost=min(record.token_cost, MOST_COST),
        path=_digest(tokens),
        data=_digest(*data),
        state=0 if record.state is None else len(record.state),
    )
    text = msgspec.json.encode(head)
    if len(text) > MOST_HEAD:  # the names of documents only help to order them
        text = msgspec.json.encode(msgspec.structs.replace(head, documents=()))
    return [MAGIC, len(text).to_bytes(LENGTH, "little"), bytes.fromhex(_digest(text)), text, tokens, *data]


@contextmanager
def open_file(path: Path) -> Generator[BufferedIOBase]:
    """Open a file. Raises OSError, and CorruptFile if it is no regular file: a pipe would block for ever."""
    with open(os.open(path, os.O_RDONLY | WITHOUT_WAITING), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CorruptFile("it is not a file")
        yield file


def read(file: BufferedIOBase, size: int, made_by: Provenance) -> Record:
    """Return the record that the next `size` bytes of a file contain. Raises CorruptFile, ForeignFile and OSError."""
    head, tokens = read_path(file, size, made_by)
    data = _read(file, head.size, head.data, "its checksum is wrong")
    return Record(
        Scope.read(head.scope),
        tokens,
        head.start,
        data[: head.size - head.state].copy() if head.state else data,  # copies, so that each is freed without the other
        documents=head.documents,
        frequency=head.frequency,
        token_cost=head.token_cost,
        state=data[head.size - head.state :].copy() if head.state else None,
    )


def read_path(file: BufferedIOBase, size: int, made_by: Provenance) -> tuple[Head, np.ndarray]:
    """Return the head and the tokens (int32) of the record that the next `size` bytes of a file contain.

    Raises CorruptFile, ForeignFile and OSError.
    """
    head, length = read_head(file)
    expected = length + 4 * head.tokens + head.size
    if size != expected:  # checked before memory is taken for the sizes that the head claims
        raise CorruptFile(f"it has {size:,} bytes and should have {expected:,}")
    head.check(made_by)
    tokens = _read(file, 4 * head.tokens, head.path, "its tokens are damaged")
    return head, tokens.view("<i4").astype(np.int32)


def read_head(file: BufferedIOBase) -> tuple[Head, int]:
    """Return the head of a record, and how many bytes there are before its tokens. Raises CorruptFile and OSError."""
    if file.read(len(MAGIC)) != MAGIC:
        raise CorruptFile("it is not one of this server's files")
    length = int.from_bytes(file.read(LENGTH), "little")
    if length > MOST_HEAD:
        raise CorruptFile("its head is too long")
    summed, text = file.read(DIGEST), file.read(length)
    if bytes.fromhex(_digest(text)) != summed:
        raise CorruptFile("its head is damaged")
    try:
        head = HEADS.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptFile(f"its head is not as expected: {error}") from None
    head = msgspec.structs.replace(
        head, frequency=min(head.frequency, MOST_USES), token_cost=min(head.token_cost, MOST_COST)
    )
    return head, len(MAGIC) + LENGTH + DIGEST + length


def _read(file: BufferedIOBase, size: int, digest: str, complaint: str) -> np.ndarray:
    """Return the next `size` bytes (uint8) of a file. Raises CorruptFile if bytes are missing or their digest is wrong."""
    data = np.empty(size, np.uint8)
    if file.readinto(data.data) != size or _digest(data.data) != digest:
        raise CorruptFile(complaint)
    return data


def _digest(*parts: bytes | memoryview) -> str:
    digest = xxhash.xxh3_128()
    for part in map(memoryview, parts):
        for start in range(0, len(part), AT_ONCE):
            digest.update(part[start : start + AT_ONCE])
    return digest.hexdigest()


# ---- A saved slot as a file: the records of its prompt, prefixes first, each after its size. ----------------------------

SIZE = struct.Struct("<Q")  # the size of a record, before it


def write(path: Path, records: Sequence[Record], made_by: Provenance) -> int:
    """Write a saved slot to a file, whole or not at all. Return the file's size. Raises OSError.

    If two writers write the same file at the same time, the file has the content of one of them.
    """
    with written_aside(path, syncs=True) as file:
        for record in records:
            parts = encode(record, made_by)
            file.write(SIZE.pack(sum(map(len, parts))))
            file.writelines(parts)
        return file.tell()


def check(path: Path, made_by: Provenance) -> None:
    """Read a whole saved slot, to find damage before any of it is used. Raises CorruptFile, ForeignFile and OSError."""
    for _ in records(path, made_by):
        pass


def records(path: Path, made_by: Provenance) -> Iterator[Record]:
    """Yield the records of a saved slot one at a time, each checked. Raises CorruptFile, ForeignFile and OSError."""
    with open_file(path) as file:
        left = os.fstat(file.fileno()).st_size
        while left:
            size = _size(file.read(SIZE.size))
            left -= SIZE.size + size
            if left < 0:
                raise CorruptFile("it ends too early")
            yield read(file, size, made_by)


def _size(data: bytes) -> int:
    """Return the size of the next record of a saved slot, from the bytes before it. Raises CorruptFile."""
    if len(data) != SIZE.size:
        raise CorruptFile("it ends too early")
    return SIZE.unpack(data)[0]
