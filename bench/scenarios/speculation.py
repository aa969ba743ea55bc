"""Measures TTFT if the server prefills the documents of each stage of a search, compared with waiting for the search."""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from time import perf_counter

from ...ordering.policy import read_along
from ..client import Client, Result
from ..report import Bar, BenchError, Report, Summary, Table, median
from ..server_api import Body
from ..servers import add_options, arms_for, sampling
from ..trace import Query, prose, question

WAYS = {
    "waiting": "nothing is sent before the search is done",
    "reading along": "every stage has the final documents",
    "late": "the last stage but one has them, those before have others",
    "wrong": "no stage but the last has any of them",
}
LOAD = 100  # tokens that each stream generates during the searches of another client
BESIDE = ("given", "waiting", "reading along")  # the ways beside running streams; given: there is no search
STREAM = 1000  # tokens of each stream that runs beside the turns


@dataclass(frozen=True, slots=True)
class StagedQuestion:
    """A question with its final documents, and the wrong documents that an early stage may find."""

    query: Query
    wrong: tuple[tuple[str, str], ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench speculation`."""
    add_options(parser, max_tokens=4)
    add = parser.add_argument
    add("--turns", type=int, default=15, help="questions, each asked in every way (default: %(default)s)")
    add("-k", type=int, default=5, help="documents of a turn (default: %(default)s)")
    add("--words", type=int, default=60, help="words of a document (default: %(default)s)")
    add("--stages", type=int, default=4, help="stages of a search (default: %(default)s)")
    add("--search", type=float, default=0.2, help="seconds of a search (default: %(default)s)")
    add("--busy", type=int, default=0, help="measure only turns beside this many streams, fewer than slots (default: none)")


def run(args: argparse.Namespace) -> Report:
    """Ask only with new documents. The ways take turns, so that a machine whose speed drifts favours no way."""
    (arm,) = [arm for arm in arms_for(args) if arm.name != "llama-server"]
    if args.busy:
        return _report_beside(args, arm.describe(), *arm.measure(sampling(args), partial(_beside, args)))

    async def work(client: Client) -> tuple[dict[str, list[Result]], dict[str, list[float]]]:
        results: dict[str, list[Result]] = {way: [] for way in WAYS}
        for number in range(args.turns):
            for way in list(WAYS)[:: 1 if number % 2 else -1]:
                results[way].append(await _turn(client, args, way, _staged_question(args, f"{number} {way}")))
        return results, await _under_load(client, args)

    results, load = arm.measure(sampling(args), work)
    ttft = {way: Summary.of(result.ttft for result in of) for way, of in results.items()}
    rows = [_row(way, of, ttft[way], ttft["waiting"]) for way, of in results.items()]
    title = f"speculation: {args.turns} turns of {args.k} documents, {args.stages} stages in {1000 * args.search:.0f} ms"
    table = Table(title, ("way", "prompt tokens", "computed", "TTFT p50 ms", "mean", "of waiting"), rows)
    speed = median(load["speculating"]) / median(load["alone"])
    bars = [
        Bar(5, "TTFT after the final set, reading along over waiting", ttft["reading along"].p50 / ttft["waiting"].p50, 0.5),
        Bar(5, "the same with wrong provisional sets", ttft["wrong"].p50 / ttft["waiting"].p50, 1.05),
        Bar(5, "tokens a second of others while somebody speculates, over without", speed, 0.98, at_least=True),
    ]
    notes = [f"{way}: {what}" for way, what in WAYS.items()]
    requests = {way: [{"ttft": one.ttft, "cached_tokens": one.cached_tokens} for one in of] for way, of in results.items()}
    data = {"arm": arm.describe(), "requests": requests, "load": load}
    return Report("speculation", [table], bars=bars, notes=notes, data=data)


async def _beside(args: argparse.Namespace, client: Client) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds from each question to its first token, and the gaps of other streams in this time, by way."""
    seconds: dict[str, list[float]] = {way: [] for way in BESIDE}
    gaps: dict[str, list[float]] = {way: [] for way in BESIDE}
    arrivals: list[list[float]] = [[] for _ in range(args.busy)]
    streams = [asyncio.create_task(_stream_on(client, f"beside {at}", of)) for at, of in enumerate(arrivals)]
    try:
        while not all(arrivals):
            await asyncio.sleep(args.search)
        for number in range(args.turns):
            for way in BESIDE[:: 1 if number % 2 else -1]:
                for of in arrivals:
                    del of[:-1]
                began = perf_counter()
                turn = _staged_question(args, f"beside {number} {way}")
                result = await (client.ask(turn.query) if way == "given" else _turn(client, args, way, turn))
                seconds[way].append(result.answered().started + result.ttft - began)
                gaps[way] += [later - earlier for of in arrivals for earlier, later in pairwise(of)]
    finally:
        for stream in streams:
            stream.cancel()
        ends = await asyncio.gather(*streams, return_exceptions=True)
    if failed := next((end for end in ends if isinstance(end, BenchError)), None):
        raise failed
    return seconds, gaps


async def _stream_on(client: Client, name: str, arrivals: list[float]) -> None:
    long = replace(client.sampling, max_tokens=STREAM)
    for number in itertools.count():
        query = Query(f"{name} {number}", 1, question(f"{name} {number}"))
        (await client.ask(query, on_token=arrivals.append, sampling=long)).answered()


def _report_beside(
    args: argparse.Namespace, arm: object, seconds: dict[str, list[float]], gaps: dict[str, list[float]]
) -> Report:
    ttft = {way: Summary.of(of) for way, of in seconds.items()}
    wait = {way: of.p50 - ttft["given"].p50 for way, of in ttft.items()}
    late = {way: Summary.of(of).p95 for way, of in gaps.items()}
    rows = [(way, 1000 * ttft[way].p50, 1000 * wait[way], 1000 * late[way]) for way in BESIDE]
    title = f"speculation beside {args.busy} streams: {args.turns} turns, a search of {1000 * args.search:.0f} ms"
    table = Table(title, ("way", "first token after ms", "wait ms", "streams' gaps p95 ms"), rows)
    bars = [
        Bar(4, "wait for a search, reading along over waiting", wait["reading along"] / wait["waiting"], 0.5),
        Bar(4, "streams' gaps p95, reading along over waiting", late["reading along"] / late["waiting"], 1.1),
    ]
    return Report("speculation", [table], bars=bars, data={"arm": arm, "seconds": seconds, "gaps": gaps})


def _staged_question(args: argparse.Namespace, name: str) -> StagedQuestion:
    right, wrong = (
        tuple((f"{kind}-{number}", prose(f"{name} {kind} {number}", args.words)) for number in range(args.k))
        for kind in ("right", "wrong")
    )
    return StagedQuestion(Query(name, 1, question(name), right), wrong)


async def _turn(client: Client, args: argparse.Namespace, way: str, turn: StagedQuestion) -> Result:
    """Run one turn: the search, with or without prefill by the server, then the question with the final documents."""
    request = await client.prepare(turn.query)
    if way == "waiting":
        await asyncio.sleep(args.search)
    else:
        await _search(client, args, way, turn)
    return (await client.send(request)).answered()


async def _search(client: Client, args: argparse.Namespace, way: str, turn: StagedQuestion) -> None:
    _, body = await client.api.prepare(client.http, turn.query, (), client.sampling)
    right = body.pop("documents")
    wrong = [{"id": name, "text": text} for name, text in turn.wrong]
    first = {"reading along": 0, "late": args.stages - 2, "wrong": args.stages - 1}[way]
    stages = [right if number >= first else wrong for number in range(args.stages)]

    async def post(path: str, body: Body) -> None:
        async with client.http.post(path, json=body) as answer:
            if answer.status != 200:
                raise BenchError(f"{path}: {await answer.text()}")

    await read_along(post, body, _paced(stages[:-1], args.search / args.stages))
    await asyncio.sleep(args.search / args.stages)


async def _paced(stages: Sequence[list], seconds: float) -> AsyncIterator[list]:
    """Yield each stage at its time in the search."""
    start = perf_counter()
    for number, stage in enumerate(stages):
        await asyncio.sleep(max(start + (number + 1) * seconds - perf_counter(), 0))
        yield stage


async def _under_load(client: Client, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the tokens per second of one stream per slot, with and without a client that speculates all the time."""
    speeds: dict[str, list[float]] = {"alone": [], "speculating": []}
    for number in range(3):
        for name in list(speeds)[:: 1 if number % 2 else -1]:
            other = asyncio.create_task(_speculate_on(client, args)) if name == "speculating" else None
            speeds[name].append(await _streams(client, args, f"{number} {name}"))
            if other:
                other.cancel()
                await asyncio.gather(other, return_exceptions=True)
    return speeds


async def _streams(client: Client, args: argparse.Namespace, name: str) -> float:
    long = replace(client.sampling, max_tokens=LOAD)
    queries = [Query(f"stream {name} {number}", 1, question(f"{name} {number}")) for number in range(args.parallel)]
    started = perf_counter()
    for result in await asyncio.gather(*(client.ask(query, sampling=long) for query in queries)):
        result.answered()
    return args.parallel * LOAD / (perf_counter() - started)


async def _speculate_on(client: Client, args: argparse.Namespace) -> None:
    number = 0
    while True:
        await _search(client, args, "late", _staged_question(args, f"load {number}"))
        number += 1


def _row(way: str, results: Sequence[Result], ttft: Summary, waiting: Summary) -> tuple[str | int | float, ...]:
    prompt = round(median([result.prompt_tokens for result in results]))
    computed = round(median([result.computed_tokens for result in results]))
    return way, prompt, computed, 1000 * ttft.p50, 1000 * ttft.mean, ttft.p50 / waiting.p50
