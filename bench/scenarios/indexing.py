"""Measures a stream's tokens per second while files are indexed, over its speed before and after."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from ..client import Client, PromptSizer
from ..journal import note
from ..report import Bar, BenchError, Progress, Report, Table, median
from ..servers import add_options, arms_for, sampling
from ..trace import prose

SHARE, CHUNKS_PER_SECOND = 0.97, 200.0  # targets
SECTIONS, WORDS = 12, 200  # sections of a file, and words of a section; each section becomes one chunk
POLL = 0.3  # s between two requests for the progress, each of which costs the stream some ms
PROMPT = 200  # tokens of the stream's prompt
TOKENS = "slotcache_generated_tokens_total"


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the stream's time. tokens: the stream's tokens. chunks: the number of chunks indexed."""

    seconds: float
    tokens: int
    chunks: int = 0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """The windows and vectors of a run.

    quiet: the windows before, between and after the windows of `busy`.
    busy: the windows in which files are read.
    vectors, vectors_later: the numbers of vectors computed during the stream and after it.
    """

    quiet: list[Window]
    busy: list[Window]
    vectors: int
    vectors_later: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench indexing`."""
    add_options(parser)
    add = parser.add_argument
    add("--files", type=int, default=100, help=f"files of a window, with {SECTIONS} chunks each (default: %(default)s)")
    add("--windows", type=int, default=5, help="windows in which files are read (default: %(default)s)")
    add("--quiet", type=float, default=5.0, help="seconds of each window without files (default: %(default)s)")
    add("--embedding-model", metavar="GGUF", help="also compute vectors, which must wait while the stream runs")


def run(args: argparse.Namespace) -> Report:
    """Measure the speed of one long stream, with and without files to read, in turn."""
    if args.url:
        raise BenchError("indexing starts a server with a folder of its own: leave --url out")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "docs"
        _write(folder, 0, 1)
        flags = ["--docs", str(folder), "--docs-db", f"{temporary}/db", "--docs-watch", "off"]
        flags += ["--embedding-model", args.embedding_model] if args.embedding_model else []
        arm = arms_for(args, slotcache_flags=flags)[0]
        measured = arm.measure(sampling(args), lambda client: _measure(client, args, folder))
    data = {"arm": arm.describe(), "measured": asdict(measured)}
    return Report("indexing", [_table(measured)], bars=_bars(measured, bool(args.embedding_model)), data=data)


def _table(measured: Measured) -> Table:
    around = [median([before.speed, after.speed]) for before, after in pairwise(measured.quiet)]
    rows = [
        (number, alone, busy.speed, busy.speed / alone, busy.chunks / busy.seconds)
        for number, (alone, busy) in enumerate(zip(around, measured.busy, strict=True), 1)
    ]
    columns = ("window", "tokens/s around it", "tokens/s", "ratio", "chunks/s")
    return Table("indexing: one stream beside files that are read", columns, rows)


def _bars(measured: Measured, has_vectors: bool) -> list[Bar]:
    rows = _table(measured).rows
    ratio, rate = (median([float(row[at]) for row in rows]) for at in (3, 4))
    bars = [
        Bar(1, "tokens/s while files are read, of those without", ratio, SHARE, at_least=True),
        Bar(2, "chunks/s beside the stream", rate, CHUNKS_PER_SECOND, at_least=True),
    ]
    if has_vectors:
        bars += [
            Bar(3, "vectors computed beside the stream", measured.vectors, 0),
            Bar(4, "vectors computed after it", measured.vectors_later, 1, at_least=True),
        ]
    return bars


async def _measure(client: Client, args: argparse.Namespace, folder: Path) -> Measured:
    sizer = await PromptSizer.of(client)
    endless = replace(client.sampling, max_tokens=args.ctx_size - 2 * PROMPT, cache_prompt=False)
    await _all_read(client, 1)
    stream = asyncio.create_task(client.ask(sizer.query("the stream", PROMPT), sampling=endless))
    try:
        before = await client.gauge(TOKENS)
        while await client.gauge(TOKENS) < before + 2:
            await asyncio.sleep(POLL)
        vectors = await _sum(client, "vectors")
        quiet, busy = [await _quiet(client, args)], list[Window]()
        with Progress("windows", args.windows) as progress:
            for number in range(1, args.windows + 1):
                busy.append(await _busy(client, args, folder, number))
                quiet.append(await _quiet(client, args))
                note(window=number, before=asdict(quiet[-2]), busy=asdict(busy[-1]), after=asdict(quiet[-1]))
                progress.step(
                    f"{busy[-1].speed:.1f} tokens/s, before and after {quiet[-2].speed:.1f}, {quiet[-1].speed:.1f}"
                )
        if stream.done():
            raise BenchError(f"the stream ended too early: {stream.result().error or 'its context is full'}")
        beside = await _sum(client, "vectors") - vectors
    finally:
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
    await asyncio.sleep(args.quiet)
    return Measured(quiet, busy, beside, await _sum(client, "vectors") - vectors - beside)


async def _quiet(client: Client, args: argparse.Namespace) -> Window:
    start, before = perf_counter(), await client.gauge(TOKENS)
    await asyncio.sleep(args.quiet)
    return Window(perf_counter() - start, round(await client.gauge(TOKENS) - before))


async def _busy(client: Client, args: argparse.Namespace, folder: Path, number: int) -> Window:
    """Let the server read new files. Return the window of this time."""
    aside = folder.with_name(f"aside-{number}")
    _write(aside, number, args.files)
    chunks = await _sum(client, "chunks")
    aside.rename(folder / str(number))
    start, before = perf_counter(), await client.gauge(TOKENS)
    async with client.http.post("/v1/sources/refresh", json={}) as answer:
        answer.raise_for_status()
    await _all_read(client, 1 + number * args.files)
    seconds, tokens = perf_counter() - start, await client.gauge(TOKENS) - before
    return Window(seconds, round(tokens), await _sum(client, "chunks") - chunks)


def _write(folder: Path, number: int, num_files: int) -> None:
    folder.mkdir()
    for at in range(num_files):
        name = f"{number}-{at}"
        sections = (f"## Part {part} of {name}\n\n{prose(f'{name} {part}', WORDS)}\n" for part in range(SECTIONS))
        (folder / f"{name}.md").write_text(f"# Note {name}\n\n" + "\n".join(sections))


async def _sources(client: Client, **query: str) -> dict[str, Any]:
    async with client.http.get("/v1/sources", params=query) as answer:
        answer.raise_for_status()
        return await answer.json()


async def _all_read(client: Client, num_files: int) -> None:
    """Wait until the index has read `num_files` files."""
    done = {"unit": "files", "done": num_files, "total": num_files}
    while (await _sources(client, limit="1"))["collections"][0]["progress"] != done:
        await asyncio.sleep(POLL)


async def _sum(client: Client, figure: str) -> int:
    """Return the number of chunks or vectors in all files."""
    found, after = 0, ""
    while after is not None:
        page = await _sources(client, after=after)
        found += sum(file[figure] for file in page["collections"][0]["files"])
        after = page["next"]
    return found
