"""The routes' common parts: the service once it is loaded, bodies in and out, the shape of errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ..service import Service
from ..vectors.vectors import Vectors
from ..wire.decoding import LARGE, R, decode_request
from ..wire.requests import check_scope
from .replies.reply import encode

logger = logging.getLogger("slotcache")
T = TypeVar("T")


class Json(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return content if isinstance(content, bytes) else encode(content)


async def read_body(request: Request, kind: type[R]) -> R:
    """Return the body as `kind`. A large one is decoded in a thread. Raises RequestError, ClientDisconnect.

    `request.state` keeps its length as `num_bytes`, and a warning for each unknown field as `warnings`.
    """
    host = request.app.state.host
    body = await host.bodies.read(request)
    request.state.num_bytes = len(body)
    arguments = (body, kind, host.settings.strict)
    decoded, warnings = (
        decode_request(*arguments) if len(body) < LARGE else await asyncio.to_thread(decode_request, *arguments)
    )
    request.state.warnings = warnings
    if warnings:
        about = {"request_id": request.state.request_id}
        logger.warning("%s: %s", request.url.path, "; ".join(warnings), extra={"fields": about})
    return decoded


async def beside_others(request: Request, work: Callable[[], T]) -> T:
    """Return what `work` on a body returns. For a large body it runs in a thread, beside other requests."""
    return work() if request.state.num_bytes < LARGE else await asyncio.to_thread(work)


def scope_of(request: Request) -> str:
    """Return the scope in the address (`?scope=`), by default the common one. Raises RequestError."""
    scope = request.query_params.get("scope", "")
    check_scope(scope, "scope")
    return scope


def vectors_of(request: Request) -> Vectors:
    """Return the models for vectors, which are there for every model. Raises RequestError 503 while the model loads."""
    return request.app.state.host.loaded()


def service_of(request: Request) -> Service:
    """Return the service. Raises RequestError: 503 while the model loads, 501 for an encoder."""
    return request.app.state.host.ready()
