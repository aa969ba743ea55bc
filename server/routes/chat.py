"""The routes that generate: chats and texts, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..chat.conversations import Origin
from ..chat.threads import PromptThreads
from ..chat.turn import Turn
from ..engine.events import End, Event, Failure
from ..engine.generation import Generation
from ..errors import RequestError
from ..service import Service
from ..wire import ChatRequest, CompletionRequest, Options, StreamOptions
from . import reply
from .http import Json, asked_of, service_of

T = TypeVar("T")


async def chat(request: Request) -> Response:
    service = service_of(request)
    style = reply.dialect("chat", service.name)
    return await _answer(request, service, style, *await _submit_chat(request, service, style.id))


async def text(request: Request) -> Response:
    return await _complete(request, "text")


async def native(request: Request) -> Response:
    return await _complete(request, "native")


async def _complete(request: Request, kind: str) -> Response:
    service = service_of(request)
    return await _answer(request, service, reply.dialect(kind, service.name), *await _submit_text(request, service))


# What was asked ends with these two calls: decoded it takes some 20 times its JSON, and an answer may take minutes.


async def _submit_chat(request: Request, service: Service, id: str) -> tuple[Generation, StreamOptions | None]:
    asked = await asked_of(request, ChatRequest)
    turn = await built(request, service, _turn, service, id, asked, service.origin(asked))
    return service.submit(turn.chat.prompt, asked, turn), _streaming(asked)


async def _submit_text(request: Request, service: Service) -> tuple[Generation, StreamOptions | None]:
    asked = await asked_of(request, CompletionRequest)
    prompt = await built(request, service, service.builder.text, asked.prompt)
    return service.submit(prompt, asked), _streaming(asked)


def _turn(service: Service, id: str, asked: ChatRequest, origin: Origin | None) -> Turn:
    return Turn.of(id, asked, service.builder.chat(asked, origin), origin)


def _streaming(asked: Options) -> StreamOptions | None:
    """How the answer is streamed, if it is."""
    return (asked.stream_options or StreamOptions()) if asked.stream else None


async def _answer(
    request: Request, service: Service, style: reply.Dialect, generation: Generation, streaming: StreamOptions | None
) -> Response:
    if streaming is not None:
        return EventStream(service, generation, style, streaming.include_usage)
    whole = await unless_disconnected(request, collect(service, generation))
    if whole is None:
        return Response(status_code=499)  # nobody reads it
    written, end = whole
    return Json(reply.whole(style, written, end))


class EventStream(StreamingResponse):
    """A generation's events up to its final one. A client that goes before that cancels it, even before the first."""

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
    """The whole text and the end. Raises the RequestError of a failure."""
    try:
        while True:
            event = await generation.events.get()
            if isinstance(event, Failure):
                raise event.error
            if isinstance(event, End):
                return "".join(generation.parts), event
    finally:
        service.abandon(generation)


async def built(request: Request, service: Service, work: Callable[..., T], *arguments: Any) -> T:
    """What `work` makes of a request in the threads for prompts. Raises RequestError; 499 if the client goes away first,
    and what has not begun then is not done."""
    return await in_threads(request, service.builder.threads, work, *arguments)


async def in_threads(request: Request, threads: PromptThreads, work: Callable[..., T], *arguments: Any) -> T:
    """The same in other threads."""
    done = await unless_disconnected(request, threads.run(request.state.num_bytes, work, *arguments))
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
