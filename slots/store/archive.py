"""Work on a cache folder without a server: read its origin, list and delete its records, export and import archives.

Servers may use the folder at the same time: each file appears whole or not at all, and a server treats a deleted file as if
the file had never existed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tarfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ..record import SUFFIX, Record, file_name
from ..reuse import Source
from ..scope import name_in
from .disk import FOLDER, INDEX, ORIGIN, DiskTier, stock
from .private_folder import own_folder, written_aside
from .record_file import FORMAT, CorruptFile, Head, HexDigest, Large, Provenance, encode, open_file, read, read_head

Progress = Callable[[int, int], None]
"""Called with the work done so far and the total: in bytes for an export, in reads of records for an import."""

# ---- Origin -------------------------------------------------------------------------------------------------------------
# A file next to the records says in words where their KV comes from, for people and for archives. The provenance in a record
# is only two digests. They show whether the KV is of this model and these settings. If it is not, they do not tell of which.

MOST_BYTES = 1 << 16

Words = Annotated[str, Meta(max_length=1000)]


class Origin(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What computed the KV of a folder.

    model, build: the names of the model and of the llama.cpp build.
    machine: the digest of the build, the CPU and the devices.
    shape: the digest of those settings that change KV, without the machine.
    is_imported: whether the KV was imported from another machine.
    """

    model: Words
    build: Words
    machine: HexDigest
    shape: HexDigest
    is_imported: bool = False


ORIGINS = msgspec.json.Decoder(Origin)


def of_any_machine(model: str, shape: str) -> Provenance:
    """Return the provenance under which KV of other machines is stored.

    model: as in `Provenance`.
    shape: as in `Origin`.
    """
    return Provenance(model, hashlib.blake2b(f"imported {shape}".encode(), digest_size=16).hexdigest())


def write_origin(folder: Path, origin: Origin) -> None:
    """Write the origin of a folder's KV to a file in the folder. Errors are ignored, since only exports need the file."""
    if read_origin(folder) != origin:
        with contextlib.suppress(OSError), written_aside(folder / ORIGIN) as file:
            file.write(msgspec.json.encode(origin))


def read_origin(folder: Path) -> Origin | None:
    """Return the origin of a folder's KV; None if it is unknown."""
    with contextlib.suppress(OSError, ValueError), open_file(folder / ORIGIN) as file:
        return ORIGINS.decode(file.read(MOST_BYTES))
    return None


# ---- Folder: its records, damage, deletion. ------------------------------------------------------------------------------

ALL = 1 << 62  # bytes: no bound
HOURS = 86_400.0  # seconds: in effect no limit


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The file of a record.

    used: the time of the last use, ns.
    head: the file's head; None if it cannot be read.
    why: the reason why the head cannot be read; empty: it can.
    """

    path: Path
    size: int
    used: int
    head: Head | None
    why: str = ""

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the record's run, for which it has KV."""
        return self.head.tokens - self.head.start if self.head else 0


@dataclass(frozen=True, slots=True)
class ScopeUse:
    """The totals of those files of a folder that belong to one scope.

    oldest, newest: the earliest and the latest time at which one of the files was last used, ns.
    """

    scope: str
    num_records: int
    num_tokens: int
    num_bytes: int
    oldest: int
    newest: int

    @classmethod
    def of(cls, scope: str, files: list[StoredRecord]) -> ScopeUse:
        used = [file.used for file in files]
        num_tokens, num_bytes = sum(file.num_tokens for file in files), sum(file.size for file in files)
        return cls(scope, len(files), num_tokens, num_bytes, min(used), max(used))


@dataclass(frozen=True, slots=True)
class StoredFolder:
    """The KV of one model and one set of settings.

    model: the digest of the model; empty if it is unknown.
    scopes: the totals of each scope, ordered by name.
    unreadable: the totals of the files whose heads cannot be read; None if there are no such files.
    """

    path: Path
    model: str
    origin: Origin | None
    scopes: tuple[ScopeUse, ...]
    unreadable: ScopeUse | None

    @classmethod
    def of(cls, path: Path) -> StoredFolder:
        by_scope: dict[str, list[StoredRecord]] = defaultdict(list)
        unreadable: list[StoredRecord] = []
        model = ""
        for file in records(path):
            if file.head is None:
                unreadable.append(file)
            else:
                by_scope[name_in(file.head.scope)].append(file)
                if Provenance(file.head.model, file.head.settings).folder == path.name:  # else a stray file
                    model = file.head.model
        scopes = tuple(ScopeUse.of(name, files) for name, files in sorted(by_scope.items()))
        return cls(path, model, read_origin(path), scopes, ScopeUse.of("", unreadable) if unreadable else None)


def folders(root: Path) -> list[Path]:
    """Return the folders in a cache folder. Each of these folders has the KV of one model and one set of settings."""
    found = (path for path in root.iterdir() if FOLDER.fullmatch(path.name))
    return sorted(path for path in found if path.is_dir() and not path.is_symlink())


def records(folder: Path) -> Iterator[StoredRecord]:
    """Yield the record files of a folder with their heads, ordered by name."""
    for name, (size, used) in sorted(stock(folder).items()):
        try:
            with open_file(folder / name) as file:
                head, why = read_head(file)[0], ""
        except FileNotFoundError:
            continue  # a server has deleted it
        except (CorruptFile, OSError) as error:
            head, why = None, _reason(error)
        yield StoredRecord(folder / name, size, used, head, why)


