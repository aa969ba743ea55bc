"""Measures KV on disk: prompts evicted from host memory, a killed server, very many records, requests without a hit."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np

from ...slots.record import Record, file_name
from ...slots.scope import Scope
from ...slots.store.disk import DiskTier
from ...slots.store.record_file import Provenance, encode
from ..client import Client, PromptSizer, Result
from ..report import Bar, BenchError, Progress, Report, Summary, Table
from ..servers import Arm, Server, add_options, arms_for, free_port, resident, sampling, tie_to_parent
from ..trace import Query

SETTLED = 1.0  # s without a write, after which all is on disk
WITH, WITHOUT = "with a disk", "without"
PREFIX, RUN = 64, 32  # tokens of generated records: of a shared prefix, and of each record after it
BRANCHES = 100  # records that continue one prefix
MADE_BY = Provenance("0" * 32, "1" * 32)
MISSES = 1000
Section = tuple[Table, list[Bar]]


@dataclass(frozen=True, slots=True)
class Index:
    """The costs of an index of records: seconds until it is ready, its bytes, and the seconds of a miss."""

    seconds: float
    bytes: int
    miss: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench disk`."""
    add_options(parser, context=4096, slots=2)
    add = parser.add_argument
    add("--prompts", type=int, default=16, help="default: %(default)s")
    add("--prompt-tokens", type=int, default=970, help="tokens of each prompt (default: %(default)s)")
    add("--cache-ram", type=int, default=16, help="MiB of host memory: too little for the prompts (default: %(default)s)")
    add("--cache-disk", type=int, default=4000, help="MiB of disk (default: %(default)s)")
    add("--records", type=int, default=100_000, help="generated records; 0 skips this part (default: %(default)s)")
    add("--pairs", type=int, default=8, help="pairs of requests without a hit; 0 skips this part (default: %(default)s)")
    parser.set_defaults(flash_attn="off")  # then answers with KV from disk are bit-equal


def run(args: argparse.Namespace) -> Report:
    """Ask prompts twice, kill the server, and ask again. Open a folder of generated records. Then compare requests without a
    hit on two servers, with a disk and without.
    """
    if args.url:
        raise BenchError("disk starts servers with a folder of their own: leave --url out")
    with TemporaryDirectory(prefix="slotcache-bench-") as name:
        folder = Path(name)
        asked, gap = _ask_and_kill(args, folder / "asked")
        made = _made(args.records, folder / "made") if args.records else {}
        pairs = asyncio.run(_pairs(args, folder / "pairs")) if args.pairs else {}
    sections = [_asked_section(args, asked, gap)]
    sections += [_made_section(args, made)] if made else []
    sections += [_pairs_section(args, pairs)] if pairs else []
    data = {
        "asked": {name: [one.figures for one in of] for name, of in asked.items()},
        "made": {name: asdict(one) for name, one in made.items()},
        "pairs": {name: [one.figures for one in of] for name, of in pairs.items()},
    }
    return Report("disk", [table for table, _ in sections], [bar for _, bars in sections for bar in bars], data=data)


def _arm(args: argparse.Namespace, name: str, flags: Sequence[str]) -> Arm:
    """Return a server with these flags and without idle prefill, which would count as a hit."""
    flags = ("--cache-ram", str(args.cache_ram), "--idle-prefill", "off", *flags)
    return replace(arms_for(args, slotcache_flags=flags)[0], name=name)


def _disk(args: argparse.Namespace, folder: Path) -> tuple[str, ...]:
    return "--cache-dir", str(folder), "--cache-disk", str(args.cache_disk)


# ---- Prompts evicted from host memory. ----------------------------------------------------------------------------------


