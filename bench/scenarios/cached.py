"""Measures the time to the first token of a completely cached prompt."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import inf

from ..client import Client, PromptSizer, Result
from ..report import Bar, Report, Summary, Table, median
from ..servers import add_options, arms_for, measured_in_rounds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench cached`."""
    add_options(parser, max_tokens=32)
    add = parser.add_argument
    add("--prompt-tokens", type=int, default=4000, help="length of the prompt (default: %(default)s)")
    add("--repeats", type=int, default=10, help="how often the prompt is sent again (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Send the same prompt many times. The time of a decode step is the median gap between two tokens of an answer."""
    arms = arms_for(args)
    rounds = measured_in_rounds(arms, args, _repeat)
    title = f"cached: a prompt of {args.prompt_tokens} tokens, asked {args.repeats} times again"
    columns = ("arm", "prompt tokens", "computed", "first TTFT ms", "TTFT p50 ms", "p95", "decode step ms", "ratio")
    table = Table(title, columns, [_row(name, results) for name, results in rounds.items()])
    bar = Bar(7, "TTFT of the cached prompt over a decode step", _ratio(rounds[arms[0].name]), 3.0, unit="x")
    requests = {name: [[_request(one) for one in results] for results in all_] for name, all_ in rounds.items()}
    return Report("cached", [table], bars=[bar], data={"arms": [arm.describe() for arm in arms], "requests": requests})


def ttft_over_step(results: Sequence[Result]) -> float:
    """Return the median TTFT over the median gap between tokens, without the first result, which filled the cache."""
    again = results[1:]
    step = median([gap for result in again for gap in result.gaps])
    return median([result.ttft for result in again]) / step if step else inf  # all tokens arrived at once


async def _repeat(client: Client, args: argparse.Namespace, number: int) -> list[Result]:
    query = (await PromptSizer.of(client)).query(f"cached {number}", args.prompt_tokens)
    return [(await client.ask(query)).answered() for _ in range(args.repeats + 1)]


def _ratio(rounds: Sequence[Sequence[Result]]) -> float:
    return median([ttft_over_step(results) for results in rounds])


def _row(name: str, rounds: Sequence[Sequence[Result]]) -> tuple[str | int | float, ...]:
    again = [result for results in rounds for result in results[1:]]
    ttft = Summary.of(result.ttft for result in again)
    step = median([gap for result in again for gap in result.gaps])
    computed = max(result.computed_tokens for result in again)
    first = median([results[0].ttft for results in rounds])
    times = (1000 * value for value in (first, ttft.p50, ttft.p95, step))
    return (name, again[0].prompt_tokens, computed, *times, _ratio(rounds))


def _request(result: Result) -> dict[str, float | int]:
    return {"ttft": result.ttft, "latency": result.latency, "cached_tokens": result.cached_tokens}
