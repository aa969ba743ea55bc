"""llama-server's `POST /slots/{id}?action=save|restore|erase`: the history of a lane to a file, from a file, and erased."""

from __future__ import annotations

import reprlib
from pathlib import Path
from time import perf_counter

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from ..engine.view import Fields
from ..errors import RequestError
from ..service import Service
from .http import Json, read_body, service_of

ACTIONS = ("save", "restore", "erase")
MAX_NAME = 200  # bytes of a file's name: of 255, since a suffix is added while the file is written


class FileName(Struct):
    """The body of save and restore."""

    filename: str


async def act(request: Request) -> Response:
    """Save, restore or erase the history of a slot, by the query's `action`."""
    service = service_of(request)
    number = _number(service, request.path_params["id"])
    action = request.query_params.get("action")
    if action not in ACTIONS:
        raise RequestError(f"action is {reprlib.repr(action)}: expected one of {', '.join(ACTIONS)}", param="action")
    service.idle.abort()  # idle prefill may be on this lane
    try:
        if action == "erase":
            return Json({"id_slot": number, "n_erased": await service.view.lane_store.erase(number)})
        path = _path(service, (await read_body(request, FileName)).filename)
        began = perf_counter()
        about = await _move(service, action, number, path)
        return Json(about | {"timings": {f"{action}_ms": 1000 * (perf_counter() - began)}})
    finally:
        service.idle.resume()


async def _move(service: Service, action: str, number: int, path: Path) -> Fields:
    """Save or restore a lane; return the answer's fields."""
    store = service.view.lane_store
    about: Fields = {"id_slot": number, "filename": path.name}
    if action == "save":
        saved, written = await store.save(number, path)
        return about | {"n_saved": saved, "n_written": written}
    restored, size = await store.restore(number, path)
    return about | {"n_restored": restored, "n_read": size}


def _number(service: Service, text: str) -> int:
    """Return the lane in the address. Raises RequestError."""
    known = {str(number): number for number in range(service.settings.parallel)}
    if text not in known:
        raise RequestError(f"there is no slot {text[:80]!r}: expected 0 to {len(known) - 1}", param="id")
    return known[text]


def _path(service: Service, name: str) -> Path:
    """Return the path of a file in --slot-save-path. Raises RequestError."""
    if not service.settings.slot_save_path:
        raise RequestError("this server was started without --slot-save-path: slots cannot be saved or restored", status=501)
    if not name.isprintable() or name != Path(name).name or name.startswith(".") or "\\" in name:
        raise RequestError(f"filename is {name[:80]!r}: expected a file's name, without a path", param="filename")
    if not 0 < len(name.encode()) <= MAX_NAME:
        raise RequestError(f"filename has {len(name.encode()):,} bytes: expected 1 to {MAX_NAME}", param="filename")
    return Path(service.settings.slot_save_path).expanduser() / name
