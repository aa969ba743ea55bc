"""An archive of KV: a tar with the records of the common scope, to be carried to another machine.

    <name>.kv ...        the records, beginnings first, each with its checksums: see `record.py`
    slotcache-kv.json    last, the manifest: which model, which build, how many

An archive is read as if an enemy had made it: each member is a plain file with a name that an export gives, its size is that
of its record, and all records are read once, to their last byte, before one is kept. How often a record was used elsewhere
does not count: it is worth one use here. Whoever makes an archive chooses the KV in it all the same, as whoever makes a
model chooses its weights.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

import msgspec
from msgspec import Struct

from .disk import DiskTier
from .origin import MOST_BYTES, Origin, of_any_machine, read_origin, write_origin
from .record import SUFFIX, CorruptFile, HexDigest, Large, encode, file_name, open_file, read
from .reuse import Source
from .scope import name_in
from .stored_kv import Progress, StoredRecord, provenance_in, records
from .tier import FORMAT, Provenance, Record, own_folder, written_aside

MANIFEST = "slotcache-kv.json"
NAME = re.compile(rf"[0-9a-f]{{32}}{re.escape(SUFFIX)}")
BLOCK = tarfile.BLOCKSIZE
FLAG = "--cache-dir"
COMMON = ""  # the name of the scope that all clients share
KINDS = {
    tarfile.LNKTYPE: "a link",
    tarfile.SYMTYPE: "a link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.DIRTYPE: "a folder",
}


class ArchiveError(Exception):
    """An archive that cannot be written, or is not taken: one line."""


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """format: of the records. model, settings: their provenance. records, bytes: how many there are."""

    format: int
    model: HexDigest
    settings: HexDigest
    origin: Origin
    records: Large
    bytes: Large


MANIFESTS = msgspec.json.Decoder(Manifest)


class ImportedTier(DiskTier):
    """KV of other machines, in a folder of its own, with what a server computes behind it: not equal bit for bit."""

    name = Source.IMPORTED


# ---- export -------------------------------------------------------------------------------------------------------------


def export(folder: Path, archive: Path, progress: Progress) -> tuple[Manifest, int]:
    """Write the common scope's records of a folder to a file. Return its manifest, and how many damaged ones are left out.

    A record that leaves the folder meanwhile, because a client drops it, say, is not in it. Raises ArchiveError and OSError.
    """
    origin, made_by = read_origin(folder), provenance_in(folder)
    if origin is None or made_by is None:
        raise ArchiveError(f"{folder}: nothing tells which model and which build its KV is of")
    chosen = [file for file in records(folder) if file.head is not None and name_in(file.head.scope) == COMMON]
    chosen.sort(key=lambda file: file.head.start if file.head else 0)
    if not chosen:
        raise ArchiveError(f"{folder}: the common scope has no KV in it")
    with written_aside(archive, syncs=True) as file:
        while True:
            written, manifest = _write_all(file, chosen, origin, made_by, progress)
            there = [one for one in written if one.path.exists()]
            if len(there) == len(written):
                break
            chosen = there
            file.seek(0)
            file.truncate()
    return manifest, len(chosen) - len(written)


def _write_all(
    file: BufferedIOBase, chosen: list[StoredRecord], origin: Origin, made_by: Provenance, progress: Progress
) -> tuple[list[StoredRecord], Manifest]:
    written: list[StoredRecord] = []
    done, size, total = 0, 0, sum(stored.size for stored in chosen)
    for stored in chosen:
        done += stored.size
        try:
            with open_file(stored.path) as source:
                record = read(source, stored.size, made_by)
        except (OSError, CorruptFile):
            continue
        size += _write_member(file, stored.path.name, encode(record, made_by))
        written.append(stored)
        progress(done, total)
    manifest = Manifest(
        format=FORMAT, model=made_by.model, settings=made_by.settings, origin=origin, records=len(written), bytes=size
    )
    _write_member(file, MANIFEST, [msgspec.json.encode(manifest)])
    file.write(bytes(2 * BLOCK))
    return written, manifest


def _write_member(file: BufferedIOBase, name: str, parts: list[bytes | memoryview] | list[bytes]) -> int:
    """Return the bytes of its content."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = sum(map(len, parts)), 0o600
    file.write(info.tobuf(tarfile.GNU_FORMAT))
    file.writelines(parts)
    file.write(bytes(-info.size % BLOCK))
    return info.size


# ---- import -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an archive: its name, where its content begins, and the bytes of that."""

    name: str
    at: int
    size: int


@dataclass(frozen=True, slots=True)
class Imported:
    """What came of an import. num_new: records that were not there. is_foreign: they are of another build or CPU."""

    manifest: Manifest
    folder: Path
    num_new: int
    is_foreign: bool


