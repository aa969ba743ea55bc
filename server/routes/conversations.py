"""The routes that show and forget a stored conversation."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from ..errors import RequestError
from ..service import Service
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
    service = service_of(request)
    is_begun = _is_begun(service, scope, id)
    if not service.conversations.forget(scope, id) and not is_begun:
        raise _unknown(id)
    await asyncio.to_thread(service.conversations.settle)
    return Json({"id": id, "object": "conversation.deleted", "deleted": True, "scope": scope})


def _is_begun(service: Service, scope: str, id: str) -> bool:
    """Whether a request is open whose answer a conversation will store."""
    origins = [turn.origin for turn in service.open.values() if turn is not None and turn.origin is not None]
    begun = [origin.conversation for origin in origins if origin.stores and not origin.conversation.forgotten]
    return any((conversation.scope, conversation.id) == (scope, id) for conversation in begun)


def _unknown(id: str) -> RequestError:
    return RequestError(
        f"no conversation {id!r} is remembered in this scope: expected the id of one that has an answer, and ?scope= as its "
        "cache_scope",
        status=404,
        param="id",
        code="conversation_not_found",
    )
