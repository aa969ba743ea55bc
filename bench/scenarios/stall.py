"""Measures how long running streams pause when a long prefill starts."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise

from ..client import Client, PromptSizer, Result
from ..journal import note
from ..report import Bar, BenchError, Report, Table, median
from ..servers import add_options, arms_for, measured_in_rounds
from ..trace import Query

SETTLED = 8
"""Tokens of each stream before the prefill is sent."""
OUTPUT = 4096
"""Most tokens of each stream, so many that no stream ends before the prefill does. Then the streams are cancelled."""
AROUND = 9
"""Successive gaps whose median is taken, so that one slow step does not count."""
TILES = "slotcache, one tile a step"


@dataclass(frozen=True, slots=True)
class Stall:
    """One prefill during running streams. Times are in seconds, lengths in tokens."""

    prefill_tokens: int
    prefill_ttft: float
    quiet_gap: float
    """The streams' median gap before the prefill is sent."""
    gaps: tuple[float, ...]
    """The streams' longest gap at each step of the prefill."""

    @property
    def longest_gap(self) -> float:
        return max(self.gaps)

    @property
    def usual_longest(self) -> float:
        """The largest median of `AROUND` successive gaps, in which a single slow step does not count."""
        windows = [self.gaps[at : at + AROUND] for at in range(max(len(self.gaps) - AROUND, 0) + 1)]
        return max(map(median, windows))

    def excess(self, allowed: float, tile: float = 0.0) -> float:
        """Return the longest gap over the allowed gap: `allowed` plus a step of the streams, or `tile` if that is longer."""
        return self.longest_gap / max(allowed + self.quiet_gap, tile)


@dataclass(slots=True)
class _RunningStream:
    """A running stream, with the time of each token."""

    arrivals: list[float] = field(default_factory=list)
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def arrived(self, now: float) -> None:
        self.arrivals.append(now)
        if len(self.arrivals) >= SETTLED:
            self.settled.set()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench stall`."""
    add_options(parser)
    add = parser.add_argument
    add("--max-stall", type=int, default=300, help="the flag of slotcache serve, in ms (default: %(default)s)")
    add("--prompt-tokens", type=int, default=6000, help="length of the prefill (default: %(default)s)")
    add("--streams", type=int, default=3, help="streams that run during the prefill (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Compare the longest gap of the worst round with `--max-stall` plus one step of the streams.

    No prefill step is smaller than a tile of the attention kernel. The arm with a `--max-stall` of 1 ms shows the time of a
    tile.
    """
    allowed = args.max_stall / 1000
    arms = arms_for(args, slotcache_flags=("--max-stall", str(args.max_stall)))
    if not args.url:
        arms.append(replace(arms_for(args, slotcache_flags=("--max-stall", "1"))[0], name=TILES))
    stalls = measured_in_rounds(arms, args, _stall)
    tile = max((one.usual_longest for one in stalls.get(TILES, [])), default=0.0)
    title = f"stall: {args.prompt_tokens} tokens of prefill while {args.streams} streams run, --max-stall {args.max_stall}"
    columns = ("prefill tokens", "its TTFT s", "tokens/s", "gap before ms", "gap p50 ms", "longest ms", "of what is allowed")
    table = Table(title, ("arm", *columns), [_row(name, rounds, allowed, tile) for name, rounds in stalls.items()])
    worst = max(one.excess(allowed, tile) for one in stalls[arms[0].name])
    bar = Bar(6, "longest gap over --max-stall, or a tile, and a step of the streams", worst, 1.0, unit="x")
    listed = {name: [asdict(one) for one in rounds] for name, rounds in stalls.items()}
    data = {"arms": [arm.describe() for arm in arms], "stalls": listed}
    return Report("stall", [table], bars=[bar], data=data)


def gaps_within(arrivals: Sequence[float], begin: float, end: float) -> list[float]:
    """Return the gaps between successive tokens that overlap the time from `begin` to `end`."""
    return [later - earlier for earlier, later in pairwise(arrivals) if later > begin and earlier < end]


async def _stall(client: Client, args: argparse.Namespace, number: int) -> Stall:
    sizer = await PromptSizer.of(client)
    streams = [_RunningStream() for _ in range(args.streams)]
    tasks = [
        asyncio.create_task(_run_stream(client, sizer.query(f"stream {number} {i}", 100), stream))
        for i, stream in enumerate(streams)
    ]
    try:
        for stream, task in zip(streams, tasks, strict=True):
            await _until_settled(stream, task)
        print(f"  {len(streams)} streams run, the prefill arrives", file=sys.stderr, flush=True)
        few = replace(client.sampling, max_tokens=4, cache_prompt=False)
        prefill = (await client.ask(sizer.query(f"prefill {number}", args.prompt_tokens), sampling=few)).answered()
        for task in tasks:
            if task.done():
                raise BenchError(f"a stream ended during the prefill: {task.result().error or 'output used up'}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    begin, end = prefill.started, prefill.started + prefill.ttft
    before = [later - earlier for s in streams for earlier, later in pairwise(s.arrivals) if later < begin]
    gaps = tuple(map(max, zip(*(gaps_within(stream.arrivals, begin, end) for stream in streams), strict=False)))
    stall = Stall(prefill.prompt_tokens, prefill.ttft, median(before), gaps)
    note(arm=client.name, round=number, **asdict(stall))
    return stall


async def _run_stream(client: Client, query: Query, stream: _RunningStream) -> Result:
    long = replace(client.sampling, max_tokens=OUTPUT, cache_prompt=False)
    return await client.ask(query, sampling=long, on_token=stream.arrived)


async def _until_settled(stream: _RunningStream, task: asyncio.Task[Result]) -> None:
    settled = asyncio.create_task(stream.settled.wait())
    await asyncio.wait({settled, task}, return_when=asyncio.FIRST_COMPLETED)
    settled.cancel()
    if not stream.settled.is_set():
        raise BenchError(f"a stream did not run: {task.result().error or 'it ended at once'}")


def _row(name: str, rounds: Sequence[Stall], allowed: float, tile: float) -> tuple[str | int | float, ...]:
    worst = max(rounds, key=lambda one: one.excess(allowed, tile))
    speed = worst.prefill_tokens / worst.prefill_ttft
    times = (1000 * worst.quiet_gap, 1000 * median(worst.gaps), 1000 * worst.longest_gap, worst.excess(allowed, tile))
    return (name, worst.prefill_tokens, worst.prefill_ttft, speed, *times)
