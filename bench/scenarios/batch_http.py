"""A batch on a server: its time beside that of llama-server's clients, and a chat beside it."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import aiohttp

from ..client import Client, Run, drive
from ..journal import note
from ..report import Bar, BenchError, Report, Summary, Table
from ..servers import Arm, add_options, arms_for, in_rounds, sampling
from ..trace import Query, burst, conversations

ENDPOINT = "/v1/chat/completions"
POLL = 0.2  # s between two looks at a batch
OPEN = ("validating", "in_progress", "finalizing")
MOST_TIME, MOST_WAIT = 0.5, 1.3  # the bars
TIMES = ("arm", "seconds", "prompt tokens", "cached", "cached %", "errors")


@dataclass(frozen=True, slots=True)
class Answered:
    """All prompts answered. seconds: until the last one. errors: their number."""

    seconds: float
    prompt: int
    cached: int
    errors: int

    def row(self, name: str) -> tuple[str | int | float, ...]:
        """Return the row under TIMES."""
        return name, self.seconds, self.prompt, self.cached, 100 * self.cached / max(self.prompt, 1), self.errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench batch-http`."""
    add_options(parser)
    add = parser.add_argument
    add("--requests", type=int, default=500, help="prompts of the batch (default: %(default)s)")
    add("--clients", type=int, default=8, help="of llama-server, at a time (default: %(default)s)")
    add("--chats", type=int, default=20, help="alone, and as many beside the batch (default: %(default)s)")
    add("--pause", type=float, default=1.0, help="seconds between two chats (default: %(default)s)")
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    """Answer the shuffled burst trace as one batch, and by clients of llama-server; then chat beside a batch."""
    if args.url:
        raise BenchError("batch-http starts its servers: leave --url out")
    queries = burst(args.requests, seed=args.seed)
    random.Random(args.seed).shuffle(queries)
    arms = arms_for(args, llama_slots=args.parallel)
    found: dict[str, list[Answered]] = {}
    for _, arm in in_rounds(arms, args.rounds):

        async def work(client: Client, arm: Arm = arm) -> Answered:
            if arm is arms[0]:
                return await _batch(client, queries)
            return _answered(await drive(client, queries, args.clients))

        one = arm.measure(sampling(args), work)
        found.setdefault(arm.name, []).append(one)
        note(arm=arm.name, seconds=one.seconds, cached=one.cached, prompt=one.prompt)
    own, *theirs = [sorted(runs, key=lambda one: one.seconds)[len(runs) // 2] for runs in found.values()]
    rows = [one.row(name) for name, one in zip(found, (own, *theirs), strict=True)]
    title = f"batch-http: {args.requests} prompts of the burst trace shuffled; {args.clients} clients of llama-server"
    bars = [Bar(2, "total time over llama-server's", own.seconds / one.seconds, MOST_TIME, unit="x") for one in theirs]
    alone, beside, unfinished = arms[0].measure(sampling(args), lambda client: _chats(client, queries, args))
    bars.append(Bar(2, "TTFT p50 of a chat beside a batch over alone", beside.p50 / alone.p50, MOST_WAIT, unit="x"))
    waits = [(name, one.count, 1000 * one.p50, 1000 * one.p95) for name, one in (("alone", alone), ("beside", beside))]
    notes = [] if unfinished else ["the batch had ended before the last chat: more --requests, or fewer --chats"]
    if not theirs:
        notes.append("no llama-server was given (--llama-server PATH): nothing to compare with")
    tables = [Table(title, TIMES, rows), Table("a chat", ("", "chats", "TTFT p50 ms", "p95"), waits)]
    return Report("batch-http", tables, bars=bars, notes=notes, has_failed=any(row[-1] for row in rows))


def _answered(run: Run) -> Answered:
    prompt, cached = (sum(getattr(one, name) for one in run.answered) for name in ("prompt_tokens", "cached_tokens"))
    return Answered(run.seconds, prompt, cached, len(run.errors))


async def _batch(client: Client, queries: list[Query]) -> Answered:
    """Return what came of one batch, from its upload to its end."""
    began = monotonic()
    name, told = await _begin(client, queries), began
    while (batch := await _get(client, f"/v1/batches/{name}"))["status"] in OPEN:
        if monotonic() - told >= 10:
            told = monotonic()
            print(f"  {batch['request_counts']}", file=sys.stderr, flush=True)
        await asyncio.sleep(POLL)  # between two looks at a server that works
    seconds = monotonic() - began
    if not batch.get("output_file_id"):
        raise BenchError(f"the batch ended as {batch['status']}: {batch.get('errors')}")
    async with client.http.get(f"/v1/files/{batch['output_file_id']}/content", raise_for_status=True) as answer:
        lines = [json.loads(line) for line in (await answer.text()).splitlines()]
    used = [line["response"]["body"]["usage"] for line in lines]
    prompt = sum(usage["prompt_tokens"] for usage in used)
    cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for usage in used)
    return Answered(seconds, prompt, cached, len(queries) - len(lines))


async def _begin(client: Client, queries: list[Query]) -> str:
    """Upload a batch and begin it; return its id. Raises BenchError."""
    lines = []
    for query in queries:
        _, body = await client.api.prepare(client.http, query, (), client.sampling)
        asked = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        lines.append(json.dumps({"custom_id": query.session, "method": "POST", "url": ENDPOINT, "body": asked}))
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", "\n".join(lines).encode(), filename="in.jsonl")
    file = await _post(client, "/v1/files", data=form)
    asked = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    return (await _post(client, "/v1/batches", json=asked))["id"]


async def _chats(client: Client, queries: list[Query], args: argparse.Namespace) -> tuple[Summary, Summary, bool]:
    """Return the waits of chats alone, of as many beside a batch, and whether it still ran at their end."""
    chats = conversations(2 * args.chats, turns=1, seed=args.seed)
    alone = await drive(client, chats[: args.chats], pause=args.pause)
    name = await _begin(client, [replace(query, session=f"beside {query.session}") for query in queries])
    while not (await _get(client, f"/v1/batches/{name}"))["request_counts"]["completed"]:
        if (await _get(client, f"/v1/batches/{name}"))["status"] not in OPEN:
            break
        await asyncio.sleep(POLL)
    beside = await drive(client, chats[args.chats :], pause=args.pause)
    batch = await _get(client, f"/v1/batches/{name}")
    if errors := alone.errors + beside.errors:
        raise BenchError(f"a chat failed: {errors[0]}")
    waits = [Summary.of(result.ttft for result in run.answered) for run in (alone, beside)]
    return waits[0], waits[1], batch["status"] in OPEN


async def _get(client: Client, path: str) -> dict[str, Any]:
    async with client.http.get(path, raise_for_status=True) as answer:
        return await answer.json()


async def _post(client: Client, path: str, **body: Any) -> dict[str, Any]:
    async with client.http.post(path, **body) as answer:
        told = await answer.json()
        if answer.status != 200:
            raise BenchError(f"POST {path} answered {answer.status}: {told.get('error', told)}")
        return told