def _ask_and_kill(args: argparse.Namespace, folder: Path) -> tuple[dict[str, list[Result]], float]:
    """Ask the prompts cold, again, and after a kill of the server. Return all results, by these names.

    Also return the seconds from the moment when the new server is ready to its first request.
    """
    arm, port = _arm(args, "disk", _disk(args, folder)), free_port()
    assert arm.command is not None
    asked: dict[str, list[Result]] = {}
    queries: list[Query] = []

    async def twice(client: Client) -> None:
        sizer = await PromptSizer.of(client)
        queries.extend(sizer.query(f"prompt {number}", args.prompt_tokens) for number in range(args.prompts))
        for time in ("cold", "again"):
            asked[time] = await _ask(client, queries, time)
            await _until_written(client)

    async def at_once(url: str) -> float:
        async with Client(url, arm.api, sampling(args), name=arm.name) as client:
            asked["after a kill"] = await _ask(client, queries, "after a kill")
        return asked["after a kill"][0].started

    with Server(arm.command(port), port) as server:
        asyncio.run(arm.work(server.url, sampling(args), twice))
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
    with Server(arm.command(port), port) as server:
        ready = perf_counter()
        return asked, asyncio.run(at_once(server.url)) - ready


async def _ask(client: Client, queries: Sequence[Query], label: str) -> list[Result]:
    results: list[Result] = []
    with Progress(label, len(queries)) as progress:
        for query in queries:
            results.append(result := (await client.ask(query)).answered())
            progress.step(f"{1000 * result.ttft:.0f} ms, {result.cached_tokens} cached")
    return results


async def _until_written(client: Client) -> None:
    written, before = -1.0, -2.0
    while written != before:
        await asyncio.sleep(SETTLED)
        written, before = await client.gauge("slotcache_disk_written_runs_total"), written


def _asked_section(args: argparse.Namespace, asked: dict[str, list[Result]], gap: float) -> Section:
    cold, rows = asked["cold"], []
    for name, of in asked.items():
        ttft = Summary.of(one.ttft for one in of)
        same = sum(one.text == other.text for one, other in zip(of, cold, strict=True))
        rows.append((name, 1000 * ttft.p50, 1000 * ttft.p95, _ttft(of) / _ttft(cold), _share(of), f"{same}/{len(of)}"))
    title = f"disk: {len(cold)} prompts of {args.prompt_tokens} tokens, {args.ctx_size:,} cells, {args.parallel} slots, "
    title += f"-cram {args.cache_ram} --cache-disk {args.cache_disk}; the first one after a kill came {1000 * gap:.0f} ms "
    title += "behind /health"
    table = Table(title, ("asked", "TTFT p50 ms", "p95", "of cold", "share of tokens back", "same text"), rows)
    again, killed = asked["again"], asked["after a kill"]
    same = sum(one.text == other.text for one, other in zip((*again, *killed), (*cold, *cold), strict=True))
    return table, [
        Bar(1, "share of the tokens that came back", _share(again), 0.95, at_least=True),
        Bar(1, "TTFT p50 asked again, over cold", _ttft(again) / _ttft(cold), 0.15),
        Bar(1, "share of answers with the same text", same / (2 * len(cold)), 1.0, at_least=True),
        Bar(2, "seconds from /health to the first request after a kill", gap, 0.1),
        Bar(2, "share of its tokens that came back", _share(killed[:1]), 0.95, at_least=True),
    ]


def _share(results: Sequence[Result]) -> float:
    return sum(one.cached_tokens for one in results) / sum(one.prompt_tokens for one in results)


def _ttft(results: Sequence[Result]) -> float:
    return median(one.ttft for one in results)


# ---- Very many records. -------------------------------------------------------------------------------------------------


