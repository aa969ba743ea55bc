"""The routes that generate: chats and texts, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine.view import Delta, End, Event, Failure, Generation
from ..errors import RequestError
from ..service import Service, Submission
from ..wire.infill import InfillRequest
from ..wire.requests import ChatRequest, CompletionRequest
from .http import Json, read_body, service_of
from .replies.chat import Chat
from .replies.native import Native
from .replies.reply import Answer, Dialect, Envelope, stream
from .replies.text import Text

T = TypeVar("T")


async def chat(request: Request) -> Response:
    return await respond(request, *await _submit_chat(request))


async def text(request: Request) -> Response:
    return await respond(request, *await _submit_text(request, CompletionRequest, Text))


async def native(request: Request) -> Response:
    return await respond(request, *await _submit_text(request, CompletionRequest, Native))


async def infill(request: Request) -> Response:
    return await respond(request, *await _submit_text(request, InfillRequest, Native))


# A decoded body takes some 20 times its JSON, and an answer may take minutes: these calls free the body when they return.


async def _submit_chat(request: Request) -> tuple[list[Generation], Dialect]:
    service, asked = service_of(request), await read_body(request, ChatRequest)
    submission = await while_connected(request, service.accept_chat(asked, request.state.num_bytes))
    assert submission.turn is not None
    reader = submission.turn.chat.reader
    return service.submit(submission), Chat(envelope(request, submission), reader)


async def _submit_text(
    request: Request, kind: type[CompletionRequest] | type[InfillRequest], dialect: Callable[[Envelope], Dialect]
) -> tuple[list[Generation], Dialect]:
    service, asked = service_of(request), await read_body(request, kind)
    submission = await while_connected(request, service.accept_text(asked, request.state.num_bytes))
    return service.submit(submission), dialect(envelope(request, submission))


def envelope(request: Request, submission: Submission) -> Envelope:
    """Return the common fields of the answer to a request, whose body was submitted."""
    service = service_of(request)
    return Envelope(
        id=submission.id,
        model=service.name,
        fingerprint=service.fingerprint,
        options=submission.options.without_texts(),
        num_prompts=len(submission.prompts),
        warnings=request.state.warnings,
    )


async def respond(request: Request, generations: Sequence[Generation], dialect: Dialect) -> Response:
    """Return the answer of a request's generations, streamed or whole."""
    service = service_of(request)
    if dialect.envelope.options.stream:
        return EventStream(service, generations, dialect)
    return Json(dialect.whole(await while_connected(request, collect(service, generations))))


class EventStream(StreamingResponse):
    """Streams the events of generations. A client that disconnects cancels them, even before the first event."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, generations: Sequence[Generation], dialect: Dialect) -> None:
        super().__init__(stream(dialect, _events(generations)), headers={"Cache-Control": "no-store"})
        self._service, self._generations = service, generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for generation in self._generations:
                self._service.abandon(generation)


async def _events(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Event]]:
    """Yield the events of all generations as they come, with the index of each one's choice."""
    if len(generations) == 1:
        async for event in _events_of(generations[0]):
            yield 0, event
        return
    reading = {asyncio.ensure_future(each.events.get()): index for index, each in enumerate(generations)}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for read in sorted(done, key=lambda read: reading[read]):
                index, event = reading.pop(read), read.result()
                if not isinstance(event, End | Failure):
                    reading[asyncio.ensure_future(generations[index].events.get())] = index
                yield index, event
    finally:
        for read in reading:
            read.cancel()


async def _events_of(generation: Generation) -> AsyncIterator[Event]:
    while True:
        event = await generation.events.get()
        yield event
        if isinstance(event, End | Failure):
            return


async def collect(service: Service, generations: Sequence[Generation]) -> list[Answer]:
    """Return the whole answers, in order. Raises the RequestError of a failure."""
    try:
        return [await _collect(generation) for generation in generations]
    finally:
        for generation in generations:
            service.abandon(generation)


async def _collect(generation: Generation) -> Answer:
    deltas: list[Delta] = []
    async for event in _events_of(generation):
        match event:
            case Failure(error):
                raise error
            case Delta():
                deltas.append(event)
            case End(text, tokens=tokens):
                return Answer((*deltas, Delta(text, tokens)), event)
    raise AssertionError("a generation ends with an end")


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
