"""A search in stages, each better than the one before it: words, then words and vectors, then a reranker's order.

The first stage takes milliseconds, so that a server can compute the leading documents while the later stages still run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..ordering import Document
from .chunks import embedded_text
from .files import Folder, path_in
from .fuse import fuse
from .lexical import numbers_within, search_words
from .records import StoredChunk
from .store import Store
from .vectors import VectorIndex

LEXICAL, FUSED, RERANKED = "lexical", "fused", "reranked"
LEXICAL_WEIGHT, VECTOR_WEIGHT = 1.0, 2.0
DEPTH = 50  # of each ranking that is fused
MAX_PATHS = 100
RERANK_DEPTH = 20  # chunks that a reranker reads

EmbedQuery = Callable[[str], Awaitable[np.ndarray]]
"""Turns a query into its vector (width,)."""

Rerank = Callable[[str, Sequence[str]], Awaitable[Sequence[float]]]
"""Scores texts for a query; a higher score is better."""

Ranks = dict[int, tuple[int, float]]
"""The rank of chunks, from 1, and their scores, by number, the best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """text: the question. paths: of files and folders to search in; none: in all. min_score: hits below it are left out.

    Raises ValueError for a `top_k` below 1 and for too many paths.
    """

    text: str
    top_k: int = 5
    paths: tuple[str, ...] = ()
    min_score: float | None = None

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: expected 1 or more")
        if len(self.paths) > MAX_PATHS:
            raise ValueError(f"{len(self.paths)} paths to search in: expected at most {MAX_PATHS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A chunk that a search found. score: of its stage: BM25, then 0 to 1, then the reranker's.

    lexical_rank, vector_rank: its place, from 1, in the search by words and by vectors; None: not among their first.
    similarity: the cosine of its vector and the query's.
    """

    chunk: StoredChunk
    score: float
    lexical_rank: int | None = None
    vector_rank: int | None = None
    similarity: float | None = None

    @property
    def document(self) -> Document:
        """Return the chunk as a document of a prompt."""
        return Document(self.chunk.id, self.chunk.text, self.chunk.title)


@dataclass(frozen=True, slots=True)
class Stage:
    """The hits that a search has by now, the best first. name: lexical, fused or reranked. is_last: no stage follows."""

    name: str
    hits: tuple[Hit, ...]
    is_last: bool


class Search:
    """Searches an index. Any number of searches may run at once, while the index grows."""

    def __init__(
        self,
        store: Store,
        vectors: VectorIndex,
        *,
        folders: Sequence[Folder] = (),
        embed: EmbedQuery | None = None,
        rerank: Rerank | None = None,
    ) -> None:
        self._store, self._vectors, self._folders = store, vectors, folders
        self._embed, self._rerank = embed, rerank

    async def stages(self, query: Query) -> AsyncIterator[Stage]:
        """Yield the stages of a search. Without an embedder the first is the last, unless a reranker follows."""
        embed = self._embed if len(self._vectors) else None
        embedding = asyncio.ensure_future(embed(query.text)) if embed else None
        try:
            found = await asyncio.to_thread(self._by_words, query)
            yield _stage(LEXICAL, found.hits, query, is_last=embedding is None and self._rerank is None)
            if embedding is not None:
                found = await asyncio.to_thread(self._fused, query, found.by_words, await embedding)
                yield _stage(FUSED, found.hits, query, is_last=self._rerank is None)
            if self._rerank is not None:
                texts = [embedded_text(hit.chunk.title, hit.chunk.text) for hit in found.hits]
                scores = await self._rerank(query.text, texts)
                hits = [replace(hit, score=float(score)) for hit, score in zip(found.hits, scores, strict=True)]
                yield _stage(RERANKED, sorted(hits, key=lambda hit: -hit.score), query, is_last=True)
        finally:
            if embedding is not None:
                embedding.cancel()
                await asyncio.wait([embedding])

    async def hits(self, query: Query) -> tuple[Hit, ...]:
        """Return the hits of the last stage."""
        hits: tuple[Hit, ...] = ()
        async for stage in self.stages(query):
            hits = stage.hits
        return hits

    def _by_words(self, query: Query) -> _Found:
        scored = search_words(self._store, query.text, max(DEPTH, query.top_k), self._paths(query))
        by_words = _ranks(scored)
        return self._found(scored, query, by_words, {})

    def _fused(self, query: Query, by_words: Ranks, vector: np.ndarray) -> _Found:
        near = self._vectors.search(vector, max(DEPTH, query.top_k), self._only(self._paths(query)))
        by_vectors = _ranks(near)
        scored = fuse([(list(by_words), LEXICAL_WEIGHT), (list(by_vectors), VECTOR_WEIGHT)])
        return self._found(scored, query, by_words, by_vectors)

    def _found(self, scored: Sequence[tuple[int, float]], query: Query, by_words: Ranks, by_vectors: Ranks) -> _Found:
        """Return the best of scored chunks as hits: those asked for, and those that a reranker reads."""
        best = scored[: max(query.top_k, RERANK_DEPTH if self._rerank else 0)]
        chunks = self._store.chunks(number for number, _ in best)
        hits: list[Hit] = []
        for number, score in best:
            rank, cosine = by_vectors.get(number, (None, None))
            lexical_rank, _ = by_words.get(number, (None, None))
            if number in chunks:  # it may be gone by now
                chunk = chunks[number]
                hits.append(Hit(chunk=chunk, score=score, lexical_rank=lexical_rank, vector_rank=rank, similarity=cosine))
        return _Found(tuple(hits), by_words)

    def _paths(self, query: Query) -> Sequence[str]:
        """Return the paths to search in as the index has them; none: all."""
        paths = [path_in(self._folders, path) for path in query.paths]
        return paths if all(paths) else ()

    def _only(self, paths: Sequence[str]) -> np.ndarray | None:
        """Return the chunks in the paths; None: all."""
        return np.array(numbers_within(self._store, paths), np.int64) if paths else None


@dataclass(frozen=True, slots=True)
class _Found:
    hits: tuple[Hit, ...]
    by_words: Ranks


def _ranks(scored: Sequence[tuple[int, float]]) -> Ranks:
    return {number: (rank, score) for rank, (number, score) in enumerate(scored, 1)}


def _stage(name: str, hits: Sequence[Hit], query: Query, *, is_last: bool) -> Stage:
    shown = tuple(hit for hit in hits[: query.top_k] if query.min_score is None or hit.score >= query.min_score)
    return Stage(name, shown, is_last)
