"""More clients than slots, and more prompts than the pool holds: does every request finish, does memory stay constant?"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp

from ..client import Client, PromptSizer, Result
from ..journal import note
from ..report import Bar, BenchError, Report, Summary, Table
from ..servers import Arm, Server, add_options, arms_for, free_port, llama_slots, sampling
from ..trace import Query

SHARED = 6  # long texts with which prompts of several clients begin
SAMPLE = 5.0  # s between two samples of memory
PAUSE = 1.0  # s after a failed request: a server that has ended would fail thousands at once
LEAVES = 0.1  # share of requests whose client disconnects during the answer
CONTINUES = 0.3  # share of requests that continue the client's last answer
SHORTEST = 200  # tokens of a prompt
PREEMPTIONS = "slotcache_preemptions_total"
OFFSETS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(slots=True)
class Tally:
    """The outcome of all requests, and the server's resident memory, MiB."""

    finished: int = 0
    left: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    results: list[Result] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    preemptions: float = float("nan")
    seconds: float = 0.0

    def data(self) -> dict[str, Any]:
        """Return the tally as JSON values."""
        figures = ("prompt_tokens", "cached_tokens", "completion_tokens", "ttft", "latency")
        requests = [{name: getattr(one, name) for name in figures} for one in self.results]
        counts = {"finished": self.finished, "left": self.left, "errors": dict(self.errors), "preemptions": self.preemptions}
        return counts | {"seconds": self.seconds, "memory_mib": self.memory, "requests": requests}

    @property
    def share(self) -> float:
        """The share of finished requests, without those whose clients disconnected."""
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
    add("--cache-ram", type=int, default=256, help="MiB for idle KV: full long before the end (default: %(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Send prompts of all lengths: new ones, some with a shared beginning, some that continue the last answer.

    One client in ten disconnects during its answer. A request that fails on slotcache's side fails the benchmark.
    """
    budget = ("--cache-ram", str(args.cache_ram))
    args.llama_args = " ".join([*budget, args.llama_args])
    arms = arms_for(args, llama_slots=llama_slots(args), slotcache_flags=budget)
    tallies = {arm.name: _stress(arm, args) for arm in arms}
    own = next(iter(tallies.values()))
    rows = [
        (name, one.seconds, one.finished, one.left, one.errors.total(), 100 * one.share, *_rates(one), *_memory(one.memory))
        for name, one in tallies.items()
    ]
    columns = ("arm", "seconds", "finished", "left", "failed", "finished %", "requests/s", "preemptions")
    columns += tuple(f"MiB at {at:.0%}" for at in OFFSETS)
    title = (
        f"stress: {args.clients} clients, {args.parallel} slots, {args.ctx_size:,} cells, prompts to {args.longest:,} tokens"
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
    data = {name: one.data() for name, one in tallies.items()}
    return Report("stress", [Table(title, columns, rows)], bars=bars, notes=notes, data=data, has_failed=own.share < 1)


def _stress(arm: Arm, args: argparse.Namespace) -> Tally:
    seconds = 60 * (args.peer_minutes if arm.name == "llama-server" else args.minutes)
    tally = Tally()

    async def work(client: Client, pid: int | None) -> None:
        sizer, began = await PromptSizer.of(client), monotonic()
        watching, end = asyncio.create_task(_watch(pid, tally)), began + seconds
        crowd = _Crowd(client=client, sizer=sizer, args=args, end=end, tally=tally)
        await asyncio.gather(*(crowd.ask_on(number) for number in range(args.clients)))
        watching.cancel()
        tally.seconds = monotonic() - began
        with contextlib.suppress(BenchError, aiohttp.ClientError):  # not slotcache, or a server that has ended
            tally.preemptions = await client.gauge(PREEMPTIONS)

    if arm.command is None:
        asyncio.run(arm.work(arm.url, sampling(args), lambda client: work(client, None)))
        return tally
    port = free_port()
    with Server(arm.command(port), port) as server:
        asyncio.run(arm.work(server.url, sampling(args), lambda client: work(client, server.pid)))
    return tally


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crowd:
    """Clients that each ask one question after the other."""

    client: Client
    sizer: PromptSizer
    args: argparse.Namespace
    end: float
    tally: Tally

    async def ask_on(self, number: int) -> None:
        """Ask until the time is over, as client `number`."""
        rng = random.Random(f"client {number}")
        history: list[tuple[Query, str]] = []
        length = 0  # of the history, tokens
        while monotonic() < self.end:
            if rng.random() > CONTINUES or length + SHORTEST > self.args.longest:
                history, length = [], 0
            query = (
                self.sizer.query(f"more {rng.random()}", SHORTEST) if history else _query(rng, self.sizer, self.args.longest)
            )
            asked = replace(self.client.sampling, max_tokens=rng.randint(1, self.args.output))
            asking = asyncio.create_task(self.client.ask(query, tuple(history), sampling=asked))
            if rng.random() < LEAVES:
                await asyncio.wait({asking}, timeout=rng.uniform(0.1, 8.0))
                if not asking.done():
                    asking.cancel()
                    await asyncio.gather(asking, return_exceptions=True)
                    self.tally.left += 1
                    continue
            result = await asking
            if error := _problem(result, asked.max_tokens):
                self.tally.errors[error] += 1
                print(f"  failed: {error}", file=sys.stderr, flush=True)
                await asyncio.sleep(PAUSE)
            else:
                self.tally.finished += 1
                self.tally.results.append(result)
                history.append((query, result.text))
                length = result.prompt_tokens + result.completion_tokens


def _problem(result: Result, wanted: int) -> str | None:
    """Return the mistake in an answer that should have `wanted` tokens. A second final event is an error already."""
    if result.error is not None:
        return result.error
    if result.completion_tokens != wanted:
        return f"{result.completion_tokens} tokens instead of {wanted}"
    return None if result.finish_reason == "length" else f"finish reason {result.finish_reason} instead of length"


def _query(rng: random.Random, sizer: PromptSizer, longest: int) -> Query:
    """Return a query of any length; one in two begins with a text that several clients share."""
    length = round(SHORTEST * (longest / SHORTEST) ** rng.random())
    if rng.random() < 0.5:
        shared = sizer.query(f"shared {rng.randrange(SHARED)}", longest).question.split()
        own = sizer.query(f"own {rng.random()}", SHORTEST).question
        words = max(0, round((length - SHORTEST) / sizer.per_word))
        return Query("stress", 1, " ".join([*shared[:words], own]))
    return sizer.query(f"alone {rng.random()}", length)


async def _watch(pid: int | None, tally: Tally) -> None:
    page = os.sysconf("SC_PAGE_SIZE") / 2**20
    while pid is not None and (status := Path(f"/proc/{pid}/statm")).exists():
        tally.memory.append(int(status.read_text().split()[1]) * page)
        print(f"  {tally.finished} finished, {tally.memory[-1]:.0f} MiB", file=sys.stderr, flush=True)
        note(finished=tally.finished, left=tally.left, errors=dict(tally.errors), memory_mib=tally.memory[-1])
        await asyncio.sleep(SAMPLE)


def _rates(tally: Tally) -> tuple[float, float]:
    return tally.finished / tally.seconds if tally.seconds else float("nan"), tally.preemptions


def _memory(samples: list[float]) -> list[float]:
    return [samples[round(at * (len(samples) - 1))] if samples else float("nan") for at in OFFSETS]
