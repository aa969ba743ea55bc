"""Cost of ordering: choose an order with a large knowledge tree, and build the text of a prompt with it."""

from __future__ import annotations

import argparse
import gc
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from ...ordering.document import Document, parse_documents
from ...ordering.fleet import Fleet
from ...ordering.policy import arrange
from ...ordering.prompt import document_text, order_hint
from ...ordering.tree import KnowledgeTree
from ..journal import note
from ..report import Bar, Report, Table, median

POPULAR, SHARE = 0.03, 0.6  # RAGCache's skew (section 3.2): 3 % of the documents get 60 % of the retrievals
TOKENS = 100  # a document
REPLICAS = 8
NAMES = [f"replica {number}" for number in range(REPLICAS)]
TRIES = 3  # of each request; the fastest counts, because other processes use the machine, too


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench arrange`."""
    add = parser.add_argument
    add("--paths", type=int, default=10_000, help="orders remembered of 5 and of 20 documents (default: %(default)s)")
    add("--long-paths", type=int, default=100_000, help="of 50 documents: a minute and some GiB (default: %(default)s)")
    add("--requests", type=int, default=500, help="measured requests of each row (default: %(default)s)")
    add("--json", type=Path, metavar="OUT", help="write everything measured to this file")


def run(args: argparse.Namespace) -> Report:
    """Measure microseconds a request, in this process and in pure Python: no model, no server."""
    rows: list[tuple[str, int, float, float]] = []

    def measure(name: str, paths: int, requests: Sequence[Any], work: Callable[[Any], object]) -> float:
        times = sorted(1e6 * _seconds(work, request) for request in requests)
        rows.append((name, paths, middle := median(times), times[int(0.95 * len(times))]))
        note(row=rows[-1])
        return middle

    few = _Retriever(1_000, 5)
    small = _served(few, args.paths)
    requests = few.draw(args.requests)
    arranged = measure("arrange, 5 documents", args.paths, _keys(requests), lambda keys: arrange(keys, small))
    far = _Retriever(10_000, 50)
    large = [_served(far, args.long_paths)]
    wide = _keys(far.draw(args.requests))
    arranged_50 = measure("arrange, 50 documents", args.long_paths, wide, lambda keys: arrange(keys, large[0]))
    large.clear()
    gc.collect()  # gigabytes of nodes that refer to each other
    built = measure("arrange and write the prompt, 5 documents", args.paths, requests, lambda rank: _text(rank, small))
    some = _Retriever(1_000, 20)
    middle = _served(some, args.paths)
    more = some.draw(args.requests)
    built_20 = measure("arrange and write the prompt, 20 documents", args.paths, more, lambda rank: _text(rank, middle))
    fleet = _fleet(few, args.paths)
    pairs = [[(key, TOKENS) for key in keys] for keys in _keys(requests)]
    name = f"choose one of {REPLICAS} replicas and an order, 5 documents"
    chosen = measure(name, args.paths, pairs, lambda documents: fleet.choose(documents, NAMES))
    name = f"rank {REPLICAS} replicas with an order each, 5 documents"
    ranked = measure(name, args.paths, pairs, lambda documents: fleet.rank(documents, NAMES))
    columns = ("what", "remembered orders", "median us", "p95 us")
    bars = [
        Bar(1, "median to arrange 5 documents", arranged, 30, unit=" us"),
        Bar(1, "median to arrange 50 documents", arranged_50, 1000, unit=" us"),
        Bar(4, f"median to choose one of {REPLICAS} replicas", chosen, 300, unit=" us"),
        Bar(4, f"median to rank {REPLICAS} replicas", ranked, 300, unit=" us"),
        Bar(7, "arranging and writing 5 documents", built, 70, unit=" us"),
        Bar(7, "arranging and writing 20 documents", built_20, 300, unit=" us"),
    ]
    title = f"arrange: what ordering costs a request, the fastest of {TRIES} tries of each"
    return Report("arrange", [Table(title, columns, rows)], bars)


class _Retriever:
    """Draws `k` of `count` documents with a popularity skew."""

    def __init__(self, count: int, k: int) -> None:
        self._rng, self._count, self._k = random.Random(count), count, k
        self._popular = max(2 * k, round(POPULAR * count))
        fields = ({"id": f"d{at}", "title": f"Page {at}", "text": f"What {at} tells. " * 20} for at in range(count))
        self._documents = parse_documents(list(fields))

    def draw(self, requests: int) -> list[list[Document]]:
        return [[self._documents[at] for at in self._one()] for _ in range(requests)]

    def _one(self) -> list[int]:
        rng, found = self._rng, dict[int, None]()
        while len(found) < self._k:
            low, high = (0, self._popular) if rng.random() < SHARE else (self._popular, self._count)
            found[rng.randrange(low, high)] = None
        return list(found)


def _keys(ranks: Sequence[Sequence[Document]]) -> list[list[str]]:
    return [[document.key for document in rank] for rank in ranks]


def _served(retriever: _Retriever, paths: int) -> KnowledgeTree:
    """Return a tree of `paths` past requests, each in the order that was best at the time."""
    tree = KnowledgeTree(max_nodes=sys.maxsize)
    for keys in _keys(retriever.draw(paths)):
        tree.insert((keys[at], TOKENS) for at in arrange(keys, tree).order)
    return tree


def _fleet(retriever: _Retriever, paths: int) -> Fleet:
    """Return what a fleet knows after `paths` past requests, each where it was placed, in the order that was best there."""
    fleet = Fleet(max_nodes=sys.maxsize)
    for keys in _keys(retriever.draw(paths)):
        documents = [(key, TOKENS) for key in keys]
        best = fleet.choose(documents, NAMES)
        fleet.served(best.replica, [documents[at] for at in best.arrangement.order])
    return fleet


def _text(rank: Sequence[Document], tree: KnowledgeTree) -> str:
    order = [rank[at] for at in arrange([document.key for document in rank], tree).order]
    return "".join(map(document_text, order)) + order_hint(order, rank)


def _seconds(work: Callable[[Any], object], request: Any) -> float:
    least = float("inf")
    for _ in range(TRIES):
        began = perf_counter()
        work(request)
        least = min(least, perf_counter() - began)
    return least
