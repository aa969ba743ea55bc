"""The routes that tell how the server is: health, model, settings, lanes, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...slots.request import Request as Queued
from ..service import Service
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
    service = service_of(request)
    return Json(await asyncio.wrap_future(service.engine.ask(lambda: _slots(service))))


def _slots(service: Service) -> list[dict[str, Any]]:
    """The lanes, without any text. Runs in the engine's thread."""
    return [
        {"id": lane.id, "n_ctx": service.intake.limit, "is_processing": lane.request is not None}
        | ({"sequence": lane.sequence_id} if lane.request is None else _running(lane.request))
        for lane in service.engine.scheduler.lanes
    ]


def _running(request: Queued) -> dict[str, Any]:
    return {
        "id_task": request.id,
        "sequence": request.sequence.id if request.sequence else -1,
        "state": "generating" if request.decoding else "prefill",
        "source": request.source,
        "prompt_tokens": request.num_prompt,
        "cached_tokens": request.cached,
        "computed_tokens": request.computed,
        "generated_tokens": request.num_tokens - request.num_prompt,
    }


async def metrics(request: Request) -> Response:
    service = service_of(request)
    snapshot = await asyncio.wrap_future(service.engine.ask(service.metrics.snapshot))
    return Response(service.metrics.exposition(snapshot), media_type="text/plain; version=0.0.4")
