"""The ASGI application: its routes, and the middleware around them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .edge.bodies import Bodies
from .edge.gate import Gate
from .edge.keys import Keys
from .edge.origins import CrossOrigin, Origins
from .edge.refusal import refusal
from .edge.spelling import Spelling
from .errors import RequestError
from .log.requests import RequestLog
from .metrics import exposition_of_vectors
from .retrieving.library import Library
from .routes import (
    cache,
    counts,
    documents,
    embeddings,
    lora,
    messages,
    openapi,
    page,
    properties,
    rerank,
    responses,
    search,
    sources,
    speculation,
    status,
)
from .routes import chat as completions
from .routes import conversations as remembered
from .routes import slots as lanes
from .routes import tokenize as texts
from .service import Service
from .settings import Settings
from .vectors.vectors import Vectors


@dataclass(slots=True)
class Host:
    """Holds all that serves while the server is up.

    started: seconds since 1970. vectors: None while the model loads. service: likewise, and with an encoder, which generates
    no text. library: likewise, and without --docs.
    """

    settings: Settings
    bodies: Bodies
    started: int = field(default_factory=lambda: int(time()))
    service: Service | None = None
    vectors: Vectors | None = None
    library: Library | None = None

    @property
    def failure(self) -> str | None:
        """Why the engine has ended for good, if it has."""
        return self.service.engine.failure if self.service else None

    @property
    def is_asleep(self) -> bool:
        """Whether all models have left memory."""
        computers = self.vectors.computers if self.vectors else []
        engines = [self.service.engine.sleep] if self.service else []
        return all(one.is_asleep for one in (*engines, *computers))

    def rouse(self) -> None:
        """Wake the model that generates, since a request will follow."""
        if self.service is not None:
            self.service.engine.sleep.rouse()

    def loaded(self) -> Vectors:
        """Return the models. Raises RequestError 503 while they load, and once the engine has ended."""
        if self.vectors is None:
            raise RequestError("the model is loading", status=503, code="loading_model", retry_after=1)
        if self.failure:
            raise RequestError(self.failure, status=503, code="engine_failed")
        return self.vectors

    def ready(self) -> Service:
        """Return the service. Raises RequestError as `loaded`, and 501 for an encoder."""
        vectors = self.loaded()
        if self.service is None:
            raise RequestError(f"{vectors.name} generates no text: it is served for vectors or scores only", status=501)
        return self.service

    async def metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format. Raises RequestError as `loaded`."""
        computed = self.loaded().computed
        if self.service is None:
            return exposition_of_vectors(computed)
        return self.service.metrics.exposition(await self.service.view.figures(), computed, self.library)

    def stop(self) -> None:
        """End all requests with an error; the server shuts down."""
        if self.service is not None:
            self.service.engine.stop()
        if self.vectors is not None:
            self.vectors.stop()
        if self.library is not None:
            self.library.keeper.stop()

    def close(self) -> None:
        """Close the index, and free the models."""
        if self.library is not None:
            self.library.close()
        if self.vectors is not None:
            self.vectors.close()
        if self.service is not None:
            self.service.close()


