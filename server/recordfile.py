"""Records as files: what a run of the prefix tree looks like on disk, and how a damaged one is noticed."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable

import numpy as np

from ..slots.archive import Record

MAGIC = b"slotcache KV 1\n"
SUFFIX = ".kv"


class Torn(ValueError):
    """A file that is not what was written."""


def file_name(record: Record) -> str:
    """The same for the same run of the same scope; tells nothing of either."""
    digest = hashlib.blake2b(json.dumps([name_of(record.scope), record.start]).encode(), digest_size=16)
    digest.update(record.tokens.tobytes())
    return digest.hexdigest() + SUFFIX


def encode(record: Record) -> list[bytes | memoryview]:
    """A record's file, in parts."""
    tokens, data = record.tokens.astype("<i4").tobytes(), record.data.data
    digest = hashlib.blake2b(tokens, digest_size=16)
    digest.update(data)
    head = {
        "scope": name_of(record.scope),
        "start": record.start,
        "tokens": len(record.tokens),
        "bytes": len(record.data),
        "documents": record.documents,
        "frequency": record.frequency,
        "token_cost": record.token_cost,
        "checksum": digest.hexdigest(),
    }
    text = json.dumps(head).encode()
    summed = hashlib.blake2b(text, digest_size=16).digest()
    return [MAGIC, struct.pack("<I", len(text)), summed, text, tokens, data]


def decode(content: bytes) -> Record:
    """The record in a file. Raises Torn."""
    view, at = memoryview(content), 0

    def read(size: int) -> bytes:
        nonlocal at
        at += size
        return bytes(view[at - size : at])

    head = read_head(read)
    middle, end = at + 4 * head["tokens"], at + 4 * head["tokens"] + head["bytes"]
    if len(view) != end:
        raise Torn(f"it has {len(view):,} bytes and should have {end:,}")
    if hashlib.blake2b(view[at:], digest_size=16).hexdigest() != head["checksum"]:
        raise Torn("its checksum is wrong")
    return Record(
        ("shared", head["scope"]),
        np.frombuffer(view[at:middle], "<i4").astype(np.int32),
        head["start"],
        np.frombuffer(view[middle:], np.uint8),
        tuple((key, at) for key, at in head["documents"]),
        head["frequency"],
        head["token_cost"],
    )


def read_head(read: Callable[[int], bytes]) -> dict:
    """What a file says of itself. Raises Torn."""
    if read(len(MAGIC)) != MAGIC:
        raise Torn("it is not one of this server's files")
    length = read(4)
    if len(length) < 4:
        raise Torn("it ends too early")
    summed = read(16)
    text = read(struct.unpack("<I", length)[0])
    if hashlib.blake2b(text, digest_size=16).digest() != summed:
        raise Torn("its head is damaged")
    return json.loads(text)


def is_shared(scope: object) -> bool:
    """Whether a scope is one that clients name; others belong to one request, and nothing of them is kept."""
    return isinstance(scope, tuple) and scope[0] == "shared"


def name_of(scope: object) -> str:
    """The name in a scope that clients share: ("shared", name)."""
    assert isinstance(scope, tuple) and scope[0] == "shared"
    return scope[1]
