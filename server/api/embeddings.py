"""Vectors and rerank scores: the bodies of the requests, and the handlers."""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Literal, cast

import numpy as np
from msgspec import UNSET, Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from ...models.embedding import normalised
from ..chat.decode import check_number
from ..chat.sampling_fields import JsonValue
from ..engine.usage import Fields
from ..http.api_errors import RequestError
from ..search.vectors import EmbeddingWorker, Vectors
from .endpoint import VectorRequest, vectors_of, while_connected
from .reply import JsonReply, encode

# ---- The bodies of requests for vectors and for scores. -----------------------------------------------------------------

MAX_PAIRED = 1 << 25  # characters of the query times documents: each document is tokenised together with the query
Norm = Annotated[int, Meta(ge=-1, le=16)]
Truncation = bool | Literal["none", "start", "end", "NONE", "START", "END"]


class EmbeddingRequest(VectorRequest, frozen=True, kw_only=True):
    """`POST /v1/embeddings`, and llama-server's `POST /embedding`.

    input, content: a text, token ids, or a list of texts or token ids.
    """

    input: JsonValue = UNSET
    content: JsonValue = UNSET
    user: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    embd_normalize: Norm | None = None
    truncate: Truncation | None = None

    def given(self) -> tuple[str, JsonValue]:
        """Return the name and the value of the field with the texts. Raises RequestError if no field has texts."""
        for name in ("input", "content"):
            if (value := getattr(self, name)) is not UNSET:
                return name, value
        raise RequestError("input is missing: expected a text or a list of texts", param="input")

    @property
    def cut(self) -> Literal["start", "end"] | None:
        """Where a text that is too long loses tokens: at its start or its end. None: a text that is too long is refused."""
        side = self.truncate.lower() if isinstance(self.truncate, str) else ("end" if self.truncate else "none")
        return None if side == "none" else cast(Literal["start", "end"], side)


class RerankDocument(Struct, frozen=True):
    """A document in a `RerankRequest`, given as an object with a text, not as a plain string."""

    text: str


class RerankRequest(VectorRequest, frozen=True, kw_only=True):
    """`POST /v1/rerank`. The texts are in `documents` (the form of Jina and Cohere) or in `texts` (the form of TEI)."""

    query: str
    documents: list[str | RerankDocument] | None = None
    texts: list[str] | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = False
    return_text: bool = False

    def passages(self) -> list[str]:
        """Return the texts of the documents. Raises RequestError."""
        if self.documents is not None and self.texts is not None:
            raise RequestError("documents and texts are both there: expected one of them", param="texts")
        name, given = ("documents", self.documents) if self.texts is None else ("texts", self.texts)
        check_number(len(given or []), name)
        found = [text.text if isinstance(text, RerankDocument) else text for text in given or []]
        if len(found) * len(self.query) > MAX_PAIRED:
            raise RequestError(f"the query is too long for {len(found)} documents: shorten it", param="query")
        return found


MAX_NUMBERS = 1 << 23  # numbers in an answer without pooling, which has a vector for each token


async def openai(request: Request, asked: EmbeddingRequest) -> Response:
    """Return vectors in OpenAI's form.

    If the request has `content` instead of `input`, return the vectors in llama-server's form, as llama-server does.
    """
    if asked.input is UNSET and asked.content is not UNSET:
        return await native(request, asked)
    worker = pooled(vectors_of(request))
    computed, num_tokens = await compute(request, worker, asked)
    entries = await asyncio.to_thread(_encode, computed, asked.encoding_format == "base64")
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return JsonReply(b'{"object":"list","model":%b,"usage":%b,"data":[%b]}' % (encode(worker.name), encode(usage), entries))


def pooled(vectors: Vectors) -> EmbeddingWorker:
    """Return the embedding model. Raises RequestError if the model makes a vector for each token."""
    worker = vectors.embedder()
    if worker.embedder.pooling == "none":
        message = "this model makes a vector for each token: use /embeddings, or start the server with --pooling mean"
        raise RequestError(message, param="input")
    return worker


