"""The routes that search the server's documents, and show them with their files."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ...retrieval.ranking import Hit, Stage
from ..chat.body import ChatRequest, ConversationReference, check_scope
from ..engine.usage import Fields
from ..http.api_errors import RequestError, failed
from ..search import retrieve
from ..search.folder import FolderIndex
from ..search.retrieve import (
    ChatToCome,
    SearchRequest,
    StagePrefetch,
    check_by,
    index_state,
    results,
    search_for,
    with_documents,
)
from ..service.service import Service
from .endpoint import scope_of, service_of, while_connected
from .reply import DONE, JsonReply, sse_event

# ---- The routes that list the files, show a document and look for changed files. ----------------------------------------

logger = logging.getLogger("slotcache")
MOST_FILES = 1000  # in one answer


class RefreshRequest(msgspec.Struct, frozen=True):
    """`POST /v1/sources/refresh`."""

    cache_scope: str = ""


async def list_sources(request: Request) -> Response:
    """List the folders and their files (`?scope=`, `?after=`, `?limit=`)."""
    folder_index = folder_index_of(request, scope_of(request), "scope")
    limit = request.query_params.get("limit", str(MOST_FILES))
    if not (limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= MOST_FILES):
        raise RequestError(f"limit is {limit[:80]!r}: expected 1 to {MOST_FILES}", param="limit")
    after = request.query_params.get("after", "")
    return JsonReply(await folder_index.ask(retrieve.collections, folder_index, after, int(limit)))


async def document(request: Request) -> Response:
    """Show a document with the documents around it in the same file (`?scope=`)."""
    folder_index = folder_index_of(request, scope_of(request), "scope")
    return JsonReply(await folder_index.ask(retrieve.document, folder_index, request.path_params["id"]))


async def refresh_sources(request: Request, asked: RefreshRequest) -> Response:
    """Start to look for changed files in the folders. The answer is sent at once, before the files are read."""
    check_scope(asked.cache_scope, "cache_scope")
    folder_index_of(request, asked.cache_scope, "cache_scope").watcher.refresh()
    return JsonReply({"object": "sources.refresh", "state": "started"})


def folder_index_of(request: Request, scope: str, where: str) -> FolderIndex:
    """Return the index of --docs for a request of this scope. where: the name of the field that has the scope.

    Raises RequestError 503 while the first model loads, 501 without --docs, and 403 if the documents have another scope.
    """
    state = request.app.state.app
    state.loaded()
    if state.folder_index is None:
        raise RequestError("this server was started without documents: start it with --docs PATH", status=501)
    state.folder_index.check_scope(scope, where)
    return state.folder_index


async def search(request: Request, asked: SearchRequest) -> Response:
    """Search the server's documents."""
    asked.check()
    folder_index = folder_index_of(request, asked.cache_scope, "cache_scope")
    check_by(asked, folder_index)
    stages, index = _stages(request, asked, folder_index), index_state(folder_index)
    if asked.stream:
        return StreamingResponse(
            _events(stages, index), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )
    return JsonReply({"object": "search"} | _shown(await while_connected(request, _last(stages)), index))


async def _stages(request: Request, asked: SearchRequest, folder_index: FolderIndex) -> AsyncIterator[Stage]:
    """Yield the stages of a search. If the request sets `speculate`, prefill the next turn with each stage's documents."""
    query = search_for(asked.query, asked, folder_index.top_k)
    ahead = _ahead(request, asked)
    try:
        async for stage in folder_index.search().stages(query):
            yield stage
            if ahead:
                ahead.show(stage.hits)
        if ahead:
            await ahead.settled()
    finally:
        if ahead:
            ahead.stop()


def _ahead(request: Request, asked: SearchRequest) -> StagePrefetch | None:
    name = asked.speculate
    if name is None:
        return None
    service, num_bytes = service_of(request), request.state.num_bytes
    turn = _turn_to_come(service, asked, name)

    async def prefill(hits: Sequence[Hit]) -> None:
        shown = await service.room_for(asked.cache_scope, hits)
        await service.prefetch(("speculation", name), with_documents(turn, shown), num_bytes, open_turn=True)

    return StagePrefetch(prefill)


def _turn_to_come(service: Service, asked: SearchRequest, name: str) -> ChatRequest:
    """Return the chat for which the search is made, with the query as the user's last message."""
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
            yield sse_event(_shown(stage, index))
    except RequestError as error:
        yield sse_event(error.body())
    except Exception as error:
        logger.exception("a stream of hits failed")
        yield sse_event(failed(error).body())
    yield DONE


def _shown(stage: Stage, index: Fields) -> Fields:
    return {"stage": stage.name, "results": results(stage.hits, with_text=True), "left_out": stage.left_out, **index}
