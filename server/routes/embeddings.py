"""The routes that turn texts into vectors, in OpenAI's shape and in llama-server's."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from ..errors import RequestError
from ..vectors.vectors import Computer, Vectors
from ..wire.embedding import EmbeddingRequest
from .chat import while_connected
from .http import Json, read_body, vectors_of
from .replies.reply import encode

MAX_NUMBERS = 1 << 23  # of an answer without pooling, which has a vector for each token


async def openai(request: Request) -> Response:
    """Return vectors in OpenAI's shape; in llama-server's where the field is `content`, as llama-server does."""
    vectors, asked = vectors_of(request), await read_body(request, EmbeddingRequest)
    computer = vectors.embedder()
    if asked.input is UNSET and asked.content is not UNSET:
        return await _native(request, vectors, asked)
    if computer.embedder.pooling == "none":
        message = "this model has a vector for each token: start the server with --pooling mean, or send it to /embeddings"
        raise RequestError(message, param="input")
    computed, num_tokens = await while_connected(request, _compute(vectors, computer, asked, request.state.num_bytes))
    entries = await asyncio.to_thread(_encode, computed, asked.encoding_format == "base64")
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return Json(b'{"object":"list","model":%b,"usage":%b,"data":[%b]}' % (encode(computer.name), encode(usage), entries))


async def native(request: Request) -> Response:
    """Return vectors in llama-server's shape: a list of vectors for each text, one of them where they are pooled."""
    return await _native(request, vectors_of(request), await read_body(request, EmbeddingRequest))


async def _native(request: Request, vectors: Vectors, asked: EmbeddingRequest) -> Response:
    computer = vectors.embedder()
    if asked.encoding_format == "base64":
        raise RequestError("base64 is a format of /v1/embeddings only: expected float", param="encoding_format")
    computed, _ = await while_connected(request, _compute(vectors, computer, asked, request.state.num_bytes))
    return Json(await asyncio.to_thread(_encode_native, computed))


async def _compute(
    vectors: Vectors, computer: Computer, asked: EmbeddingRequest, num_bytes: int
) -> tuple[list[np.ndarray], int]:
    """Return the vectors as the request wants them, and the number of tokens that they took."""
    width = computer.embedder.width
    if asked.dimensions is not None and asked.dimensions > width:
        message = f"dimensions is {asked.dimensions}: this model's vectors have {width} numbers"
        raise RequestError(message, param="dimensions")
    texts = await vectors.threads.run(num_bytes, _tokens, computer, asked)
    computed = await computer.compute(texts)
    norm = asked.embd_normalize
    if norm is None:
        norm = -1 if computer.embedder.pooling == "none" else vectors.settings.embd_normalize
    kept = [computer.normalised(vector[..., : asked.dimensions], norm) for vector in computed]
    return kept, sum(map(len, texts))


def _tokens(computer: Computer, asked: EmbeddingRequest) -> list[np.ndarray]:
    """Tokenise the texts of a request. Raises RequestError."""
    name, given = asked.given()
    texts = computer.tokens(given, name, cut=asked.cut)
    if computer.embedder.pooling == "none":
        numbers = sum(map(len, texts)) * computer.embedder.width
        if numbers > MAX_NUMBERS:
            raise RequestError(f"the answer would have {numbers:,} numbers: expected at most {MAX_NUMBERS:,}", param=name)
    return texts


# ---- answers may have millions of numbers, so they are made in a thread, a vector at a time: others wait meanwhile ----


def _encode(computed: list[np.ndarray], as_base64: bool) -> bytes:
    return b",".join(
        encode({"object": "embedding", "index": index, "embedding": _base64(vector) if as_base64 else vector.tolist()})
        for index, vector in enumerate(computed)
    )


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _encode_native(computed: list[np.ndarray]) -> bytes:
    entries = (
        encode({"index": index, "embedding": np.atleast_2d(vectors).tolist()}) for index, vectors in enumerate(computed)
    )
    return b"[%b]" % b",".join(entries)
