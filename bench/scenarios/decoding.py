"""Measures the tokens per second of many streams at once, over the speed of llama.cpp's own benchmark without a server."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...slots.child import run_child
from ..client import Client, PromptSizer, Result
from ..journal import note
from ..report import Bar, BenchError, Report, ServerError, Table, median
from ..servers import add_options, arms_for, bench_model, in_rounds, llama_repack, sampling

BATCHED_BENCH = "llama-batched-bench"
REQUIRED = 0.90


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench decode`."""
    add_options(parser, slots=16, max_tokens=128)
    add = parser.add_argument
    add("--streams", type=_numbers, default=(1, 4, 8, 16), help="streams at a time (default: 1,4,8,16)")
    add("--prompt-tokens", type=int, default=256, help="tokens of each stream's prompt (default: %(default)s)")
    add("--llama-batched-bench", metavar="PATH", help="default: the program beside --llama-server")


def run(args: argparse.Namespace) -> Report:
    """Measure while all streams run: from the latest first token to the earliest last token."""
    speeds: dict[str, list[dict[int, float]]] = {}
    arms = arms_for(args, llama_slots=max(args.streams))
    binary = _batched_bench(args)
    for number, arm in in_rounds(arms, args.rounds):
        # The speed without a server is measured in every round, between the servers.
        if binary and arm is arms[0]:
            speeds.setdefault(BATCHED_BENCH, []).append(_engine_speeds(binary, args))

        async def work(client: Client, number: int = number) -> dict[int, float]:
            return await _server_speeds(client, args, number)

        speeds.setdefault(arm.name, []).append(arm.measure(sampling(args), work))
    middle = {name: {at: median([of[at] for of in rounds]) for at in args.streams} for name, rounds in speeds.items()}
    rows = [(name, *(speed[streams] for streams in args.streams)) for name, speed in middle.items()]
    title = f"decode: tokens/s of all streams, {args.prompt_tokens} tokens of prompt, {args.max_tokens} of output"
    table = Table(title, ("arm", *(f"{streams} streams" for streams in args.streams)), rows)
    bars, notes = [], []
    if binary:
        own, engine = middle[arms[0].name], middle[BATCHED_BENCH]
        bars = [_bar(streams, own[streams] / engine[streams]) for streams in args.streams]
    elif not args.url:
        notes.append(f"no {BATCHED_BENCH} was given (--{BATCHED_BENCH} PATH): nothing to compare with")
    data = {"arms": [arm.describe() for arm in arms], "speeds": speeds}
    return Report("decode", [table], bars=bars, notes=notes, data=data)


def shared_speed(results: Sequence[Result]) -> float:
    """Return the tokens per second while all of `results` were decoded; not a number if they did not overlap.

    A chunk may have several tokens, because half a character waits for its other half. Therefore chunks are weighted.
    """
    begin = max(result.started + result.arrivals[0] for result in results)
    end = min(result.started + result.arrivals[-1] for result in results)
    if end <= begin:
        return float("nan")
    tokens = 0.0
    for result in results:
        inside = sum(begin < result.started + arrival <= end for arrival in result.arrivals)
        tokens += inside * (result.completion_tokens or len(result.arrivals)) / len(result.arrivals)
    return tokens / (end - begin)


async def _server_speeds(client: Client, args: argparse.Namespace, number: int) -> dict[int, float]:
    sizer = await PromptSizer.of(client)
    alone = replace(client.sampling, cache_prompt=False)
    speeds: dict[int, float] = {}
    for streams in args.streams:
        queries = [sizer.query(f"stream {number} {streams} {i}", args.prompt_tokens) for i in range(streams)]
        results = await asyncio.gather(*(client.ask(query, sampling=alone) for query in queries))
        speeds[streams] = shared_speed([result.answered() for result in results])
        print(f"  {streams} streams: {speeds[streams]:.0f} tokens/s", file=sys.stderr, flush=True)
        note(arm=client.name, round=number, streams=streams, speed=speeds[streams])
    return speeds


def _engine_speeds(binary: Path, args: argparse.Namespace) -> dict[int, float]:
    """Return the speeds of `llama-batched-bench` with one pool of cells for all streams (-kvu), as in slotcache."""
    streams = ",".join(map(str, args.streams))
    command = [str(binary), "-m", str(bench_model(args)), "-c", str(args.ctx_size), "-kvu", "-t", str(args.threads)]
    command += ["-fa", args.flash_attn, "-npp", str(args.prompt_tokens), "-ntg", str(args.max_tokens), "-npl", streams]
    command += llama_repack(args.repack)
    print(f"  {BATCHED_BENCH} with {streams} streams", file=sys.stderr, flush=True)
    done = run_child([*command, "--output-format", "jsonl"])
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    speeds = {row["pl"]: row["speed_tg"] for row in rows}
    note(arm=BATCHED_BENCH, speeds=speeds)
    if missing := set(args.streams) - set(speeds):
        said = done.stderr[-2000:].decode("utf-8", "replace")
        raise ServerError(f"{' '.join(command)}\nended with code {done.returncode}, without {missing}:\n{said}")
    return speeds


def _batched_bench(args: argparse.Namespace) -> Path | None:
    if args.url:
        return None
    if args.llama_batched_bench:
        if shutil.which(args.llama_batched_bench) is None:
            raise BenchError(f"--{BATCHED_BENCH} {args.llama_batched_bench}: not a program that can be run")
        return Path(args.llama_batched_bench)
    beside = Path(args.llama_server).with_name(BATCHED_BENCH) if args.llama_server else None
    return beside if beside and beside.is_file() else None


def _bar(streams: int, ratio: float) -> Bar:
    return Bar(5, f"tokens/s over {BATCHED_BENCH}, {streams} streams", ratio, REQUIRED, at_least=True)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
