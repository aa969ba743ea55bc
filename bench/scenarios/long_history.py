"""A history that is sent whole and grows by a document each turn: how long is a request queued before its prefill?"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from ...models.demo import FILE as MODEL
from ..client import Client, Result
from ..report import Bar, BenchError, Report, Table, median
from ..servers import add_options, arms_for, in_rounds, sampling
from ..trace import Query, prose, question

BASE = 10
"""The turn with which the queue time of the last turn is compared."""
FEW = 10.0
"""Milliseconds of queue time that are always allowed."""
SHOWN = 5
"""Turns between two rows of the table."""
PATIENCE = 60.0
"""Seconds to answer. A slower request ends the benchmark: later turns would only be slower."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench history`."""
    add_options(parser, context=4096, max_tokens=4)
    parser.set_defaults(model=MODEL, rounds=5)
    add = parser.add_argument
    add("--turns", type=int, default=40, help="of the conversation (default: %(default)s)")
    add("--words", type=int, default=10, help="of a document (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Run one client: a new document in each turn, the real answers as history; medians over rounds."""
    if args.turns <= BASE:
        raise BenchError(f"--turns {args.turns}: expected more than {BASE}, the turn that others are compared with")
    (arm,) = [arm for arm in arms_for(args) if arm.name != "llama-server"]
    rounds = [
        arm.measure(sampling(args), lambda client, number=number: _converse(client, args, number))
        for number, arm in in_rounds([arm], args.rounds)
    ]
    turns = list(zip(*rounds, strict=True))
    table = Table(
        f"history: {args.turns} turns, a document of {args.words} words in each, medians of {args.rounds}",
        ("turn", "prompt tokens", "computed", "queue ms", "TTFT ms"),
        [_row(number, of) for number, of in enumerate(turns, 1) if number % SHOWN == 0 or number == args.turns],
    )
    base, last = _queue_ms(turns[BASE - 1]), _queue_ms(turns[-1])
    bar = Bar(2, f"queue time of turn {args.turns}, turn {BASE}'s being {base:.1f} ms", last, max(5 * base, FEW), unit=" ms")
    data = {"arm": arm.describe(), "queue_ms": [[one.timings["queue_ms"] for one in of] for of in rounds]}
    return Report("history", [table], bars=[bar], data=data)


async def _converse(client: Client, args: argparse.Namespace, number: int) -> list[Result]:
    history: list[tuple[Query, str]] = []
    results: list[Result] = []
    for turn in range(1, args.turns + 1):
        name = f"{number} {turn}"
        query = Query("history", turn, question(name), ((f"page-{turn}", prose(f"page {name}", args.words)),))
        results.append(result := await _answered(client, query, history))
        history.append((query, result.text))
    return results


async def _answered(client: Client, query: Query, history: Sequence[tuple[Query, str]]) -> Result:
    try:
        result = await asyncio.wait_for(client.ask(query, history), PATIENCE)
    except TimeoutError:
        raise BenchError(f"turn {query.turn}: no answer in {PATIENCE:.0f} s") from None
    if result.error:
        raise BenchError(f"turn {query.turn}: {result.error}")
    if "queue_ms" not in result.timings:
        raise BenchError("the answers tell no queue time: this measures slotcache only")
    return result


def _queue_ms(results: Sequence[Result]) -> float:
    return median([result.timings["queue_ms"] for result in results])


def _row(number: int, results: Sequence[Result]) -> tuple[int | float, ...]:
    prompt = round(median([result.prompt_tokens for result in results]))
    computed = round(median([result.computed_tokens for result in results]))
    return number, prompt, computed, _queue_ms(results), 1000 * median([result.ttft for result in results])
