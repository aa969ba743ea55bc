"""A long prefill arrives while other streams run: how long do these streams pause?"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise

from ..arms import arms_for, in_rounds
from ..client import Client, Result
from ..error import BenchError
from ..options import add_options, sampling
from ..report import Bar, Report, Table
from ..sizer import PromptSizer
from ..stats import median
from ..trace import Query

SETTLED = 8
"""Tokens of every stream before the prefill arrives."""
OUTPUT = 4096
"""Output of each stream, so that no stream ends before the prefill. The streams are cancelled after it."""
STEPS = 5
"""Prompts of one budget's length, to measure the step that prefills them."""


@dataclass(frozen=True, slots=True)
class Stall:
    """One prefill among running streams. Times in seconds, lengths in tokens."""

    prefill_tokens: int
    prefill_ttft: float
    budget_tokens: int
    budget_step: float
    quiet_gap: float
    """The streams' usual gap before the prefill arrives."""
    longest_gap: float
    """The streams' longest gap between its arrival and its first token."""


@dataclass(slots=True)
class _RunningStream:
    """A running stream: the clock's readings at its tokens."""

    arrivals: list[float] = field(default_factory=list)
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def arrived(self, now: float) -> None:
        self.arrivals.append(now)
        if len(self.arrivals) >= SETTLED:
            self.settled.set()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench stall`."""
    add_options(parser)
    add = parser.add_argument
    add("--prefill-budget", type=int, default=512, help="given to slotcache serve, tokens (default: %(default)s)")
    add("--prompt-tokens", type=int, default=6000, help="length of the prefill (default: %(default)s)")
    add("--streams", type=int, default=3, help="streams that run during the prefill (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Compare the worst round's longest gap with the step that prefills one budget on the idle server."""
    arms = arms_for(args, slotcache_flags=("--prefill-budget", str(args.prefill_budget)))
    stalls: dict[str, list[Stall]] = {}
    for number, arm in in_rounds(arms, args.rounds):

        async def work(client: Client, number: int = number) -> Stall:
            return await _stall(client, args, number)

        stalls.setdefault(arm.name, []).append(arm.measure(sampling(args), work))
    title = f"stall: {args.prompt_tokens} tokens of prefill while {args.streams} streams run, budget {args.prefill_budget}"
    columns = (
        "arm",
        "prefill tokens",
        "its TTFT s",
        "gap before ms",
        "longest gap ms",
        "step of the budget ms",
        "ratio",
    )
    table = Table(title, columns, [_row(name, rounds) for name, rounds in stalls.items()])
    bar = Bar(6, "longest gap over the step that prefills the budget", _ratio(stalls[arms[0].name]), 3.0, unit="x")
    data = {
        "arms": [arm.describe() for arm in arms],
        "stalls": {n: [asdict(one) for one in r] for n, r in stalls.items()},
    }
    return Report("stall", [table], bars=[bar], data=data)


def longest_gap(arrivals: Sequence[float], begin: float, end: float) -> float:
    """Return the longest gap between two readings that overlaps the time from `begin` to `end`; 0 for no gap."""
    return max((later - earlier for earlier, later in pairwise(arrivals) if later > begin and earlier < end), default=0.0)


async def _stall(client: Client, args: argparse.Namespace, number: int) -> Stall:
    sizer = await PromptSizer.of(client)
    steps = await _budget_steps(client, sizer, args.prefill_budget, number)
    streams = [_RunningStream() for _ in range(args.streams)]
    tasks = [
        asyncio.create_task(_run_stream(client, sizer.query(f"stream {number} {i}", 100), stream))
        for i, stream in enumerate(streams)
    ]
    try:
        for stream, task in zip(streams, tasks, strict=True):
            await _until_settled(stream, task)
        print(f"  {len(streams)} streams run, the prefill arrives", file=sys.stderr, flush=True)
        prefill = await _checked(client, sizer.query(f"prefill {number}", args.prompt_tokens), 4)
        for task in tasks:
            if task.done():
                raise BenchError(f"a stream ended during the prefill: {task.result().error or 'output used up'}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    begin, end = prefill.started, prefill.started + prefill.ttft
    before = [later - earlier for s in streams for earlier, later in pairwise(s.arrivals) if later < begin]
    return Stall(
        prefill_tokens=prefill.prompt_tokens,
        prefill_ttft=prefill.ttft,
        budget_tokens=round(median([step.prompt_tokens for step in steps])),
        budget_step=median([step.ttft for step in steps]),
        quiet_gap=median(before),
        longest_gap=max(longest_gap(stream.arrivals, begin, end) for stream in streams),
    )


async def _budget_steps(client: Client, sizer: PromptSizer, budget: int, number: int) -> list[Result]:
    """Send new prompts that fit the budget, one at a time on the idle server: each is one step."""
    return [await _checked(client, sizer.query(f"step {number} {i}", budget), 1) for i in range(STEPS)]


async def _run_stream(client: Client, query: Query, stream: _RunningStream) -> Result:
    long = replace(client.sampling, max_tokens=OUTPUT, cache_prompt=False)
    return await client.ask(query, sampling=long, on_token=stream.arrived)


async def _until_settled(stream: _RunningStream, task: asyncio.Task[Result]) -> None:
    settled = asyncio.create_task(stream.settled.wait())
    await asyncio.wait({settled, task}, return_when=asyncio.FIRST_COMPLETED)
    settled.cancel()
    if not stream.settled.is_set():
        raise BenchError(f"a stream did not run: {task.result().error or 'it ended at once'}")


async def _checked(client: Client, query: Query, max_tokens: int) -> Result:
    result = await client.ask(query, sampling=replace(client.sampling, max_tokens=max_tokens, cache_prompt=False))
    if result.error:
        raise BenchError(f"{query.session}: {result.error}")
    return result


def _ratio(rounds: Sequence[Stall]) -> float:
    return max(one.longest_gap / one.budget_step for one in rounds)


def _row(name: str, rounds: Sequence[Stall]) -> tuple[str | int | float, ...]:
    worst = max(rounds, key=lambda one: one.longest_gap / one.budget_step)
    times = (1000 * worst.quiet_gap, 1000 * worst.longest_gap, 1000 * worst.budget_step)
    return (name, worst.prefill_tokens, worst.prefill_ttft, *times, _ratio(rounds))
