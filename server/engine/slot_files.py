"""Saves, restores and erases the KV of slots, as llama-server does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...slots.record import Record
from ...slots.slot import Histories, Slot
from ...slots.store import record_file
from ...slots.store.record_file import CorruptFile, ForeignFile, Provenance
from ..http.api_errors import RequestError
from ..http.threads import WaitingThread
from .engine import Engine

logger = logging.getLogger("slotcache.engine")
ADOPT_SECONDS = 60.0  # the longest wait for the engine to take a record


class Arrivals:
    """Puts records of KV from files into host memory.

    The methods wait for the engine, so the engine's thread and the event loop must not call them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._is_warm = engine, False

    def adopt(self, record: Record) -> bool:
        """Put a record into host memory after the current step. Return whether the record is in host memory now.

        Return False if the record's layout differs from the model's KV, or if host memory has no room for the record.
        Raises TimeoutError after `ADOPT_SECONDS`.
        """
        self._await_warm_up()
        engine = self._engine
        if not engine.accepts(record):
            logger.warning("the KV of %d tokens in a file does not fit this model", len(record.tokens) - record.start)
            return False
        return engine.inbox.ask(lambda: engine.scheduler.index.host.put(record.used_once())).result(ADOPT_SECONDS)

    def _await_warm_up(self) -> None:
        """Wait for the engine's warm-up, which finds out the layout of KV and the budgets."""
        if not self._is_warm:
            self._engine.inbox.ask(lambda: None).result(ADOPT_SECONDS)
            self._is_warm = True


# ---- The history of a slot in a file. -----------------------------------------------------------------------------------


class SlotStore:
    """Saves the histories of slots to files, and restores them. Any thread may use this object.

    made_by: identifies the model and the settings that KV depends on. Each file contains the `made_by` of the server that
    wrote it, and a file with another `made_by` is refused. If the server saves no KV, `made_by` is None.
    """

    def __init__(self, engine: Engine, made_by: Provenance | None) -> None:
        self._inbox, self._scheduler, self._background = engine.inbox, engine.scheduler, engine.background
        device, index = engine.scheduler.tree.device, engine.scheduler.index
        self._histories = Histories(device, index, carry_out=engine.carry_out)
        self._arrivals, self._made_by = Arrivals(engine), made_by
        self._thread = WaitingThread("slot-files")  # one file at a time: each copy of a history may take gigabytes

    async def save(self, number: int, path: Path) -> tuple[int, int]:
        """Write a slot's history to a file. Return the number of tokens and the file's size in bytes.

        Raises RequestError.
        """
        return await self._thread.run(self._save, number, path)

    async def restore(self, number: int, path: Path) -> tuple[int, int]:
        """Replace a slot's history by the content of a file. Return the number of tokens and the file's size in bytes.

        Raises RequestError.
        """
        return await self._thread.run(self._restore, number, path)

    def close(self) -> None:
        """Wait until the current file is written or read."""
        self._thread.close()

    async def erase(self, number: int) -> int:
        """Drop the KV of a slot's history and of its prefilled next turn. Return the number of dropped tokens.

        If other prompts also use some of this KV, that part stays.

        Raises RequestError.
        """
        return await asyncio.wrap_future(self._inbox.ask(lambda: self._histories.erase(self._slot(number))))

    # ---- in the thread of the files --------------------------------------------------------------------------------

    def _save(self, number: int, path: Path) -> tuple[int, int]:
        records = self._inbox.ask(lambda: self._records(number)).result()
        try:
            written = record_file.write(path, records, self._provenance)
        except OSError as error:
            raise RequestError(f"cannot write {path.name}: {error.strerror}", status=500) from None
        return len(records[-1].tokens) if records else 0, written

    def _restore(self, number: int, path: Path) -> tuple[int, int]:
        last, size = self._adopt_all(path)
        if last is None:
            return 0, size
        restored = self._inbox.ask(lambda: self._remember(number, last)).result()
        if not restored:
            raise RequestError(f"{path.name} does not fit: --cache-ram has no room, or it is damaged", param="filename")
        return restored, size

    @property
    def _provenance(self) -> Provenance:
        assert self._made_by is not None
        return self._made_by

    def _adopt_all(self, path: Path) -> tuple[Record | None, int]:
        """Put the records of a file into host memory, up to the first record that does not fit.

        Return the last record that was read, whether it fit or not, and the file's size in bytes.
        """
        last = None
        with _request_errors(path):
            record_file.check(path, self._provenance)  # check the whole file before using its first record
            for last in record_file.records(path, self._provenance):
                if not self._adopt(last):
                    break
            return last, path.stat().st_size

    def _adopt(self, record: Record) -> bool:
        """Put a record into host memory. Raises RequestError if the engine is busy for too long."""
        try:
            return self._arrivals.adopt(record)
        except TimeoutError:
            raise RequestError("the engine is busy: try again", status=503, retry_after=1) from None

    # ---- in the engine's thread ------------------------------------------------------------------------------------

    def _slot(self, number: int) -> Slot:
        slot = self._scheduler.slots[number]
        if slot.job is not None and not slot.job.request.kind.is_client:
            self._background.drop_all()  # no client waits for the slot's job
        if slot.job is not None:
            raise RequestError(f"slot {number} is running a request: try again when it has ended", status=503, retry_after=1)
        return slot

    def _records(self, number: int) -> list[Record]:
        """Return the records of the cached part of a slot's history. Raises RequestError."""
        slot = self._slot(number)
        if slot.scope is not None and not slot.scope.is_lasting:
            raise RequestError("KV of several LoRA adapters cannot be saved: it is another one when they are loaded again")
        if len(slot.history) and not self._scheduler.index.host.max_bytes:
            raise RequestError("KV cannot be saved here: that takes --cache-ram")
        return self._histories.save(slot)

    def _remember(self, number: int, record: Record) -> int:
        """Replace a slot's history by the cached part of a record's tokens. Return the number of these tokens."""
        return self._histories.remember(self._slot(number), record.scope, record.tokens)


@contextmanager
def _request_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading a file into RequestError."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"cannot read {path.name}: {error.strerror}", param="filename") from None
    except ForeignFile as error:
        raise RequestError(f"{path.name} is not for this server: {error}", param="filename") from None
    except CorruptFile as error:
        raise RequestError(f"{path.name} is damaged: {error}", param="filename") from None