def make_app(host: Host) -> Starlette:
    """Return the ASGI application over a host."""
    routes = [
        Route("/health", status.health),
        Route("/v1/health", status.health),
        Route("/v1/models", properties.models),
        Route("/models", properties.models),
        Route("/v1/models/{id:path}", properties.model),
        Route("/props", properties.show),
        Route("/props", properties.change, methods=["POST"]),
        Route("/slots", status.slots),
        Route("/slots/{id}", lanes.act, methods=["POST"]),
        Route("/metrics", status.metrics),
        Route("/openapi.json", openapi.show),
        Route("/v1/chat/completions", completions.chat, methods=["POST"]),
        Route("/chat/completions", completions.chat, methods=["POST"]),
        Route("/v1/chat/completions/input_tokens", counts.of_chat, methods=["POST"]),
        Route("/chat/completions/input_tokens", counts.of_chat, methods=["POST"]),
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route("/responses", responses.create, methods=["POST"]),
        Route("/v1/responses/input_tokens", counts.of_response, methods=["POST"]),
        Route("/responses/input_tokens", counts.of_response, methods=["POST"]),
        Route("/v1/responses/{id}", responses.show, methods=["GET"]),
        Route("/v1/responses/{id}", responses.forget, methods=["DELETE"]),
        Route("/v1/responses/{id}/cancel", responses.cancel, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", responses.input_items, methods=["GET"]),
        Route("/v1/messages", messages.create, methods=["POST"]),
        Route("/v1/messages/count_tokens", counts.of_messages, methods=["POST"]),
        Route("/v1/completions", completions.text, methods=["POST"]),
        Route("/completion", completions.native, methods=["POST"]),
        Route("/completions", completions.native, methods=["POST"]),
        Route("/infill", completions.infill, methods=["POST"]),
        Route("/lora-adapters", lora.show, methods=["GET"]),
        Route("/lora-adapters", lora.change, methods=["POST"]),
        Route("/v1/embeddings", embeddings.openai, methods=["POST"]),
        Route("/embedding", embeddings.native, methods=["POST"]),
        Route("/embeddings", embeddings.native, methods=["POST"]),
        Route("/v1/rerank", rerank.rerank, methods=["POST"]),
        Route("/v1/reranking", rerank.rerank, methods=["POST"]),
        Route("/rerank", rerank.rerank, methods=["POST"]),
        Route("/reranking", rerank.rerank, methods=["POST"]),
        Route("/v1/cache", cache.holdings, methods=["GET"]),
        Route("/v1/cache", cache.drop, methods=["DELETE"]),
        Route("/v1/cache/warm", cache.warm, methods=["POST"]),
        Route("/v1/documents/order", documents.order, methods=["POST"]),
        Route("/v1/speculate", speculation.speculate, methods=["POST"]),
        Route("/v1/speculate", speculation.forget, methods=["DELETE"]),
        Route("/v1/search", search.search, methods=["POST"]),
        Route("/v1/sources", sources.show, methods=["GET"]),
        Route("/v1/sources/refresh", sources.refresh, methods=["POST"]),
        Route("/v1/sources/{id}", sources.document, methods=["GET"]),
        Route("/v1/conversations/{id:path}", remembered.show, methods=["GET"]),
        Route("/v1/conversations/{id:path}", remembered.forget, methods=["DELETE"]),
        Route("/tokenize", texts.tokenize, methods=["POST"]),
        Route("/detokenize", texts.detokenize, methods=["POST"]),
        Route("/apply-template", texts.apply_template, methods=["POST"]),
    ]
    shown = [Route("/", page.show), Route("/page/{path:path}", page.show)] if host.settings.ui else []
    app = Starlette(
        routes=[*routes, *shown],
        middleware=_layers(host.settings),
        exception_handlers={RequestError: refuse, HTTPException: refuse, ClientDisconnect: let_go, Exception: fail},
    )
    app.state.host = host
    return app


class Farewell:
    """Answers 503 to requests that uvicorn cancels at shutdown, after its grace time; uvicorn itself answers 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers = False

        async def note_and_send(message: Message) -> None:
            nonlocal answers
            answers = True
            await send(message)

        try:
            await self._app(scope, receive, note_and_send)
        except asyncio.CancelledError:
            if scope["type"] == "http" and not answers:
                await refusal(RequestError("the server is shutting down", status=503), scope["path"])(scope, receive, send)


def _layers(settings: Settings) -> list[Middleware]:
    """Return the layers around all routes, the outermost first. Raises SettingsError."""
    origins = Origins(settings)
    cross_origin = [Middleware(CrossOrigin, origins=origins)] if origins else []
    gate = Middleware(Gate, settings=settings, keys=Keys.of(settings), origins=origins)
    return [Middleware(Spelling), Middleware(RequestLog), Middleware(Farewell), *cross_origin, gate]


def refuse(request: Request, error: Exception) -> Response:
    request.state.error = error
    if isinstance(error, RequestError):
        return refusal(error, request.url.path)
    assert isinstance(error, HTTPException)
    message = f"no such route: {request.url.path}" if error.status_code == 404 else error.detail
    return refusal(RequestError(message, status=error.status_code, headers=error.headers), request.url.path)


def let_go(request: Request, error: Exception) -> Response:
    """Answer a client that left while it sent its body, for the log only."""
    return Response(status_code=499)


def fail(request: Request, error: Exception) -> Response:
    return refusal(RequestError(f"the server failed: {type(error).__name__}", status=500), request.url.path)
