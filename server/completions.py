"""The routes that generate: chats and texts, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from . import reply
from .errors import RequestError
from .generation import End, Event, Failure, Generation
from .prompt import ChatPrompt
from .service import Service
from .threads import LARGE
from .turn import Turn
from .web import Json, asked_of, service_of
from .wire import ChatRequest, CompletionRequest, Options

T = TypeVar("T")


async def chat(request: Request) -> Response:
    service = service_of(request)
    asked = await asked_of(request, ChatRequest)
    origin = service.origin(asked)
    chat = await built(request, service, service.builder.chat, asked, origin)
    style = reply.dialect("chat", service.name)
    return await _answer(request, service, chat.prompt, asked, style, Turn(style.id, asked, chat, origin))


async def text(request: Request) -> Response:
    return await _complete(request, "text")


async def native(request: Request) -> Response:
    return await _complete(request, "native")


async def _complete(request: Request, kind: str) -> Response:
    service = service_of(request)
    asked = await asked_of(request, CompletionRequest)
    prompt = await built(request, service, service.builder.text, asked.prompt)
    return await _answer(request, service, prompt, asked, reply.dialect(kind, service.name))


async def _answer(
    request: Request,
    service: Service,
    prompt: ChatPrompt,
    asked: Options,
    style: reply.Dialect,
    turn: Turn | None = None,
) -> Response:
    generation = service.submit(prompt, asked, turn)
    if asked.stream:
        usage = bool(asked.stream_options and asked.stream_options.include_usage)
        body = reply.stream(style, _events(service, generation), usage)
        return StreamingResponse(body, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
    whole = await unless_disconnected(request, collect(service, generation))
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


async def collect(service: Service, generation: Generation) -> tuple[str, End]:
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


async def built(request: Request, service: Service, work: Callable[..., T], *arguments: Any) -> T:
    """What `work` makes of a request in the threads for prompts. Raises RequestError; 499 if the client goes away first,
    and what has not begun then is not done."""
    num_bytes = int(request.headers.get("content-length") or LARGE)
    done = await unless_disconnected(request, service.builder.threads.run(num_bytes, work, *arguments))
    if done is None:
        raise RequestError("the client has gone", status=499)
    return done


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
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
