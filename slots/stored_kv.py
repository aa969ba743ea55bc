"""KV in a cache folder, seen from outside a server: what it holds, what is damaged, and what may leave.

Servers may run on the folder meanwhile, as they do beside each other: a file appears whole or not at all, and one that is
gone is to a server one that it never had.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .disk import FOLDER, INDEX, DiskTier, stock
from .origin import Origin, read_origin
from .record import CorruptFile, Head, open_file, read, read_head
from .scope import name_in
from .tier import Provenance

ALL = 1 << 62  # bytes: no bound
HOURS = 86_400.0  # seconds: as long as it takes


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A file. used: the time of its last use, ns. head: None where it cannot be read; why says why."""

    path: Path
    size: int
    used: int
    head: Head | None
    why: str = ""

    @property
    def num_tokens(self) -> int:
        """The tokens of its own run."""
        return self.head.tokens - self.head.start if self.head else 0


@dataclass(frozen=True, slots=True)
class ScopeUse:
    """What a scope has in a folder. oldest, newest: times of last use, ns."""

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
    """The KV of one model and one set of settings. model: its digest. scopes: by name; unreadable: files without a head."""

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
                if Provenance(file.head.model, file.head.settings).folder == path.name:  # else a stray file of another one
                    model = file.head.model
        scopes = tuple(ScopeUse.of(name, files) for name, files in sorted(by_scope.items()))
        return cls(path, model, read_origin(path), scopes, ScopeUse.of("", unreadable) if unreadable else None)


def folders(root: Path) -> list[Path]:
    """Return the folders of a cache folder, each of one model and one set of settings."""
    found = (path for path in root.iterdir() if FOLDER.fullmatch(path.name))
    return sorted(path for path in found if path.is_dir() and not path.is_symlink())


def records(folder: Path) -> Iterator[StoredRecord]:
    """Yield a folder's files with their heads, by name."""
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
    """Return what is wrong with a file, read to its last byte; empty: nothing, or it is gone."""
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
    """Let files leave until those that stay have at most so many bytes, as a server of the folder used last would.

    Raises FolderError.
    """
    by_use = [(max((used for _, used in stock(path).values()), default=0), path) for path in folders(root)]
    for _, path in sorted(by_use, reverse=True):
        if made_by := provenance_in(path):
            DiskTier(root, max_bytes, made_by).close(seconds=HOURS)
            return


def prune_unused(root: Path, since: int) -> None:
    """Let files leave that were not used since a time (ns), but for those on which one stands that was.

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
    """Delete all records of a folder, and the index, which has their tokens. Return how many are gone, and their bytes."""
    gone = [size for name, (size, _) in stock(folder).items() if _delete(folder / name)]
    _delete(folder / INDEX)
    return len(gone), sum(gone)


def provenance_in(folder: Path) -> Provenance | None:
    """Return the provenance of a folder's KV; None if no head tells."""
    heads = (file.head for file in records(folder) if file.head is not None)
    found = (Provenance(head.model, head.settings) for head in heads)
    return next((one for one in found if one.folder == folder.name), None)


def _delete(path: Path) -> bool:
    """Delete a file; return whether it is gone."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


Progress = Callable[[int, int], None]
"""Told how many bytes of how many are done."""
