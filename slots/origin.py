"""The origin of a folder's KV in words, in a file beside its records: for people, and for archives.

The provenance in a record is two digests. They tell whether KV is of this model and these settings, and not which others it
is of.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from .record import HexDigest, open_file
from .tier import Provenance

ORIGIN = "origin.json"
MOST_BYTES = 1 << 16

Words = Annotated[str, Meta(max_length=1000)]


class Origin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """model, build: in words. machine: the digest of the build, the CPU and the devices. shape: that of all else in a
    `Provenance` beside the model: the settings that shape KV. is_imported: it came here from another machine.
    """

    model: Words
    build: Words
    machine: HexDigest
    shape: HexDigest
    is_imported: bool = False


def of_any_machine(model: str, shape: str) -> Provenance:
    """Return the provenance of KV that was imported from another machine. model: as in `Provenance`; shape: as above."""
    return Provenance(model, hashlib.blake2b(f"imported {shape}".encode(), digest_size=16).hexdigest())


def write_origin(folder: Path, origin: Origin) -> None:
    """Keep the origin of a folder. Where it cannot be written, only exports need it."""
    aside = folder / f"origin.{secrets.token_hex(8)}.tmp"
    if read_origin(folder) == origin:
        return
    with contextlib.suppress(OSError):
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(origin))
            aside.replace(folder / ORIGIN)
        finally:
            aside.unlink(missing_ok=True)


def read_origin(folder: Path) -> Origin | None:
    """Return the origin of a folder; None where it is unknown."""
    with contextlib.suppress(OSError, ValueError), open_file(folder / ORIGIN) as file:
        return msgspec.json.decode(file.read(MOST_BYTES), type=Origin)
    return None
