"""The disk tier: what the host tier holds, written behind, and found again when the server starts.

A file is one record (see `slots.archive`), written aside and renamed, with a checksum, so that a torn one is noticed. Files
lie in a folder of the model and of every setting that changes the KV; what does not fit is never looked at. All of it runs
in threads of its own: the engine only hands records over, and takes them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..models.errors import ModelError
from ..slots.archive import Record
from .recordfile import SUFFIX, Torn, decode, encode, file_name, name_of, read_head

logger = logging.getLogger("slotcache.disk")
MOST_PENDING = 512 << 20  # bytes that may wait to be written; what comes on top is not written


@dataclass(frozen=True, slots=True)
class Entry:
    """A file. used: when it was written, seconds."""

    path: Path
    scope: str
    start: int
    stop: int
    size: int
    used: float


class DiskTier:
    """Records under `folder`, at most `max_bytes` of them; the oldest go first. Raises ModelError if it cannot be used."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.num_bytes = 0
        self.num_written = self.num_refused = 0  # records; files
        self._entries: dict[Path, Entry] = {}  # the oldest first
        self._pending: list[Record] = []
        self._dropped: list[str] = []  # scopes
        self._pending_bytes = 0
        self._writing: Record | None = None
        self._changed = threading.Condition()
        self._closing = self._failing = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for left in folder.glob("*.tmp"):
                left.unlink()
            for entry in sorted(self._found(), key=lambda entry: entry.used):
                self._entries[entry.path] = entry
                self.num_bytes += entry.size
            (folder / "try.tmp").write_bytes(b"")
            (folder / "try.tmp").unlink()
        except OSError as error:
            raise ModelError(f"--cache-dir {folder}: {error.strerror or error}: expected a folder to write to") from None
        self._thread = threading.Thread(target=self._write_behind, name="disk", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Write a record some time soon. From any thread."""
        with self._changed:
            if self._pending_bytes + len(record.data) > MOST_PENDING:
                logger.debug("%d tokens are not written: the disk is too slow", len(record.tokens) - record.start)
                return
            self._pending.append(record)
            self._pending_bytes += len(record.data)
            self._changed.notify()

    def drop(self, scope: str, seconds: float = 10.0) -> bool:
        """Delete a scope's files; whether that is done within so long. From any thread."""
        with self._changed:
            self._pending = [record for record in self._pending if name_of(record.scope) != scope]
            self._pending_bytes = sum(len(record.data) for record in self._pending)
            self._dropped.append(scope)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: scope not in self._dropped, seconds)

    def load(self, num_bytes: int, adopt: Callable[[Record, Callable[[], bool]], bool]) -> int:
        """Give `adopt` the newest records, as many as take `num_bytes`, beginnings first; how many it took.

        With each record comes a function that says whether it still is on disk: what was dropped since must not come back.
        """
        chosen: list[Entry] = []
        for entry in reversed(self._all()):
            num_bytes -= entry.size
            if num_bytes < 0:
                break
            chosen.append(entry)
        found = self._records(sorted(chosen, key=lambda entry: (entry.start, entry.used)))
        return sum(adopt(record, lambda entry=entry: self._holds(entry)) for entry, record in found)

    @property
    def idle(self) -> bool:
        """Whether all that was handed over is written."""
        with self._changed:
            return not self._pending and not self._dropped and self._writing is None

    def close(self, seconds: float = 10.0) -> None:
        """Write what is pending, for so long at most."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)

    # ---- the writer's thread -----------------------------------------------------------------------------------------

    def _write_behind(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._dropped or self._closing)
                scopes = set(self._dropped)
                record = self._writing = self._next()
                self._pending_bytes -= len(record.data) if record else 0
                if record is None and not scopes:
                    return
            try:
                self._remove([entry for entry in self._all() if entry.scope in scopes])
                if record is not None:
                    self._write(record)
            except Exception:  # a thread that ends would never write again
                logger.exception("the disk tier failed; it goes on with what comes next")
            with self._changed:
                self._writing = None
                self._dropped = [scope for scope in self._dropped if scope not in scopes]
                self._changed.notify_all()

    def _next(self) -> Record | None:
        """What to write now: beginnings first, since a run is of no use without what stands before it."""
        if not self._pending:
            return None
        record = min(self._pending, key=lambda record: record.start)
        self._pending.remove(record)
        return record

    def _write(self, record: Record) -> None:
        path = self.folder / file_name(record)
        if path in self._entries:
            return
        parts = encode(record)
        size = sum(map(len, parts))
        if size > self.max_bytes:
            return
        aside = path.with_suffix(f".{os.getpid()}.tmp")  # two servers may share the folder
        try:
            self._make_room(size)
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            if not self._failing:
                logger.warning("cannot write to %s: %s; the cache goes on without", self.folder, error.strerror or error)
            self._failing = True
            return
        if self._failing:
            logger.warning("can write to %s again", self.folder)
        self._failing = False
        self.num_written += 1
        self._add(Entry(path, name_of(record.scope), record.start, len(record.tokens), size, os.stat(path).st_mtime))

    def _holds(self, entry: Entry) -> bool:
        """Whether it still is there, and is not about to be deleted."""
        with self._changed:
            return entry.path in self._entries and entry.scope not in self._dropped

    def _all(self) -> list[Entry]:
        """The oldest first. Those who load and who write both take some away."""
        with self._changed:
            return list(self._entries.values())

    def _add(self, entry: Entry) -> None:
        with self._changed:
            self._entries[entry.path] = entry
        self.num_bytes += entry.size

    def _make_room(self, size: int) -> None:
        over, oldest = self.num_bytes + size - self.max_bytes, []
        for entry in self._all():
            if over <= 0:
                break
            over -= entry.size
            oldest.append(entry)
        self._remove(oldest)

    def _remove(self, entries: list[Entry]) -> None:
        for entry in entries:
            with self._changed:
                if self._entries.pop(entry.path, None):
                    self.num_bytes -= entry.size
            with contextlib.suppress(OSError):
                entry.path.unlink(missing_ok=True)

    # ---- what is there -----------------------------------------------------------------------------------------------

    def _found(self) -> Iterator[Entry]:
        """What stands in the folder, by its heads."""
        for path in self.folder.glob(f"*{SUFFIX}"):
            try:
                with path.open("rb") as file:
                    head = read_head(file.read)
                about = path.stat()
                yield Entry(path, head["scope"], head["start"], head["tokens"], about.st_size, about.st_mtime)
            except (OSError, Torn) as error:
                self._refuse(path, error)

    def _records(self, entries: list[Entry]) -> Iterator[tuple[Entry, Record]]:
        for entry in entries:
            if not self._holds(entry):
                continue
            try:
                yield entry, decode(entry.path.read_bytes())
            except (OSError, Torn) as error:
                self._refuse(entry.path, error)
                self._remove([entry])

    def _refuse(self, path: Path, error: Exception) -> None:
        self.num_refused += 1
        logger.warning("%s is not used: %s", path.name, error)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