def import_archive(archive: Path, root: Path, machine: str, takes_foreign: bool, progress: Progress) -> Imported:
    """Put the records of an archive into a cache folder, once all of them were checked.

    machine: as in `Origin`, of this one. takes_foreign: KV of another one, too. Raises ArchiveError, CorruptFile, OSError
    and FolderError.
    """
    with _own_file(archive) as file:
        members, manifest = _members(file)
        origin, made_by = manifest.origin, Provenance(manifest.model, manifest.settings)
        is_foreign = origin.is_imported or origin.machine != machine
        if is_foreign and not takes_foreign:
            raise ArchiveError(
                f"its KV was computed by another llama.cpp or on another CPU ({origin.build}): --import-foreign takes it, "
                "outside the promise of equal bits"
            )
        target = of_any_machine(made_by.model, origin.shape) if is_foreign else made_by
        for number, member in enumerate(members):
            _record(file, member, made_by)
            progress(number + 1, 2 * len(members))
        folder = own_folder(own_folder(root, FLAG) / target.folder, FLAG)
        if (free := shutil.disk_usage(folder).free) < manifest.bytes:
            raise ArchiveError(f"it has {manifest.bytes >> 20:,} MiB of KV, and {folder} has room for {free >> 20:,}")
        write_origin(folder, msgspec.structs.replace(origin, is_imported=is_foreign))
        num_new = 0
        for number, member in enumerate(members):
            num_new += _keep(_record(file, member, made_by), target, folder)
            progress(len(members) + number + 1, 2 * len(members))
    return Imported(manifest, folder, num_new, is_foreign)


@contextmanager
def _own_file(path: Path) -> Generator[BufferedIOBase]:
    """Open an archive that nobody else can change meanwhile. Raises ArchiveError and OSError."""
    if path.is_symlink():
        raise ArchiveError("it is a link: name the file")
    with open_file(path) as file:
        about = os.fstat(file.fileno())
        if hasattr(os, "geteuid") and about.st_uid not in (os.geteuid(), 0):
            raise ArchiveError(f"it belongs to user {about.st_uid}: expected a file of your own")
        if about.st_mode & 0o022:
            raise ArchiveError(f"other users may write to it (mode {about.st_mode & 0o777:o}): chmod go-w")
        yield file


def _members(file: BufferedIOBase) -> tuple[list[Member], Manifest]:
    """Return the records of an archive and its manifest. No content of a record is read. Raises ArchiveError and OSError."""
    total, found = os.fstat(file.fileno()).st_size, dict[str, Member]()
    while (block := file.read(BLOCK)) != bytes(BLOCK):
        try:
            info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.HeaderError, ValueError):
            raise ArchiveError("it is no archive of KV, or it is damaged") from None
        _check_header(info)
        at = file.tell()
        if not 0 <= info.size <= total - at:
            raise ArchiveError(f"{info.name} has {info.size:,} bytes, and the archive ends before")
        if info.name in found:
            raise ArchiveError(f"it has {info.name} twice")
        if MANIFEST in found:
            raise ArchiveError("something follows its manifest")
        found[info.name] = Member(info.name, at, info.size)
        file.seek(at + info.size + -info.size % BLOCK)
    if MANIFEST not in found:
        raise ArchiveError("it has no manifest")
    members = list(found.values())
    manifest = _manifest(file, members.pop())
    if (len(members), sum(member.size for member in members)) != (manifest.records, manifest.bytes):
        raise ArchiveError("its records are not those of its manifest")
    return members, manifest


def _check_header(info: tarfile.TarInfo) -> None:
    name = ascii(info.name[:80])
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise ArchiveError(f"{name} is {KINDS.get(info.type, 'no plain file')}")
    if info.name != MANIFEST and not NAME.fullmatch(info.name):
        raise ArchiveError(f"{name} is a name that no export gives")
    if info.mode & ~0o644:
        raise ArchiveError(f"{name} has the mode {info.mode:o}: expected 600")


def _manifest(file: BufferedIOBase, member: Member) -> Manifest:
    file.seek(member.at)
    try:
        manifest = MANIFESTS.decode(file.read(min(member.size, MOST_BYTES)))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ArchiveError(f"its manifest is not as expected: {error}") from None
    if manifest.format != FORMAT:
        raise ArchiveError(f"its records have format {manifest.format}: expected {FORMAT}")
    return manifest


def _record(file: BufferedIOBase, member: Member, made_by: Provenance) -> Record:
    """Return a record, checked. Raises ArchiveError and OSError."""
    file.seek(member.at)
    try:
        record = read(file, member.size, made_by)
    except CorruptFile as error:
        raise ArchiveError(f"{member.name}: {error}") from None
    if record.scope.name != COMMON or not record.scope.is_lasting:
        raise ArchiveError(f"{member.name} is not of the common scope")
    if file_name(record) != member.name:
        raise ArchiveError(f"{member.name} has the KV of another record")
    return record


def _keep(record: Record, made_by: Provenance, folder: Path) -> bool:
    """Write a record aside and rename it, unless it is there: no request has used it here so far. Raises OSError."""
    path = folder / file_name(record)
    if path.exists():
        return False
    with written_aside(path, syncs=True, used=time.time_ns()) as file:
        file.writelines(encode(record.used_once(), made_by))
    return True
