"""The routes that count the tokens of a prompt, without an answer."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..wire.messages import MessagesCountRequest
from ..wire.requests import ChatRequest
from ..wire.responses import ResponseCountRequest
from .accepting import accept
from .chat import while_connected
from .http import Json, beside_others, read_body, service_of


async def of_chat(request: Request) -> Response:
    """Count the prompt of a chat completion."""
    return Json({"object": "chat.completion.input_tokens", **await _count(request, await read_body(request, ChatRequest))})


async def of_response(request: Request) -> Response:
    """Count the prompt of a response."""
    asked = await read_body(request, ResponseCountRequest)
    return Json({"object": "response.input_tokens", **await _count(request, await beside_others(request, asked.chat))})


async def of_messages(request: Request) -> Response:
    """Count the prompt of Anthropic's Messages."""
    asked = await read_body(request, MessagesCountRequest)
    return Json(await _count(request, await beside_others(request, asked.chat)))


async def _count(request: Request, asked: ChatRequest) -> dict[str, int]:
    """Count the tokens that the prompt would have now: a hint after its documents depends on their order."""
    service = service_of(request)
    submission = await while_connected(request, accept(request, asked))
    predicted = await service.view.predict(submission.prompt, service.intake.scope(asked))
    return {"input_tokens": len(predicted.layout.tokens)}
