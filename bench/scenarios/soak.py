"""Mixed load on all routes for hours: do memory and latency stay constant, and is every request answered?"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from time import monotonic, perf_counter

import aiohttp

from ...models.demo import FILE as MODEL
from ..journal import note
from ..report import Bar, Cell, Report, Summary, Table, median
from ..rude import Lost, Visitor
from ..servers import Server, ServerOptions, free_port, slotcache_command

QUARTERS = 4
SAMPLE = 1.0  # s between two samples of memory
REPORT_EVERY = 60.0  # s between two lines of progress
PAUSE = 1.0  # s after a lost request: a server that has ended would lose thousands at once
TIMED = ("chat", "stream", "converse")  # acts whose time is reported
MOST_LOST = 20  # reasons that are listed


@dataclass(slots=True)
class Quarter:
    """One quarter of the run. seconds: of each timed act. memory: the server's resident set, MiB, about once a second."""

    acts: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    seconds: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    @property
    def peak(self) -> float:
        return max(self.memory, default=nan)


@dataclass(slots=True)
class Soak:
    """The events of a run of `length` seconds, by quarter. lost: the number of lost requests, by reason."""

    length: float
    began: float = field(default_factory=monotonic)
    quarters: list[Quarter] = field(default_factory=lambda: [Quarter() for _ in range(QUARTERS)])
    lost: Counter[str] = field(default_factory=Counter)

    @property
    def is_over(self) -> bool:
        return monotonic() - self.began >= self.length

    @property
    def now(self) -> Quarter:
        return self.quarters[min(int((monotonic() - self.began) / self.length * QUARTERS), QUARTERS - 1)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench soak`."""
    add = parser.add_argument
    how_long = parser.add_mutually_exclusive_group()
    how_long.add_argument("--hours", type=float, help="how long")
    how_long.add_argument("--minutes", type=float, default=30.0, help="how long (default: %(default)s)")
    add("-m", "--model", type=Path, default=MODEL, help="GGUF to serve (default: the embedded model)")
    add("--url", help="load the server that runs there, without its memory; start none")
    add("--clients", type=int, default=6, help="at a time (default: %(default)s)")
    add("--pause", type=float, default=0.02, help="seconds of each client between two acts (default: %(default)s)")
    add("-t", "--threads", type=int, default=1, help="of the server (default: %(default)s)")
    add("--slotcache-args", default="", metavar="'...'", help="more flags for slotcache serve")
    add("--json", type=Path, metavar="OUT", help="write everything measured to this file")


def run(args: argparse.Namespace) -> Report:
    """Run the load. One lost request fails the benchmark. The server's limits are small, so that they are reached early."""
    soak = Soak(3600 * args.hours if args.hours else 60 * args.minutes)
    if args.url:
        asyncio.run(_load(soak, args.url, args, None))
        return report(soak)
    with tempfile.TemporaryDirectory(prefix="slotcache-soak-") as folder:
        port = free_port()
        with Server(_command(args, Path(folder), port), port) as server:
            soak.began = monotonic()
            asyncio.run(_load(soak, server.url, args, server.pid))
    return report(soak)


def report(soak: Soak) -> Report:
    """Return a table by quarter, and the later quarters relative to the first."""
    rows = [_row(number, one) for number, one in enumerate(soak.quarters, 1)]
    columns = ("quarter", "acts", "left", "lost", "chat p50 ms", "p95", "longest", "memory p50 MiB", "peak MiB")
    first, *later = soak.quarters
    growth = max((one.peak for one in later), default=nan) / first.peak
    slowing = _p50(later[-1]) / _p50(first)
    num_lost = sum(one.lost for one in soak.quarters)
    bars = [
        Bar(5, "memory after the first quarter over the most in it", growth, 1.05),
        Bar(5, "requests lost", num_lost, 0),
    ]
    notes = [f"chats of the last quarter over the first's: {slowing:.2f} of the time at the median"]
    notes += [f"lost {count} x {what}" for what, count in soak.lost.most_common(MOST_LOST)]
    total = sum((one.acts for one in soak.quarters), Counter[str]())
    data = {"acts": dict(total), "lost": dict(soak.lost), "memory_mib": [one.memory for one in soak.quarters]}
    title = f"soak: {soak.length / 60:.1f} minutes, {total.total():,} acts"
    return Report("soak", [Table(title, columns, rows)], bars=bars, notes=notes, data=data, has_failed=num_lost > 0)


def _command(args: argparse.Namespace, folder: Path, port: int) -> list[str]:
    (folder / "slots").mkdir(mode=0o700)
    extra = ("--cache-ram", "16", "--conversations", "40", "--conversation-ram", "8", "--cache-disk", "32")
    extra += ("--cache-dir", str(folder / "cache"), "--slot-save-path", str(folder / "slots"))
    options = ServerOptions(args.model, 4096, 2, args.threads, extra=(*extra, *shlex.split(args.slotcache_args)))
    return slotcache_command(options, port)


async def _load(soak: Soak, url: str, args: argparse.Namespace, pid: int | None) -> None:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(url, connector=connector) as http:
        watching = asyncio.create_task(_watch(soak, pid))
        await asyncio.gather(*(_client(soak, Visitor(http, number), args.pause) for number in range(args.clients)))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _client(soak: Soak, visitor: Visitor, pause: float) -> None:
    while not soak.is_over:
        began = perf_counter()
        try:
            name = await visitor.act()
        except Lost as error:
            soak.now.lost += 1
            soak.lost[str(error)] += 1
            await asyncio.sleep(PAUSE)
            continue
        soak.now.acts[name] += 1
        if name in TIMED:
            soak.now.seconds.append(perf_counter() - began)
        await asyncio.sleep(pause)


async def _watch(soak: Soak, pid: int | None) -> None:
    page, told = os.sysconf("SC_PAGE_SIZE") / 2**20, monotonic()
    while True:
        status = Path(f"/proc/{pid}/statm")
        if pid is not None and status.exists():
            soak.now.memory.append(int(status.read_text().split()[1]) * page)
        if monotonic() - told > REPORT_EVERY:
            told = monotonic()
            print(f"  {(told - soak.began) / 60:.0f} min, {_state(soak.now)}", file=sys.stderr, flush=True)
            acts = [dict(one.acts) for one in soak.quarters]
            note(acts=acts, lost=dict(soak.lost), memory_mib=soak.now.memory[-1:])
        await asyncio.sleep(SAMPLE)


def _state(quarter: Quarter) -> str:
    return f"{quarter.acts.total()} acts in this quarter, {quarter.lost} lost, {(quarter.memory or [nan])[-1]:.0f} MiB"


def _p50(quarter: Quarter) -> float:
    return median(quarter.seconds)


def _row(number: int, one: Quarter) -> Sequence[Cell]:
    took = Summary.of(1000 * seconds for seconds in one.seconds)
    return (
        number,
        one.acts.total(),
        one.acts["leave"],
        one.lost,
        took.p50,
        took.p95,
        took.maximum,
        median(one.memory),
        one.peak,
    )
