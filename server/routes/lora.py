"""llama-server's routes for LoRA adapters."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from ..wire.adapters import AdapterScales
from ..wire.decoding import decode
from .http import Json, service_of


async def show(request: Request) -> Response:
    """List the LoRA adapters, with the scales of requests that set none."""
    return Json(service_of(request).intake.lora.shown())


async def change(request: Request) -> Response:
    """Change these scales. Requests that are open keep theirs."""
    service, body = service_of(request), await request.app.state.host.bodies.read(request)
    given = b'{"adapters":%b}' % body if body.lstrip()[:1] == b"[" else body
    asked = await asyncio.to_thread(decode, given, AdapterScales)  # it may be large
    service.intake.lora.change(asked.adapters)
    return Json({"success": True})
