"""The origin of a folder's KV in words, in a file beside its records: for people, and for archives.

The provenance in a record is two digests. They tell whether KV is of this model and these settings, and not which others it
is of.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from .record import HexDigest, open_file
from .tier import Provenance, written_aside

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


ORIGINS = msgspec.json.Decoder(Origin)


def of_any_machine(model: str, shape: str) -> Provenance:
    """Return the provenance of KV that was imported from another machine. model: as in `Provenance`; shape: as above."""
    return Provenance(model, hashlib.blake2b(f"imported {shape}".encode(), digest_size=16).hexdigest())


def write_origin(folder: Path, origin: Origin) -> None:
    """Keep the origin of a folder. Where it cannot be written, only exports need it."""
    if read_origin(folder) != origin:
        with contextlib.suppress(OSError), written_aside(folder / ORIGIN) as file:
            file.write(msgspec.json.encode(origin))


def read_origin(folder: Path) -> Origin | None:
    """Return the origin of a folder; None where it is unknown."""
    with contextlib.suppress(OSError, ValueError), open_file(folder / ORIGIN) as file:
        return ORIGINS.decode(file.read(MOST_BYTES))
    return None
