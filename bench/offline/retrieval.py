"""Measures search over MT-RAG's passages: the recall of relevant passages, and the time of an index and of a search."""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import numpy as np

from ...retrieval.index import Index
from ...retrieval.ranking import Query, Search, VectorIndex
from ...retrieval.store import Store
from ..journal import note
from ..report import Bar, BenchError, Report, Skip, Summary, Table, mean
from ..servers import DATA_VARIABLE
from .passages import QueryEmbedder, Turn, load_passages, load_turns, put_passages, write_sources

TOP_K = 5
LEAST_RECALL = 0.24  # recall@5 of the word search
MOST_INDEX_SECONDS = 5.0  # to index 10,000 chunks without vectors
MOST_SEARCH_MS = 20.0  # p50 of a search, including the embedding of the query
FORMS: dict[str, Callable[[Sequence[str]], str]] = {
    "last question": lambda questions: questions[-1],
    "first + last": lambda questions: "\n".join(dict.fromkeys((questions[0], questions[-1]))),
    "all questions": "\n".join,
}

Ranking = Callable[[str], Awaitable[list[int]]]
"""Returns the numbers of the chunks that a query finds, best first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench retrieval`."""
    add = parser.add_argument
    add("--data", metavar="PATH", default=os.environ.get(DATA_VARIABLE), help="folder with mtrag_retrieved/")
    add("--embedding-model", type=Path, metavar="GGUF", help="also measure vectors and the fused ranking")
    add("-t", "--threads", type=int, default=os.cpu_count() or 1, help="threads of that model (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Measure recall@5 and the time of a search for each ranking, then the time of an index."""
    if not args.data:
        raise Skip(f"retrieval needs --data PATH or {DATA_VARIABLE}: a folder that holds mtrag_retrieved/")
    if args.embedding_model and not args.embedding_model.is_file():
        raise BenchError(f"no model at {args.embedding_model}")
    folder = Path(args.data) / "mtrag_retrieved"
    try:
        with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
            return _measure(args, folder, Path(temporary), stack)
    except FileNotFoundError as error:
        raise BenchError(f"no MT-RAG data at {folder}: {error}") from None


def _measure(args: argparse.Namespace, folder: Path, temporary: Path, stack: ExitStack) -> Report:
    passages = load_passages(folder)
    store = Store(temporary / "passages.db", {"chunks": "passages", "vectors": ""})
    stack.callback(store.close)
    numbers = put_passages(store, passages)
    turns = load_turns(folder, numbers)
    rankings = {"lexical": _of(Search(store, VectorIndex(np.zeros(0, np.int64), np.zeros((0, 1)))))}
    if args.embedding_model:
        embedder = QueryEmbedder(args.embedding_model, args.threads)
        stack.callback(embedder.close)
        rows = {numbers[passage.id]: at for at, passage in enumerate(passages)}
        vectors = VectorIndex(np.array(list(rows)), embedder.vectors(passages)[list(rows.values())])
        rankings["vectors"] = _by_vectors(vectors, embedder)
        rankings["fused"] = _of(Search(store, vectors, embed=embedder.embed))
    recalls = {name: [_recall(ranking, turns, form)[0] for form in FORMS] for name, ranking in rankings.items()}
    note(recalls=recalls)
    times = {name: Summary.of(_recall(ranking, turns, "last question")[1]) for name, ranking in rankings.items()}
    note(search_ms={name: asdict(time) for name, time in times.items()})
    (temporary / "sources").mkdir()
    indexed = _time_index(write_sources(passages, temporary / "sources"), temporary)
    title, rows = f"recall@{TOP_K}: {len(turns)} turns, {len(passages):,} passages", [(n, *of) for n, of in recalls.items()]
    tables = [
        Table(title, ("ranking", *FORMS), rows),
        Table("a search for the last question", ("ranking", "p50 ms", "p95"), [(n, t.p50, t.p95) for n, t in times.items()]),
        Table("an index of these sources as files, without vectors", ("files", "chunks", "seconds"), [indexed]),
    ]
    return Report("retrieval", tables, _bars(recalls, times, indexed))


def _bars(recalls: dict[str, list[float]], times: dict[str, Summary], indexed: tuple[int, int, float]) -> list[Bar]:
    _, num_chunks, seconds = indexed
    best = {name: max(row) for name, row in recalls.items()}
    last = list(times)[-1]
    bars = [
        Bar(1, "recall@5 by words", best["lexical"], LEAST_RECALL, at_least=True),
        Bar(2, "index of 10,000 chunks", 10_000 * seconds / num_chunks, MOST_INDEX_SECONDS, unit=" s"),
        Bar(3, f"search p50, {last}", times[last].p50, MOST_SEARCH_MS, unit=" ms"),
    ]
    if "fused" in best:
        half = max(best["lexical"], best["vectors"])
        bars.append(Bar(4, "recall@5 fused, of its better half", best["fused"], half, at_least=True))
    return bars


def _of(search: Search) -> Ranking:
    async def rank(text: str) -> list[int]:
        return [hit.chunk.number for hit in await search.hits(Query(text=text, top_k=TOP_K))]

    return rank


def _by_vectors(vectors: VectorIndex, embedder: QueryEmbedder) -> Ranking:
    async def rank(text: str) -> list[int]:
        return [number for number, _ in vectors.search(await embedder.embed(text), TOP_K)]

    return rank


def _recall(ranking: Ranking, turns: Sequence[Turn], form: str) -> tuple[float, list[float]]:
    """Return the mean recall over the turns, and the milliseconds of each search."""

    async def measure() -> tuple[float, list[float]]:
        shares: list[float] = []
        times: list[float] = []
        for turn in turns:
            start = perf_counter()
            found = await ranking(FORMS[form](turn.questions))
            times.append(1000 * (perf_counter() - start))
            shares.append(len(turn.relevant.intersection(found)) / len(turn.relevant))
        return mean(shares), times

    return asyncio.run(measure())


def _time_index(num_files: int, temporary: Path) -> tuple[int, int, float]:
    """Index the sources. Return the number of files, the number of chunks, and the seconds."""
    index = Index([temporary / "sources"], temporary / "sources.db")
    start = perf_counter()
    index.refresh()
    seconds = perf_counter() - start
    num_chunks = index.progress.chunks
    index.close()
    return num_files, num_chunks, seconds
