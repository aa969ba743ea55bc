"""Searches by words and by vectors, and fuses both rankings in stages."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Protocol

import numpy as np

from ..ordering.document import Document
from .chunks import embedded_text
from .files import Folder, path_in
from .store import Store
from .words import numbers_within, search_words
from .writing import StoredChunk

K = 10.0  # the smaller, the more the first ranks count; with the usual 60, fusion was worse than only vectors


def fuse(rankings: Sequence[tuple[Sequence[int], float]], k: float = K) -> list[tuple[int, float]]:
    """Merge weighted rankings by reciprocal rank fusion (Cormack et al., 2009). Return numbers and scores, best first.

    rankings: pairs of a ranking (a list of numbers, best first) and its weight. Scores are between 0 and 1. A number that is
    first in all rankings has score 1.
    """
    scores: defaultdict[int, float] = defaultdict(float)
    full = sum(weight for _, weight in rankings) / (k + 1)
    for numbers, weight in rankings:
        for rank, number in enumerate(numbers, 1):
            scores[number] += weight / (k + rank) / full
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


# ---- Search by vectors: exact, over all vectors. `ann` has a search for many vectors. -----------------------------------

Nearest = list[tuple[int, float]]
"""The numbers and cosines of the chunks nearest to a query, nearest first."""


class VectorSearch(Protocol):
    """A search over the vectors of chunks."""

    def __len__(self) -> int: ...

    def groups(self, query: np.ndarray, limit: int, only: np.ndarray | None = None) -> Iterator[tuple[Nearest, bool]]:
        """Yield, once or more, the nearest chunks found so far, and whether the search is complete.

        The arguments are those of `VectorIndex.search`.
        """
        ...


SLACK = 1.5  # times the rows in use: the new size of a full matrix


class VectorIndex:
    """Unit vectors in memory, by the number of their chunk. Safe to use from several threads."""

    def __init__(self, numbers: np.ndarray, vectors: np.ndarray) -> None:
        """numbers: (chunks,) int64. vectors: (chunks, width)."""
        self._lock = Lock()
        self._numbers = numbers
        self._vectors = vectors.astype(np.float32)
        self._size = len(numbers)

    def __len__(self) -> int:
        return self._size

    def add(self, numbers: Sequence[int], vectors: np.ndarray) -> None:
        """Add the vectors (chunks, width) of chunks that have none yet."""
        with self._lock:
            size = self._size + len(numbers)
            if size > len(self._numbers) or self._vectors.shape[1] != vectors.shape[1]:
                self._grow(int(SLACK * size), vectors.shape[1])
            self._numbers[self._size : size] = numbers
            self._vectors[self._size : size] = vectors
            self._size = size

    def _grow(self, size: int, width: int) -> None:
        numbers, vectors = np.zeros(size, np.int64), np.zeros((size, width), np.float32)
        numbers[: self._size] = self._numbers[: self._size]
        if self._size:
            vectors[: self._size] = self._vectors[: self._size]
        self._numbers, self._vectors = numbers, vectors

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove the vectors of chunks. The last vectors move to the places of the removed vectors."""
        numbers = np.fromiter(numbers, np.int64)
        if not len(numbers):
            return
        with self._lock:
            gone = np.isin(self._numbers[: self._size], numbers)
            holes = np.flatnonzero(gone)
            size = self._size - len(holes)
            holes = holes[holes < size]
            movers = size + np.flatnonzero(~gone[size:])
            self._numbers[holes], self._vectors[holes] = self._numbers[movers], self._vectors[movers]
            self._size = size

    def search(self, query: np.ndarray, limit: int, only: np.ndarray | None = None) -> Nearest:
        """Return the at most `limit` chunks nearest to a query (width,).

        only: the numbers of the chunks to search among; None for all.
        """
        with self._lock:
            if not self._size:
                return []
            numbers = self._numbers[: self._size]
            scores = self._vectors[: self._size] @ unit(query[None])[0]
            if only is not None:
                kept = np.flatnonzero(np.isin(numbers, only))
                numbers, scores = numbers[kept], scores[kept]
            else:
                numbers = numbers.copy()
        best = np.argpartition(-scores, limit)[:limit] if limit < len(scores) else np.arange(len(scores))
        best = best[np.lexsort((numbers[best], -scores[best]))]
        return list(zip(numbers[best].tolist(), scores[best].tolist(), strict=True))

    def groups(self, query: np.ndarray, limit: int, only: np.ndarray | None = None) -> Iterator[tuple[Nearest, bool]]:
        """Yield once: the result of `search`, and True, since the search is complete after one step."""
        yield self.search(query, limit, only), True


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors (n, width) scaled to length 1, float32. Values that are not finite become 0; zero vectors stay zero."""
    vectors = np.nan_to_num(np.asarray(vectors, np.float32), posinf=0.0, neginf=0.0)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)


# ---- Search -------------------------------------------------------------------------------------------------------------
# A search has stages, each better than the stage before: words, then words and vectors, then a reranker's order. If the
# vectors are searched in groups, there is a provisional stage for each change of the first documents.
#
# The first stage takes milliseconds, so that a server can prefill the best documents while the later stages still run.

LEXICAL, PROVISIONAL, FUSED, RERANKED = "lexical", "provisional", "fused", "reranked"
BY_WORDS, BY_VECTORS = "words", "vectors"
LEXICAL_WEIGHT, VECTOR_WEIGHT = 1.0, 2.0
DEPTH = 50  # chunks of each ranking that are fused
MAX_PATHS = 100
RERANK_DEPTH = 50  # chunks that a reranker reads
LEAST_OF_BEST, LEAST_COSINE = 0.5, 0.8  # of the best word score, and of the best cosine: a hit must reach one of them

EmbedQuery = Callable[[str], Awaitable[np.ndarray]]
"""Turns a query into its vector (width,)."""

Rerank = Callable[[str, Sequence[str]], Awaitable[Sequence[float]]]
"""Scores texts for a query; a higher score is better."""

Ranks = dict[int, tuple[int, float]]
"""The rank (from 1) and the score of each chunk, by its number, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A question to an index.

    text: the question.
    top_k: the highest number of hits.
    paths: files and folders to search in; empty for all.
    min_score: hits with a lower score are left out. If `min_score` is None and there is no reranker, a hit is left out if it
    is far worse than the best hit by words, and also far worse than the best hit by vectors.
    by: `words` or `vectors`, to use only one search; empty for both.

    Raises ValueError for a `top_k` below 1 and for too many paths.
    """

    text: str
    top_k: int = 5
    paths: tuple[str, ...] = ()
    min_score: float | None = None
    by: str = ""

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: expected 1 or more")
        if len(self.paths) > MAX_PATHS:
            raise ValueError(f"{len(self.paths)} paths to search in: expected at most {MAX_PATHS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A chunk that a search found.

    score: depends on the stage. The lexical stage has BM25 scores. The provisional and the fused stage have scores from 0 to
    1, or cosines if the search is only by vectors. The reranked stage has the reranker's scores.
    lexical_rank, vector_rank: the rank, from 1, by words and by vectors; None if the chunk is not in that ranking.
    similarity: the cosine between the chunk and the query; None if the chunk is not in the ranking by vectors.
    file: the id of an attached file; empty for a chunk from a folder's index.
    """

    chunk: StoredChunk
    score: float
    lexical_rank: int | None = None
    vector_rank: int | None = None
    similarity: float | None = None
    file: str = ""

    @property
    def document(self) -> Document:
        """Return the chunk as a document of a prompt."""
        return Document(self.chunk.id, self.chunk.text, self.chunk.title)


