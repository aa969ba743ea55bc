"""The history of a lane in a file: saved, restored, and erased."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...slots.archive import Record
from ...slots.histories import Histories
from ...slots.lanes import Lane
from ...slots.tiers import slotfile
from ...slots.tiers.provenance import Provenance
from ...slots.tiers.record import Foreign, Torn
from ..errors import RequestError
from .arrivals import Arrivals
from .engine import Engine


class LaneStore:
    """Safe from any thread. made_by: provenance of this server's KV; None without --slot-save-path."""

    def __init__(self, engine: Engine, made_by: Provenance | None) -> None:
        self._inbox, self._scheduler, self._background = engine.inbox, engine.scheduler, engine.background
        self._histories = Histories(engine.scheduler, engine.archive, engine.carry_out)
        self._arrivals, self._made_by = Arrivals(engine), made_by

    async def save(self, number: int, path: Path) -> tuple[int, int]:
        """Write a lane's history; return its tokens, and the file's bytes. Raises RequestError."""
        records = await asyncio.wrap_future(self._inbox.ask(lambda: self._records(number)))
        try:
            written = await asyncio.to_thread(slotfile.write, path, records, self._provenance)
        except OSError as error:
            raise RequestError(f"cannot write {path.name}: {error.strerror}", status=500) from None
        return len(records[-1].tokens) if records else 0, written

    async def restore(self, number: int, path: Path) -> tuple[int, int]:
        """Make a file a lane's history; return the tokens that came back, and the file's bytes. Raises RequestError."""
        last, size = await asyncio.to_thread(self._adopt_all, path)
        if last is None:
            return 0, size
        restored = await asyncio.wrap_future(self._inbox.ask(lambda: self._remember(number, last)))
        if not restored:
            raise RequestError(f"{path.name} does not fit: --cache-ram has no room, or it is damaged", param="filename")
        return restored, size

    async def erase(self, number: int) -> int:
        """Forget the KV that only a lane's history holds; return its tokens. Raises RequestError."""
        return await asyncio.wrap_future(self._inbox.ask(lambda: self._histories.erase(self._lane(number))))

    @property
    def _provenance(self) -> Provenance:
        assert self._made_by is not None
        return self._made_by

    def _adopt_all(self, path: Path) -> tuple[Record | None, int]:
        """Put a file's records back, up to the first that does not fit; return the last one tried, and the file's size."""
        last = None
        with _request_errors(path):
            slotfile.check(path, self._provenance)  # the whole file, before its first record is used
            for last in slotfile.records(path, self._provenance):
                if not self._adopt(last):
                    break
            return last, path.stat().st_size

    def _adopt(self, record: Record) -> bool:
        """Put a record into host memory. Raises RequestError if the engine is busy for too long: the file is good."""
        try:
            return self._arrivals.adopt(record)
        except TimeoutError:
            raise RequestError("the engine is busy: try again", status=503, retry_after=1) from None

    # ---- in the engine's thread ------------------------------------------------------------------------------------

    def _lane(self, number: int) -> Lane:
        lane = self._scheduler.lanes[number]
        if lane.request is not None and lane.request.background:
            self._background.drop_all()  # no client waits for it
        if lane.request is not None:
            raise RequestError(f"slot {number} is running a request: try again when it has ended", status=503, retry_after=1)
        return lane

    def _records(self, number: int) -> list[Record]:
        """Return a lane's history as far as it has KV, from its beginning."""
        lane = self._lane(number)
        if lane.scope is not None and not lane.scope.is_lasting:
            raise RequestError("KV of several LoRA adapters cannot be saved: it is another one when they are loaded again")
        if len(lane.history) and not self._scheduler.snapshots.max_bytes and not self._scheduler.tree.host.max_tokens:
            raise RequestError("KV cannot be saved here: that takes --cache-ram, and a model without a sliding window")
        return self._histories.save(lane)

    def _remember(self, number: int, record: Record) -> int:
        """Make a record a lane's history, as far as it is cached; return its tokens."""
        return self._histories.remember(self._lane(number), record.scope, record.tokens)


@contextmanager
def _request_errors(path: Path) -> Iterator[None]:
    """Raise RequestError for the errors of reading a file."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"cannot read {path.name}: {error.strerror}", param="filename") from None
    except Foreign as error:
        raise RequestError(f"{path.name} is not for this server: {error}", param="filename") from None
    except Torn as error:
        raise RequestError(f"{path.name} is damaged: {error}", param="filename") from None
