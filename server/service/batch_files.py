"""The files and the batches that clients store, each of them its owner's alone, in one folder.

    file-*.json, file-*.data        a file: what is known of it, its content
    batch_*.json, batch_*.part      a batch; the answers that it has so far

Batches are answered one after another, the oldest first. One that a server leaves unfinished, the next one on this folder
goes on with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct, field

from ...slots.tier import MOST_SERVERS, FolderError, locked_folder, places, remove_stale, written_aside
from ..config.settings import Settings
from ..http.api_errors import RequestError
from .batch import RESULTS, Ask, LineError, NoLines, NotAnswers, Results, encode, read_lines, run

logger = logging.getLogger("slotcache.batches")
Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled"]
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
MOST_OPEN = 16  # batches of all owners that wait or run


def _now() -> int:
    return int(time.time())


class ClientFile(Struct, frozen=True):
    """A file of an owner. created_at: seconds since 1970."""

    id: str
    owner: str
    bytes: int
    filename: str
    purpose: str
    created_at: int = field(default_factory=_now)

    def public(self) -> dict[str, object]:
        """Return OpenAI's object."""
        shown = ("id", "bytes", "created_at", "filename", "purpose")
        return {"object": "file", "status": "processed", **{name: getattr(self, name) for name in shown}}


class StoredBatch(Struct, kw_only=True):
    """A batch of an owner, with OpenAI's fields. times: of its steps, by name. counts: of its lines."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    times: dict[str, int] = field(default_factory=lambda: {"created_at": _now()})
    counts: dict[str, int] = field(default_factory=lambda: {"total": 0, "completed": 0, "failed": 0})
    errors: list[LineError] = []
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    def step(self, status: Status) -> None:
        self.status = status
        self.times[f"{status}_at"] = _now()

    def public(self) -> dict[str, object]:
        """Return OpenAI's object."""
        names = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        shown = (
            "id",
            "endpoint",
            "input_file_id",
            "completion_window",
            "status",
            "output_file_id",
            "error_file_id",
            "metadata",
        )
        errors = {"object": "list", "data": self.errors} if self.errors else None
        return {
            "object": "batch",
            **{name: getattr(self, name) for name in shown},
            "created_at": self.times["created_at"],
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names},
            "request_counts": self.counts,
            "errors": errors,
        }


Stored = TypeVar("Stored", ClientFile, StoredBatch)


class StorageFull(Exception):
    """The answers of a batch would take more room than files may."""


