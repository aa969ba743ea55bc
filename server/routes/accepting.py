"""Chats on their way into the service: documents are found for those that ask for it, and prompts are computed ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from functools import partial

from starlette.requests import Request

from ..errors import RequestError
from ..retrieving.account import Findings, Found
from ..retrieving.library import Hit
from ..retrieving.pipelining import Ahead
from ..retrieving.question import fitting, query_of, with_documents
from ..retrieving.sources import index_state
from ..service import Service, Submission
from ..wire.requests import ChatRequest
from .http import service_of

STAGE = 0.03  # s that a stage of a chat's search has to last before its documents are computed ahead


async def accept(request: Request, asked: ChatRequest, open_turn: bool = False, *, kind: str = "chatcmpl-") -> Submission:
    """Find the documents of a chat with `retrieval`, and accept it: see `Service.accept_chat`. Raises RequestError."""
    service = service_of(request)
    found: Found = None
    if asked.retrieves:
        asked, found = await _retrieve(request, asked)
    return await service.accept_chat(asked, request.state.num_bytes, open_turn, kind=kind, found=found)


async def read_ahead(service: Service, key: Hashable, asked: ChatRequest, num_bytes: int, *, open_turn: bool) -> bool:
    """Compute the prompt of a chat in idle time. False: the server is not idle. Raises RequestError.

    key, num_bytes, open_turn: as in `Service.submit_background` and `Service.accept_chat`.
    """
    if service.open:
        return False
    submission = await service.accept_chat(asked.prefill_only(), num_bytes, open_turn)
    return await start_ahead(service, key, submission)


async def start_ahead(service: Service, key: Hashable, submission: Submission) -> bool:
    started = await asyncio.wrap_future(service.submit_background(key, submission))
    if not started:
        service.idle.resume()
    return started


async def _retrieve(request: Request, asked: ChatRequest) -> tuple[ChatRequest, Findings]:
    """Return the chat with the documents that were found for it, and these.

    While a later stage of the search runs, the documents that lead so far are computed ahead.
    """
    service, library = service_of(request), request.app.state.host.library
    if library is None:
        raise RequestError("retrieval: this server has no documents: start it with --docs PATH", param="retrieval")
    asked.check()
    library.check_scope(asked.cache_scope, "cache_scope")
    key, num_bytes = ("retrieval", request.state.request_id), request.state.num_bytes

    async def prefill(hits: Sequence[Hit]) -> None:
        await read_ahead(service, key, with_documents(asked, hits), num_bytes, open_turn=True)

    query, index = query_of(asked, library), index_state(library)
    if query is None:
        return with_documents(asked, ()), Findings((), index)
    ahead, hits = Ahead(prefill, delay=STAGE), ()
    try:
        async for stage in library.search().stages(query):
            hits = stage.hits
            if not stage.is_last:
                ahead.show(hits)
    except BaseException:
        service.door.drop_background((asked.cache_scope, key))
        raise
    finally:
        ahead.stop()
    builder = service.builder
    fit = partial(fitting, hits, library.room, partial(builder.length, asked.cache_scope))
    found = Findings(await builder.threads.run(0, fit), index)
    return with_documents(asked, found.hits), found