def damage(stored: StoredRecord) -> str:
    """Read a whole file, and return what is wrong with it; empty if nothing is wrong or the file is gone."""
    if stored.head is None:
        return stored.why
    made_by = Provenance(stored.head.model, stored.head.settings)
    try:
        with open_file(stored.path) as file:
            read(file, os.fstat(file.fileno()).st_size, made_by)
    except FileNotFoundError:
        return ""
    except (CorruptFile, OSError) as error:
        return _reason(error)
    return "" if stored.path.parent.name == made_by.folder else "it is in the folder of another model or other settings"


def prune(root: Path, max_bytes: int) -> None:
    """Delete files until at most `max_bytes` bytes remain, in the order in which the last server would delete them.

    The last server is the one that has used a file most recently. Raises FolderError.
    """
    by_use = [(max((used for _, used in stock(path).values()), default=0), path) for path in folders(root)]
    for _, path in sorted(by_use, reverse=True):
        if made_by := provenance_in(path):
            DiskTier(root, max_bytes, made_by).close(seconds=HOURS)
            return


def prune_unused(root: Path, since: int) -> None:
    """Delete files that were last used before a time (ns), unless a file that was used later depends on them.

    Raises FolderError.
    """
    for path in folders(root):
        if made_by := provenance_in(path):
            tier = DiskTier(root, ALL, made_by)
            tier.wait()
            with tier.index.lock:
                for entry in sorted(tier.index.entries.values(), key=lambda entry: -entry.start):
                    if entry.used >= since:
                        tier.index.touch_prefixes(entry, entry.used)
                    else:
                        _delete(path / entry.key)
            tier.close(seconds=HOURS)
        else:
            for name, (_, used) in stock(path).items():
                if used < since:
                    _delete(path / name)


def remove(folder: Path) -> tuple[int, int]:
    """Delete all records of a folder, and the index, which has their tokens. Return how many records and bytes are gone."""
    gone = [size for name, (size, _) in stock(folder).items() if _delete(folder / name)]
    _delete(folder / INDEX)
    return len(gone), sum(gone)


def provenance_in(folder: Path) -> Provenance | None:
    """Return the provenance of a folder's KV; None if no file's head tells it."""
    heads = (file.head for file in records(folder) if file.head is not None)
    found = (Provenance(head.model, head.settings) for head in heads)
    return next((one for one in found if one.folder == folder.name), None)


def _delete(path: Path) -> bool:
    """Delete a file. Return False if the file cannot be deleted."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


# ---- Archive ------------------------------------------------------------------------------------------------------------
# A tar with the records of the common scope, to be carried to another machine.
#
#     <name>.kv ...        the records, prefixes first, each with its checksums: see `record_file.py`
#     slotcache-kv.json    last, the manifest: the model, the build, the number of records
#
# An archive is not trusted. Each member must be a plain file with a name that an export gives and with the size of its
# record. All records are read once, to their last byte, before any record is kept. A record counts as used once, whatever
# its use elsewhere. Still, whoever makes an archive chooses the KV in it, as whoever makes a model chooses its weights.

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
    """An archive cannot be written or is not accepted. The message is a single line."""


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest of an archive.

    format: the version of the records' file format.
    model, settings: the provenance of the records, as in `Provenance`.
    origin: the origin of their KV.
    records: the number of records.
    bytes: the size of all records together.
    """

    format: int
    model: HexDigest
    settings: HexDigest
    origin: Origin
    records: Large
    bytes: Large


MANIFESTS = msgspec.json.Decoder(Manifest)


class ImportedTier(DiskTier):
    """A disk tier for KV of other machines, and for KV that this server has computed after such KV.

    The tier has a separate folder. The KV in this tier need not be equal, bit for bit, to KV that this machine computes.
    """

    name = Source.IMPORTED


# ---- export -------------------------------------------------------------------------------------------------------------


def export(folder: Path, archive: Path, progress: Progress) -> tuple[Manifest, int]:
    """Write a folder's records of the common scope to an archive.

    Return the archive's manifest, and how many damaged records are left out. A record that is deleted during the export, for
    example because a client drops it, is left out, too. Raises ArchiveError and OSError.
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
    """Write a member of an archive. Return the size of the member's content in bytes."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = sum(map(len, parts)), 0o600
    file.write(info.tobuf(tarfile.GNU_FORMAT))
    file.writelines(parts)
    file.write(bytes(-info.size % BLOCK))
    return info.size


# ---- import -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an archive: its name, and the position and size of its content, in bytes."""

    name: str
    at: int
    size: int


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import.

    num_new: the number of records that the folder did not have before.
    is_foreign: whether the records were computed with another build, or on another CPU or device.
    """

    manifest: Manifest
    folder: Path
    num_new: int
    is_foreign: bool


def import_archive(archive: Path, root: Path, machine: str, takes_foreign: bool, progress: Progress) -> Imported:
    """Check all records of an archive, and then put them into a cache folder.

    machine: the digest of this machine, as in `Origin`.
    takes_foreign: whether to accept KV of other machines.

    Raises ArchiveError, CorruptFile, OSError and FolderError.
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
    """Open an archive, which no other user may be able to change. Raises ArchiveError and OSError."""
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
    """Return the members of an archive that are records, and its manifest. Raises ArchiveError and OSError."""
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
    """Read and check the record in a member of an archive. Raises ArchiveError and OSError."""
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
    """Write a record to a folder.

    The new file counts as used once. Return False if the folder has the record already. Raises OSError.
    """
    path = folder / file_name(record)
    if path.exists():
        return False
    with written_aside(path, syncs=True, used=time.time_ns()) as file:
        file.writelines(encode(record.used_once(), made_by))
    return True
