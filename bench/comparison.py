"""Compares servers on one trace, request by request."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..ordering.policy import ORACLE_LIMIT, arrange
from ..ordering.tree import KnowledgeTree
from .client import Client, Result, Run, drive
from .journal import note
from .report import Progress, Summary, Table, mean, median
from .servers import Arm, in_rounds, sampling
from .trace import Query

COLUMNS = ("arm", "TTFT p50 ms", "p95", "mean", "gap p50 ms", "p95", "tokens/s", "total s")
COLUMNS += ("prompt tokens", "cached", "cached %", "documents reused", "errors")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The runs of one arm, one for each round. Figures are medians over the rounds, times in seconds."""

    arm: Arm
    runs: tuple[Run, ...]

    @property
    def ttft(self) -> Summary:
        """Time to the first token."""
        return Summary.median_of([Summary.of(result.ttft for result in run.answered) for run in self.runs])

    @property
    def gap(self) -> Summary:
        """Time between tokens of one answer."""
        return Summary.median_of([Summary.of(gap for result in run.answered for gap in result.gaps) for run in self.runs])

    @property
    def seconds(self) -> float:
        """Time of the whole trace."""
        return median([run.seconds for run in self.runs])

    @property
    def documents_reused(self) -> float:
        """The mean number of a query's documents that were cached; not a number if the server does not report documents."""
        pairs = [pair for run in self.runs for pair in zip(run.queries, run.results, strict=True)]
        return mean([reused(query, result) for query, result in pairs if result.documents])

    def total(self, name: str) -> float:
        """Return the sum of a figure over the results of a run."""
        return median([sum(getattr(result, name) for result in run.answered) for run in self.runs])

    def row(self) -> tuple[str | int | float, ...]:
        """Return the arm's row under COLUMNS."""
        ttft, gap, cached, prompt = self.ttft, self.gap, self.total("cached_tokens"), self.total("prompt_tokens")
        times = (1000 * value for value in (ttft.p50, ttft.p95, ttft.mean, gap.p50, gap.p95))
        speed, num_errors = self.total("completion_tokens") / self.seconds, sum(len(run.errors) for run in self.runs)
        tokens = (int(prompt), int(cached), 100 * cached / max(prompt, 1))
        return (self.arm.name, *times, speed, self.seconds, *tokens, self.documents_reused, num_errors)

    def data(self) -> dict[str, Any]:
        """Return the arm and all its requests, as JSON values."""
        return self.arm.describe() | {"runs": [{"seconds": run.seconds, "requests": _rows(run)} for run in self.runs]}


def compare(arms: Sequence[Arm], queries: Sequence[Query], args: argparse.Namespace) -> list[Outcome]:
    """Drive every arm with the same queries, `--rounds` times.

    With one client, all servers run at the same time, and the arms take turns query by query, with `--pause` after each
    answer. With several clients, an arm needs the whole machine, so one server runs at a time.
    """
    pause = args.pause if args.concurrency == 1 else 0.0
    if args.concurrency == 1 and len(arms) > 1:
        rounds: list[list[Run]] = []
        for number in range(args.rounds):
            note(begins_round=number + 1)
            rounds.append(asyncio.run(_taking_turns(arms, queries, args, pause)))
        return [Outcome(arm, tuple(runs[at] for runs in rounds)) for at, arm in enumerate(arms)]
    runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
    for _, arm in in_rounds(arms, args.rounds):
        with Progress(arm.name, len(queries)) as progress:

            def show(_: int, result: Result, progress: Progress = progress) -> None:
                progress.step(result.error or f"TTFT {1000 * result.ttft:.0f} ms, {result.cached_tokens} cached")

            async def work(client: Client, show: Any = show) -> Run:
                return await drive(client, queries, args.concurrency, show, pause=pause)

            runs[arm.name].append(arm.measure(sampling(args), work))
    return [Outcome(arm, tuple(runs[arm.name])) for arm in arms]


