"""The routes that generate: chats and texts, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine.view import Delta, End, Event, Failure, Generation, account
from ..errors import RequestError
from ..service import Service, Submission
from ..wire.infill import InfillRequest
from ..wire.requests import ChatRequest, CompletionRequest, TextRequest
from .accepting import accept
from .http import Json, read_body, service_of
from .pulse import Pulse
from .replies.chat import Chat
from .replies.native import Native
from .replies.reply import Answer, Dialect, Envelope, encode, stream
from .replies.text import Text

T = TypeVar("T")


async def chat(request: Request) -> Response:
    return await respond(request, *await _submit_chat(request))


async def text(request: Request) -> Response:
    return await respond(request, *await _submit_text(request, TextRequest))


async def native(request: Request) -> Response:
    return await respond(request, *await _submit_text(request, CompletionRequest))


async def infill(request: Request) -> Response:
    return await respond(request, *await _submit_text(request, InfillRequest))


# A decoded body takes some 20 times its JSON, and an answer may take minutes: these calls free the body when they return.


async def _submit_chat(request: Request) -> tuple[list[Generation], Dialect]:
    service, asked = service_of(request), await read_body(request, ChatRequest)
    submission = await while_connected(request, accept(request, asked))
    assert submission.turn is not None
    reader = submission.turn.chat.shown_reader
    generations = service.submit(submission)
    return generations, Chat(envelope(request, submission, generations), reader)


async def _submit_text(
    request: Request, kind: type[CompletionRequest] | type[InfillRequest]
) -> tuple[list[Generation], Dialect]:
    service, asked = service_of(request), await read_body(request, kind)
    submission = await while_connected(request, service.accept_text(asked, request.state.num_bytes))
    generations = service.submit(submission)
    head = envelope(request, submission, generations)
    return generations, Text(head, submission.echoes) if kind is TextRequest else Native(replace(head, verbose=True))


def envelope(request: Request, submission: Submission, generations: Sequence[Generation]) -> Envelope:
    """Return the common fields of the answer to a request, whose body was submitted."""
    service, options = service_of(request), submission.options.without_texts()
    return Envelope(
        id=submission.id,
        model=service.name,
        options=options,
        num_prompts=len(submission.prompts),
        fingerprint=service.fingerprint,
        generations=generations,
        verbose=service.settings.verbose if options.verbose is None else options.verbose,
        warnings=request.state.warnings,
        piece=service.model.piece,
    )


async def respond(request: Request, generations: Sequence[Generation], dialect: Dialect) -> Response:
    """Return the answer of a request's generations, streamed or whole."""
    service = service_of(request)
    request.state.account = partial(account, generations)
    if dialect.envelope.options.stream:
        return EventStream(service, generations, dialect)
    spell = _speller(service, dialect)
    answers = await while_connected(request, collect(service, generations, spell))
    if any(answer.chances for answer in answers):  # much larger than its text
        return Json(await asyncio.to_thread(lambda: encode(dialect.whole(answers))))
    return Json(dialect.whole(answers))


class EventStream(StreamingResponse):
    """Streams the events of generations. A client that disconnects cancels them, even before the first event."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, generations: Sequence[Generation], dialect: Dialect) -> None:
        events = _events(generations, _speller(service, dialect))
        super().__init__(stream(dialect, events), headers={"Cache-Control": "no-store"})
        self._service, self._generations = service, generations
        asked = dialect.envelope.options.sse_ping_interval
        self._ping_interval = service.settings.sse_ping_interval if asked is None else asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pulse = Pulse(send, self._ping_interval)
        try:
            await super().__call__(scope, receive, pulse.send)
        finally:
            pulse.stop()
            for generation in self._generations:
                self._service.abandon(generation)


Spell = Callable[[Generation], Awaitable[str]]
"""Returns the text of a prompt that was computed."""


def _speller(service: Service, dialect: Dialect) -> Spell | None:
    """Return what spells the prompts, for an answer that shows them."""

    async def spell(generation: Generation) -> str:
        layout = generation.request.layout
        assert layout is not None
        return await asyncio.to_thread(service.model.detokenize, layout.ids, special=True)

    return spell if dialect.envelope.verbose else None


async def _events(generations: Sequence[Generation], spell: Spell | None) -> AsyncIterator[tuple[int, Event]]:
    """Yield the events of all generations as they come, with the index of each one's choice."""
    if len(generations) == 1:
        async for event in _events_of(generations[0], spell):
            yield 0, event
        return
    reading = {asyncio.ensure_future(_next(each, spell)): index for index, each in enumerate(generations)}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for read in sorted(done, key=lambda read: reading[read]):
                index, event = reading.pop(read), read.result()
                if not isinstance(event, End | Failure):
                    reading[asyncio.ensure_future(_next(generations[index], spell))] = index
                yield index, event
    finally:
        for read in reading:
            read.cancel()


async def _events_of(generation: Generation, spell: Spell | None) -> AsyncIterator[Event]:
    while True:
        event = await _next(generation, spell)
        yield event
        if isinstance(event, End | Failure):
            return


async def _next(generation: Generation, spell: Spell | None) -> Event:
    event = await generation.events.get()
    return replace(event, prompt=await spell(generation)) if spell and isinstance(event, End) else event


async def collect(service: Service, generations: Sequence[Generation], spell: Spell | None = None) -> list[Answer]:
    """Return the whole answers, in order. Raises the RequestError of a failure."""
    try:
        return [await _collect(generation, spell) for generation in generations]
    finally:
        for generation in generations:
            service.abandon(generation)


async def _collect(generation: Generation, spell: Spell | None) -> Answer:
    deltas: list[Delta] = []
    async for event in _events_of(generation, spell):
        match event:
            case Failure(error):
                raise error
            case Delta():
                deltas.append(event)
            case End():
                return Answer((*deltas, event.delta()), event)
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
