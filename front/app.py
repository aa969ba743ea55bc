"""The ASGI application: chats are ordered, everything else is relayed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ..server.edge.gate import Gate
from ..server.edge.keys import Keys
from ..server.edge.origins import CrossOrigin, Origins
from ..server.edge.refusal import refusal
from ..server.errors import RequestError
from ..server.log.requests import RequestLog
from .chats import Chats
from .exchange import Exchange
from .host import Host


def make_app(host: Host) -> Starlette:
    """Return the ASGI application over a host. Raises SettingsError."""
    chats, others = Chats(host), Exchange(host)
    routes = [
        Route("/v1/chat/completions", chats, methods=["POST"]),
        Route("/chat/completions", chats, methods=["POST"]),
        Route("/metrics", metrics),
        Route("/{path:path}", others),
    ]
    app = Starlette(
        routes=routes,
        middleware=_layers(host),
        exception_handlers={RequestError: refuse, HTTPException: refuse, ClientDisconnect: let_go, Exception: fail},
        lifespan=partial(_while_up, host),
    )
    app.state.host = host
    return app


@asynccontextmanager
async def _while_up(host: Host, app: Starlette) -> AsyncIterator[None]:
    async with host.upstream:
        yield
        host.counting.stop()


def _layers(host: Host) -> list[Middleware]:
    """Return the layers around all routes, the outermost first. Raises SettingsError."""
    origins = Origins(host.hosting)
    cross_origin = [Middleware(CrossOrigin, origins=origins)] if origins else []
    gate = Middleware(Gate, settings=host.hosting, keys=Keys.of(host.hosting), origins=origins)
    return [Middleware(RequestLog), *cross_origin, gate]


async def metrics(request: Request) -> Response:
    """Show the front's own metrics; the upstream's are at its own address."""
    return Response(request.app.state.host.metrics.exposition(), media_type="text/plain; version=0.0.4")


def refuse(request: Request, error: Exception) -> Response:
    request.state.error = error
    if isinstance(error, RequestError):
        return refusal(error, request.url.path)
    assert isinstance(error, HTTPException)
    return refusal(RequestError(error.detail, status=error.status_code, headers=error.headers), request.url.path)


def let_go(request: Request, error: Exception) -> Response:
    """Answer a client that has left, for the log only."""
    return Response(status_code=499)


def fail(request: Request, error: Exception) -> Response:
    return refusal(RequestError(f"the front failed: {type(error).__name__}", status=500), request.url.path)
