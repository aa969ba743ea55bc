"""Lets several models take turns on one device. Measures how much KV survives a swap of models, and the time of a swap.

llama-server's router runs a process for each model. When the process ends, the model's KV is lost.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from ..report import Bar, BenchError, Cell, Report, Table, median
from ..servers import HOST, Server, events, free_port, llama_server, own_command

FILLER = "The keeper of the northern lighthouse writes down wind, tide and every ship that passes. "
EARLY = 10  # swaps between two readings of memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench models`."""
    add = parser.add_argument
    add("models", type=Path, nargs="+", metavar="GGUF", help="two models or more")
    add("--swaps", type=int, default=20, help="default: %(default)s")
    add("--conversations", type=int, default=8, help="conversations with each model (default: %(default)s)")
    add("--words", type=int, default=300, help="words of each conversation's first turn (default: %(default)s)")
    add("--requests", type=int, default=0, help="more requests, from 8 clients to all models (default: %(default)s)")
    add("--model-turn", type=int, default=2, help="default: %(default)s")
    add("--cache-ram", type=int, default=2048, help="MiB of KV in the memory of each server (default: %(default)s)")
    add("-c", "--ctx-size", type=int, default=8192, help="context of each server, tokens (default: %(default)s)")
    add("-t", "--threads", type=int, default=os.cpu_count() or 1, help="threads of each server (default: %(default)s)")
    add("--llama-server", metavar="PATH", help="llama-server, whose router gets the same conversations")
    add("--slotcache-args", default="", metavar="'...'", help="more flags for slotcache serve")


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer.

    kept: the tokens that an earlier turn had computed.
    cached: the tokens that the server reused.
    ttft, seconds: the seconds to the first token, and to the end.
    """

    kept: int
    cached: int
    ttft: float
    seconds: float


@dataclass(slots=True)
class Talk:
    """A conversation with one model. num_known: the tokens of its last prompt."""

    model: str
    messages: list[dict[str, str]]
    num_known: int = 0

    def ask(self, url: str, text: str) -> Turn:
        """Ask once more, after only the first turn, so that the conversation does not grow. Raises BenchError."""
        del self.messages[2:]
        self.messages.append({"role": "user", "content": text})
        body = {"model": self.model, "messages": self.messages, "max_tokens": 8, "temperature": 0, "cache_prompt": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        began, ttft, text, kept = perf_counter(), 0.0, "", self.num_known
        usage: dict[str, Any] = {}
        try:
            for chunk in events(f"{url}/v1/chat/completions", body, 600):
                if "error" in chunk:
                    raise BenchError(f"{url}: {chunk['error']}")
                usage = chunk.get("usage") or usage
                if piece := "".join(choice["delta"].get("content") or "" for choice in chunk["choices"]):
                    text, ttft = text + piece, ttft or perf_counter() - began
        except OSError as error:
            raise BenchError(f"{url}: {error}") from None
        seconds = perf_counter() - began
        self.messages.append({"role": "assistant", "content": text})
        self.num_known = usage["prompt_tokens"]
        return Turn(kept, usage["prompt_tokens_details"]["cached_tokens"], ttft or seconds, seconds)


def run(args: argparse.Namespace) -> Report:
    """Let all conversations with a model take a turn, then all with the next model, and so on. Raises BenchError."""
    if len(args.models) < 2:
        raise BenchError("expected two models or more")
    port, files = free_port(), [part for file in args.models for part in ("-m", str(file))]
    flags = ["--port", str(port), "--model-turn", str(args.model_turn), *_both(args), *args.slotcache_args.split()]
    with Server([*own_command(), "serve", *files, *flags], port) as server:
        swaps, memory = _swaps(server, args)
        waits = _crowd(server.url, args)
    after = _after_swaps(swaps)
    shares = [sum(min(turn.cached, turn.kept) for turn in turns) / sum(turn.kept for turn in turns) for turns in after]
    firsts = [turns[0].seconds for turns in after]
    ttfts = _ttfts(after)
    least = min(shares, default=0.0)
    rows: list[tuple[str, Cell]] = [("swaps", len(swaps)), ("tokens that came back, the least share", least)]
    rows += [("seconds of the first answer behind a swap, median", median(firsts))]
    rows += [(f"TTFT, s, of {name}, median", seconds) for name, seconds in ttfts.items()]
    rows += [("memory, MiB, after each 10 swaps", " ".join(f"{size >> 20}" for size in memory))]
    rows += [("requests of the crowd", len(waits)), ("longest wait, s", max(waits, default=0.0))]
    bars = [Bar(38, "the least share of tokens that came back after a swap", least, 0.95, at_least=True)]
    bars += [Bar(38, "memory at the end over memory after 10 swaps", memory[-1] / memory[0], 1.05, unit="x")]
    data: dict[str, Any] = {"shares": shares, "firsts": firsts, "memory": memory, "waits": waits, "ttft": ttfts}
    if binary := llama_server(args):
        theirs = data["router"] = _ttfts(_after_swaps(_router_swaps(binary, args)))
        rows += [(f"TTFT, s, of {name}, median, llama-server's router", seconds) for name, seconds in theirs.items()]
        ratios = {name: ttfts[name] / theirs[name] for name in ttfts}
        bars += [Bar(38, f"TTFT of {name} over llama-server's router's", of, 0.2, unit="x") for name, of in ratios.items()]
    table = Table(f"models: {len(args.models)} models, {args.conversations} conversations each", ("what", "value"), rows)
    return Report("models", [table], bars=bars, data=data)


def _both(args: argparse.Namespace) -> list[str]:
    """Return the flags of both servers."""
    return ["-c", str(args.ctx_size), "--cache-ram", str(args.cache_ram), "-t", str(args.threads)]


def _after_swaps(swaps: list[list[Turn]]) -> list[list[Turn]]:
    """Return the turns after each swap, without the first turns of conversations."""
    return [turns for turns in swaps if any(turn.kept for turn in turns)]


def _ttfts(after: list[list[Turn]]) -> dict[str, float]:
    return {
        "the first answer behind a swap": median([turns[0].ttft for turns in after]),
        "all answers behind a swap": median([turn.ttft for turns in after for turn in turns]),
    }


def _router_swaps(binary: str, args: argparse.Namespace) -> list[list[Turn]]:
    """Hold the same conversations with llama-server's router. Raises BenchError."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        for file in args.models:
            Path(folder, file.name).symlink_to(file.absolute())
        flags = ["--models-dir", folder, "--models-max", "1", "--host", HOST, "--port", str(port), "--no-webui"]
        with Server([binary, *flags, *_both(args)], port) as server:
            return _swaps(server, args)[0]


def _swaps(server: Server, args: argparse.Namespace) -> tuple[list[list[Turn]], list[int]]:
    names = [file.stem for file in args.models]
    filler = " ".join((FILLER.split() * args.words)[: args.words])
    opening = [f"Log {number}. {filler}" for number in range(args.conversations)]
    talks = {name: [Talk(name, []) for _ in opening] for name in names}
    swaps: list[list[Turn]] = []
    memory: list[int] = []
    for number in range(args.swaps + len(names)):
        name = names[number % len(names)]
        is_first = number < len(names)
        pairs = zip(talks[name], opening, strict=True)
        swaps.append([talk.ask(server.url, text if is_first else "Go on.") for talk, text in pairs])
        if number >= EARLY and number % EARLY == 0:
            memory.append(server.memory)
    return swaps, memory or [server.memory]


def _crowd(url: str, args: argparse.Namespace) -> list[float]:
    """Return the seconds of each request from 8 clients, which use all models in turn."""
    asked: Iterator[str] = (args.models[number % len(args.models)].stem for number in range(args.requests))
    with ThreadPoolExecutor(8) as clients:
        return list(clients.map(lambda name: Talk(name, []).ask(url, "Say hello.").seconds, asked))
