"""The disk tier: files, their index, neighbours, writes behind.

A file is one record (see `HostMemory`), written aside and renamed, with checksums, so that a torn one is noticed. Files
lie in a folder of the model and of every setting that changes the KV; all folders together stay within one bound. A thread
of its own writes and deletes: the engine only queues records. Two servers may share a folder: before each write, a server
looks for the files that the other one has written and deleted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .radix import Node, RadixTree, path
from .record import SUFFIX, CorruptFile, encode, file_name, open_file, read, read_head, read_path
from .reuse import Source
from .scope import Scope, name_in
from .tier import FORMAT, Provenance, Record, own_folder, remove_stale

# ---- Fileindex ----------------------------------------------------------------------------------------------------------
# The index of record files: the runs in them, the files that stand on a file, and the file that leaves first.
#
# A run is of no use without the runs before it. So a file counts as used a moment after every file that stands on it:
# then no file stands on the least recently used one. The order lives in the files' times, and outlives the server.

MOMENT = 1000  # ns: what file systems tell apart


@dataclass(slots=True, eq=False, kw_only=True)
class FileEntry:
    """A file with the run at positions [start, stop). used: ns. node: the index's node that ends where the run does."""

    path: Path
    scope: str
    start: int
    stop: int
    size: int
    used: int
    node: Node


