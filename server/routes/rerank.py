"""The routes that score documents against a query: Jina's and Cohere's shape, and TEI's."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..engine.view import Fields
from ..vectors.vectors import Computer, Vectors
from ..wire.embedding import RerankRequest
from .chat import while_connected
from .http import Json, read_body, vectors_of


async def rerank(request: Request) -> Response:
    """Return the scores of the documents, the best first; a bare list where they are named `texts`, as TEI does."""
    vectors, asked = vectors_of(request), await read_body(request, RerankRequest)
    computer = vectors.ranker()
    passages = asked.passages()
    scores, num_tokens = await while_connected(
        request, _score(vectors, computer, asked, passages, num_bytes=request.state.num_bytes)
    )
    best = sorted(range(len(scores)), key=lambda at: -scores[at])[: asked.top_n]
    if asked.texts is not None:
        shown = asked.return_text or asked.return_documents
        return Json([{"index": at, "score": scores[at]} | ({"text": passages[at]} if shown else {}) for at in best])
    results = [_result(asked, at, scores[at], passages[at]) for at in best]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return Json({"object": "list", "model": computer.name, "usage": usage, "results": results})


def _result(asked: RerankRequest, at: int, score: float, passage: str) -> Fields:
    result: Fields = {"index": at, "relevance_score": score}
    return result | ({"document": {"text": passage}} if asked.return_documents or asked.return_text else {})


async def _score(
    vectors: Vectors, computer: Computer, asked: RerankRequest, passages: list[str], *, num_bytes: int
) -> tuple[list[float], int]:
    """Return a score for each document, and the number of tokens that they took."""
    name = "documents" if asked.texts is None else "texts"
    made = await vectors.threads.run(num_bytes, computer.pairs, asked.query, passages, name=name)
    return [float(scores[0]) for scores in await computer.compute(made)], sum(map(len, made))
