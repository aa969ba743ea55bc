"""More clients than lanes, with prompts that do not fit the pool together: does every request end well, and memory stay?"""

import argparse
import asyncio
import random
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

from .arms import Arm, arms_for
from .client import Client, Result
from .options import add_options, sampling
from .prompt import PromptSizer
from .report import Bar, Report, Table
from .server import Server, free_port
from .stats import Summary
from .trace import Query

SHARED = 6  # long texts that several clients begin with
SAMPLE = 5.0  # s between two looks at memory
LEAVES = 0.1  # of requests, those whose client goes away in the middle
OFFSETS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(slots=True)
class Tally:
    """What became of requests, and the server's resident memory, MiB."""

    finished: int = 0
    left: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    results: list[Result] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def share(self) -> float:
        """Of the requests whose clients stayed, those that ended well."""
        return self.finished / max(self.finished + self.errors.total(), 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench stress`."""
    add_options(parser, context=8192)
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="for slotcache (default: %(default)s)")
    add("--peer-minutes", type=float, default=1.0, help="for llama-server (default: %(default)s)")
    add("--clients", type=int, default=16, help="default: %(default)s")
    add("--longest", type=int, default=5000, help="tokens of a prompt (default: %(default)s)")
    add("--output", type=int, default=500, help="most tokens of an answer (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Prompts from 200 tokens up, some of them beginning alike; one client in ten goes away in the middle."""
    tallies = {arm.name: _stress(arm, args) for arm in arms_for(args, llama_lanes=args.parallel)}
    own = next(iter(tallies.values()))
    rows = [
        (name, one.seconds, one.finished, one.left, one.errors.total(), 100 * one.share, *_memory(one.memory))
        for name, one in tallies.items()
    ]
    columns = ("arm", "seconds", "finished", "left", "failed", "finished %", *(f"MiB at {at:.0%}" for at in OFFSETS))
    title = (
        f"stress: {args.clients} clients, {args.parallel} lanes, {args.ctx_size:,} cells, prompts to {args.longest:,} tokens"
    )
    growth = own.memory[-1] / _memory(own.memory)[1] if own.memory else float("nan")
    bars = [
        Bar(3, "requests that finished correctly", 100 * own.share, 100, at_least=True, unit=" %"),
        Bar(3, "memory at the end over that after a quarter", growth, 1.05),
    ]
    notes = [f"{name}: {count} x {what}" for name, one in tallies.items() for what, count in one.errors.most_common(5)]
    for name, one in tallies.items():
        ttft = Summary.of(result.ttft for result in one.results)
        notes.append(f"{name}: TTFT p50 {ttft.p50:.2f} s, p95 {ttft.p95:.2f} s")
    return Report("stress", [Table(title, columns, rows)], bars, notes, {name: repr(one) for name, one in tallies.items()})


def _stress(arm: Arm, args: argparse.Namespace) -> Tally:
    seconds = 60 * (args.peer_minutes if arm.name == "llama-server" else args.minutes)
    tally = Tally(seconds=seconds)

    async def work(client: Client, pid: int | None) -> None:
        sizer, end = await PromptSizer.of(client), monotonic() + seconds
        watching = asyncio.create_task(_watch(pid, tally))
        await asyncio.gather(*(_client(client, sizer, args, number, end, tally) for number in range(args.clients)))
        watching.cancel()

    if arm.command is None:
        asyncio.run(arm.work(arm.url, sampling(args), lambda client: work(client, None)))
        return tally
    port = free_port()
    with Server(arm.command(port), port) as server:
        asyncio.run(arm.work(server.url, sampling(args), lambda client: work(client, server.pid)))
    return tally


async def _client(
    client: Client, sizer: PromptSizer, args: argparse.Namespace, number: int, end: float, tally: Tally
) -> None:
    """One question after the other until the time is over."""
    rng = random.Random(f"client {number}")
    while monotonic() < end:
        query = _query(rng, sizer, args.longest)
        asked = replace(client.sampling, max_tokens=rng.randint(1, args.output))
        asking = asyncio.create_task(client.ask(query, sampling=asked))
        if rng.random() < LEAVES:
            await asyncio.wait({asking}, timeout=rng.uniform(0.1, 8.0))
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                tally.left += 1
                continue
        _count(await asking, asked.max_tokens, tally)


def _count(result: Result, wanted: int, tally: Tally) -> None:
    if result.error is None and result.completion_tokens != wanted:
        tally.errors[f"{result.completion_tokens} tokens instead of {wanted}"] += 1
    elif result.error is not None:
        tally.errors[result.error] += 1
        print(f"  failed: {result.error}", file=sys.stderr, flush=True)
    else:
        tally.finished += 1
        tally.results.append(result)


def _query(rng: random.Random, sizer: PromptSizer, longest: int) -> Query:
    """Of any length; one in two begins with a text that others begin with, too."""
    length = round(200 * (longest / 200) ** rng.random())
    if rng.random() < 0.5:
        shared = sizer.query(f"shared {rng.randrange(SHARED)}", longest).question.split()
        own = sizer.query(f"own {rng.random()}", 200).question
        words = max(0, round((length - 200) / sizer.per_word))
        return Query("stress", 1, " ".join([*shared[:words], own]))
    return sizer.query(f"alone {rng.random()}", length)


async def _watch(pid: int | None, tally: Tally) -> None:
    while pid is not None:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        tally.memory.append(pages * 4096 / 2**20)
        print(f"  {tally.finished} finished, {tally.memory[-1]:.0f} MiB", file=sys.stderr, flush=True)
        await asyncio.sleep(SAMPLE)


def _memory(samples: list[float]) -> list[float]:
    return [samples[round(at * (len(samples) - 1))] if samples else float("nan") for at in OFFSETS]
