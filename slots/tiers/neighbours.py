"""Folders of other models and settings beside ours in --cache-dir: under the same bound, and their files leave first.

Another server may be at work in one of them. A file that is gone is to that server one that it never had, so it may leave.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path

from ..scope import name_in
from .record import SUFFIX, Torn, open_file, read_head

FOLDER = re.compile("[0-9a-f]{16}")


class Neighbours:
    """All folders in `root` with a name like that of `own`, without `own`. The least recently used leaves first."""

    def __init__(self, root: Path, own: Path) -> None:
        self._root, self._own = root, own
        self.num_bytes = 0
        self._files: deque[tuple[Path, int]] = deque()  # with their sizes, those that leave first in front
        self._seen: dict[Path, int] = {}  # when each folder had changed last

    def look(self) -> None:
        """List the files again, if any folder has changed since the last time."""
        seen = {folder: changed_at(folder) for folder in (self._root, *self._folders())}
        if seen == self._seen:
            return
        self._seen = seen
        folders = [sorted(stock(folder).items(), key=lambda one: one[1][1]) for folder in self._folders()]
        by_last_use = sorted((files for files in folders if files), key=lambda files: files[-1][1][1])
        self._files = deque((file, size) for files in by_last_use for file, (size, _) in files)
        self.num_bytes = sum(size for _, size in self._files)

    def free(self, num_bytes: int) -> None:
        """Delete files until `num_bytes` are free or no file is left."""
        while num_bytes > 0 and self._files:
            file, size = self._files.popleft()
            num_bytes -= size
            self.num_bytes -= size
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
                file.parent.rmdir()  # fails until it is empty

    def drop(self, scopes: Collection[str]) -> None:
        """Delete the files of these scopes, and those with a head that cannot be read."""
        self.look()
        gone = {file for file, _ in self._files if _is_of(file, scopes)}
        for file in gone:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        self.look()

    def _folders(self) -> Iterator[Path]:
        with contextlib.suppress(OSError), os.scandir(self._root) as found:
            for entry in found:
                if FOLDER.fullmatch(entry.name) and entry.name != self._own.name and entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)


def changed_at(folder: Path) -> int:
    """Return the time (ns) of the last change to a folder's list of files; 0 if the folder does not exist."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def names(folder: Path) -> set[str]:
    """Return the names of the records in a folder."""
    with contextlib.suppress(FileNotFoundError):
        return {name for name in os.listdir(folder) if name.endswith(SUFFIX)}
    return set()


def stock(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the records in a folder with their sizes and the times of their last use (ns)."""
    found: dict[Path, tuple[int, int]] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    found[Path(entry.path)] = about.st_size, about.st_mtime_ns
    return found


def _is_of(path: Path, scopes: Collection[str]) -> bool:
    try:
        with open_file(path) as file:
            return name_in(read_head(file)[0].scope) in scopes
    except Torn:
        return True
    except OSError:
        return False