def _made(count: int, root: Path) -> dict[str, Index]:
    """Generate records. Return the costs of their index twice: without an index file, and with it."""
    with Progress("tenths of the records made", 10) as progress:
        folder = root / MADE_BY.folder
        folder.mkdir(parents=True, mode=0o700)
        root.chmod(0o700)
        for number, record in enumerate(_records(count), 1):
            (folder / file_name(record)).write_bytes(b"".join(encode(record, MADE_BY)))
            if number % -(-count // 10) == 0 or number == count:
                progress.step()
    found: dict[str, Index] = {}
    for name in ("heads read", "index read"):
        # A new process, so that the growth of its memory is only the index.
        with ProcessPoolExecutor(1, get_context("fork"), tie_to_parent) as fresh:
            found[name] = fresh.submit(_opened, root, count).result()
    return found


def _records(count: int) -> Iterator[Record]:
    rng, prefix = np.random.default_rng(0), np.empty(0, np.int32)
    for number in range(count):
        start = PREFIX if number % (BRANCHES + 1) else 0
        if not start:
            prefix = rng.integers(0, 32_000, PREFIX, np.int32)
        run = rng.integers(0, 32_000, RUN, np.int32) if start else prefix[:0]
        yield Record(Scope.shared(""), np.concatenate([prefix, run]), start, np.zeros(64, np.uint8))


def _opened(root: Path, count: int) -> Index:
    before, began = resident(os.getpid()), perf_counter()
    tier = DiskTier(root, 1 << 40, MADE_BY)
    tier.wait()
    seconds, size = perf_counter() - began, resident(os.getpid()) - before
    if len(tier.index.entries) != count:
        raise BenchError(f"the index has {len(tier.index.entries):,} records of {count:,}")
    rng, times = np.random.default_rng(1), []
    for prompt in rng.integers(0, 32_000, (MISSES, 1000), np.int32):
        began = perf_counter()
        with tier.index.lock:
            tier.index.continuing(Scope.shared(""), prompt, 0)
        times.append(perf_counter() - began)
    tier.close(seconds=600)
    return Index(seconds, size, median(times))


def _allowed(count: int) -> int:
    """Return the bytes that an index may take: 1 KiB for each record, and 4 bytes for each of its tokens."""
    return 1024 * count + 4 * sum(len(record.tokens) - record.start for record in _records(count))


def _made_section(args: argparse.Namespace, made: dict[str, Index]) -> Section:
    rows = [(name, one.seconds, one.bytes / 2**20, one.bytes / args.records, 1e6 * one.miss) for name, one in made.items()]
    columns = ("start", "ready after s", "MiB", "bytes a record", "a miss us")
    table = Table(f"{args.records:,} records of {RUN} and {PREFIX} tokens", columns, rows)
    last = made["index read"]
    return table, [
        Bar(3, "seconds to ready with the index's file", last.seconds, 5.0),
        Bar(3, "memory over 1 KiB a record and 4 bytes a token", last.bytes / _allowed(args.records), 1.0),
        Bar(3, "us of a miss", 1e6 * last.miss, 100.0),
    ]


# ---- Pairs of requests without a hit. -----------------------------------------------------------------------------------


async def _pairs(args: argparse.Namespace, folder: Path) -> dict[str, list[Result]]:
    """Return the results of two servers, with a disk and without, that take turns. Each prompt is new to its server."""
    arms = [_arm(args, WITH, _disk(args, folder)), _arm(args, WITHOUT, ())]
    results: dict[str, list[Result]] = {arm.name: [] for arm in arms}
    with ExitStack() as servers, Progress("pairs", args.pairs) as progress:
        urls = [servers.enter_context(arm.up()) for arm in arms]

        async def work(first: Client) -> None:
            async with Client(urls[1], arms[1].api, sampling(args), name=WITHOUT) as second:
                sizer = await PromptSizer.of(second)
                for number in range(-1, args.pairs):  # the first pair warms up both servers
                    for client in (first, second)[:: 1 if number % 2 else -1]:
                        result = await client.ask(sizer.query(f"pair {number}", args.prompt_tokens))
                        results[client.name].append(result.answered())
                    if number >= 0:
                        progress.step()

        await arms[0].work(urls[0], sampling(args), work)
    return {name: of[1:] for name, of in results.items()}


def _pairs_section(args: argparse.Namespace, pairs: dict[str, list[Result]]) -> Section:
    rows = [(name, 1000 * _ttft(of), 1000 * _step(of)) for name, of in pairs.items()]
    table = Table(f"{args.pairs} pairs without a hit", ("server", "TTFT p50 ms", "step p50 ms"), rows)
    return table, [
        Bar(4, f"{name} with a disk, over without", figure(pairs[WITH]) / figure(pairs[WITHOUT]), 1.03)
        for name, figure in (("TTFT p50", _ttft), ("a step", _step))
    ]


def _step(results: Sequence[Result]) -> float:
    return median((one.latency - one.ttft) / max(one.completion_tokens - 1, 1) for one in results)
