"""The ASGI application: its routes, and what stands around every one of them."""

from __future__ import annotations

import secrets

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from . import cache, completions, documents, lanes, remembered, speculation, status, texts
from .errors import RequestError
from .web import Host, refusal

OPEN_PATHS = ("/health", "/v1/health")  # no key needed


def make_app(host: Host) -> Starlette:
    """The ASGI application over a host."""
    routes = [
        Route("/health", status.health),
        Route("/v1/health", status.health),
        Route("/v1/models", status.models),
        Route("/models", status.models),
        Route("/props", status.properties),
        Route("/slots", status.slots),
        Route("/slots/{id:int}", lanes.act, methods=["POST"]),
        Route("/metrics", status.metrics),
        Route("/v1/chat/completions", completions.chat, methods=["POST"]),
        Route("/chat/completions", completions.chat, methods=["POST"]),
        Route("/v1/completions", completions.text, methods=["POST"]),
        Route("/completion", completions.native, methods=["POST"]),
        Route("/completions", completions.native, methods=["POST"]),
        Route("/v1/cache", cache.holdings, methods=["GET"]),
        Route("/v1/cache", cache.drop, methods=["DELETE"]),
        Route("/v1/cache/warm", cache.warm, methods=["POST"]),
        Route("/v1/documents/order", documents.order, methods=["POST"]),
        Route("/v1/speculate", speculation.speculate, methods=["POST"]),
        Route("/v1/speculate", speculation.forget, methods=["DELETE"]),
        Route("/v1/conversations/{id:path}", remembered.show, methods=["GET"]),
        Route("/v1/conversations/{id:path}", remembered.forget, methods=["DELETE"]),
        Route("/tokenize", texts.tokenize, methods=["POST"]),
        Route("/detokenize", texts.detokenize, methods=["POST"]),
        Route("/apply-template", texts.apply_template, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(KeyCheck, key=host.settings.api_key)],
        exception_handlers={RequestError: refuse, HTTPException: refuse, Exception: fail},
    )
    app.state.host = host
    return app


class KeyCheck:
    """Answers 401 where a key is set and the request does not carry it."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._key and scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            carried = Request(scope).headers.get("authorization", "").removeprefix("Bearer ")
            if not secrets.compare_digest(carried.encode(), self._key.encode()):
                error = RequestError("expected `Authorization: Bearer <key>` with the server's --api-key", status=401)
                await refusal(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return refusal(error)
    assert isinstance(error, HTTPException)
    message = f"no such route: {request.url.path}" if error.status_code == 404 else error.detail
    return refusal(RequestError(message, status=error.status_code))


def fail(request: Request, error: Exception) -> Response:
    return refusal(RequestError(f"the server failed: {type(error).__name__}", status=500))
