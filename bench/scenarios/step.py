"""Measures the time of a step outside llama.cpp, by the context length of the streams. slotcache reports the figures."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace

from ..client import Client, PromptSizer
from ..journal import note
from ..report import Bar, Report, Table, median
from ..servers import add_options, arms_for, sampling

HOST_SECONDS = "slotcache_step_host_seconds"
GENERATED = "slotcache_generated_tokens_total"
LOOP_SECONDS = "slotcache_loop_seconds_total"
SAMPLES = 20
PAUSE = 0.05
"""Seconds between two readings."""
STREAMED = 3.0
"""Seconds in which the event loop's time is measured: much longer than two readings take."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench step`."""
    add_options(parser, context=20000, slots=8)
    add = parser.add_argument
    add("--contexts", default="4000,16000", help="tokens of each stream's prompt (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Read the figures while all slots generate after the same prompt."""
    (arm,) = [arm for arm in arms_for(args) if arm.name != "llama-server"]
    lengths = [int(length) for length in args.contexts.split(",")]

    async def work(client: Client) -> list[tuple[float, float]]:
        return [await _seconds(client, length, args.parallel) for length in lengths]

    measured = arm.measure(sampling(args), work)
    rows = [(length, args.parallel, 1e3 * host, 1e6 * loop) for length, (host, loop) in zip(lengths, measured, strict=True)]
    table = Table("step: time outside llama.cpp", ("context", "streams", "host ms a step", "loop us a token"), rows)
    first, last = measured[0], measured[-1]
    bars = [
        Bar(5, f"host ms a step at {lengths[0]} tokens of context", 1000 * first[0], 1.0, unit=" ms"),
        Bar(5, f"the same at {lengths[-1]} over that at {lengths[0]}", last[0] / first[0], 1.1, unit="x"),
        Bar(5, "wire and HTTP of a streamed token", 1e6 * last[1], 150, unit=" us"),
    ]
    data = {"arm": arm.describe(), "seconds": dict(zip(lengths, measured, strict=True))}
    return Report("step", [table], bars=bars, data=data)


async def _seconds(client: Client, length: int, streams: int) -> tuple[float, float]:
    """Return the median seconds outside llama.cpp of a step with all streams, and the event loop's seconds per token."""
    query = (await PromptSizer.of(client)).query(f"context {length}", length)
    (await client.ask(query, sampling=replace(client.sampling, max_tokens=1))).answered()

    async def keep_asking() -> None:
        while True:  # a small model gives short answers
            (await client.ask(query, sampling=replace(client.sampling, max_tokens=1000))).answered()

    tasks = [asyncio.create_task(keep_asking()) for _ in range(streams)]

    async def pause(seconds: float) -> None:
        ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()

    try:
        readings: list[float] = []
        start = await client.gauge(GENERATED)
        while len(readings) < SAMPLES:
            await pause(PAUSE)
            if await client.gauge(GENERATED) > start + 4 * streams:  # all have started
                readings.append(await client.gauge(HOST_SECONDS))
        tokens, loop = await client.gauge(GENERATED), await client.gauge(LOOP_SECONDS)
        await pause(STREAMED)
        tokens, loop = await client.gauge(GENERATED) - tokens, await client.gauge(LOOP_SECONDS) - loop
        host, each = median(readings), loop / tokens
        note(context=length, streams=streams, host_seconds=host, loop_seconds=each)
        return host, each
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
