"""The routes' common parts: the service once it is loaded, bodies in and out, the shape of errors."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from ..service import Service
from ..vectors.vectors import Vectors
from ..wire.decoding import LARGE, R, decode
from ..wire.requests import check_scope
from .replies.reply import encode


class Json(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return content if isinstance(content, bytes) else encode(content)


async def read_body(request: Request, kind: type[R]) -> R:
    """Return the body as `kind`, and keep its length in `request.state.num_bytes`. A large one is decoded in a thread.

    Raises RequestError, ClientDisconnect.
    """
    body = await request.app.state.host.bodies.read(request)
    request.state.num_bytes = len(body)
    return decode(body, kind) if len(body) < LARGE else await asyncio.to_thread(decode, body, kind)


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
