"""The routes that hold and show what is cached: fill it ahead, list it, drop it. None of them shows any text."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..slots.radix import descendants
from .completions import collect, unless_disconnected
from .errors import RequestError
from .service import Service
from .web import Json, body_of, scope_of, service_of
from .wire import ChatRequest, decode


async def warm(request: Request) -> Response:
    """Compute the prompt of a chat (messages, documents) and leave it in the cache; nothing is generated."""
    service = service_of(request)
    asked = decode(await body_of(request), ChatRequest)
    if not service.model.can_trim:
        raise RequestError("this model keeps no KV that can be cut at a prefix: there is nothing to warm")
    asked.cache_prompt, asked.max_tokens, asked.max_completion_tokens, asked.n_predict = True, 0, None, None
    chat = await asyncio.to_thread(service.builder.chat, asked, service.origin(asked))
    done = await unless_disconnected(request, collect(service, service.submit(chat.prompt, asked)))
    if done is None:
        return Response(status_code=499)  # nobody reads it
    report = done[1].report
    return Json({"object": "cache.warm", "prompt_tokens": report.num_prompt, "slotcache": report.slotcache()})


async def holdings(request: Request) -> Response:
    """What one scope (`?scope=`, the common one without it) has cached, run by run."""
    service, scope = service_of(request), scope_of(request)
    return Json(await asyncio.wrap_future(service.engine.ask(lambda: _holdings(service, scope))))


async def drop(request: Request) -> Response:
    """Forget what one scope has cached, but for what running requests need."""
    service, scope = service_of(request), scope_of(request)
    dropped = await asyncio.wrap_future(service.engine.ask(lambda: service.engine.scheduler.tree.drop(("shared", scope))))
    return Json({"object": "cache.dropped", "scope": scope, "tokens": dropped})


def _holdings(service: Service, scope: str) -> dict[str, Any]:
    """Runs in the engine's thread."""
    root = service.engine.scheduler.tree.roots.get(("shared", scope))
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
            }
            for node in nodes
        ],
    }
