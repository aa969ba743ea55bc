"""Private folders for KV or documents: checks of their owner, locks, and files that are written whole or not at all.

Whoever can write to a private folder can change answers. So only the owner of a private folder may be able to write to it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path

STALE = 3600  # seconds; an older unfinished file has no writer any more
MOST_SERVERS = 16  # servers that share a folder, each with a separate place in it


class FolderError(Exception):
    """A folder cannot be used for KV or documents. The message has the folder's name, the reason, and what was expected."""


def user_folder(variable: str, usual: str) -> Path:
    """Return a base folder of the user, by the XDG Base Directory Specification. Raises FolderError if the user has no home.

    variable: the environment variable that may name the folder. A variable with a relative path is ignored.
    usual: the default, relative to the user's home.
    """
    named = os.environ.get(variable, "")
    return Path(named) if os.path.isabs(named) else home_folder() / usual


def home_folder() -> Path:
    """Return the user's home folder. If HOME is empty or relative, use the system's user database. Raises FolderError."""
    try:
        if os.path.isabs(os.environ.get("HOME", os.sep)):
            return Path.home()
        import pwd

        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except (ImportError, KeyError, RuntimeError):
        raise FolderError("this user has no home: expected an absolute path in HOME") from None


def own_folder(path: Path, flag: str) -> Path:
    """Make the folder `path` if it is missing, check that only this user can write to it, and return it.

    Raises FolderError.

    flag: the setting that names the folder, for error messages.
    """
    try:
        if not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        about = path.stat()
    except OSError as error:
        raise FolderError(f"{flag} {path}: {error.strerror or error}: expected a folder to write to") from None
    if hasattr(os, "geteuid") and about.st_uid != os.geteuid():
        raise FolderError(f"{flag} {path}: it belongs to user {about.st_uid}: expected one of your own")
    if about.st_mode & 0o022:
        raise FolderError(
            f"{flag} {path}: other users may write to it (mode {about.st_mode & 0o777:o}): "
            f"expected a folder that only its owner can write to (chmod go-w)"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise FolderError(f"{flag} {path}: Permission denied: expected a folder to write to")
    return path


MOST_TRIES = 10  # to lock a file that other servers remove; on some file systems, a file's number changes


def lock(file: Path) -> int:
    """Lock a file, which is made if it is missing.

    Return a descriptor. The lock ends when the descriptor is closed or this process ends. Raises BlockingIOError if the file
    is locked already, and OSError for other errors, for example if the platform has no such locks.
    """
    for _ in range(MOST_TRIES):
        descriptor = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                    return descriptor
        except ImportError:
            os.close(descriptor)
            raise OSError(errno.ENOTSUP, "this platform has no flock", str(file)) from None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the file was removed since: whoever locks its successor would not see this lock
    raise OSError(errno.ESTALE, "another file has the name of each that is opened", str(file))


def locked_folder(folder: Path) -> tuple[Path, int]:
    """Check a folder of --cache-dir as `own_folder` does, and lock it. Return the folder and its lock.

    Raises FolderError, and BlockingIOError if another server has the lock.
    """
    own_folder(folder, "--cache-dir")
    try:
        return folder, lock(folder / "lock")
    except BlockingIOError:
        raise
    except OSError as error:
        problem = f"{error.strerror}: expected a folder on a file system with locks"
        raise FolderError(f"--cache-dir {folder}: it cannot be locked: {problem}") from None


def places(folder: Path) -> Iterator[Path]:
    """Yield a folder, and then the folders next to it that servers use if they find it locked."""
    return (folder.with_name(f"{folder.name}-{number}") if number else folder for number in range(MOST_SERVERS))


@contextmanager
def written_aside(path: Path, *, syncs: bool = False, used: int | None = None) -> Generator[BufferedWriter]:
    """Open a new file, which replaces the file `path` at the end of the block. Raises OSError.

    If the block raises, the file `path` stays as it was.

    syncs: whether to wait until the new file is on the disk before it replaces `path`.
    used: the modification time of the new file, ns; None: the time now.
    """
    aside = path.with_name(f".{secrets.token_hex(8)}.tmp")  # a random name: two servers may write the same file
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
            if syncs:
                file.flush()
                os.fsync(file.fileno())
        if used is not None:
            os.utime(aside, ns=(used, used))
        aside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def remove_stale(folder: Path) -> None:
    """Delete unfinished files (*.tmp) that are so old that the servers that wrote them must have ended."""
    for leftover in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if leftover.stat().st_mtime < time.time() - STALE:
                leftover.unlink()
