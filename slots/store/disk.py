"""The disk tier: records in files, which a separate thread writes.

Each file has one record. A file is written under another name and then renamed. Checksums show whether a file is damaged.
Each model, with all settings that change KV, has a folder for its files. The files of all these folders together stay within
one limit on bytes. The engine only queues records; a separate thread writes and deletes files. Two servers may share a
folder: before each write, a server looks for files that the other server has written or deleted.

From time to time, the index of all files is written to a separate file. When a server starts, it compares this index with
the names, sizes and times of the files, so that it has to read the heads of new and changed files only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import xxhash

from ..record import SUFFIX, Record, file_name
from ..reuse import Source
from ..scope import Scope, name_in
from .private_folder import own_folder, remove_stale, written_aside
from .record_file import FORMAT, CorruptFile, Provenance, encode, open_file, read, read_head, read_path
from .record_index import RecordEntry, RecordIndex

# ---- Neighbours ---------------------------------------------------------------------------------------------------------
# Folders of other models and settings in --cache-dir. They share the limit on bytes, and their files are deleted before the
# server's own files.
#
# Another server may use such a folder. It treats a deleted file as if the file had never existed, so any file may be
# deleted.

FOLDER = re.compile("[0-9a-f]{16}")
INDEX = "records.index"
ORIGIN = "origin.json"  # see `archive.py`


class Neighbours:
    """The folders in `root` of other models and settings: all folders except `own`.

    To free bytes, files of the least recently used folder are deleted before files of other folders.
    """

    def __init__(self, root: Path, own: Path) -> None:
        self._root, self._own = root, own
        self.num_bytes = 0
        self._files: deque[tuple[Path, int]] = deque()  # with their sizes, in the order of deletion
        self._seen: dict[Path, int] = {}  # the last change of each folder

    def look(self) -> None:
        """List the files again, if any folder has changed since the last call."""
        seen = {folder: changed_at(folder) for folder in (self._root, *self._folders())}
        if seen == self._seen:
            return
        self._seen = seen
        folders = [(folder, sorted(stock(folder).items(), key=lambda one: one[1][1])) for folder in self._folders()]
        by_last_use = sorted((one for one in folders if one[1]), key=lambda one: one[1][-1][1][1])
        self._files = deque((folder / name, size) for folder, files in by_last_use for name, (size, _) in files)
        self.num_bytes = sum(size for _, size in self._files)

    def free(self, num_bytes: int) -> None:
        """Delete files until `num_bytes` bytes are freed or no file is left."""
        while num_bytes > 0 and self._files:
            file, size = self._files.popleft()
            num_bytes -= size
            self.num_bytes -= size
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
                if not names(file.parent):
                    for beside in (INDEX, ORIGIN):
                        (file.parent / beside).unlink(missing_ok=True)
                file.parent.rmdir()  # fails until it is empty

    def drop(self, scopes: Collection[str]) -> None:
        """Delete the files of these scopes, and files whose head cannot be read."""
        self.look()
        gone = {file for file, _ in self._files if _is_of(file, scopes)}
        for file in (*gone, *{file.parent / INDEX for file in gone}):  # the index has the files' tokens, too
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


def stock(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of last use (ns) of each record in a folder, by its name.

    A time of last use that is in the future counts as the time now.
    """
    found: dict[str, tuple[int, int]] = {}
    now = time.time_ns()
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    about = entry.stat(follow_symlinks=False)
                    found[entry.name] = about.st_size, min(about.st_mtime_ns, now)
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
MOST_USELESS = 4096  # records that are remembered as not worth a file
FEW = 256  # changes after which the index is written again, or a quarter of its records if that is more
MOST_INDEX = 1 << 32  # bytes of a file with an index


