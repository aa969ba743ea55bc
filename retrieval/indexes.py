"""Lists the indexes in a folder, with the sources, the size and the last use of each. Also removes indexes.

An index contains the full text of its sources. The index's lock file names the sources, and is written at each use of the
index. A server uses an index only while it has the lock.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..slots.store.private_folder import lock

LOCK = ".lock"
NAME = r"(?P<name>[0-9a-f]{16}-\d+(-\d{1,2})?)"  # a hash, the chunk size, a server's number
FILE = re.compile(NAME + rf"(\{LOCK}|(\.old)?\.(db|part)(-wal|-shm|-journal)?|-[0-9a-f]{{16}}\.ivf)")


def lock_index(database: Path, paths: Sequence[str]) -> int:
    """Lock an index until the returned descriptor is closed.

    database: the file of the index.
    paths: the sources of the index, which are written into the lock file.

    Raises BlockingIOError if a server uses the index, and OSError.
    """
    descriptor = lock(database.with_suffix(LOCK))
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, "\0".join(paths).encode(errors="surrogateescape"), 0)
    return descriptor


@dataclass(frozen=True, slots=True)
class KeptIndex:
    """An index in the folder.

    paths: its sources; empty if an earlier version made the index.
    used: the time of the last use, in seconds since 1970.
    """

    folder: Path
    name: str
    paths: tuple[str, ...]
    num_bytes: int
    used: float

    def __str__(self) -> str:
        return ", ".join(self.paths) or f"{self.name}, made by an earlier version"

    def remove(self) -> bool:
        """Delete the files of the index. Return False if a server uses the index. Raises OSError."""
        lock_file = self.folder / f"{self.name}{LOCK}"
        try:
            descriptor = lock(lock_file)
        except BlockingIOError:
            return False
        try:
            for file in _files(self.folder).get(self.name, ()):
                if file != lock_file:
                    file.unlink(missing_ok=True)
            lock_file.unlink()
        finally:
            os.close(descriptor)
        return True


def stored_indexes(folder: Path) -> list[KeptIndex]:
    """Return the indexes in a folder, the most recently used first."""
    found = [index for name, files in _files(folder).items() if (index := _read(folder, name, files))]
    return sorted(found, key=lambda index: -index.used)


def remove_unused(folder: Path, since: float) -> Iterator[KeptIndex]:
    """Delete and yield each index that was last used before `since`, in seconds since 1970. Raises OSError."""
    return (index for index in stored_indexes(folder) if index.used < since and index.remove())


def _files(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each index, by its name. Other files in the folder are ignored."""
    files: defaultdict[str, list[Path]] = defaultdict(list)
    for path in folder.iterdir() if folder.is_dir() else ():
        if found := FILE.fullmatch(path.name):
            files[found["name"]].append(path)
    return files


def _read(folder: Path, name: str, files: Sequence[Path]) -> KeptIndex | None:
    """Return the index with these files; None if only its lock is left, or if it was removed meanwhile."""
    if all(file.suffix == LOCK for file in files):
        return None
    stats, lines = [], ""
    with suppress(FileNotFoundError):
        lines = (folder / f"{name}{LOCK}").read_bytes().decode(errors="surrogateescape")
    for file in files:
        with suppress(FileNotFoundError):  # a journal is removed when its server ends
            stats.append(file.stat())
    if not stats:
        return None
    size, used = sum(one.st_size for one in stats), max(one.st_mtime for one in stats)
    return KeptIndex(folder, name, tuple(filter(None, lines.split("\0"))), size, used)
