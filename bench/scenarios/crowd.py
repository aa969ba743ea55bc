"""Clients that only hold on: more connections than descriptors, and streams that nobody reads."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import shlex
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp

from ...models.demo import FILE as MODEL
from .. import rude
from ..report import Bar, BenchError, Report, Table
from ..servers import HOST, Server, ServerOptions, free_port, tie_to_parent

ASKING = 0.2  # s between two questions of the client that is answered
BACK = 1.0  # s until a client whose connection was closed opens another one
AFTER = 1.0  # s until the descriptors are counted, once all clients have left
SAMPLE = 1.0  # s between two samples of memory
TIMEOUT = 30.0  # s to answer
CACHE = "16"  # MiB for idle KV: the answers' own would hide what the streams take
NAME = "a" * 8192  # of the model: each chunk holds it, so few of them fill what the system keeps of an answer
LATEST, LONGEST_LOG, MOST_GROWTH, MORE_DESCRIPTORS = 2.0, 100.0, 100.0, 10  # the bars: s, kB, MiB, descriptors
HALVES = (
    b"",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n{",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
)
"""What clients send before they hold on: nothing, half a head, half a body, and a request whose connection they keep."""
QUESTION = {"content": "What is in it?"}


@dataclass(slots=True)
class Outcome:
    """Figures of one trial. waits: seconds of each question. descriptors: of the server before and after. log: kB."""

    waits: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    opened: int = 0
    descriptors: tuple[int, int] = (0, 0)
    log: float = 0.0
    memory: list[float] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """MiB of resident memory at most, above the first sample's."""
        return max(self.memory) - self.memory[0] if self.memory else float("nan")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench crowd`."""
    add = parser.add_argument
    add("--only", default=",".join(TRIALS), help="trials (default: %(default)s)")
    add("--connections", type=int, default=2000, help="that are half open at a time (default: %(default)s)")
    add("--descriptors", type=int, default=1024, help="`ulimit -n` of that server (default: %(default)s)")
    add("--seconds", type=float, default=60.0, help="of the half-open connections (default: %(default)s)")
    add("--streams", type=int, default=50, help="that nobody reads (default: %(default)s)")
    add("--unread-seconds", type=float, default=120.0, help="of these streams (default: %(default)s)")
    add("--tokens", type=int, default=1000, help="of the answer of such a stream (default: %(default)s)")
    add("--slotcache-args", default="", metavar="'...'", help="more flags for slotcache serve")
    add("--json", type=Path, metavar="OUT", help="write everything measured to this file")


def run(args: argparse.Namespace) -> Report:
    """Run each trial on a server of its own with the embedded model. A missed bar fails the benchmark."""
    names = args.only.split(",")
    if unknown := [name for name in names if name not in TRIALS]:
        raise BenchError(f"--only {unknown[0]}: expected some of {', '.join(TRIALS)}")
    found = {name: _measure(name, args) for name in names}
    rows = [
        (name, one.opened, len(one.waits), 1000 * max(one.waits, default=0.0), len(one.errors), one.log, one.growth)
        for name, one in found.items()
    ]
    columns = ("trial", "opened", "asked", "longest ms", "failed", "log kB", "MiB more")
    bars = [bar for name, one in found.items() for bar in _bars(name, one)]
    notes = [f"{name}: {error}" for name, one in found.items() for error in dict.fromkeys(one.errors)]
    notes += [f"{name}: {one.descriptors[0]} descriptors before, {one.descriptors[1]} after" for name, one in found.items()]
    data: dict[str, Any] = {name: {"waits": one.waits, "memory_mib": one.memory} for name, one in found.items()}
    title = "crowd: clients that only hold on"
    has_failed = not all(bar.is_met for bar in bars)
    return Report("crowd", [Table(title, columns, rows)], bars=bars, notes=notes, data=data, has_failed=has_failed)


def _bars(name: str, one: Outcome) -> list[Bar]:
    bars = [
        Bar(1, f"{name}: longest time to an answer", max(one.waits, default=float("nan")), LATEST, unit=" s"),
        Bar(1, f"{name}: questions without an answer", len(one.errors), 0),
        Bar(1, f"{name}: growth of the log", one.log, LONGEST_LOG, unit=" kB"),
        Bar(1, f"{name}: descriptors that do not come back", one.descriptors[1] - one.descriptors[0], MORE_DESCRIPTORS),
    ]
    if name == "unread":
        bars.append(Bar(1, f"{name}: growth of resident memory", one.growth, MOST_GROWTH, unit=" MiB"))
    return bars


def _measure(name: str, args: argparse.Namespace) -> Outcome:
    print(f"{name} ...", file=sys.stderr, flush=True)
    port, (fault, hold_on) = free_port(), TRIALS[name]
    extra = ("--cache-ram", CACHE, "--alias", NAME, *shlex.split(args.slotcache_args))
    options = ServerOptions(MODEL, context=4096, threads=1, extra=extra)
    command = [sys.executable, "-m", "slotcache.bench.faulty", fault, "serve", *options.flags(port)]
    limited = ["sh", "-c", f'ulimit -n {args.descriptors} && exec "$@"', "sh", *command]
    with Server(limited, port) as server:
        return asyncio.run(_play(server, port, lambda outcome: hold_on(port, args, outcome)))


async def _play(server: Server, port: int, hold_on: Callable[[Outcome], Awaitable[None]]) -> Outcome:
    """Ask while others hold on."""
    outcome, url = Outcome(), f"http://{HOST}:{port}"
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(TIMEOUT)) as http:
        await _ask(http, outcome)  # uncounted: the first request of a process pays for its start
        outcome.waits.clear()
        before, log = _descriptors(server), server.log.stat().st_size
        beside = [asyncio.create_task(work) for work in (_ask_on(http, outcome), _watch(server, outcome))]
        await hold_on(outcome)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await asyncio.sleep(AFTER)
        outcome.descriptors = before, _descriptors(server)
        outcome.log = (server.log.stat().st_size - log) / 1000
    return outcome


async def _ask_on(http: aiohttp.ClientSession, outcome: Outcome) -> None:
    while True:
        await _ask(http, outcome)
        await asyncio.sleep(ASKING)


async def _ask(http: aiohttp.ClientSession, outcome: Outcome) -> None:
    """Ask on a connection of its own. The slots may be taken by streams that nobody reads, so it asks for no tokens."""
    began = monotonic()
    try:
        async with http.post("/tokenize", json=QUESTION) as answer:
            await answer.read()
        outcome.waits.append(monotonic() - began)
        if answer.status != 200:
            outcome.errors.append(f"the answer was {answer.status}")
    except asyncio.CancelledError:
        outcome.waits.append(monotonic() - began)  # it still waits at the end
        raise
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        outcome.errors.append(f"{type(error).__name__} after {monotonic() - began:.1f} s")


async def _watch(server: Server, outcome: Outcome) -> None:
    page = os.sysconf("SC_PAGE_SIZE") / 2**20
    while True:
        outcome.memory.append(int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * page)
        await asyncio.sleep(SAMPLE)


def _descriptors(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


async def _half_open(port: int, args: argparse.Namespace, outcome: Outcome) -> None:
    """Hold many connections half open in another process, so that the client which asks has this one for itself."""
    with ProcessPoolExecutor(1, get_context("spawn"), tie_to_parent) as pool:
        outcome.opened = await asyncio.wrap_future(pool.submit(_crowd, port, args.connections, args.seconds))


def _crowd(port: int, connections: int, seconds: float) -> int:
    """Hold connections half open, and open each one again that the server closes. Return how many were opened in all."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < connections + 100:
        raise BenchError(f"this bench opens {connections:,} connections itself: raise its own `ulimit -n`")
    return asyncio.run(_hold_all(port, connections, monotonic() + seconds))


async def _hold_all(port: int, connections: int, end: float) -> int:
    holding = [_hold(port, sent, end) for _, sent in zip(range(connections), cycle(HALVES), strict=False)]
    return sum(await asyncio.gather(*holding))


async def _hold(port: int, sent: bytes, end: float) -> int:
    opened = 0
    while (left := end - monotonic()) > 0:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(left):
                reader, writer = await asyncio.open_connection(HOST, port)
                opened += 1
                try:
                    writer.write(sent)
                    while await reader.read(1 << 16):
                        pass
                finally:
                    writer.close()
        await asyncio.sleep(min(BACK, max(end - monotonic(), 0.0)))
    return opened


async def _unread(port: int, args: argparse.Namespace, outcome: Outcome) -> None:
    """Ask for streams that nobody reads, of a server that pings each of them every millisecond."""
    held = await rude.stall(f"http://{HOST}:{port}", args.streams, args.tokens)
    outcome.opened = len(held)
    await asyncio.sleep(args.unread_seconds)
    for connection in held:
        connection.close()


TRIALS = {"half-open": ("none", _half_open), "unread": ("eager", _unread)}
"""The faults of the servers, as `bench.faulty` names them, and what the clients do."""