class FileIndex(RadixTree):
    """All files of one folder. `_covers` has the files whose runs cover a node."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[Path, FileEntry] = {}
        self.num_bytes = 0
        self._covers: dict[Node, list[FileEntry]] = {}

    def add(self, file: Path, scope: str, start: int, tokens: np.ndarray, *, size: int, used: int) -> FileEntry:
        """Add a file with the KV of `tokens` (int32) from `start` on."""
        node = self.insert(self.root(Scope.read(scope)), tokens, (start,))[len(tokens)]
        entry = FileEntry(path=file, scope=scope, start=start, stop=len(tokens), size=size, used=used, node=node)
        self.entries[file] = entry
        for covered in self._run(entry):
            self._covers.setdefault(covered, []).append(entry)
        self.num_bytes += size
        return entry

    def remove(self, entry: FileEntry) -> None:
        """Forget a file."""
        del self.entries[entry.path]
        self.num_bytes -= entry.size
        for covered in self._run(entry):
            self._covers[covered].remove(entry)
        for node in path(entry.node):
            if node.children or self._covers.get(node):
                break
            self._covers.pop(node, None)
            self._unlink(node)

    def stands_on_files(self, scope: str, start: int, tokens: np.ndarray) -> bool:
        """Return whether all KV before the run from `start` on is in files."""
        match = self.match(Scope.read(scope), tokens[:start])
        return match.length == start and all(self._covers.get(node) for node in path(match.node))

    def prefixes(self, scope: str, start: int, tokens: np.ndarray) -> list[FileEntry]:
        """Return the files that a run from `start` on stands on, and shorter files from `start` on, the deepest first."""
        match = self.match(Scope.read(scope), tokens)
        nodes = path(match.node)
        on_path = {node for node in nodes if node.end <= match.length}
        found: set[FileEntry] = set()
        for node in nodes:
            for entry in self._covers.get(node, ()):
                is_needed = node.start < start and entry.start < start
                is_shorter = entry.start == start and entry.stop < len(tokens) and entry.node in on_path  # a state, say
                if is_needed or is_shorter:
                    found.add(entry)
        return sorted(found, key=lambda entry: (entry.start, entry.stop), reverse=True)

    def use(self, entries: list[FileEntry], now: int) -> list[FileEntry]:
        """Count these files, the deepest first, as used one after the other from `now` on. Return those with a new time."""
        changed: list[FileEntry] = []
        for entry in entries:
            now += MOMENT
            if entry.used < now:
                entry.used = now
                changed.append(entry)
            now = entry.used
        return changed

    def settle(self) -> None:
        """Correct the times of files that other servers wrote: each must come after those that stand on it.

        Deep files first: a file has its final time before it moves the files that it stands on.
        """
        for entry in sorted(self.entries.values(), key=lambda entry: (entry.start, entry.stop), reverse=True):
            for prefix in self.prefixes(entry.scope, entry.start, self._tokens(entry)):
                prefix.used = max(prefix.used, entry.used + MOMENT)

    def newest_first(self) -> list[FileEntry]:
        """Return the files by their last use; each comes before all that stand on it."""
        return sorted(self.entries.values(), key=_use, reverse=True)

    def oldest(self) -> FileEntry | None:
        """Return the file that leaves next; no file stands on it."""
        return min(self.entries.values(), key=_use, default=None)

    def _run(self, entry: FileEntry) -> Iterator[Node]:
        for node in path(entry.node):
            if node.end <= entry.start:
                return
            yield node

    def _tokens(self, entry: FileEntry) -> np.ndarray:
        return np.concatenate([node.tokens for node in path(entry.node)][::-1])

    def _split(self, lower: Node, at: int) -> Node:
        upper = super()._split(lower, at)
        self._covers[upper] = list(self._covers.get(lower, ()))
        return upper


def _use(entry: FileEntry) -> tuple[int, int]:
    return entry.used, -entry.start


# ---- Neighbours ---------------------------------------------------------------------------------------------------------
# Folders of other models and settings beside ours in --cache-dir: under the same bound, and their files leave first.
#
# Another server may be at work in one of them. A file that is gone is to that server one that it never had, so it may
# leave.

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
    except CorruptFile:
        return True
    except OSError:
        return False


logger = logging.getLogger("slotcache.disk")
MOST_PENDING = 512 << 20  # bytes that may wait to be written; further records are not written


class DiskTier:
    """Records in `root`, at most `max_bytes` of them. Raises FolderError if the folder cannot be used."""

    name = Source.DISK

    def __init__(self, root: Path, max_bytes: int, made_by: Provenance) -> None:
        self.folder = own_folder(own_folder(root, "--cache-dir") / made_by.folder, "--cache-dir")
        self.max_bytes = max_bytes
        self.num_written = self.num_refused = 0  # records; files
        self._made_by = made_by
        self._index, self._neighbours = FileIndex(), Neighbours(root, self.folder)
        self._indexing = threading.Lock()  # guards the index against the writer and readers of damaged files
        self._seen = -1  # the time of the folder's last change that is in the index
        self._pending: list[Record] = []
        self._dropped: list[str] = []  # scopes whose files are to be deleted
        self._pending_bytes = 0
        self._writing: Record | None = None
        self._changed = threading.Condition()  # guards the queues, which any thread fills; never held during file access
        self._closing = self._failing = self._ready = False
        if (older := root / made_by.folder_of(FORMAT - 1)).is_dir():
            logger.info("%s has KV in an earlier format: it is not used, and leaves first", older)
        self._thread = threading.Thread(target=self._write_behind, name="disk", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files under the bound."""
        return self._index.num_bytes + self._neighbours.num_bytes

    def has_room(self, record: Record) -> bool:
        """Return whether the queue has room. The files that leave for it are deleted later, in the writer's thread."""
        return self._pending_bytes + record.num_bytes <= MOST_PENDING

    def put(self, record: Record) -> bool:
        """Queue a record. Return False if too much is waiting. From any thread."""
        with self._changed:
            if not self.has_room(record):
                logger.debug("%d tokens are not written: the disk is too slow", len(record.tokens) - record.start)
                return False
            self._pending.append(record)
            self._pending_bytes += record.num_bytes
            self._changed.notify_all()
        return True

    def get(self, key: str) -> Record | None:
        """Read a file. Return None if it is gone or damaged. From any thread."""
        path = self.folder / key
        entry = self._index.entries.get(path) if key in self else None
        if entry is None:
            return None
        try:
            with open_file(path) as file:
                return read(file, os.fstat(file.fileno()).st_size, self._made_by)
        except (OSError, CorruptFile) as error:
            self._refuse(path, error)
            self._remove([entry])
            return None

    def __contains__(self, key: str) -> bool:
        """Return whether a file is in the index and its scope is not being dropped. From any thread."""
        with self._changed:
            entry = self._index.entries.get(self.folder / key)
            return entry is not None and name_in(entry.scope) not in self._dropped

    def drop(self, scope: Scope, seconds: float = 10.0) -> bool:
        """Delete a scope's files in all folders, and wait for it. Return whether it was done in time. From any thread."""
        with self._changed:
            self._pending = [record for record in self._pending if record.scope.name != scope.name]
            self._pending_bytes = sum(record.num_bytes for record in self._pending)
            self._dropped.append(scope.name)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: scope.name not in self._dropped, seconds)

    def load(self, num_bytes: int) -> list[str]:
        """Return the names of the newest files, as many as take `num_bytes`, prefixes first. From any thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready)
        chosen: list[FileEntry] = []
        with self._indexing:
            newest = self._index.newest_first()
        for entry in newest:
            num_bytes -= entry.size
            if num_bytes < 0:
                break
            chosen.append(entry)
        return [entry.path.name for entry in sorted(chosen, key=lambda entry: (entry.start, entry.used))]

    @property
    def idle(self) -> bool:
        """Whether the queues are empty and the last record is written."""
        with self._changed:
            return self._ready and not self._pending and not self._dropped and self._writing is None

    def close(self, seconds: float = 10.0) -> None:
        """Write the queued records, for `seconds` at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(seconds)

    # ---- the writer's thread -----------------------------------------------------------------------------------------

    def _write_behind(self) -> None:
        self._guarded(self._begin)
        with self._changed:
            self._ready = True
            self._changed.notify_all()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._dropped or self._closing)
                dropped = list(self._dropped)
                record = self._writing = self._next()
                self._pending_bytes -= record.num_bytes if record else 0
                if record is None and not dropped:
                    return
            if dropped:
                self._guarded(lambda scopes=set(dropped): self._forget(scopes))
            if record is not None:
                self._guarded(lambda record=record: self._write(record))
            self._count_own_changes()
            with self._changed:
                self._writing = None
                self._dropped = self._dropped[len(dropped) :]  # a scope that was dropped again meanwhile stays queued
                self._changed.notify_all()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # a thread that ends would never write again
            logger.exception("the disk tier failed; it goes on with what comes next")

    def _next(self) -> Record | None:
        """Take the next record from the queue: prefixes first, since a run is of no use without the runs before it."""
        if not self._pending:
            return None
        record = min(self._pending, key=lambda record: record.start)
        self._pending.remove(record)
        return record

    def _begin(self) -> None:
        os.utime(self.folder)
        self._look()
        self._make_room(0)

    def _forget(self, scopes: set[str]) -> None:
        self._seen = -1  # look again: the clock of a file system is too coarse to show every change
        self._look()
        self._remove([entry for entry in self._index.newest_first()[::-1] if name_in(entry.scope) in scopes])
        self._neighbours.drop(scopes)

    def _write(self, record: Record) -> None:
        self._look()
        path, scope, now = self.folder / file_name(record), record.scope.text, time.time_ns()
        if path in self._index.entries:
            return
        parts = encode(record, self._made_by)
        size = sum(map(len, parts))
        if size > self.max_bytes:
            return
        self._use(scope, record.start, record.tokens, now)
        is_whole = self._has_prefixes(record)
        if not is_whole and self.num_bytes + size > self.max_bytes:
            return  # without its prefixes it is of no use, so no file leaves for it
        self._make_room(size)
        if is_whole and not self._has_prefixes(record):
            return  # its prefixes had to leave
        if self._write_file(path, parts, now):
            self.num_written += 1
            with self._indexing:
                self._index.add(path, scope, record.start, record.tokens, size=size, used=now)

    def _write_file(self, path: Path, parts: list[bytes | memoryview], now: int) -> bool:
        """Write a file aside and rename it."""
        aside = path.with_suffix(f".{secrets.token_hex(8)}.tmp")  # two servers may write the same run
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)  # another server may have removed it when it was empty
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            os.utime(aside, ns=(now, now))
            os.replace(aside, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            if not self._failing:
                logger.warning("cannot write to %s: %s; the cache goes on without", self.folder, error.strerror or error)
            self._failing = True
            return False
        if self._failing:
            logger.warning("can write to %s again", self.folder)
        self._failing = False
        return True

    def _use(self, scope: str, start: int, tokens: np.ndarray, now: int) -> None:
        """Count the files that a new run stands on as used a moment after it. Other servers see it by the files' times."""
        with self._indexing:
            used = self._index.use(self._index.prefixes(scope, start, tokens), now)
        for entry in used:
            with contextlib.suppress(OSError):
                os.utime(entry.path, ns=(entry.used, entry.used))

    def _has_prefixes(self, record: Record) -> bool:
        with self._indexing:
            return self._index.stands_on_files(record.scope.text, record.start, record.tokens)

    def _make_room(self, size: int) -> None:
        """Delete the least recently used files: first those of other folders, then ours, on which no file stands."""
        self._neighbours.free(self.num_bytes + size - self.max_bytes)
        while self.num_bytes + size > self.max_bytes and (oldest := self._index.oldest()):
            self._remove([oldest])

    def _remove(self, entries: list[FileEntry]) -> None:
        for entry in entries:
            with self._indexing:
                if self._index.entries.get(entry.path) is entry:
                    self._index.remove(entry)
            with contextlib.suppress(OSError):
                entry.path.unlink(missing_ok=True)

    # ---- the folder's files --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """List the files again: other servers write to this folder and those beside it, and delete from them."""
        self._neighbours.look()
        seen = changed_at(self.folder)
        if seen == self._seen:
            return
        self._seen, found = seen, stock(self.folder)
        with self._indexing:
            for entry in [entry for path, entry in self._index.entries.items() if path not in found]:
                self._index.remove(entry)
        unknown = [path for path in found if path not in self._index.entries]
        for file in unknown:
            self._note(file, *found[file])
        if unknown:
            with self._indexing:
                self._index.settle()
        remove_stale(self.folder)

    def _count_own_changes(self) -> None:
        """Skip the next look if the folder has only this thread's changes, and none of another server."""
        seen = changed_at(self.folder)
        if names(self.folder) == {path.name for path in self._index.entries}:
            self._seen = seen

    def _note(self, path: Path, size: int, used: int) -> None:
        try:
            with open_file(path) as file:
                head, tokens = read_path(file, size, self._made_by)
        except (OSError, CorruptFile) as error:
            self._refuse(path, error)
            return
        with self._indexing:
            self._index.add(path, head.scope, head.start, tokens, size=size, used=used)

    def _refuse(self, path: Path, error: Exception) -> None:
        if isinstance(error, FileNotFoundError):
            return  # another server has deleted it
        self.num_refused += 1
        logger.warning("%s is not used: %s", path.name, error)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
