"""Folders with KV. Write access to one is the power to change answers, so only the owner may have it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

STALE = 3600  # seconds; an unfinished file that is older has no writer any more


class FolderError(Exception):
    """A folder that must not or cannot hold KV. The message names it, the reason, and the right state."""


def own_folder(path: Path, flag: str) -> Path:
    """Return the folder, made if it is missing, and checked. flag: the setting that names it. Raises FolderError."""
    try:
        if not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        about = path.stat()
    except OSError as error:
        raise FolderError(f"{flag} {path}: {error.strerror or error}: expected a folder to write to") from None
    if about.st_uid != os.geteuid():
        raise FolderError(f"{flag} {path}: it belongs to user {about.st_uid}: expected one of the server's own user")
    if about.st_mode & 0o022:
        raise FolderError(
            f"{flag} {path}: other users may write to it (mode {about.st_mode & 0o777:o}), and so change answers: "
            f"expected a folder that only its owner can write to (chmod go-w)"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise FolderError(f"{flag} {path}: Permission denied: expected a folder to write to")
    return path


def remove_stale(folder: Path) -> None:
    """Delete the unfinished files (*.tmp) of servers that have ended."""
    for left in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - STALE:
                left.unlink()
