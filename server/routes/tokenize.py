"""The routes between text and tokens, as llama-server has them."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..errors import RequestError
from ..service import Service
from ..wire.requests import ChatRequest
from .chat import while_connected
from .http import Json, read_body, service_of
from .replies.reply import encode

PIECE = 50_000  # tokens


class TokenizeRequest(msgspec.Struct):
    content: str
    add_special: bool = False
    parse_special: bool = True


class DetokenizeRequest(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]


async def tokenize(request: Request) -> Response:
    service = service_of(request)
    asked = await read_body(request, TokenizeRequest)
    wanted = (asked.content, asked.parse_special, asked.add_special)
    work = service.builder.text_threads.run(request.state.num_bytes, service.model.tokenize, *wanted)
    tokens = await while_connected(request, work)
    return Json(await asyncio.to_thread(_encode_tokens, tokens))


async def detokenize(request: Request) -> Response:
    service = service_of(request)
    asked = await read_body(request, DetokenizeRequest)
    work = service.builder.text_threads.run(request.state.num_bytes, _encode_text, service, asked.tokens)
    return Json(await while_connected(request, work))


async def apply_template(request: Request) -> Response:
    """Render a chat as one prompt, with its documents in the order that they would have now."""
    service = service_of(request)
    asked = await read_body(request, ChatRequest)
    submission = await while_connected(request, service.accept_chat(asked, request.state.num_bytes))
    layout = (await service.view.predict(submission.prompt, asked.cache_scope)).layout
    work = service.builder.threads.run(request.state.num_bytes, _encode_prompt, service, layout.tokens)
    return Json(await while_connected(request, work))


# ---- answers as long as a body, so they are made in a thread ----------------------------------------------------------


def _encode_tokens(tokens: np.ndarray) -> bytes:
    """Encode tokens piece by piece: while one piece is encoded, all other threads wait."""
    pieces = (encode(tokens[at : at + PIECE].tolist())[1:-1] for at in range(0, len(tokens), PIECE))
    return b'{"tokens":[' + b",".join(pieces) + b"]}"


def _encode_text(service: Service, tokens: list[int]) -> bytes:
    """Raises RequestError for a token outside the vocabulary."""
    if unknown := next((token for token in tokens if token >= service.model.num_vocab), None):
        raise RequestError(f"tokens: {unknown} is not below {service.model.num_vocab}", param="tokens")
    return encode({"content": service.model.detokenize(np.array(tokens, np.int32))})


def _encode_prompt(service: Service, tokens: np.ndarray) -> bytes:
    return encode({"prompt": service.model.detokenize(tokens, special=True), "n_tokens": len(tokens)})
