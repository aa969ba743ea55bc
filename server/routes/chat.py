"""The routes that generate: chats and texts, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine.view import End, Event, Failure, Generation
from ..errors import RequestError
from ..service import Service
from ..wire.requests import ChatRequest, CompletionRequest, Options, StreamOptions
from . import reply
from .http import Json, read_body, service_of

T = TypeVar("T")


async def chat(request: Request) -> Response:
    return await _answer(request, reply.Chat, *await _submit_chat(request))


async def text(request: Request) -> Response:
    return await _answer(request, reply.Text, *await _submit_text(request))


async def native(request: Request) -> Response:
    return await _answer(request, reply.Native, *await _submit_text(request))


# A decoded body takes some 20 times its JSON, and an answer may take minutes: these calls free the body when they return.


async def _submit_chat(request: Request) -> tuple[Generation, StreamOptions | None]:
    service, asked = service_of(request), await read_body(request, ChatRequest)
    submission = await while_connected(request, service.accept_chat(asked, request.state.num_bytes))
    return service.submit(submission), _stream_options(asked)


async def _submit_text(request: Request) -> tuple[Generation, StreamOptions | None]:
    service, asked = service_of(request), await read_body(request, CompletionRequest)
    submission = await while_connected(request, service.accept_text(asked, request.state.num_bytes))
    return service.submit(submission), _stream_options(asked)


def _stream_options(asked: Options) -> StreamOptions | None:
    """Return how the answer is streamed; None where it is sent whole."""
    return (asked.stream_options or StreamOptions()) if asked.stream else None


async def _answer(
    request: Request,
    dialect: Callable[[str, str], reply.Dialect],
    generation: Generation,
    streaming: StreamOptions | None,
) -> Response:
    service = service_of(request)
    style = dialect(generation.id, service.name)
    if streaming is not None:
        return EventStream(service, generation, style, streaming.include_usage)
    written, end = await while_connected(request, collect(service, generation))
    return Json(reply.whole(style, written, end))


class EventStream(StreamingResponse):
    """Streams a generation's events. A client that disconnects cancels it, even before the first event."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, generation: Generation, style: reply.Dialect, include_usage: bool) -> None:
        body = reply.stream(style, _events(generation), include_usage)
        super().__init__(body, headers={"Cache-Control": "no-store"})
        self._service, self._generation = service, generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._service.abandon(self._generation)


async def _events(generation: Generation) -> AsyncIterator[Event]:
    while True:
        event = await generation.events.get()
        yield event
        if isinstance(event, End | Failure):
            return


async def collect(service: Service, generation: Generation) -> tuple[str, End]:
    """Return the whole text and the end. Raises the RequestError of a failure."""
    try:
        while True:
            event = await generation.events.get()
            if isinstance(event, Failure):
                raise event.error
            if isinstance(event, End):
                return "".join(generation.parts), event
    finally:
        service.abandon(generation)


async def while_connected(request: Request, work: Coroutine[object, object, T]) -> T:
    """Return what `work` returns. Cancels it when the client leaves first, and raises RequestError 499 then."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        raise RequestError("the client has gone", status=499)
    finally:
        watching.cancel()
        working.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
