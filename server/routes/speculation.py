"""Turns that a client opens before its search is done (RAGCache, section 5.3: dynamic speculative pipelining).

A client that searches in stages sends the messages at once, and then the documents of each stage. While idle, the server
prefills the prompt of the newest stage; a later stage replaces an earlier one, and their common prefix stays cached. The
chat completion with the final documents reuses the part that was right. A wrong guess delays no request.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from ..errors import RequestError
from ..wire.requests import MAX_NAME, SpeculateRequest
from .accepting import accept, start_ahead
from .chat import while_connected
from .http import Json, read_body, scope_of, service_of


async def speculate(request: Request) -> Response:
    """Prefill the system prompt, the history and the documents so far, if the server is idle."""
    service = service_of(request)
    asked = await read_body(request, SpeculateRequest)
    if service.open:
        return _answer(asked, "skipped")
    asked = asked.prefill_only()
    last = asked.messages[-1] if asked.messages else {}
    is_open = last.get("role") == "user" and not (asked.documents or last.get("documents") or asked.retrieves)
    submission = await while_connected(request, accept(request, asked, is_open))
    started = await start_ahead(service, ("speculation", asked.id), submission)
    return _answer(asked, "started" if started else "skipped")


async def forget(request: Request) -> Response:
    """Stop the prefill of a turn that will not come (`?id=`, `?scope=`)."""
    service, query = service_of(request), request.query_params
    scope, name = scope_of(request), query.get("id", "default")
    if len(name) > MAX_NAME:
        raise RequestError(f"id has {len(name):,} characters: expected at most {MAX_NAME}", param="id")
    dropped = await asyncio.wrap_future(service.door.drop_background((scope, ("speculation", name))))
    service.idle.resume()
    return Json({"object": "speculation", "id": name, "state": "dropped" if dropped else "done"})


def _answer(asked: SpeculateRequest, state: str) -> Response:
    return Json({"object": "speculation", "id": asked.id, "state": state})
