"""The routes. What they share is a `Host`: the service once it is loaded, and 503 until then."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from . import reply
from .errors import RequestError
from .generation import End, Event, Failure, Generation
from .prompt import ChatPrompt
from .service import Service
from .settings import Settings
from .wire import ChatRequest, CompletionRequest, Options, decode

OPEN_PATHS = ("/health", "/v1/health")  # no key needed
T = TypeVar("T")


@dataclass(slots=True)
class Host:
    """Holds the service while the server is up. service: None while the model loads."""

    settings: Settings
    service: Service | None = None

    def ready(self) -> Service:
        """The service. Raises RequestError 503 while there is none."""
        if self.service is None:
            raise RequestError("the model is loading", status=503, code="loading_model", retry_after=1)
        return self.service


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else reply.encode(content)


def make_app(host: Host) -> Starlette:
    """The ASGI application over a host."""
    routes = [
        Route("/health", health),
        Route("/v1/health", health),
        Route("/v1/models", models),
        Route("/models", models),
        Route("/props", properties),
        Route("/slots", slots),
        Route("/metrics", metrics),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", text, methods=["POST"]),
        Route("/completion", native, methods=["POST"]),
        Route("/completions", native, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/apply-template", apply_template, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(KeyCheck, key=host.settings.api_key)],
        exception_handlers={RequestError: refuse, HTTPException: refuse, Exception: fail},
    )
    app.state.host = host
    return app


# ---- generation ------------------------------------------------------------------------------------------------------


async def chat(request: Request) -> Response:
    service = _service(request)
    asked = decode(await _body(request), ChatRequest)
    prompt = await asyncio.to_thread(service.builder.chat, asked)
    return await _answer(request, service, prompt, asked, "chat")


async def text(request: Request) -> Response:
    return await _complete(request, "text")


async def native(request: Request) -> Response:
    return await _complete(request, "native")


async def _complete(request: Request, kind: str) -> Response:
    service = _service(request)
    asked = decode(await _body(request), CompletionRequest)
    prompt = await asyncio.to_thread(service.builder.text, asked.prompt)
    return await _answer(request, service, prompt, asked, kind)


async def _answer(request: Request, service: Service, prompt: ChatPrompt, asked: Options, kind: str) -> Response:
    generation = service.submit(prompt, asked)
    style = reply.dialect(kind, generation.request.id, service.name)
    if asked.stream:
        usage = bool(asked.stream_options and asked.stream_options.include_usage)
        body = reply.stream(style, _events(service, generation), usage)
        return StreamingResponse(body, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
    whole = await _unless_disconnected(request, _collect(service, generation))
    if whole is None:
        return Response(status_code=499)  # nobody reads it
    written, end = whole
    return Json(reply.whole(style, written, end))


async def _events(service: Service, generation: Generation) -> AsyncIterator[Event]:
    """A generation's events up to its final one; whoever stops listening before that cancels it."""
    try:
        while True:
            event = await service.next_event(generation)
            yield event
            if isinstance(event, End | Failure):
                return
    finally:
        service.abandon(generation)


async def _collect(service: Service, generation: Generation) -> tuple[str, End]:
    """The whole text and the end. Raises the RequestError of a failure."""
    try:
        while True:
            event = await service.next_event(generation)
            if isinstance(event, Failure):
                raise event.error
            if isinstance(event, End):
                return "".join(generation.parts), event
    finally:
        service.abandon(generation)


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None, and `work` is cancelled, if the client goes away first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        watching.cancel()
        working.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ---- tokens ----------------------------------------------------------------------------------------------------------


class TokenizeRequest(msgspec.Struct):
    content: str
    add_special: bool = False
    parse_special: bool = True


class DetokenizeRequest(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]


async def tokenize(request: Request) -> Response:
    model = _service(request).model
    asked = decode(await _body(request), TokenizeRequest)
    tokens = await asyncio.to_thread(model.tokenize, asked.content, asked.parse_special, asked.add_special)
    return Json({"tokens": tokens.tolist()})


