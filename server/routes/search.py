"""`POST /v1/search`: a search in the server's documents, whole or stage by stage."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..engine.view import Fields
from ..errors import RequestError
from ..retrieving.library import Hit, Library, Stage
from ..retrieving.pipelining import Ahead
from ..retrieving.question import query_of_search, with_documents
from ..retrieving.sources import index_state, results
from ..service import Service
from ..wire.requests import ChatRequest, ConversationReference
from ..wire.searching import ChatToCome, SearchRequest
from .accepting import read_ahead
from .chat import while_connected
from .http import Json, read_body, service_of
from .replies.reply import DONE, event
from .sources import library_of


async def search(request: Request) -> Response:
    """Search the server's documents."""
    asked = await read_body(request, SearchRequest)
    asked.check()
    library = library_of(request, asked.cache_scope, "cache_scope")
    stages, index = _stages(request, asked, library), index_state(library)
    if asked.stream:
        return StreamingResponse(
            _events(stages, index), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )
    return Json({"object": "search"} | _shown(await while_connected(request, _last(stages)), index))


async def _stages(request: Request, asked: SearchRequest, library: Library) -> AsyncIterator[Stage]:
    """Yield the stages of a search. The documents that lead are computed ahead, if the request names a turn for it."""
    query = query_of_search(asked, library)
    ahead = _ahead(request, asked)
    try:
        async for stage in library.search().stages(query):
            yield stage
            if ahead:
                ahead.show(stage.hits)
        if ahead:
            await ahead.settled()
    finally:
        if ahead:
            ahead.stop()


def _ahead(request: Request, asked: SearchRequest) -> Ahead | None:
    name = asked.speculate
    if name is None:
        return None
    service, num_bytes = service_of(request), request.state.num_bytes
    turn = _turn_to_come(service, asked, name)

    async def prefill(hits: Sequence[Hit]) -> None:
        await read_ahead(service, ("speculation", name), with_documents(turn, hits), num_bytes, open_turn=True)

    return Ahead(prefill)


def _turn_to_come(service: Service, asked: SearchRequest, name: str) -> ChatRequest:
    """Return the chat whose last question is the query."""
    scope = asked.cache_scope
    chat = asked.chat or ChatToCome()
    if asked.chat is None and service.conversations.find(scope, name):
        chat = replace(chat, conversation=ConversationReference(name, history="new"))
    question = {"role": "user", "content": asked.query}
    return replace(chat, messages=[*chat.messages, question], cache_scope=scope, retrieval=True)


async def _last(stages: AsyncIterator[Stage]) -> Stage:
    found = [stage async for stage in stages]
    return found[-1]


async def _events(stages: AsyncIterator[Stage], index: Fields) -> AsyncIterator[bytes]:
    try:
        async for stage in stages:
            yield event(_shown(stage, index))
    except RequestError as error:
        yield event(error.body())
    yield DONE


def _shown(stage: Stage, index: Fields) -> Fields:
    return {"stage": stage.name, "results": results(stage.hits, with_text=True), **index}
