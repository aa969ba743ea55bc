"""Questions about a folder of documents: typed while the server reads along, and asked after a start that has read ahead.

Each subject of the folder has as many documents as a question finds. A question names its subject in the midst of its words.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp

from ..client import Client, EncodedRequest, Result
from ..report import Bar, BenchError, Progress, Report, Summary, Table, median
from ..server_api import ChatApi
from ..servers import Arm, arms_for, ranker_model, sampling
from ..trace import prose, question

SETTLED = 1.0  # s in which nothing is written to disk
STARTS = ("Tarn", "Gal", "Os", "Ald", "Bren", "Cor", "Dun", "Elm", "Fen", "Har", "Kel", "Lor", "Mar", "Nor", "Pen", "Ros")
ENDS = ("wick", "mere", "by", "ford", "holm", "ton", "stead", "gate", "worth", "well")
PLACES = [start + end for end in ENDS for start in STARTS]
PAUSE = 0.3  # s without a key after which the page searches
REST = 0.5  # s that a person rests after some words
WORDS = 3  # typed at a stretch
WAYS = {
    "waiting": "the chat alone is sent, when the question is complete",
    "typing": "the page searches at each rest, and the server computes the leading documents",
}
ORIGINS = {
    "cold": "a server that has read nothing",
    "new": "started again with --read-ahead and --cache-dir; no question has found these documents before",
    "together": "the same; a question before the start has found the same documents",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench speculation` about a folder."""
    add = parser.add_argument
    add("--typing", action="store_true", help="questions about a folder, typed, and asked after a start")
    add("--seconds", type=float, default=5.0, help="with --typing: until a question is typed (default: %(default)s)")
    add("--subjects", type=int, default=100, help="with --typing: of the folder (default: %(default)s)")
    add("--embedding-model", type=Path, metavar="GGUF", help="with --typing: search by vectors as well")


def run(args: argparse.Namespace) -> Report:
    """Type, with a reranker and without, then ask after a start. Subjects are new to each question but the last kind."""
    if args.url:
        raise BenchError("--typing starts servers with a folder of its own: leave --url out")
    if not 4 * args.turns <= args.subjects <= len(PLACES):
        raise BenchError(f"--subjects {args.subjects}: expected 4 for each turn, and at most {len(PLACES)}")
    with TemporaryDirectory(prefix="slotcache-bench-") as name:
        folder = Path(name)
        _write(folder / "docs", args)
        typed = {ranks: _type_all(args, folder, ranks) for ranks in (False, True)}
        asked = _ask_all(args, folder)
    documents = f"{args.k} documents of {args.subjects * args.k}"
    tables = [
        *(_table(f"typing{', with a reranker' * ranks}: {documents}", WAYS, of, "waiting") for ranks, of in typed.items()),
        _table(f"reading ahead: {documents}", ORIGINS, asked, "cold"),
    ]
    bars = [
        *(
            Bar(4, f"TTFT p50{', with a reranker' * ranks}, typing over waiting", _ratio(of, "typing", "waiting"), most)
            for (ranks, of), most in zip(typed.items(), (0.6, 0.7), strict=True)
        ),
        Bar(4, "TTFT p50 of a new question after a start, over cold", _ratio(asked, "new", "cold"), 0.8),
        Bar(4, "of documents that were read together before it, over cold", _ratio(asked, "together", "cold"), 0.35),
    ]
    notes = [f"{name}: {what}" for name, what in (WAYS | ORIGINS).items()]
    data = {"typed": [_data(of) for of in typed.values()], "asked": _data(asked)}
    return Report("speculation --typing", tables, bars=bars, notes=notes, data=data)


