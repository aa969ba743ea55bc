"""Streams on all routes while a long prompt is computed: when the first event comes, and how long none does."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from time import perf_counter

import aiohttp

from ..client import Client, PromptSizer
from ..report import Bar, BenchError, Report, Table
from ..server_api import Body
from ..servers import add_options, arms_for, sampling
from ..trace import Query

FIRST, SILENCE = 100, 10  # most ms to the first event, and seconds between two
PROBE = 2000  # tokens of a prompt that tells the speed
BESIDE = 100  # tokens of the prompts that wait


def _chat(text: str) -> Body:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


ROUTES: dict[str, Callable[[str], Body]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 1},
    "/v1/messages": _chat,
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 1},
    "/completion": lambda text: {"prompt": text, "n_predict": 1},
    "/api/chat": lambda text: _chat(text) | {"options": {"num_predict": 1}},
    "/api/generate": lambda text: {"prompt": text, "options": {"num_predict": 1}},
}
LONG = next(iter(ROUTES))  # the route of the long prompt


@dataclass(frozen=True, slots=True)
class Wait:
    """A stream. Seconds from its request: of each event, and of the end."""

    path: str
    events: tuple[float, ...]
    end: float

    @property
    def silence(self) -> float:
        """The longest time without an event, from the first one on."""
        return max((later - earlier for earlier, later in pairwise((*self.events, self.end))), default=self.end)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench silence`."""
    add_options(parser, context=65536, slots=1)
    add = parser.add_argument
    add(
        "--seconds",
        type=float,
        default=30.0,
        help="of the long prompt, if the context holds it (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> Report:
    """Ask on each route while the server computes a long prompt in its only slot."""
    arm = arms_for(args, slotcache_flags=("--any-model",))[0]
    waits, before = arm.measure(sampling(args), lambda client: _waits(client, args))
    title = f"silence: streams on {len(ROUTES)} routes while one computes a long prompt"
    rows = [
        (wait.path, 1000 * alone, 1000 * wait.events[0], len(wait.events), wait.silence, wait.end)
        for wait, alone in zip(waits, before, strict=True)
    ]
    columns = ("route", "first event, idle ms", "first event ms", "events", "longest silence s", "whole answer s")
    first, silence = max(wait.events[0] for wait in waits), max(wait.silence for wait in waits)
    bars = [
        Bar(2, "first event of a stream while a long prompt is computed", 1000 * first, FIRST, unit=" ms"),
        Bar(2, "longest silence of a stream", silence, SILENCE, unit=" s"),
    ]
    data = {"waits": [asdict(wait) for wait in waits], "arms": [arm.describe()]}
    return Report("silence", [Table(title, columns, rows)], bars=bars, data=data)


async def _waits(client: Client, args: argparse.Namespace) -> tuple[list[Wait], list[float]]:
    """Return the streams, the long one first, and when the first event came on each one's route on an idle server."""
    sizer, once = await PromptSizer.of(client), replace(client.sampling, max_tokens=1, cache_prompt=False)
    probe = await client.ask(sizer.query("probe", min(PROBE, args.ctx_size // 2)), sampling=once)
    if probe.error:
        raise BenchError(f"a prompt that tells the speed: {probe.error}")
    async with client.http.get("/v1/models") as answer:
        most = round(0.9 * (await answer.json())["data"][0]["context_length"])
    num_tokens = min(round(probe.prompt_tokens / probe.ttft * args.seconds), most)
    alone = {path: (await _watch(client.http, path, sizer.query(path, BESIDE))).events[0] for path in ROUTES}
    long = asyncio.create_task(_watch(client.http, LONG, sizer.query("long", num_tokens)))
    while not (long.done() or await client.gauge("slotcache_requests_running")):
        await asyncio.sleep(0.01)  # until the engine has it
    waiting: list[asyncio.Task[Wait]] = []
    for path in ROUTES:  # one after the other: each is a client of its own
        waiting.append(asyncio.create_task(_watch(client.http, path, sizer.query(f"beside {path}", BESIDE))))
        await asyncio.sleep(min(args.seconds / 30, 1))
    waits = await asyncio.gather(long, *waiting)
    return list(waits), [alone[wait.path] for wait in waits]


async def _watch(http: aiohttp.ClientSession, path: str, query: Query) -> Wait:
    body = json.dumps(ROUTES[path](query.question) | {"model": "any", "stream": True, "cache_prompt": False}).encode()
    started, events = perf_counter(), list[float]()
    async with http.post(path, data=body, headers={"Content-Type": "application/json"}) as answer:
        if answer.status != 200:
            raise BenchError(f"{path}: {await answer.text()}")
        async for line in answer.content:
            if _is_event(path, line):
                events.append(perf_counter() - started)
    if not events:
        raise BenchError(f"{path}: a stream without events")
    return Wait(path, tuple(events), perf_counter() - started)


def _is_event(path: str, line: bytes) -> bool:
    """Whether clients of a route count a line as a sign of life: Ollama's any line, llama-server's comments, too."""
    if path.startswith("/api/"):
        return line.startswith(b"{")
    return line.startswith((b"data:", b":") if path == "/completion" else b"data:")