async def detokenize(request: Request) -> Response:
    model = _service(request).model
    asked = decode(await _body(request), DetokenizeRequest)
    if unknown := next((token for token in asked.tokens if token >= model.num_vocab), None):
        raise RequestError(f"tokens: {unknown} is not below {model.num_vocab}", param="tokens")
    return Json({"content": model.detokenize(np.array(asked.tokens, np.int32))})


async def apply_template(request: Request) -> Response:
    """What a chat would be as one prompt, its documents in the order they would have now."""
    service = _service(request)
    asked = decode(await _body(request), ChatRequest)
    prompt = await asyncio.to_thread(service.builder.chat, asked)
    tree = service.engine.scheduler.tree
    scope = ("shared", asked.cache_scope)
    layout = await asyncio.wrap_future(service.engine.ask(lambda: prompt.arrange(tree, scope)))
    return Json({"prompt": service.model.detokenize(layout.tokens, special=True), "n_tokens": len(layout.tokens)})


# ---- state -----------------------------------------------------------------------------------------------------------


async def health(request: Request) -> Response:
    _service(request)
    return Json({"status": "ok"})


async def models(request: Request) -> Response:
    service = _service(request)
    about = {
        "n_vocab": service.model.num_vocab,
        "n_ctx_train": service.model.context_train,
        "n_params": service.model.num_parameters,
        "size": service.model.size,
    }
    entry = {"id": service.name, "object": "model", "created": 0, "owned_by": "slotcache", "meta": about}
    return Json({"object": "list", "data": [entry]})


async def properties(request: Request) -> Response:
    return Json(_service(request).properties())


async def slots(request: Request) -> Response:
    service = _service(request)
    return Json(await asyncio.wrap_future(service.engine.ask(lambda: _slots(service))))


def _slots(service: Service) -> list[dict[str, Any]]:
    """The lanes, without any text. Runs in the engine's thread."""
    return [
        {"id": lane.id, "n_ctx": service.limit, "is_processing": lane.request is not None}
        | ({"sequence": lane.sequence_id} if lane.request is None else _running(lane.request.owner))
        for lane in service.engine.scheduler.lanes
    ]


def _running(generation: Generation) -> dict[str, Any]:
    request = generation.request
    return {
        "id_task": request.id,
        "sequence": request.sequence.id if request.sequence else -1,
        "state": "generating" if request.decoding else "prefill",
        "source": request.source,
        "prompt_tokens": request.num_prompt,
        "cached_tokens": request.cached,
        "computed_tokens": request.computed,
        "generated_tokens": generation.num_generated,
    }


async def metrics(request: Request) -> Response:
    service = _service(request)
    snapshot = await asyncio.wrap_future(service.engine.ask(service.metrics.snapshot))
    return Response(service.metrics.exposition(snapshot), media_type="text/plain; version=0.0.4")


# ---- around every route ----------------------------------------------------------------------------------------------


class KeyCheck:
    """Answers 401 where a key is set and the request does not carry it."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._key and scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            carried = Request(scope).headers.get("authorization", "").removeprefix("Bearer ")
            if not secrets.compare_digest(carried.encode(), self._key.encode()):
                error = RequestError("expected `Authorization: Bearer <key>` with the server's --api-key", status=401)
                await _refusal(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return _refusal(error)
    assert isinstance(error, HTTPException)
    message = f"no such route: {request.url.path}" if error.status_code == 404 else error.detail
    return _refusal(RequestError(message, status=error.status_code))


def fail(request: Request, error: Exception) -> Response:
    return _refusal(RequestError(f"the server failed: {type(error).__name__}", status=500))


def _refusal(error: RequestError) -> Response:
    return Json(error.body(), status_code=error.status, headers=error.headers)


async def _body(request: Request) -> bytes:
    """The body, read no further than it may be long. Raises RequestError 413."""
    most = request.app.state.host.settings.max_body << 20
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise RequestError(f"the body is larger than {most:,} bytes, the server's --max-body", status=413)
    return bytes(body)


def _service(request: Request) -> Service:
    return request.app.state.host.ready()
