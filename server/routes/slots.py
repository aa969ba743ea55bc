"""llama-server's `POST /slots/{id}?action=save|restore|erase`: what a lane ran last, to a file, from one, and forgotten."""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ...slots.archive import Record
from ...slots.histories import Histories
from ...slots.lanes import Lane
from ...slots.tiers import slotfile
from ...slots.tiers.record import Foreign, Torn
from ..errors import RequestError
from ..provenance import Provenance, provenance_of
from ..service import Service
from .http import Json, read_body, service_of

ACTIONS = ("save", "restore", "erase")
MAX_NAME = 200  # bytes of a file's name; what is added while it is written has room in 255


class FileName(Struct):
    """The body of save and restore."""

    filename: str


async def act(request: Request) -> Response:
    """One of the three, by the query's `action`."""
    service = service_of(request)
    number = _number(service, request.path_params["id"])
    action = request.query_params.get("action")
    if action not in ACTIONS:
        raise RequestError(f"action is {reprlib.repr(action)}: expected one of {', '.join(ACTIONS)}", param="action")
    service.idle.give_way()  # a lane that computes ahead is nobody's
    try:
        if action == "erase":
            erased = await asyncio.wrap_future(service.engine.ask(lambda: _erase(service, number)))
            return Json({"id_slot": number, "n_erased": erased})
        path = _path(service, (await read_body(request, FileName)).filename)
        began = perf_counter()
        about = await (_save if action == "save" else _restore)(service, number, path)
        return Json(about | {"timings": {f"{action}_ms": 1000 * (perf_counter() - began)}})
    finally:
        service.resume_idle()


async def _save(service: Service, number: int, path: Path) -> dict[str, Any]:
    records = await asyncio.wrap_future(service.engine.ask(lambda: _records(service, number)))
    try:
        written = await asyncio.to_thread(slotfile.write, path, records, _made_by(service))
    except OSError as error:
        raise RequestError(f"cannot write {path.name}: {error.strerror}", status=500) from None
    saved = len(records[-1].tokens) if records else 0
    return {"id_slot": number, "filename": path.name, "n_saved": saved, "n_written": written}


async def _restore(service: Service, number: int, path: Path) -> dict[str, Any]:
    last, size = await asyncio.to_thread(_adopt_all, service, path)
    restored = 0
    if last is not None:
        restored = await asyncio.wrap_future(service.engine.ask(lambda: _remember(service, number, last)))
        if not restored:
            raise RequestError(f"{path.name} does not fit: --cache-ram has no room, or it is damaged", param="filename")
    return {"id_slot": number, "filename": path.name, "n_restored": restored, "n_read": size}


def _adopt_all(service: Service, path: Path) -> tuple[Record | None, int]:
    """Put a file's records back, up to the first that has no room; the last one that was tried, and the file's size."""
    last = None
    with _refused(path):
        slotfile.check(path, _made_by(service))  # all of it, before any of it is used
        for last in slotfile.records(path, _made_by(service)):
            if not service.engine.adopt(last):
                break
        return last, path.stat().st_size


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Turn the errors of reading a file into the client's. Raises RequestError."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"cannot read {path.name}: {error.strerror}", param="filename") from None
    except Foreign as error:
        raise RequestError(f"{path.name} is not for this server: {error}", param="filename") from None
    except Torn as error:
        raise RequestError(f"{path.name} is damaged: {error}", param="filename") from None


def _made_by(service: Service) -> Provenance:
    return provenance_of(service.settings, service.model, service.context)


def _number(service: Service, text: str) -> int:
    """The lane that an address names. Raises RequestError."""
    known = {str(number): number for number in range(service.settings.parallel)}
    if text not in known:
        raise RequestError(f"there is no slot {text[:80]!r}: expected 0 to {len(known) - 1}", param="id")
    return known[text]


def _path(service: Service, name: str) -> Path:
    """The file of that name in --slot-save-path. Raises RequestError."""
    if not service.settings.slot_save_path:
        raise RequestError("this server was started without --slot-save-path: slots cannot be saved or restored")
    if not name.isprintable() or name != Path(name).name or name.startswith(".") or "\\" in name:
        raise RequestError(f"filename is {name[:80]!r}: expected a file's name, without a path", param="filename")
    if not 0 < len(name.encode()) <= MAX_NAME:
        raise RequestError(f"filename has {len(name.encode()):,} bytes: expected 1 to {MAX_NAME}", param="filename")
    return Path(service.settings.slot_save_path).expanduser() / name


# ---- in the engine's thread ----------------------------------------------------------------------------------------


def _lane(service: Service, number: int) -> Lane:
    lane = service.engine.scheduler.lanes[number]
    if lane.request is not None and lane.request.background:
        service.engine.background.give_way()  # nobody waits for it
    if lane.request is not None:
        raise RequestError(f"slot {number} is running a request: try again when it has ended", status=503, retry_after=1)
    return lane


def _histories(service: Service) -> Histories:
    engine = service.engine
    return Histories(engine.scheduler, engine.archive, engine.carry_out)


def _records(service: Service, number: int) -> list[Record]:
    """What a lane ran last, as far as it has KV; beginnings first."""
    lane = _lane(service, number)
    if len(lane.history) and not service.snapshots.max_bytes and not service.engine.scheduler.tree.host.max_tokens:
        raise RequestError("KV cannot be saved here: that takes --cache-ram, and a model without a sliding window")
    return _histories(service).save(lane)


def _remember(service: Service, number: int, record: Record) -> int:
    """A lane ran this last, as far as it has come back; how many tokens that are."""
    return _histories(service).remember(_lane(service, number), record.scope, record.tokens)


def _erase(service: Service, number: int) -> int:
    return _histories(service).erase(_lane(service, number))