class DiskTier:
    """A tier of records in files, in a folder in `root`. Raises FolderError if the folder cannot be used.

    max_bytes: the limit on the bytes of all files in `root`, including other folders.
    made_by: the provenance of the KV.
    without: the names of scopes whose records are not written.
    """

    name: str = Source.DISK

    def __init__(self, root: Path, max_bytes: int, made_by: Provenance, without: Collection[str] = ()) -> None:
        self.folder = own_folder(own_folder(root, "--cache-dir") / made_by.folder, "--cache-dir")
        self.max_bytes = max_bytes
        self.num_written = self.num_refused = 0  # num_written: records; num_refused: files
        self._made_by, self._without = made_by, without
        self.index, self._neighbours = RecordIndex(), Neighbours(root, self.folder)
        self._num_changes = 0  # changes of the index since it was written
        self._seen = -1  # the time (ns) of the folder's last change that the index includes
        self._pending: dict[str, Record] = {}  # by key
        self._useless: set[str] = set()  # keys of records that were not worth a file; cleared when another one is written
        self._dropped: list[str] = []  # scopes whose files are to be deleted
        self._pending_bytes = 0
        self._writing = ""  # the key of the record that was taken from the queue
        self._changed = threading.Condition()  # guards the queues, which any thread fills; never locked during file access
        self._closing = self._failing = self._ready = False
        if (older := root / made_by.folder_of(FORMAT - 1)).is_dir():
            logger.info("%s has KV in an earlier format: it is not used, and is deleted first", older)
        self._thread = threading.Thread(target=self._write_behind, name="disk", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def num_bytes(self) -> int:
        """The bytes of all files to which the limit applies."""
        return self.index.num_bytes + self._neighbours.num_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Return whether the queue has room for `num_bytes` bytes, and the last write did not fail.

        Any thread may call this. The bytes need not be free in the folder yet: the writer's thread evicts files when it
        writes.
        """
        return num_bytes <= self.max_bytes and self._pending_bytes + num_bytes <= MOST_PENDING and not self._failing

    def put(self, record: Record) -> bool:
        """Queue a record. Return False if the record is refused, for example because the queue is full.

        Any thread may call this. After a failed write, the queue takes only one record at a time, until a write succeeds.
        """
        if record.scope.name in self._without:
            return False
        key = file_name(record)
        with self._changed:
            if key in self._useless:
                return False
            if key in self._pending:
                return True
            if self._pending if self._failing else not self.has_room(record.num_bytes):
                logger.debug("%d tokens are not written: the disk is too slow", len(record.tokens) - record.start)
                return False
            self._pending[key] = record
            self._pending_bytes += record.num_bytes
            self._changed.notify_all()
        return True

    def get(self, key: str) -> Record | None:
        """Read a file, and count it as used. Return None if the file is gone or damaged. Any thread may call this."""
        path, now = self.folder / key, time.time_ns()
        entry = self.index.entries.get(key) if key in self else None
        if entry is None:
            return None
        try:
            with open_file(path) as file:
                record = read(file, os.fstat(file.fileno()).st_size, self._made_by)
        except (OSError, CorruptFile) as error:
            self._refuse(path, error)
            self._forget_entry(entry)
            return None
        with self.index.lock:
            self.index.use(key, now)
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now, now))
        return record

    def __contains__(self, key: str) -> bool:
        """Return whether a record is in a file or is about to be written, and its scope is not being dropped.

        Any thread may call this.
        """
        with self._changed:
            entry = self.index.entries.get(key)
            is_kept = entry is not None and not (self._dropped and entry.scope.name in self._dropped)
            return is_kept or key in self._pending or key == self._writing

    def drop(self, scope: Scope, seconds: float = 10.0) -> bool:
        """Delete the files of all scopes with this scope's name, in all folders. Any thread may call this.

        Wait at most `seconds` until the files are deleted. Return whether they were deleted in this time.
        """
        with self._changed:
            self._pending = {key: record for key, record in self._pending.items() if record.scope.name != scope.name}
            self._pending_bytes = sum(record.num_bytes for record in self._pending.values())
            self._dropped.append(scope.name)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: scope.name not in self._dropped, seconds)

    def wait(self) -> None:
        """Wait until the index has all files that were in the folder at the start. Any thread may call this."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued and nothing is being written."""
        with self._changed:
            return self._ready and not self._pending and not self._dropped and not self._writing

    def close(self, seconds: float = 10.0) -> None:
        """Write the queued records and the index. Wait at most `seconds` until both are written."""
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
                record = self._next()
                if record is None and not dropped:
                    break
            if dropped:
                self._guarded(lambda scopes=set(dropped): self._forget(scopes))
            if record is not None:
                self._guarded(lambda record=record: self._write(record))
            self._guarded(self._count_own_changes)
            with self._changed:
                self._writing = ""
                self._dropped = self._dropped[len(dropped) :]  # a scope that was dropped again since stays queued
                self._changed.notify_all()
        self._guarded(self._end)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:  # a thread that ends would never write again
            logger.exception("the disk tier failed; it goes on with what comes next")

    def _next(self) -> Record | None:
        """Take the next record from the queue.

        Records of earlier runs come first, since a run is useless without the runs before it.
        """
        if not self._pending:
            return None
        self._writing = min(self._pending, key=lambda key: self._pending[key].start)
        record = self._pending.pop(self._writing)
        self._pending_bytes -= record.num_bytes
        return record

    def _begin(self) -> None:
        with contextlib.suppress(OSError):  # the folder may be read-only
            os.utime(self.folder)
        self._read_index()
        self._look()
        self._make_room(0)
        if self._num_changes >= FEW:
            self._write_index()
            self._count_own_changes()

    def _end(self) -> None:
        """Write the index, without files that another server has deleted.

        The tokens of a deleted file must not stay in the index.
        """
        self._seen = -1
        self._look()
        self._write_index()

    def _forget(self, scopes: set[str]) -> None:
        self._useless.clear()
        self._seen = -1  # look again: the clock of a file system is too coarse to show every change
        self._look()
        for entry in self.index.of(scopes):
            self._remove(entry)
        with contextlib.suppress(OSError):
            (self.folder / INDEX).unlink(missing_ok=True)  # it has the files' tokens
        self._neighbours.drop(scopes)

    def _write(self, record: Record) -> None:
        self._look()
        name, now = file_name(record), time.time_ns()
        if name in self.index.entries:
            return
        parts = encode(record, self._made_by)
        size = sum(map(len, parts))
        if not self._makes_room(record, size):
            if len(self._useless) >= MOST_USELESS:
                self._useless.clear()
            self._useless.add(name)
            return
        if self._write_file(self.folder / name, parts, now):
            self.num_written += 1
            self._num_changes += 1
            self._useless.clear()
            with self.index.lock:
                entry = self.index.add(
                    name,
                    record.scope,
                    record.start,
                    record.tokens,
                    size=size,
                    used=now,
                    frequency=record.frequency,
                    token_cost=record.token_cost,
                    documents=record.documents,
                    has_state=record.state is not None,
                )
                in_front = self.index.touch_prefixes(entry, now)
            for prefix in in_front:  # file times show other servers that prefixes are deleted last
                with contextlib.suppress(OSError):
                    os.utime(self.folder / prefix.key, ns=(prefix.used, prefix.used))
        if self._num_changes >= max(FEW, len(self.index.entries) // 4):
            self._write_index()

    def _write_file(self, path: Path, parts: list[bytes | memoryview], now: int) -> bool:
        """Write a file under another name, then rename it."""
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)  # another server may have removed it when it was empty
            with written_aside(path, syncs=True, used=now) as file:
                file.writelines(parts)
        except OSError as error:
            if not self._failing:
                logger.warning("cannot write to %s: %s; the cache goes on without", self.folder, error.strerror or error)
            self._failing = True
            return False
        if self._failing:
            logger.warning("can write to %s again", self.folder)
        self._failing = False
        return True

    def _has_prefixes(self, record: Record) -> bool:
        with self.index.lock:
            return self.index.stands_on_records(record.scope, record.start, record.tokens)

    def _makes_room(self, record: Record, size: int) -> bool:
        """Delete files to make room for a record. Return False if the record is not worth writing.

        A record is not worth writing if it is too large, or if its prefixes had to be deleted to make room for it. No file
        is deleted for a record whose prefixes are missing.
        """
        if size > self.max_bytes:
            return False
        is_whole = self._has_prefixes(record)
        if not is_whole and self.num_bytes + size > self.max_bytes:
            return False  # so no file is deleted for it
        self._make_room(size)
        return not is_whole or self._has_prefixes(record)  # or its prefixes were deleted for it

    def _make_room(self, size: int) -> None:
        """Delete files until `size` bytes fit.

        Files of other folders are deleted before the tier's own files. Own files are deleted in the order of their worth,
        least worth first, but each file only after all files that depend on it.
        """
        self._neighbours.free(self.num_bytes + size - self.max_bytes)
        while self.num_bytes + size > self.max_bytes:
            with self.index.lock:
                gone = self.index.evict()
            if gone is None:
                return
            self._num_changes += 1
            with contextlib.suppress(OSError):
                (self.folder / gone.key).unlink(missing_ok=True)

    def _remove(self, entry: RecordEntry) -> None:
        self._forget_entry(entry)
        with contextlib.suppress(OSError):
            (self.folder / entry.key).unlink(missing_ok=True)

    def _forget_entry(self, entry: RecordEntry) -> None:
        with self.index.lock:
            if self.index.entries.get(entry.key) is entry:
                self.index.remove(entry)
                self._num_changes += 1

    # ---- the index in a file -------------------------------------------------------------------------------------------

    def _write_index(self) -> None:
        """Write the index to its file: first a digest, then the content."""
        content = self.index.stored()
        self._num_changes = 0
        if self.index.entries:
            self._write_file(self.folder / INDEX, [xxhash.xxh3_128_digest(content), content], time.time_ns())

    def _read_index(self) -> None:
        """Take over the index from its file, without records whose files have changed since the index was written."""
        path = self.folder / INDEX
        try:
            with open_file(path) as file:
                digest, content = file.read(16), file.read(MOST_INDEX)
            if xxhash.xxh3_128_digest(content) != digest:
                raise CorruptFile("its checksum is wrong")
            with self.index.lock:
                self.index.restore(content)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            logger.warning("%s is not used: %s; the heads of all files are read", path, error)
            with self.index.lock:
                self.index.clear()
            return
        found = stock(self.folder)
        for entry in list(self.index.entries.values()):
            if found.get(entry.key) != (entry.size, entry.used):
                self._forget_entry(entry)

    # ---- the folder's files --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """List the files again if need be: other servers may have written or deleted files, here or in other folders."""
        self._neighbours.look()
        seen = changed_at(self.folder)
        if seen == self._seen:
            return
        self._seen, found = seen, stock(self.folder)
        for entry in [entry for name, entry in self.index.entries.copy().items() if name not in found]:
            self._forget_entry(entry)
        for name in found.keys() - self.index.entries.keys():
            self._note(name, *found[name])
        remove_stale(self.folder)

    def _count_own_changes(self) -> None:
        """Let the next `_look` do nothing, if only this thread and no other server has changed the folder."""
        seen = changed_at(self.folder)
        if names(self.folder) == self.index.entries.keys():
            self._seen = seen

    def _note(self, name: str, size: int, used: int) -> None:
        path = self.folder / name
        try:
            with open_file(path) as file:
                head, tokens = read_path(file, size, self._made_by)
        except (OSError, CorruptFile) as error:
            self._refuse(path, error)
            return
        self._num_changes += 1
        with self.index.lock:
            self.index.add(
                name,
                Scope.read(head.scope),
                head.start,
                tokens,
                size=size,
                used=used,
                frequency=head.frequency,
                token_cost=head.token_cost,
                documents=head.documents,
                has_state=head.state > 0,
            )

    def _refuse(self, path: Path, error: Exception) -> None:
        """Delete a damaged file. A file that could not be read at all stays, since it may be undamaged."""
        if isinstance(error, FileNotFoundError):
            return  # another server has deleted it
        logger.warning("%s is not used: %s", path.name, error)
        if isinstance(error, CorruptFile):
            self.num_refused += 1
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