def _write(folder: Path, args: argparse.Namespace) -> None:
    folder.mkdir()
    for subject, number in itertools.product(PLACES[: args.subjects], range(args.k)):
        before, after = (prose(f"{subject} {number} {half}", args.words // 2) for half in "ab")
        heading, first = f"# {subject}, part {number}", f"{subject}: {before} That is how it was in {subject}."
        text = f"{heading}\n\n{first} {after} So much of {subject}.\n"
        (folder / f"{subject.lower()}-{number}.md").write_text(text)


def _question(subject: str, number: int) -> str:
    return question(f"{subject} {number}").replace(" do when", f" of {subject} do when", 1)


def _arm(args: argparse.Namespace, folder: Path, name: str, flags: Sequence[str] = ()) -> Arm:
    """Return a server of the folder, with an index of its own."""
    embedding = ("--embedding-model", str(args.embedding_model)) if args.embedding_model else ()
    docs = ("--docs", str(folder / "docs"), "--docs-db", str(folder / name), "--docs-top-k", str(args.k))
    chosen = arms_for(args, slotcache_flags=(*docs, "--docs-watch", "off", *embedding, *flags))
    return replace(next(arm for arm in chosen if arm.name != "llama-server"), name=name, api=ChatApi())


# ---- typing ----------------------------------------------------------------------------------------------------------


def _type_all(args: argparse.Namespace, folder: Path, ranks: bool) -> dict[str, list[Result]]:
    """Return the results of each way, which take turns."""
    flags = ("--rerank-model", str(ranker_model())) if ranks else ()
    subjects = iter(PLACES)

    async def work(client: Client) -> dict[str, list[Result]]:
        results: dict[str, list[Result]] = {way: [] for way in WAYS}
        await _until_ready(client)
        with Progress(f"typing{', with a reranker' * ranks}", len(WAYS) * args.turns) as progress:
            for number, way in _in_turn(WAYS, args.turns):
                results[way].append(await _typed(client, args, _question(next(subjects), number), way == "typing"))
                progress.step(f"{way}: {1000 * results[way][-1].ttft:.0f} ms")
        return results

    return _arm(args, folder, f"typing-{ranks}", flags).measure(sampling(args), work)


async def _typed(client: Client, args: argparse.Namespace, text: str, is_read_along: bool) -> Result:
    """Type a question, a few words and a rest in turn, with a search at each rest; send it with the last word."""
    words, name = text.split(), f"chat {text}"
    stretches = -(-len(words) // WORDS)
    typing = max(args.seconds - REST * (stretches - 1), 0.0) / stretches
    for stop in range(WORDS, len(words), WORDS):
        await asyncio.sleep(typing)
        searching = asyncio.ensure_future(_search(client, " ".join(words[:stop]), name)) if is_read_along else None
        await asyncio.sleep(REST)
        if searching is not None:
            searching.cancel()
            await asyncio.wait([searching])
    await asyncio.sleep(typing)
    return await _ask(client, text, name)


async def _search(client: Client, query: str, name: str) -> None:
    """Search as the page does; the next key ends it."""
    await asyncio.sleep(PAUSE)
    with suppress(aiohttp.ClientError):
        async with client.http.post("/v1/search", json={"query": query, "speculate": name, "stream": True}) as answer:
            await answer.read()


async def _ask(client: Client, text: str, name: str) -> Result:
    """Ask as the page does. Raises BenchError."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "conversation": {"id": name, "history": "whole"},
        "retrieval": True,
        "cache_prompt": True,
        "store": True,
        "return_progress": True,
        "report_segments": True,
        "max_tokens": client.sampling.max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    result = await client.send(EncodedRequest("/v1/chat/completions", json.dumps(body).encode(), name))
    if result.error:
        raise BenchError(f"{text}: {result.error}")
    await asyncio.sleep(REST)  # the answer is read
    return result


# ---- reading ahead ---------------------------------------------------------------------------------------------------


def _ask_all(args: argparse.Namespace, folder: Path) -> dict[str, list[Result]]:
    """Return the results of each origin, which take turns: of two servers, one of which reads ahead and is started twice."""
    ahead = _arm(args, folder, "ahead", ("--read-ahead", "1024", "--cache-dir", str(folder / "kv")))
    cold = _arm(args, folder, "cold")
    known, fresh = PLACES[: args.turns], iter(PLACES[args.turns : args.subjects])

    async def prepare(client: Client) -> None:
        await _until_read(client)
        for subject in known:
            await _ask(client, _question(subject, 0), f"before {subject}")
        await _until_read(client)

    ahead.measure(sampling(args), prepare)
    results: dict[str, list[Result]] = {origin: [] for origin in ORIGINS}
    with ExitStack() as servers:
        urls = {arm.name: servers.enter_context(arm.up()) for arm in (ahead, cold)}

        async def work(warm: Client) -> None:
            async with Client(urls["cold"], cold.api, sampling(args), name=cold.name) as other:
                await asyncio.gather(_until_read(warm), _until_ready(other))
                await _ask(other, _question(next(fresh), 0), "warm-up")
                with Progress("reading ahead", len(ORIGINS) * args.turns) as progress:
                    for number, origin in _in_turn(ORIGINS, args.turns):
                        subject = known[number] if origin == "together" else next(fresh)
                        client = other if origin == "cold" else warm
                        results[origin].append(await _ask(client, _question(subject, 1), f"{origin} {subject}"))
                        progress.step(f"{origin}: {1000 * results[origin][-1].ttft:.0f} ms")

        asyncio.run(ahead.work(urls["ahead"], sampling(args), work))
    return results


async def _until_ready(client: Client) -> None:
    await _until(client, lambda shown: all(one["state"] == "ready" for one in shown["collections"]))


async def _until_read(client: Client) -> None:
    """Return when all documents are computed, and what was computed is on disk."""
    await _until_ready(client)
    await _until(client, lambda shown: shown["read_ahead"]["done"])
    written, before = -1.0, -2.0
    while written != before:
        await asyncio.sleep(SETTLED)
        written, before = await client.gauge("slotcache_disk_written_runs_total"), written


async def _until(client: Client, holds: Callable[[dict], bool]) -> None:
    while True:
        async with client.http.get("/v1/sources", params={"limit": 1}) as answer:
            if holds(await answer.json()):
                return
        await asyncio.sleep(0.2)


# ---- figures ---------------------------------------------------------------------------------------------------------


def _in_turn(names: Mapping[str, str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield every name once a round, backwards in every other round."""
    for number in range(rounds):
        for name in list(names)[:: 1 if number % 2 else -1]:
            yield number, name


def _ratio(results: Mapping[str, Sequence[Result]], name: str, base: str) -> float:
    p50, of = (Summary.of(result.ttft for result in results[one]).p50 for one in (name, base))
    return p50 / of


def _table(title: str, names: Mapping[str, str], results: Mapping[str, Sequence[Result]], base: str) -> Table:
    columns = ("question", "prompt tokens", "computed", "TTFT p50 ms", "mean", f"of {base}")
    rows = []
    for name in names:
        of = results[name]
        sizes = ([result.prompt_tokens for result in of], [result.computed_tokens for result in of])
        ttft = Summary.of(result.ttft for result in of)
        rows.append((name, *map(round, map(median, sizes)), 1000 * ttft.p50, 1000 * ttft.mean, _ratio(results, name, base)))
    return Table(title, columns, rows)


def _data(results: Mapping[str, Sequence[Result]]) -> dict[str, list[dict[str, float]]]:
    return {
        name: [{"ttft": one.ttft, "prompt_tokens": one.prompt_tokens, "cached_tokens": one.cached_tokens} for one in of]
        for name, of in results.items()
    }
