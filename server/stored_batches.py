"""Counts the files that earlier versions stored for `/v1/files` and `/v1/batches`, and deletes them on command."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..slots.store.private_folder import locked_folder, places

NAME = re.compile(r"file-[0-9a-f]{24}\.(json|data)|batch_[0-9a-f]{24}\.(json|part)|\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, slots=True)
class StoredBatches:
    """The number and the total size of files that earlier versions stored. The files contain texts of clients."""

    num_files: int
    num_bytes: int

    @classmethod
    def of(cls, root: Path) -> StoredBatches:
        """Count the files that earlier versions stored in a cache folder. Raises OSError."""
        sizes = [path.lstat().st_size for folder in _folders(root) for path in _files(folder)]
        return cls(len(sizes), sum(sizes))

    def __str__(self) -> str:
        return f"{self.num_files:,} files of /v1/files and /v1/batches, {self.num_bytes / 2**20:,.1f} MiB"


def at_start(cache_dir: str) -> str:
    """Return a line that counts the files of earlier versions in --cache-dir, and says how to delete them.

    Return an empty text if the folder has no such files.
    """
    if not cache_dir:
        return ""
    with suppress(OSError):  # the start itself refuses an unusable folder
        root = Path(cache_dir).expanduser()
        if (stored := StoredBatches.of(root)).num_files:
            return f"{root}: {stored}, which are no longer served: `slotcache cache prune {root} --batches` deletes them"
    return ""


def delete(root: Path) -> None:
    """Delete the files that earlier versions stored in a cache folder, and keep all other files.

    Raises FolderError and OSError. Raises BlockingIOError if a server uses the files.
    """
    for folder in _folders(root):
        _, lock = locked_folder(folder)
        try:
            for path in _files(folder):
                path.unlink(missing_ok=True)
            (folder / "lock").unlink()
        finally:
            os.close(lock)
        with suppress(OSError):  # the folder has other files
            folder.rmdir()


def _folders(root: Path) -> list[Path]:
    return [path for path in places(root / "files") if path.is_dir() and not path.is_symlink()]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if NAME.fullmatch(path.name))
