"""Stored answers in a folder, so that conversations outlive a restart: written behind the event loop's back.

Each answer is a file of its own, written aside and renamed. Nothing is synchronised: the newest answers may be lost when the
machine fails, and a file that is torn then is noticed when it is read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from ...slots.tiers.folder import own_folder, remove_stale
from .stored import SUFFIX, StoredAnswer, Torn, Vocabulary, decode, encode

logger = logging.getLogger("slotcache.conversations")


class Shelf:
    """The folder and the thread that writes to it. Raises FolderError if the folder cannot be used.

    A change that waits is replaced by the next one of the same file, so no more waits than the conversations hold.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = own_folder(folder, "--cache-dir")
        self._waiting: dict[str, StoredAnswer | None] = {}  # by the file's name; None: delete it
        self._changed = threading.Condition()  # guards what waits; never held during file access
        self._busy = self._closing = self._failing = False
        self._thread = threading.Thread(target=self._write_behind, name="shelf", daemon=True)
        self._thread.start()

    def put(self, stored: StoredAnswer) -> None:
        """Queue an answer to be written. From any thread."""
        self._queue({stored.file_name: stored})

    def drop(self, names: Iterable[str]) -> None:
        """Queue files to be deleted. From any thread."""
        self._queue(dict.fromkeys(names))

    def settle(self, seconds: float = 10.0) -> bool:
        """Wait until nothing waits; return whether that came about in time. From any thread but the event loop's."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._busy), seconds)

    def load(self, vocabulary: Vocabulary, max_bytes: int) -> list[tuple[StoredAnswer, float]]:
        """Return the newest answers whose files have `max_bytes` together, each with the time of its file.

        Older files are deleted, and so are damaged ones, with one warning for all of them.
        """
        remove_stale(self.folder)
        found: list[tuple[StoredAnswer, float]] = []
        refused: list[str] = []
        for path, size, written in self._newest_first():
            max_bytes -= size
            if max_bytes < 0:
                self.drop([path.name])
                continue
            try:
                stored = decode(path.read_bytes(), vocabulary)
                if stored.file_name != path.name:
                    raise Torn("it has the name of another file")
            except (OSError, Torn) as error:
                refused.append(f"{path.name}: {error}")
                if isinstance(error, Torn):
                    self.drop([path.name])
                continue
            found.append((stored, written))
        if refused:
            logger.warning("%d stored answers in %s are not used, first %s", len(refused), self.folder, refused[0])
        return found

    def close(self, seconds: float = 10.0) -> None:
        """Carry out what waits, for `seconds` at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(seconds)

    def _newest_first(self) -> list[tuple[Path, int, float]]:
        """Return the answers' files with their sizes and times."""
        files: list[tuple[Path, int, float]] = []
        for path in self.folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                about = path.stat()
                if stat.S_ISREG(about.st_mode):
                    files.append((path, about.st_size, about.st_mtime))
        return sorted(files, key=lambda file: file[2], reverse=True)

    def _queue(self, changes: dict[str, StoredAnswer | None]) -> None:
        with self._changed:
            self._waiting |= changes
            self._changed.notify_all()

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
                stored, self._busy = self._waiting.pop(name), True
            self._guarded(name, stored)

    def _guarded(self, name: str, stored: StoredAnswer | None) -> None:
        try:
            self._change(self.folder / name, stored)
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "cannot write to %s: %s; answers are stored in memory only", self.folder, error.strerror or error
                )
            self._failing = True
        except Exception:  # a thread that ends would never write again
            logger.exception("an answer could not be written; the next one may be")
        else:
            if self._failing:
                logger.warning("can write to %s again", self.folder)
            self._failing = False

    def _change(self, path: Path, stored: StoredAnswer | None) -> None:
        """Write a file aside and rename it, or delete it. Raises OSError."""
        if stored is None:
            path.unlink(missing_ok=True)
            return
        aside = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.writelines(encode(stored))
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


def seconds_since(written: float) -> float:
    """Return the age of a file; 0 for one of the future, which a clock that was set back has left."""
    return max(time.time() - written, 0.0)
