"""The routes that show the server's state: health, model, settings, lanes, metrics."""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from ..engine.view import Fields, LaneState
from ..errors import RequestError
from .http import Json, service_of


async def health(request: Request) -> Response:
    service_of(request)
    return Json({"status": "ok"})


async def models(request: Request) -> Response:
    service = service_of(request)
    about = {
        "n_vocab": service.model.num_vocab,
        "n_ctx_train": service.model.context_train,
        "n_params": service.model.num_parameters,
        "size": service.model.size,
    }
    entry = {"id": service.name, "object": "model", "created": 0, "owned_by": "slotcache", "meta": about}
    return Json({"object": "list", "data": [entry]})


async def properties(request: Request) -> Response:
    return Json(service_of(request).properties())


async def slots(request: Request) -> Response:
    """List the lanes, without any text."""
    service = service_of(request)
    _check_shown(service.settings.slots, "--slots")
    return Json([_slot(lane, service.intake.limit) for lane in await service.view.lanes()])


def _slot(lane: LaneState, limit: int) -> Fields:
    slot: Fields = {"id": lane.id, "n_ctx": limit, "is_processing": lane.task is not None}
    return slot | ({"sequence": lane.sequence} if lane.task is None else asdict(lane.task))


async def metrics(request: Request) -> Response:
    service = service_of(request)
    _check_shown(service.settings.metrics, "--metrics")
    written = service.metrics.exposition(await service.view.figures())
    headers = {"Process-Start-Time-Unix": str(service.metrics.started)}
    return Response(written, media_type="text/plain; version=0.0.4", headers=headers)


def _check_shown(shown: bool, flag: str) -> None:
    """Raise RequestError for a route that a flag turned off."""
    if not shown:
        raise RequestError(f"this server was started without {flag}", status=501)
