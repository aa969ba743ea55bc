"""The routes that hold and show what is cached: fill it ahead, list it, drop it. None of them shows any text."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from math import inf
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...slots.radix import descendants
from ...slots.request import Request as Queued
from ...slots.scope import Scope
from ..errors import RequestError
from ..service import Service
from ..wire import WarmRequest
from .chat import collect, while_connected
from .http import Json, read_body, scope_of, service_of


async def warm(request: Request) -> Response:
    """Compute the prompt of a chat (messages, documents) and leave it in the cache; nothing is generated.

    With `pin` it leaves the cache last, for `ttl` seconds or as long as the server runs.
    """
    service = service_of(request)
    asked = await read_body(request, WarmRequest)
    if asked.pin is not None and not service.model.can_trim:
        raise RequestError("this model's state cannot be cut, and snapshots cannot be pinned: leave pin out", param="pin")
    if not (service.model.can_trim or service.snapshots.max_bytes):
        raise RequestError("this model's state cannot be cut and --cache-ram leaves no room for snapshots: nothing to warm")
    asked = asked.prefill_only()
    submission = await while_connected(request, service.accept_chat(asked, request.state.num_bytes))
    generation = service.submit(replace(submission, turn=None))  # what is warmed is not a turn of a conversation
    _, end = await while_connected(request, collect(service, generation))
    report = end.report
    answer = {"object": "cache.warm", "prompt_tokens": report.num_prompt, "slotcache": report.slotcache()}
    if asked.pin is not None:
        pinned = await asyncio.wrap_future(service.engine.ask(lambda: _pin(service, generation.request, asked)))
        answer["pinned_tokens"] = pinned
    return Json(answer)


async def holdings(request: Request) -> Response:
    """What one scope (`?scope=`, the common one without it) has cached, run by run."""
    service, scope = service_of(request), scope_of(request)
    return Json(await asyncio.wrap_future(service.engine.ask(lambda: _holdings(service, scope))))


async def drop(request: Request) -> Response:
    """Forget what one scope has cached, but for what running requests need; nothing more is computed ahead for it."""
    service, scope = service_of(request), scope_of(request)
    service.idle.forget(scope)
    dropped = await asyncio.wrap_future(service.engine.ask(lambda: _drop(service, scope)))
    for tier in service.tiers:
        await asyncio.to_thread(tier.drop, Scope.shared(scope))
        # Again: at the start of the server, runs that are gone from the tier now may have come back from it meanwhile.
        await asyncio.wrap_future(service.engine.ask(lambda: _drop(service, scope)))
    service.resume_idle()
    return Json({"object": "cache.dropped", "scope": scope, "tokens": dropped})


def _pin(service: Service, done: Queued, asked: WarmRequest) -> int:
    """How many tokens of a finished request's prompt are pinned then. Runs in the engine's thread."""
    holds, prompt = service.engine.scheduler.holds, done.tokens[: done.num_prompt]
    if asked.pin:
        return holds.hold(done.scope, prompt, asked.ttl or inf)
    holds.release(done.scope, prompt)
    return 0


def _drop(service: Service, scope: str) -> int:
    """Runs in the engine's thread."""
    service.engine.background.drop_scope(scope)
    return service.engine.scheduler.tree.drop(Scope.shared(scope)) + service.snapshots.drop(Scope.shared(scope))


def _holdings(service: Service, scope: str) -> dict[str, Any]:
    """Runs in the engine's thread."""
    root = service.engine.scheduler.tree.roots.get(Scope.shared(scope))
    nodes = list(descendants(root)) if root else []
    return {
        "object": "cache",
        "scope": scope,
        "tokens": {
            "device": sum(node.ready for node in nodes),
            "host": sum(len(node.tokens) for node in nodes if node.blob is not None),
        },
        "runs": [
            {
                "start": node.start,
                "tokens": len(node.tokens),
                "device_tokens": node.ready,
                "host": node.blob is not None,
                "document": next((key for _, key in node.document_of), None),
                "frequency": node.frequency,
                "in_use": node.pins > 0,
                "pinned": node.held_until > 0,
            }
            for node in nodes
        ],
        "snapshots": [
            {"tokens": node.end, "bytes": service.snapshots.size_of(node.end)}
            for node in service.snapshots.of(Scope.shared(scope))
        ],
    }
