"""Vectors in clusters beside the exact search: recall, the first stage, the last documents at half the time, memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Self

import numpy as np

from ...retrieval.index import Embedder, Index
from ...retrieval.ranking import DEPTH, VectorSearch, unit
from ..journal import note
from ..report import Bar, Report, Summary, Table, mean

TOP_K = 5
BATCH = 16384  # vectors that are made at once
CLOSENESS = 0.75  # the cosine of a made vector and the one it is made of, about: that of passages of one article
LEAST_RECALL = 0.97
MOST_FIRST = 0.2  # of the time of a search, until the first documents
LEAST_SHOWN = 0.75  # of the queries, whose last documents are there at half the time; RAGCache's Table 3 saves 0.77
MOST_MEMORY = 1.2  # of the vectors, as float16
MOST_OPEN, MOST_MADE = 2.0, 30.0  # seconds


@dataclass(frozen=True, slots=True)
class TimedSearch:
    """A search: the documents after each group of clusters, and the seconds until then."""

    shown: Sequence[Sequence[int]]
    seconds: Sequence[float]

    @property
    def has_last_at_half(self) -> bool:
        half = [shown for shown, seconds in zip(self.shown, self.seconds, strict=True) if seconds <= self.seconds[-1] / 2]
        return half[-1:] == [self.shown[-1]]


@dataclass(frozen=True, slots=True)
class Searched:
    """An index that was opened, and searched with each query. memory: bytes that it took from the start to the end."""

    searches: Sequence[TimedSearch]
    opened: float
    memory: int

    @classmethod
    def of(cls, open_index: Callable[[], Index], queries: np.ndarray) -> Self:
        before, start = _resident(), perf_counter()
        index = open_index()
        opened = perf_counter() - start
        searches = [_search(index.vectors, query) for query in queries]
        memory = _resident() - before
        index.close()
        return cls(searches, opened, memory)


def measure_clusters(count: int, passages: np.ndarray, queries: np.ndarray, temporary: Path) -> Report:
    """Measure `count` vectors that are made of those of passages. passages, queries: unit vectors (n, width)."""
    folder, database = temporary / "none", temporary / "vectors.db"
    folder.mkdir()

    def open_index() -> Index:
        return Index([folder], database, embedder=Embedder("made", np.array), clusters_from=1)

    index = open_index()
    _put(index, _made(count, passages))
    index.close()
    exact = Searched.of(open_index, queries)
    index = open_index()
    start = perf_counter()
    index.cluster()
    made, num_clusters = perf_counter() - start, index.progress.clusters
    index.close()
    del index
    found = Searched.of(open_index, queries)
    title = f"{count:,} vectors of {passages.shape[1]}, {num_clusters:,} clusters, {len(queries)} queries"
    float16 = 2 * count * passages.shape[1]
    rows = [_row(name, one, float16) for name, one in (("all", exact), ("clusters", found))]
    table = Table(title, ("compared", "p50 ms", "p95", "opened s", "memory, of float16"), rows)
    return Report("retrieval", [table], _bars(exact, found, found.memory / float16, made))


def _row(name: str, one: Searched, float16: int) -> tuple[str, float, float, float, float]:
    times = Summary.of(1000 * search.seconds[-1] for search in one.searches)
    return name, times.p50, times.p95, one.opened, one.memory / float16


def _bars(exact: Searched, found: Searched, memory: float, made: float) -> list[Bar]:
    pairs = zip(exact.searches, found.searches, strict=True)
    recall = mean([len({*right.shown[-1]} & {*one.shown[-1]}) / TOP_K for right, one in pairs])
    first = Summary.of(one.seconds[0] / one.seconds[-1] for one in found.searches).p50
    shown = mean([float(one.has_last_at_half) for one in found.searches])
    note(recall=recall, first=first, shown=shown, memory=memory, opened=found.opened, made=made)
    return [
        Bar(1, f"recall@{TOP_K} against the exact search", recall, LEAST_RECALL, at_least=True),
        Bar(2, "the first documents, of the time of a search", first, MOST_FIRST),
        Bar(3, "queries whose last documents are shown at half the time", shown, LEAST_SHOWN, at_least=True),
        Bar(4, "memory, of the vectors as float16", memory, MOST_MEMORY),
        Bar(5, "opened", found.opened, MOST_OPEN, unit=" s"),
        Bar(6, "made and saved", made, MOST_MADE, unit=" s"),
    ]


def _made(count: int, passages: np.ndarray) -> Iterator[np.ndarray]:
    """Yield batches of vectors, each one of a passage and some of the difference of two others: so noise has their shape."""
    random, noise = np.random.default_rng(1), np.sqrt(1 / CLOSENESS**2 - 1) / np.sqrt(2)
    for first in range(0, count, BATCH):
        own, one, other = random.integers(0, len(passages), (3, min(BATCH, count - first)))
        yield unit(passages[own] + noise * (passages[one] - passages[other]))


def _put(index: Index, batches: Iterator[np.ndarray]) -> None:
    first = 1
    for vectors in batches:
        numbers = range(first, first + len(vectors))
        with index.store.writing() as connection:
            rows = [(number, f"{number:010x}", str(number)) for number in numbers]
            connection.executemany("insert into chunk values (?, ?, ?, '', '', 0)", rows)
        index.store.put_vectors(numbers, vectors.astype(np.float16))
        first += len(vectors)


def _search(vectors: VectorSearch, query: np.ndarray) -> TimedSearch:
    shown: list[Sequence[int]] = []
    seconds: list[float] = []
    start = perf_counter()
    for nearest, _ in vectors.groups(query, DEPTH):
        seconds.append(perf_counter() - start)
        shown.append([number for number, _ in nearest[:TOP_K]])
    return TimedSearch(shown, seconds)


def _resident() -> int:
    """Return the bytes of this process in memory, with those of mapped files."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