@dataclass(frozen=True, slots=True)
class Stage:
    """The hits of a search so far, best first.

    name: `lexical`, `provisional`, `fused` or `reranked`.
    is_last: whether no stage follows.
    left_out: the number of hits that were left out because of their scores.
    """

    name: str
    hits: tuple[Hit, ...]
    is_last: bool
    left_out: int = 0


class Search:
    """Searches an index. Any number of searches may run at once, also while the index grows.

    threads: the threads that run the searches; None for the event loop's own threads.
    """

    def __init__(
        self,
        store: Store,
        vectors: VectorSearch,
        *,
        folders: Sequence[Folder] = (),
        embed: EmbedQuery | None = None,
        rerank: Rerank | None = None,
        threads: Executor | None = None,
    ) -> None:
        self._store, self._vectors, self._folders = store, vectors, folders
        self._embed, self._rerank, self._threads = embed, rerank, threads

    async def stages(self, query: Query) -> AsyncIterator[Stage]:
        """Yield the stages of a search. Without an embedder and a reranker, there is only one stage."""
        run = partial(asyncio.get_running_loop().run_in_executor, self._threads)
        embed = self._embed if len(self._vectors) and query.by != BY_WORDS else None
        embedding = asyncio.ensure_future(embed(query.text)) if embed else None
        try:
            found = _Found((), {})
            if query.by != BY_VECTORS or embedding is None:
                found = await run(self._by_words, query)
                yield _stage(LEXICAL, found, query, is_last=embedding is None and self._rerank is None)
            if embedding is not None:
                fused, is_whole = self._fused(query, found.by_words, await embedding), False
                while not is_whole:
                    found, is_whole = await run(next, fused)
                    name = FUSED if is_whole else PROVISIONAL
                    yield _stage(name, found, query, is_last=is_whole and self._rerank is None)
            if self._rerank is not None:
                texts = [embedded_text(hit.chunk.title, hit.chunk.text) for hit in found.hits]
                scores = await self._rerank(query.text, texts)
                hits = [replace(hit, score=float(score)) for hit, score in zip(found.hits, scores, strict=True)]
                ranked = replace(found, hits=tuple(sorted(hits, key=lambda hit: -hit.score)))
                yield _stage(RERANKED, ranked, query, is_last=True)
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
        is_wanted = query.by != BY_VECTORS
        scored = search_words(self._store, query.text, max(DEPTH, query.top_k), self._paths(query)) if is_wanted else []
        by_words = _ranks(scored)
        return self._found(scored, query, by_words, {})

    def _fused(self, query: Query, by_words: Ranks, vector: np.ndarray) -> Iterator[tuple[_Found, bool]]:
        """Search by vectors, and yield the hits so far whenever the hits that a stage would show have changed.

        Each yielded pair has the hits, and whether the search is complete.
        """
        lexical = [(number, score) for number, (_, score) in by_words.items()]
        shown = _shown(self._near(lexical, query, by_words, {}), query)
        only = self._only(self._paths(query))
        for near, is_last in self._vectors.groups(vector, max(DEPTH, query.top_k), only):
            by_vectors = _ranks(near)
            scored = near if query.by else fuse([(list(by_words), LEXICAL_WEIGHT), (list(by_vectors), VECTOR_WEIGHT)])
            documents = _shown(self._near(scored, query, by_words, by_vectors), query)
            if is_last or documents != shown:
                shown = documents
                yield self._found(scored, query, by_words, by_vectors), is_last

    def _found(self, scored: Sequence[tuple[int, float]], query: Query, by_words: Ranks, by_vectors: Ranks) -> _Found:
        """Return the chunks with the best scores as hits: `top_k` of them, or more if a reranker reads more."""
        near = self._near(scored, query, by_words, by_vectors)
        kept = {number for number, _ in near}
        num_far = sum(number not in kept for number, _ in scored[: query.top_k])
        best = near[: max(query.top_k, RERANK_DEPTH if self._rerank else 0)]
        chunks = self._store.chunks(number for number, _ in best)
        hits: list[Hit] = []
        for number, score in best:
            rank, cosine = by_vectors.get(number, (None, None))
            lexical_rank, _ = by_words.get(number, (None, None))
            if number in chunks:  # it may be gone by now
                chunk = chunks[number]
                hits.append(Hit(chunk=chunk, score=score, lexical_rank=lexical_rank, vector_rank=rank, similarity=cosine))
        return _Found(tuple(hits), by_words, num_far)

    def _near(
        self, scored: Sequence[tuple[int, float]], query: Query, by_words: Ranks, by_vectors: Ranks
    ) -> Sequence[tuple[int, float]]:
        """Return the scored chunks without those that are far worse than the best chunk, both by words and by vectors.

        A search by vectors always finds some nearest chunks, even if no chunk answers the question. With a reranker or
        `min_score`, all chunks are returned.
        """
        if self._rerank or query.min_score is not None:
            return scored
        of_words, of_vectors = (max((score for _, score in each.values()), default=0) for each in (by_words, by_vectors))
        near = {number for number, (_, score) in by_words.items() if score >= LEAST_OF_BEST * of_words}
        near |= {number for number, (_, cosine) in by_vectors.items() if cosine >= LEAST_COSINE * of_vectors}
        return [row for row in scored if row[0] in near]

    def _paths(self, query: Query) -> Sequence[str]:
        """Return the query's paths in the index; empty for the whole index."""
        paths = [path_in(self._folders, path) for path in query.paths]
        return paths if all(paths) else ()

    def _only(self, paths: Sequence[str]) -> np.ndarray | None:
        """Return the numbers of the chunks in the paths; None for all chunks."""
        return np.array(numbers_within(self._store, paths), np.int64) if paths else None


@dataclass(frozen=True, slots=True)
class _Found:
    hits: tuple[Hit, ...]
    by_words: Ranks
    num_far: int = 0  # the first `top_k` chunks that are far worse than the best


def _ranks(scored: Sequence[tuple[int, float]]) -> Ranks:
    return {number: (rank, score) for rank, (number, score) in enumerate(scored, 1)}


def _shown(scored: Sequence[tuple[int, float]], query: Query) -> list[int]:
    """Return the numbers of the scored chunks that a stage contains."""
    return [number for number, score in scored[: query.top_k] if query.min_score is None or score >= query.min_score]


def _stage(name: str, found: _Found, query: Query, *, is_last: bool) -> Stage:
    best, least = found.hits[: query.top_k], query.min_score
    shown = tuple(hit for hit in best if least is None or hit.score >= least)
    return Stage(name, shown, is_last, len(best) - len(shown) + found.num_far)
