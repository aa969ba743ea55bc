"""The routes between text and tokens, as llama-server has them."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from .errors import RequestError
from .web import Json, body_of, service_of
from .wire import ChatRequest, decode


class TokenizeRequest(msgspec.Struct):
    content: str
    add_special: bool = False
    parse_special: bool = True


class DetokenizeRequest(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]


async def tokenize(request: Request) -> Response:
    model = service_of(request).model
    asked = decode(await body_of(request), TokenizeRequest)
    tokens = await asyncio.to_thread(model.tokenize, asked.content, asked.parse_special, asked.add_special)
    return Json({"tokens": tokens.tolist()})


async def detokenize(request: Request) -> Response:
    model = service_of(request).model
    asked = decode(await body_of(request), DetokenizeRequest)
    if unknown := next((token for token in asked.tokens if token >= model.num_vocab), None):
        raise RequestError(f"tokens: {unknown} is not below {model.num_vocab}", param="tokens")
    return Json({"content": model.detokenize(np.array(asked.tokens, np.int32))})


async def apply_template(request: Request) -> Response:
    """What a chat would be as one prompt, its documents in the order they would have now."""
    service = service_of(request)
    asked = decode(await body_of(request), ChatRequest)
    chat = await asyncio.to_thread(service.builder.chat, asked, service.origin(asked))
    tree = service.engine.scheduler.tree
    scope = ("shared", asked.cache_scope)
    layout = await asyncio.wrap_future(service.engine.ask(lambda: chat.prompt.arrange(tree, scope)))
    return Json({"prompt": service.model.detokenize(layout.tokens, special=True), "n_tokens": len(layout.tokens)})