class BatchFiles:
    """The folder, in --cache-dir; without one it is temporary, and made for the first file.

    Not thread-safe: the event loop's. Raises FolderError.
    """

    def __init__(self, settings: Settings) -> None:
        self.max_files, self.max_bytes = settings.files, settings.files_disk << 20
        self._is_temporary = not settings.cache_dir
        self._lock = -1
        if self._is_temporary:
            self.folder = Path(tempfile.gettempdir()) / f"slotcache-files-{secrets.token_hex(8)}"
        else:
            self.folder, self._lock = _free(Path(settings.cache_dir).expanduser() / "files")
            remove_stale(self.folder)
        self.files = self._load(ClientFile, "file-*.json")
        self.batches = self._load(StoredBatch, "batch_*.json")
        self._unwritten: dict[str, int] = {}  # bytes of the files that are being written
        self._sweep()

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values()) + sum(self._unwritten.values())

    def file(self, owner: str, id: str) -> ClientFile:
        """Return a file. Raises RequestError 404, also for one of another owner."""
        return _owned(self.files, owner, id, "file", code="file_not_found")

    def batch(self, owner: str, id: str) -> StoredBatch:
        """Return a batch. Raises RequestError 404, also for one of another owner."""
        return _owned(self.batches, owner, id, "batch", code="batch_not_found")

    def check_room(self, num_bytes: int) -> None:
        """Raise RequestError where one more file of this size is too much."""
        if (count := len(self.files) + len(self._unwritten)) >= self.max_files:
            problem = f"{count:,} files are stored, of at most {self.max_files:,} (--files)"
        elif self.num_bytes + num_bytes > self.max_bytes:
            problem = f"files take {self.num_bytes:,} bytes, and {num_bytes:,} more are too many (--files-disk)"
        else:
            return
        raise RequestError(f"{problem}: delete some first", status=413, code="storage_full")

    async def add(self, owner: str, filename: str, purpose: str, content: bytes) -> ClientFile:
        """Store a file, which is there once it is written."""
        file = ClientFile(f"file-{secrets.token_hex(12)}", owner, len(content), filename, purpose)
        self._unwritten[file.id] = file.bytes
        try:
            await asyncio.to_thread(self._write_file, file, content)
        except OSError as error:
            self._unlink(file)
            raise RequestError(f"the file cannot be stored: {error.strerror or error}", status=500) from None
        finally:
            del self._unwritten[file.id]
        self.files[file.id] = file
        return file

    def path(self, file: ClientFile) -> Path:
        """Return where the content of a file is."""
        return self.folder / f"{file.id}.data"

    def part(self, batch: StoredBatch) -> Path:
        """Return where the answers of an unfinished batch are."""
        return self.folder / f"{batch.id}.part"

    def save(self, stored: ClientFile | StoredBatch) -> None:
        """Write what is known of a file or a batch."""
        with written_aside(self.folder / f"{stored.id}.json") as file:
            file.write(encode(stored))

    def delete(self, file: ClientFile) -> None:
        """Forget a file."""
        del self.files[file.id]
        self._unlink(file)

    def _unlink(self, file: ClientFile) -> None:
        for path in (self.folder / f"{file.id}.json", self.path(file)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def forget(self, batch: StoredBatch) -> None:
        """Forget a batch that has ended; its files stay."""
        del self.batches[batch.id]
        (self.folder / f"{batch.id}.json").unlink(missing_ok=True)

    def close(self) -> None:
        if self._is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)
        elif self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _write_file(self, file: ClientFile, content: bytes) -> None:
        if self._is_temporary:
            self.folder.mkdir(mode=0o700, exist_ok=True)
        with written_aside(self.path(file)) as written:
            written.write(content)
        self.save(file)

    def _load(self, kind: type[Stored], pattern: str) -> dict[str, Stored]:
        """Return what the folder has of a kind, the oldest first; a damaged file is left out."""
        found: list[Stored] = []
        for path in sorted(self.folder.glob(pattern), key=lambda path: path.name):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=kind))
            except (OSError, msgspec.MsgspecError) as error:
                logger.warning("%s is not used: %s", path, error)
        return {stored.id: stored for stored in sorted(found, key=_created)}

    def _sweep(self) -> None:
        """Delete contents that no file is known of: their server ended while it stored them."""
        for path in self.folder.glob("file-*.data"):
            if path.stem not in self.files:
                path.unlink(missing_ok=True)


def _created(stored: ClientFile | StoredBatch) -> int:
    return stored.created_at if isinstance(stored, ClientFile) else stored.times["created_at"]


def _owned(known: dict[str, Stored], owner: str, id: str, kind: str, *, code: str) -> Stored:
    found = known.get(id)
    if found is None or found.owner != owner:
        raise RequestError(f"no {kind} {id[:80]!r} is stored for this key", status=404, param="id", code=code)
    return found


def _free(folder: Path) -> tuple[Path, int]:
    """Return a folder, or the first one beside it that no other server has, and its lock. Raises FolderError."""
    for place in places(folder):
        with contextlib.suppress(BlockingIOError):
            return locked_folder(place)
    raise FolderError(f"{folder}: {MOST_SERVERS} servers have files here: expected another --cache-dir")


# ---- The batches at work. -----------------------------------------------------------------------------------------------