async def native(request: Request, asked: EmbeddingRequest) -> Response:
    """Return vectors in llama-server's form: a list of vectors for each text.

    If the model pools its vectors, each list has one vector. If it does not, each list has one vector for each token of
    the text.
    """
    worker = vectors_of(request).embedder()
    if asked.encoding_format == "base64":
        raise RequestError("base64 is a format of /v1/embeddings only: expected float", param="encoding_format")
    computed, _ = await compute(request, worker, asked)
    return JsonReply(await asyncio.to_thread(_encode_native, computed))


async def compute(request: Request, worker: EmbeddingWorker, asked: EmbeddingRequest) -> tuple[list[np.ndarray], int]:
    """Return the vectors of a request's texts, and the number of tokens in the texts. Raises RequestError.

    The vectors are cut to the request's `dimensions` and normalised as the request wants.
    """
    return await while_connected(request, _compute(vectors_of(request), worker, asked, request.state.num_bytes))


async def _compute(
    vectors: Vectors, worker: EmbeddingWorker, asked: EmbeddingRequest, num_bytes: int
) -> tuple[list[np.ndarray], int]:
    width = worker.embedder.width
    if asked.dimensions is not None and asked.dimensions > width:
        message = f"dimensions is {asked.dimensions}: this model's vectors have {width} numbers"
        raise RequestError(message, param="dimensions")
    texts = await vectors.threads.run(num_bytes, _tokens, worker, asked)
    computed = await worker.compute(texts)
    norm = asked.embd_normalize
    if norm is None:
        norm = -1 if worker.embedder.pooling == "none" else vectors.settings.embd_normalize
    kept = [normalised(vector[..., : asked.dimensions], norm) for vector in computed]
    return kept, sum(map(len, texts))


def _tokens(worker: EmbeddingWorker, asked: EmbeddingRequest) -> list[np.ndarray]:
    """Tokenise the texts of a request. Raises RequestError."""
    name, given = asked.given()
    texts = worker.tokens(given, name, cut=asked.cut)
    if worker.embedder.pooling == "none":
        numbers = sum(map(len, texts)) * worker.embedder.width
        if numbers > MAX_NUMBERS:
            raise RequestError(f"the answer would have {numbers:,} numbers: expected at most {MAX_NUMBERS:,}", param=name)
    return texts


# ---- Encoding the vectors -----------------------------------------------------------------------------------------------
# An answer may have millions of numbers, so a thread encodes it. All other threads wait while a piece is encoded, so each
# vector is a piece of its own.


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


# ---- The routes that score documents against a query: Jina's and Cohere's shape, and TEI's. -----------------------------


async def rerank(request: Request, asked: RerankRequest) -> Response:
    """Return the scores of the documents, the best first. For a request with `texts`, return TEI's form: only a list."""
    vectors = vectors_of(request)
    worker = vectors.ranker()
    passages = asked.passages()
    scores, num_tokens = await while_connected(
        request, _score(vectors, worker, asked, passages, num_bytes=request.state.num_bytes)
    )
    best = sorted(range(len(scores)), key=lambda at: -scores[at])[: asked.top_n]
    if asked.texts is not None:
        shown = asked.return_text or asked.return_documents
        return JsonReply([{"index": at, "score": scores[at]} | ({"text": passages[at]} if shown else {}) for at in best])
    results = [_result(asked, at, scores[at], passages[at]) for at in best]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return JsonReply({"object": "list", "model": worker.name, "usage": usage, "results": results})


def _result(asked: RerankRequest, at: int, score: float, passage: str) -> Fields:
    result: Fields = {"index": at, "relevance_score": score}
    return result | ({"document": {"text": passage}} if asked.return_documents or asked.return_text else {})


async def _score(
    vectors: Vectors, worker: EmbeddingWorker, asked: RerankRequest, passages: list[str], *, num_bytes: int
) -> tuple[list[float], int]:
    """Return a score for each document, and the number of tokens that were computed."""
    name = "documents" if asked.texts is None else "texts"
    made = await vectors.threads.run(num_bytes, worker.pairs, asked.query, passages, name=name)
    return [float(scores[0]) for scores in await worker.compute(made)], sum(map(len, made))
