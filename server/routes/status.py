"""The routes that show the server's state: health, lanes, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from ..engine.view import Fields, Generation, LaneState
from ..errors import RequestError
from ..service import Service
from .http import Json, service_of, vectors_of

TEXTS = ("dry_sequence_breakers", "logit_bias")  # parameters that are texts, or tokens of texts


async def health(request: Request) -> Response:
    vectors_of(request)
    return Json({"status": "ok"})


async def slots(request: Request) -> Response:
    """List the lanes, without any text. `?fail_on_no_slot=1`: an error if all are busy."""
    service = service_of(request)
    _check_shown(service.settings.slots, "--slots")
    lanes = await service.view.lanes()
    if request.query_params.get("fail_on_no_slot") and all(lane.task for lane in lanes):
        raise RequestError("no slot available: all lanes are busy", status=503, retry_after=1)
    running = {generation.request.id: generation for generation in service.open}
    return Json([_slot(service, lane, running) for lane in lanes])


def _slot(service: Service, lane: LaneState, running: Mapping[int, Generation]) -> Fields:
    """Return a lane with llama-server's fields, and with ours. Of its last request an idle lane keeps little."""
    task = lane.task
    slot: Fields = {
        "id": lane.id,
        "n_ctx": service.intake.limit,
        "speculative": service.intake.defaults.drafts and not service.intake.why_no_drafts,
        "is_processing": task is not None,
    }
    if task is None:
        told = {"id_task": lane.last, "n_prompt_tokens": lane.tokens, "next_token": [_next_token(0, -1)]}
        return slot | (told if lane.last >= 0 else {}) | {"sequence": lane.sequence}
    generation = running.get(task.id_task)
    left = task.limit - task.generated_tokens
    told = {
        "n_prompt_tokens": task.prompt_tokens,
        "n_prompt_tokens_processed": max(min(task.computed_tokens, task.prompt_tokens) - task.cached_tokens, 0),
        "n_prompt_tokens_cache": task.cached_tokens,
        "next_token": [_next_token(task.generated_tokens, left)],
    }
    return slot | told | asdict(task) | ({"params": _params(generation)} if generation else {})


def _params(generation: Generation) -> Fields:
    """Return the parameters of sampling without those that hold a client's texts."""
    return {name: value for name, value in generation.sampling.shown().items() if name not in TEXTS}


def _next_token(decoded: int, left: int) -> Fields:
    return {"has_next_token": left > 0, "n_remain": left, "n_decoded": decoded}


async def metrics(request: Request) -> Response:
    host = request.app.state.host
    _check_shown(host.settings.metrics, "--metrics")
    headers = {"Process-Start-Time-Unix": str(host.started)}
    return Response(await host.metrics(), media_type="text/plain; version=0.0.4", headers=headers)


def _check_shown(shown: bool, flag: str) -> None:
    """Raise RequestError for a route that a flag turned off."""
    if not shown:
        raise RequestError(f"this server was started without {flag}", status=501)