class Batches:
    """Answers the batches of a folder. It belongs to the event loop. num_slots: requests that run at a time."""

    def __init__(self, files: BatchFiles, ask: Callable[[str], Ask], num_slots: int) -> None:
        self.files, self._ask, self._num_slots = files, ask, num_slots
        self._task: asyncio.Task[None] | None = None
        self._running: tuple[StoredBatch, asyncio.Task[None]] | None = None
        self._is_closing = False
        self._wake()

    def create(
        self, owner: str, endpoint: str, input: ClientFile, window: str, metadata: dict[str, str] | None
    ) -> StoredBatch:
        """Store a batch, which is answered after those before it. Raises RequestError."""
        self.files.check_room(0)
        known = self.files.batches
        if sum(batch.is_open for batch in known.values()) >= MOST_OPEN:
            raise RequestError(f"{MOST_OPEN} batches wait or run: try again later", status=429, code="queue_full")
        if len(known) >= self.files.max_files:
            self._forget_one()
        batch = StoredBatch(
            id=f"batch_{secrets.token_hex(12)}",
            owner=owner,
            endpoint=endpoint,
            input_file_id=input.id,
            completion_window=window,
            metadata=metadata,
        )
        try:
            self.files.save(batch)
        except OSError as error:
            raise RequestError(f"the batch cannot be stored: {error.strerror or error}", status=500) from None
        known[batch.id] = batch
        self._wake()
        return batch

    def _forget_one(self) -> None:
        """Forget the oldest ended batch of the owner who has most of them. Raises RequestError where none has ended."""
        ended = [batch for batch in self.files.batches.values() if not batch.is_open]
        if not ended:
            raise RequestError("all batches wait or run: try again later", status=429, code="queue_full")
        ((most, _),) = Counter(batch.owner for batch in ended).most_common(1)
        self.files.forget(next(batch for batch in ended if batch.owner == most))

    def cancel(self, batch: StoredBatch) -> None:
        """End a batch; the answers that it has are kept. Raises RequestError if it has ended."""
        if not batch.is_open:
            raise RequestError(f"the batch is {batch.status}: it has ended", param="id")
        if batch.status == "cancelling":
            return
        batch.step("cancelling")
        if self._running is not None and self._running[0] is batch:
            self._running[1].cancel()
        with contextlib.suppress(OSError):  # a full disk keeps no batch at work
            self.files.save(batch)

    async def close(self) -> None:
        """Stop; what is unfinished stays so."""
        self._is_closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        self.files.close()

    def _wake(self) -> None:
        if self._task is None and any(batch.is_open for batch in self.files.batches.values()):
            self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        try:
            while (batch := next((one for one in self.files.batches.values() if one.is_open), None)) is not None:
                try:
                    await self._answer(batch)
                except Exception:
                    logger.exception("%s failed", batch.id)
                    self._fail(batch, "server_error", "the server failed on this batch")
        finally:
            self._task = None

    async def _answer(self, batch: StoredBatch) -> None:
        """Answer a batch, from its first line without an answer on."""
        try:
            results = Results(self.files.part(batch))
            try:
                await self._run(batch, results)
            finally:
                results.close()
            await self._finish(batch)
        except (OSError, NotAnswers) as error:
            logger.warning("%s: its answers cannot be stored: %s", batch.id, error)
            self._fail(batch, "storage_failed", "the answers of this batch cannot be stored")

    async def _run(self, batch: StoredBatch, results: Results) -> None:
        files = self.files
        try:
            data = await asyncio.to_thread(files.path(files.file(batch.owner, batch.input_file_id)).read_bytes)
            lines = await asyncio.to_thread(read_lines, data, batch.endpoint)
        except NoLines as error:
            batch.errors = list(error.errors)
            return

        def count() -> None:
            num_done, num_failed = len(results.done), results.num_failed
            batch.counts = {"total": len(lines), "completed": num_done - num_failed, "failed": num_failed}
            if files.num_bytes + results.num_bytes > files.max_bytes:
                raise StorageFull

        count()
        if batch.status == "cancelling":
            return
        if batch.status == "validating":
            batch.step("in_progress")
        files.save(batch)
        logger.info("%s: %d lines, %d are answered", batch.id, len(lines), len(results.done))
        work = run(lines, results, self._ask(batch.owner), num_slots=self._num_slots, on_answer=count)
        self._running = batch, asyncio.create_task(work)
        try:
            await self._running[1]
        except asyncio.CancelledError:
            if self._is_closing or batch.status != "cancelling":
                raise
        except ExceptionGroup as group:
            if group.split(StorageFull)[1] is not None:
                raise
            batch.errors = [LineError("storage_full", "the answers take more room than --files-disk leaves", 0)]
        finally:
            self._running = None

    async def _finish(self, batch: StoredBatch) -> None:
        """Make files of the answers and of the errors, and end the batch."""
        part = self.files.part(batch)
        good, bad = await asyncio.to_thread(_parted, part.read_bytes())
        for content, name in ((good, "output"), (bad, "error")):
            if content:
                file = await self.files.add(batch.owner, f"{batch.id}_{name}.jsonl", "batch_output", content)
                setattr(batch, f"{name}_file_id", file.id)
        batch.step("cancelled" if batch.status == "cancelling" else "failed" if batch.errors else "completed")
        self.files.save(batch)
        part.unlink(missing_ok=True)
        logger.info("%s is %s: %s", batch.id, batch.status, batch.counts)

    def _fail(self, batch: StoredBatch, code: str, message: str) -> None:
        batch.errors = [LineError(code, message, 0)]
        batch.step("failed")
        with contextlib.suppress(OSError):
            self.files.save(batch)
        with contextlib.suppress(OSError):
            self.files.part(batch).unlink(missing_ok=True)


def _parted(answers: bytes) -> tuple[bytes, bytes]:
    """Return the lines of answers, and those of failures."""
    parted: tuple[list[bytes], list[bytes]] = ([], [])
    for line in answers.splitlines(keepends=True):
        parted[RESULTS.decode(line).has_failed].append(line)
    return b"".join(parted[0]), b"".join(parted[1])
