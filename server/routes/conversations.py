"""The routes that show and forget a stored conversation."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from ..errors import RequestError
from .http import Json, scope_of, service_of


async def show(request: Request) -> Response:
    """Show a conversation (`?scope=`) up to the answer that it continues from, and the ids of all its answers."""
    id, scope = request.path_params["id"], scope_of(request)
    conversation = service_of(request).conversations.find(scope, id)
    if conversation is None:
        raise _unknown(id)
    entries = conversation.answers[conversation.head]
    return Json(
        {
            "id": conversation.id,
            "object": "conversation",
            "created_at": int(conversation.created),
            "scope": conversation.scope,
            "bytes": conversation.num_bytes,
            "turns": sum(entry.role == "user" for entry in entries),
            "last_response_id": conversation.head,
            "response_ids": list(conversation.answers),
            "messages": [entry.public() for entry in entries],
        }
    )


async def forget(request: Request) -> Response:
    """Forget a conversation with all its answers."""
    id, scope = request.path_params["id"], scope_of(request)
    conversations = service_of(request).conversations
    if not conversations.forget(scope, id):
        raise _unknown(id)
    await asyncio.to_thread(conversations.settle)
    return Json({"id": id, "object": "conversation.deleted", "deleted": True, "scope": scope})


def _unknown(id: str) -> RequestError:
    return RequestError(
        f"no conversation {id!r} is remembered in this scope: expected the id of one that has an answer, and ?scope= as its "
        "cache_scope",
        status=404,
        param="id",
        code="conversation_not_found",
    )