async def _taking_turns(arms: Sequence[Arm], queries: Sequence[Query], args: argparse.Namespace, pause: float) -> list[Run]:
    """Return one run of each arm."""
    turn, all_warm = asyncio.Lock(), asyncio.Barrier(len(arms))
    with ExitStack() as servers, Progress("all arms in turn", len(arms) * len(queries)) as progress:
        urls = [servers.enter_context(arm.up()) for arm in arms]

        async def one(arm: Arm, url: str) -> Run:
            def show(_: int, result: Result) -> None:
                progress.step(result.error or f"{arm.name}: TTFT {1000 * result.ttft:.0f} ms")

            async def work(client: Client) -> Run:
                await all_warm.wait()  # a warm-up must not slow another arm's first query
                return await drive(client, queries, concurrency=1, on_result=show, turn=turn, pause=pause)

            return await arm.work(url, sampling(args), work)

        return list(await asyncio.gather(*(one(arm, url) for arm, url in zip(arms, urls, strict=True))))


def pace(args: argparse.Namespace) -> str:
    """Return the concurrency and pause of the queries, for a title."""
    return f"{args.concurrency} at a time" + (f", {args.pause} s after each answer" if args.concurrency == 1 else "")


def table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """Return a table with one row for each arm."""
    return Table(title, COLUMNS, [outcome.row() for outcome in outcomes])


def problems(outcomes: Sequence[Outcome]) -> list[str]:
    """Return one line for each arm with errors: their number, and the first error."""
    errors = {outcome.arm.name: [error for run in outcome.runs for error in run.errors] for outcome in outcomes}
    return [f"{name}: {len(found)} requests failed, the first with: {found[0]}" for name, found in errors.items() if found]


def reused(query: Query, result: Result) -> int:
    """Return how many of the query's documents, from the first one on, were completely cached."""
    count, own = 0, {name for name, _ in query.documents}
    for used in result.documents[max(0, len(result.documents) - len(query.documents)) :]:
        if used.id not in own:
            continue  # an earlier turn's: with de-duplication, the query's own documents may not be shown again
        if used.cached_tokens < used.tokens:
            break
        count += 1
    return count


def _rows(run: Run) -> list[dict[str, Any]]:
    pairs = zip(run.queries, run.results, strict=True)
    return [{"session": query.session, "turn": query.turn, "ttft": one.ttft} | one.figures for query, one in pairs]


# ---- Check that a server reused as many documents as its earlier orders of documents allow. -----------------------------


@dataclass(frozen=True, slots=True)
class Prediction:
    """The documents that one query could reuse, and that it did reuse.

    predicted, reported: the numbers of these documents.
    order: the ids of the prompt's documents, in order.
    """

    index: int
    predicted: int
    reported: int
    order: tuple[str, ...]

    def text(self) -> str:
        """Return one line about the query."""
        return f"query {self.index}: predicted {self.predicted}, reported {self.reported}, used {', '.join(self.order)}"


def predictions(run: Run) -> Iterator[Prediction]:
    """Compare the server's report with an exhaustive search over a trie of all earlier orders, query by query.

    The trace must be sent one query at a time. The trie has the orders that the server reported. If the search finds more
    documents than the server reused, KV was evicted in between. If it finds fewer, search or server is wrong. Queries whose
    result has no documents are skipped.
    """
    tree = KnowledgeTree(max_nodes=max(1, sum(len(query.documents) for query in run.queries)))
    for index, (query, result) in enumerate(zip(run.queries, run.results, strict=True)):
        if not result.documents:
            continue
        keys = [name for name, _ in query.documents]
        # Both policies are exact. The oracle tries every order, so it can only order a few documents.
        policy = "oracle" if len(keys) <= ORACLE_LIMIT else "auto"
        predicted = arrange(keys, tree, policy).reused_documents
        tree.insert([(used.id, used.tokens) for used in result.documents])
        yield Prediction(index, predicted, reused(query, result), tuple(used.id for used in result.documents))


def differences(run: Run, more_is_right: bool = False) -> tuple[list[Prediction], int]:
    """Return the queries whose prediction and report differ, and the number of compared queries.

    more_is_right: accept more reused documents than predicted, because the server also prefills documents in idle time.
    """
    compared = list(predictions(run))
    found = [one for one in compared if one.predicted != one.reported]
    return [one for one in found if one.reported < one.predicted or not more_is_right], len(compared)
