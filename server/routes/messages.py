"""Anthropic's Messages."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..engine.view import Generation
from ..wire.messages import MessagesRequest
from .accepting import accept
from .chat import envelope, respond, while_connected
from .http import beside_others, read_body, service_of
from .replies.messages import Messages


async def create(request: Request) -> Response:
    """Answer as Anthropic's Messages do."""
    return await respond(request, *await _submit(request))


async def _submit(request: Request) -> tuple[list[Generation], Messages]:
    service, asked = service_of(request), await read_body(request, MessagesRequest)
    chat = await beside_others(request, asked.chat)
    submission = await while_connected(request, accept(request, chat, kind="msg_"))
    assert submission.turn is not None
    generations = service.submit(submission)
    answered = generations[0].request
    dialect = Messages(
        envelope(request, submission, generations),
        submission.turn.chat.shown_reader(),
        lambda: (answered.num_prompt, answered.cached),
        shows_thoughts=asked.shows_thoughts,
        caches=service.intake.caches(chat),
    )
    return generations, dialect
