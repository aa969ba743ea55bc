"""The embedder and the reranker of the server, as an index and its searches use them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from ...models.digest import digest, files_of
from ...retrieval import Embedder
from ..vectors.vectors import Computer

POOLED = ("mean", "cls", "last")  # ways in which a text becomes one vector
MAX_LETTERS = 8192  # of a query, from its end: a long message asks its question last
MARGIN = 0.9  # of the length that fits, in letters: they are no tokens


def can_search(computer: Computer | None) -> bool:
    """Whether a model turns each text into one vector."""
    return computer is not None and computer.embedder.pooling in POOLED


class Embedding:
    """Turns texts of an index and queries into vectors."""

    def __init__(self, computer: Computer) -> None:
        self._computer = computer

    def for_index(self) -> Embedder:
        """Return the embedder of an index. Its digest takes seconds the first time. Raises ModelError."""
        embedder = self._computer.embedder
        files = digest(files_of(embedder.model.path))
        return Embedder(f"{files} {embedder.pooling} {embedder.limit}", self._embed)

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        """Compute texts while no request waits for vectors. The index's thread. Raises RequestError."""
        return np.stack(self._computer.compute_in_gaps([self._tokens(text) for text in texts]))

    async def query(self, text: str) -> np.ndarray:
        """Return the vector (width,) of a query. Raises RequestError."""
        tokens = await asyncio.to_thread(self._tokens, text[-MAX_LETTERS:], from_start=True)
        (vector,) = await self._computer.compute([tokens])
        return vector

    def _tokens(self, text: str, from_start: bool = False) -> np.ndarray:
        embedder = self._computer.embedder
        return embedder.shortened(embedder.tokens(text), from_start)


class Reranking:
    """Scores texts for a query."""

    def __init__(self, computer: Computer) -> None:
        self._computer = computer

    async def scores(self, query: str, texts: Sequence[str]) -> list[float]:
        """Return a score for each text; a higher one is better. Raises RequestError."""
        if not texts:
            return []
        pairs = await asyncio.to_thread(lambda: [self._pair(query[-MAX_LETTERS:], text) for text in texts])
        return [float(scores[0]) for scores in await self._computer.compute(pairs)]

    def _pair(self, query: str, text: str) -> np.ndarray:
        """Return the tokens of both. What is too long loses the end of the text and the start of the query."""
        limit = self._computer.embedder.limit
        while len(pair := self._computer.pair(query, text)) > limit:
            share = MARGIN * limit / len(pair)
            text, query = text[: int(share * len(text))], query[len(query) - int(share * len(query)) :]
        return pair
