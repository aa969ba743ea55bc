"""Takes record files apart and puts them together again with right checksums, as a forger would."""

from pathlib import Path

import msgspec
import xxhash

START = 15 + 4 + 16  # bytes of the magic, the head's length and the head's digest


def split(path: Path) -> dict:
    """Return the head of a record file."""
    content = path.read_bytes()
    return msgspec.json.decode(head_of(content))


def head_of(content: bytes) -> bytes:
    return content[START : START + int.from_bytes(content[15:19], "little")]


def resealed(content: bytes, head: bytes) -> bytes:
    """Return the file with another head (text), with right length and digest."""
    rest = content[START + len(head_of(content)) :]
    return content[:15] + len(head).to_bytes(4, "little") + digest(head) + head + rest


def digest(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)
