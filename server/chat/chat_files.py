"""Files about chats, in a folder that belongs to one server. A thread writes whole files, each with a checksum.

    magic | digest | content

Files are not synced to the disk, so the newest files may be lost or incomplete after the machine has failed. The
checksum reveals an incomplete file when the server reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from ...slots.store.private_folder import locked_folder, remove_stale, written_aside

T = TypeVar("T")
DIGEST = 16  # bytes
logger = logging.getLogger("slotcache.conversations")

Make = Callable[[], Iterable[bytes]]
"""Returns the content of a file, in parts."""


class DamagedFile(ValueError):
    """The content of a file is not what the server wrote."""


def with_checksum(magic: bytes, content: bytes) -> list[bytes]:
    """Return the parts of a file: the magic, the checksum of the content, and the content."""
    return [magic, _digest(content), content]


def checked_content(magic: bytes, data: bytes) -> memoryview:
    """Return the content of a file. Raises DamagedFile if the magic or the checksum is wrong."""
    begin = len(magic) + DIGEST
    if data[: len(magic)] != magic:
        raise DamagedFile("it is not one of this server's files")
    content = memoryview(data)[begin:]
    if _digest(content) != data[len(magic) : begin]:
        raise DamagedFile("its checksum is wrong")
    return content


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST).digest()


class ChatFiles:
    """The files of a folder, and the thread that writes them.

    Raises FolderError if the folder cannot be used, and BlockingIOError if another server uses it. At most one change
    waits for each file, since a newer change replaces the waiting one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = locked_folder(folder)
        self._waiting: dict[str, Make | None] = {}  # by the file's name; None: delete it
        self._changed = threading.Condition()  # guards `_waiting`; never locked during file access
        self._busy = self._closing = self._failing = False
        self._thread = threading.Thread(target=self._write_behind, name="conversations", daemon=True)
        try:
            remove_stale(self.folder)
            self._thread.start()
        except BaseException:  # for example, no thread can start: the next try must not find the folder locked
            if self._lock >= 0:
                os.close(self._lock)
            raise

    def write(self, name: str, make: Make) -> None:
        """Queue a file to be written. Any thread may call this.

        make: returns the content; called by the writing thread.
        """
        self.change({name: make})

    def drop(self, names: Iterable[str]) -> None:
        """Queue files to be deleted. Any thread may call this."""
        self.change(dict.fromkeys(names))

    def change(self, makes: Mapping[str, Make | None]) -> None:
        """Queue changes of files. Any thread may call this.

        makes: by the file's name, a function that returns the new content, or None to delete the file.
        """
        with self._changed:
            self._waiting |= makes
            self._changed.notify_all()

    def settle(self, seconds: float = 10.0) -> bool:
        """Wait until all queued changes are done, for at most `seconds`. Return whether all changes are done.

        Do not call it in the event loop's thread, since it blocks.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._busy), seconds)

    def load(
        self, suffix: str, max_bytes: int, decode: Callable[[bytes], T], name: Callable[[T], str]
    ) -> list[tuple[T, float]]:
        """Return the contents of the files whose names end with `suffix`, each with the time when it was written.

        The newest files are loaded, `max_bytes` in total, and older files are deleted. Files that are damaged, or whose
        name does not fit their content, are deleted, too. One log line warns of all damaged and unreadable files.

        decode: decodes the bytes of a file; raises DamagedFile. name: returns the name that the file of a content must
        have.
        """
        found: list[tuple[T, float]] = []
        refused: list[str] = []
        for path, written in self._newest_first(suffix, max_bytes):
            try:
                stored = decode(path.read_bytes())
                if name(stored) != path.name:
                    raise DamagedFile("it has the name of another file")
            except (OSError, DamagedFile) as error:
                refused.append(f"{path.name}: {error}")
                if isinstance(error, DamagedFile):
                    self.drop([path.name])
                continue
            found.append((stored, written))
        if refused:
            logger.warning("%d files in %s are not used, first %s", len(refused), self.folder, refused[0])
        return found

    def _newest_first(self, suffix: str, max_bytes: int) -> list[tuple[Path, float]]:
        """Return the newest files whose names end with `suffix`, up to `max_bytes` in total, each with its time.

        Delete older files. Also delete each file of more than `max_bytes`, since the server writes no file of this size.
        """
        files: list[tuple[Path, int, float]] = []
        for path in self.folder.glob(f"*{suffix}"):
            with contextlib.suppress(OSError):
                about = path.stat()
                if stat.S_ISREG(about.st_mode):
                    files.append((path, about.st_size, about.st_mtime))
        found: list[tuple[Path, float]] = []
        left = max_bytes
        for path, size, written in sorted(files, key=lambda file: file[2], reverse=True):
            left -= size if size <= max_bytes else 0
            if left < 0 or size > max_bytes:
                self.drop([path.name])
            else:
                found.append((path, written))
        return found

    def close(self, seconds: float = 10.0) -> None:
        """Carry out the queued changes, for at most `seconds`, and release the folder."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(seconds)
        if not self._thread.is_alive() and self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # ---- the writer's thread -----------------------------------------------------------------------------------------

    def _write_behind(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                name = next(iter(self._waiting))
                make, self._busy = self._waiting.pop(name), True
            self._guarded(name, make)

    def _guarded(self, name: str, make: Make | None) -> None:
        try:
            self._change(self.folder / name, make)
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "cannot write to %s: %s; answers are stored in memory only", self.folder, error.strerror or error
                )
            self._failing = True
        except Exception:  # the thread must not end
            logger.exception("a file could not be written; the next one may be")
        else:
            if self._failing:
                logger.warning("can write to %s again", self.folder)
            self._failing = False

    def _change(self, path: Path, make: Make | None) -> None:
        """If `make` is None, delete the file; otherwise write a new file and rename it to `path`. Raises OSError."""
        if make is None:
            path.unlink(missing_ok=True)
            return
        with written_aside(path) as file:
            file.writelines(make())
