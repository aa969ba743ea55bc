"""OpenAI's Responses: made, shown again and deleted."""

from __future__ import annotations

import asyncio
import re

from starlette.requests import Request
from starlette.responses import Response

from ..engine.view import Fields, Generation
from ..errors import RequestError
from ..wire.items import items_of
from ..wire.responses import ResponseRequest
from .accepting import accept
from .chat import envelope, respond, while_connected
from .http import Json, beside_others, read_body, scope_of, service_of
from .replies.output import Output
from .replies.responses import Responses

MOST_ITEMS, USUAL_ITEMS = 100, 20  # of one page of input items
ORDERS = ("asc", "desc")


async def create(request: Request) -> Response:
    """Answer as OpenAI's Responses do. The answer is stored unless `store` is false."""
    return await respond(request, *await _submit(request))


async def _submit(request: Request) -> tuple[list[Generation], Responses]:
    service, asked = service_of(request), await read_body(request, ResponseRequest)
    chat, echo = await beside_others(request, lambda: (asked.chat(), asked.echo()))
    submission = await while_connected(request, accept(request, chat, kind="resp_"))
    turn, scope = submission.turn, chat.cache_scope
    assert turn is not None and turn.origin is not None
    id, suffix = submission.id, submission.id.removeprefix("resp_")
    generations = service.submit(submission)
    dialect = Responses(
        envelope(request, submission, generations),
        turn.chat.shown_reader(),
        echo,
        output=Output(suffix, summarises=asked.summarises, seals=asked.seals),
        keep=lambda response: service.conversations.attach(scope, id, response),
        caches=service.intake.caches(chat),
    )
    return generations, dialect


async def show(request: Request) -> Response:
    """Show a stored response (`?scope=`)."""
    id, scope = request.path_params["id"], scope_of(request)
    conversation = service_of(request).conversations.find_answer(scope, id)
    if conversation is None or id not in conversation.records:
        raise _unknown(id)
    return Json(conversation.records[id])


async def forget(request: Request) -> Response:
    """Delete a stored response; later ones keep what they have of it in their history."""
    id, scope = request.path_params["id"], scope_of(request)
    conversations = service_of(request).conversations
    if not conversations.forget_answer(scope, id):
        raise _unknown(id)
    await asyncio.to_thread(conversations.settle)
    return Json({"id": id, "object": "response", "deleted": True})


async def cancel(request: Request) -> Response:
    """Refuse: only responses in the background can be cancelled. Any other ends when its client closes the connection."""
    raise RequestError("this response is not in the background: close its connection to cancel it", param="id")


async def input_items(request: Request) -> Response:
    """List the items that a stored response answered, those of earlier turns included."""
    id, scope = request.path_params["id"], scope_of(request)
    conversation = service_of(request).conversations.find_answer(scope, id)
    if conversation is None:
        raise _unknown(id)
    *before, _ = conversation.answers[id]
    messages = [entry.message for entry in before if not entry.one_turn]
    items = items_of(messages, id.removeprefix("resp_"))
    return Json(_page(items, request))


def _page(items: list[Fields], request: Request) -> Fields:
    """Return one page of a list, as OpenAI's API parts it. Raises RequestError."""
    limit, order, after = (request.query_params.get(name) for name in ("limit", "order", "after"))
    if order not in (None, *ORDERS):
        raise RequestError(f"order: expected one of {', '.join(ORDERS)}", param="order")
    if limit is not None and not (re.fullmatch("[0-9]{1,3}", limit) and 1 <= int(limit) <= MOST_ITEMS):
        raise RequestError(f"limit: expected a number from 1 to {MOST_ITEMS}", param="limit")
    if order != "asc":
        items = items[::-1]
    if after is not None:
        at = next((at for at, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise RequestError(f"after: no item {after[:80]!r} in this list", param="after")
        items = items[at + 1 :]
    page = items[: int(limit or USUAL_ITEMS)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "has_more": len(items) > len(page), "first_id": first, "last_id": last}


def _unknown(id: str) -> RequestError:
    return RequestError(
        f"no response {id[:80]!r} is stored in this scope: expected the id of a stored one, and ?scope= as its cache_scope",
        status=404,
        param="id",
        code="response_not_found",
    )
