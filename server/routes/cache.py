"""The routes that fill, list and drop the cache. None of them shows any text."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from starlette.requests import Request
from starlette.responses import Response

from ..engine.view import Fields, Generation
from ..errors import RequestError
from ..service import Service
from ..wire.requests import WarmRequest
from .accepting import accept
from .chat import collect, while_connected
from .http import Json, read_body, scope_of, service_of


async def warm(request: Request) -> Response:
    """Compute the prompt of a chat (messages, documents) and leave it in the cache; nothing is generated.

    With `pin` it is evicted last, for `ttl` seconds or until the server stops.
    """
    service = service_of(request)
    asked = await read_body(request, WarmRequest)
    if not (service.model.can_trim or service.view.keeps_snapshots):
        raise RequestError("this model's state cannot be cut and --cache-ram leaves no room for snapshots: nothing to warm")
    asked = asked.prefill_only()
    submission = await while_connected(request, accept(request, asked))
    (generation,) = service.submit(replace(submission, turn=None))  # warming a prompt is not a turn of a conversation
    (answer,) = await while_connected(request, collect(service, [generation]))
    report = answer.end.report
    warmed: Fields = {"object": "cache.warm", "prompt_tokens": report.num_prompt, "slotcache": report.slotcache()}
    if asked.pin is not None:
        warmed["pinned_tokens"] = await _pin(service, generation, asked)
    return Json(warmed)


async def holdings(request: Request) -> Response:
    """List the cached runs of a scope (`?scope=`, by default the common one)."""
    service, scope = service_of(request), scope_of(request)
    held = await service.view.holdings(scope)
    return Json({"object": "cache", "scope": scope, "tokens": held.tokens, "runs": held.runs, "snapshots": held.snapshots})


async def drop(request: Request) -> Response:
    """Drop the cache of a scope, except KV that running requests use, and its queued idle prefill."""
    service, scope = service_of(request), scope_of(request)
    service.idle.forget(scope)
    dropped = await service.view.drop(scope)
    service.idle.resume()
    return Json({"object": "cache.dropped", "scope": scope, "tokens": dropped})


async def _pin(service: Service, generation: Generation, asked: WarmRequest) -> int:
    """Pin a warmed prompt, or end its pin; return how many of its tokens are pinned now."""
    if asked.pin:
        return await service.view.pin(generation, asked.ttl or inf)
    await service.view.unpin(generation)
    return 0
