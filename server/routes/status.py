"""The routes that show the server's state: health, model, settings, lanes, metrics."""

from __future__ import annotations

from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from ..engine.view import Fields, LaneState
from ..errors import RequestError
from .http import Json, service_of, vectors_of


async def health(request: Request) -> Response:
    vectors_of(request)
    return Json({"status": "ok"})


async def models(request: Request) -> Response:
    """List the served model, and those beside it for vectors and scores."""
    return Json({"object": "list", "data": [_entry(name, about) for name, about in vectors_of(request).models().items()]})


def _entry(name: str, about: Fields) -> Fields:
    return {"id": name, "object": "model", "created": 0, "owned_by": "slotcache", "meta": about}


async def properties(request: Request) -> Response:
    """Show llama-server's properties and every setting; of an encoder, those that it has."""
    vectors, service = vectors_of(request), request.app.state.host.service
    return Json((service.properties() if service else {}) | vectors.properties())


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
