"""The routes over the server's documents: their files, one document, a new look at the folders."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..errors import RequestError
from ..retrieving import sources
from ..retrieving.library import Library
from ..wire.requests import check_scope
from .http import Json, read_body, scope_of

MOST_FILES = 1000  # of an answer


class RefreshRequest(msgspec.Struct, frozen=True):
    """`POST /v1/sources/refresh`."""

    cache_scope: str = ""


async def show(request: Request) -> Response:
    """List the folders and their files (`?scope=`, `?after=`, `?limit=`)."""
    library = library_of(request, scope_of(request), "scope")
    limit = request.query_params.get("limit", str(MOST_FILES))
    if not (limit.isdecimal() and len(limit) < 10 and 1 <= int(limit) <= MOST_FILES):
        raise RequestError(f"limit is {limit[:80]!r}: expected 1 to {MOST_FILES}", param="limit")
    after = request.query_params.get("after", "")
    return Json(await asyncio.to_thread(sources.collections, library, after, int(limit)))


async def document(request: Request) -> Response:
    """Show a document with its neighbours in the file (`?scope=`)."""
    library = library_of(request, scope_of(request), "scope")
    return Json(await asyncio.to_thread(sources.document, library, request.path_params["id"]))


async def refresh(request: Request) -> Response:
    """Look for changes below the folders. The answer does not wait for them."""
    asked = await read_body(request, RefreshRequest)
    check_scope(asked.cache_scope, "cache_scope")
    library_of(request, asked.cache_scope, "cache_scope").keeper.refresh()
    return Json({"object": "sources.refresh", "state": "started"})


def library_of(request: Request, scope: str, where: str) -> Library:
    """Return the documents for a request of a scope. where: the scope's field.

    Raises RequestError: 503 while the model loads, 501 without --docs, 403 for another scope.
    """
    host = request.app.state.host
    host.loaded()
    if host.library is None:
        raise RequestError("this server was started without documents: start it with --docs PATH", status=501)
    host.library.check_scope(scope, where)
    return host.library
