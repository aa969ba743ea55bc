"""The routes between text and tokens, as llama-server has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..errors import RequestError
from ..service import Service
from ..vectors.vectors import Vectors
from ..wire.requests import ChatRequest
from ..wire.requests import Json as AnyJson
from .accepting import accept
from .chat import while_connected
from .http import Json, read_body, service_of, vectors_of
from .replies.reply import encode

PIECE = 50_000  # tokens


class TokenizeRequest(msgspec.Struct):
    """`POST /tokenize`. content: a text, token ids, or both mixed."""

    content: str | list[AnyJson]
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]


async def tokenize(request: Request) -> Response:
    vectors = vectors_of(request)
    asked = await read_body(request, TokenizeRequest)
    request.app.state.host.rouse()
    tokens = await while_connected(request, vectors.threads.run(request.state.num_bytes, _tokens, vectors, asked))
    return Json(await asyncio.to_thread(_encode_tokens, tokens, vectors.model.spelling if asked.with_pieces else None))


async def detokenize(request: Request) -> Response:
    vectors = vectors_of(request)
    asked = await read_body(request, DetokenizeRequest)
    work = vectors.threads.run(request.state.num_bytes, _encode_text, vectors, asked.tokens)
    return Json(await while_connected(request, work))


async def apply_template(request: Request) -> Response:
    """Render a chat as one prompt, with its documents in the order that they would have now."""
    service = service_of(request)
    asked = await read_body(request, ChatRequest)
    submission = await while_connected(request, accept(request, asked))
    layout = (await service.view.predict(submission.prompt, service.intake.scope(asked))).layout
    work = service.builder.threads.run(request.state.num_bytes, _encode_prompt, service, layout.ids)
    return Json(await while_connected(request, work))


# ---- answers as long as a body, so they are made in a thread ----------------------------------------------------------


def _tokens(vectors: Vectors, asked: TokenizeRequest) -> np.ndarray:
    return vectors.texts.tokens(asked.content, "content", special=asked.parse_special, begin=asked.add_special)


def _encode_tokens(tokens: np.ndarray, spelling: Callable[[int], bytes] | None) -> bytes:
    """Encode tokens piece by piece: while one piece is encoded, all other threads wait. spelling: of each, if wanted."""
    pieces = (encode(_shown(tokens[at : at + PIECE].tolist(), spelling))[1:-1] for at in range(0, len(tokens), PIECE))
    return b'{"tokens":[' + b",".join(pieces) + b"]}"


def _shown(tokens: list[int], spelling: Callable[[int], bytes] | None) -> list[object]:
    return [{"id": token, "piece": _piece(spelling(token))} for token in tokens] if spelling else [*tokens]


def _piece(spelling: bytes) -> str | list[int]:
    """Return a token's text, or its bytes where they are no whole characters."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return list(spelling)


def _encode_text(vectors: Vectors, tokens: list[int]) -> bytes:
    """Raises RequestError for a token outside the vocabulary."""
    model = vectors.model
    if unknown := next((token for token in tokens if token >= model.num_vocab), None):
        raise RequestError(f"tokens: {unknown} is not below {model.num_vocab}", param="tokens")
    return encode({"content": model.detokenize(np.array(tokens, np.int32), special=True)})


def _encode_prompt(service: Service, tokens: np.ndarray) -> bytes:
    """Encode a prompt as the text that `/completion` makes the same tokens of: it puts BOS in front by itself."""
    begin = service.model.tokenizer.begin
    shown = tokens[len(begin) :] if np.array_equal(tokens[: len(begin)], begin) else tokens
    return encode({"prompt": service.model.detokenize(shown, special=True), "n_tokens": len(tokens)})
