"""The embedder and the reranker of the server, as an index and its searches use them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Self

import numpy as np

from ...models.digest import digest, files_of
from ...retrieval import Embedder, Prefixes, prefixes_of
from ..flags.setting import SettingsError
from ..settings import Settings
from ..vectors.vectors import Computer

POOLED = ("mean", "cls", "last")  # ways in which a text becomes one vector
MAX_LETTERS = 8192  # of a query, from its end: a long message asks its question last
MARGIN = 0.9  # of the length that fits, in letters: they are no tokens
AUTO = "auto"  # a prefix that the model's name decides
MOST_PREFIX = 0.5  # of the tokens that a model takes at once


def can_search(computer: Computer | None) -> bool:
    """Whether a model turns each text into one vector."""
    return computer is not None and computer.embedder.pooling in POOLED


class Embedding:
    """Turns texts of an index and queries into vectors. prefixes: in front of both, as the model was trained with."""

    def __init__(self, computer: Computer, prefixes: Prefixes) -> None:
        self._computer, self.prefixes = computer, prefixes

    @classmethod
    def of(cls, computer: Computer, settings: Settings) -> Self:
        """Take the prefixes from the settings, else from the model's name. Raises SettingsError for a long one."""
        model, embedder = computer.embedder.model, computer.embedder
        usual = prefixes_of(*(model.metadata(f"general.{key}") or "" for key in ("name", "architecture")))
        given = (settings.embedding_query_prefix, settings.embedding_document_prefix)
        prefixes = Prefixes(*(own if one == AUTO else one for one, own in zip(given, astuple(usual), strict=True)))
        for kind, prefix in asdict(prefixes).items():
            size = len(embedder.tokens(prefix))
            if size > MOST_PREFIX * embedder.limit:
                raise SettingsError(
                    f"--embedding-{kind}-prefix has {size} tokens, of {embedder.limit} that {computer.name} takes at once: "
                    "expected a short text"
                )
        return cls(computer, prefixes)

    def for_index(self) -> Embedder:
        """Return the embedder of an index. Its digest takes seconds the first time. Raises ModelError."""
        embedder = self._computer.embedder
        files, prefix = digest(files_of(embedder.model.path)), self.prefixes.document
        return Embedder(f"{files} {embedder.pooling} {embedder.limit}" + (f" {prefix!r}" if prefix else ""), self._embed)

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        """Compute texts while no request waits for vectors. The index's thread. Raises RequestError."""
        embedder, prefix = self._computer.embedder, self.prefixes.document
        tokens = [embedder.shortened(embedder.tokens(prefix + text)) for text in texts]
        return np.stack(self._computer.compute_in_gaps(tokens))

    async def query(self, text: str) -> np.ndarray:
        """Return the vector (width,) of a query. Raises RequestError."""
        (vector,) = await self._computer.compute([await asyncio.to_thread(self._query_tokens, text[-MAX_LETTERS:])])
        return vector

    def _query_tokens(self, text: str) -> np.ndarray:
        """Return the tokens of the prefix and a query. One that is too long loses its start."""
        embedder = self._computer.embedder
        while len(tokens := embedder.tokens(self.prefixes.query + text)) > embedder.limit:
            text = text[len(text) - int(MARGIN * embedder.limit / len(tokens) * len(text)) :]
        return tokens


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
