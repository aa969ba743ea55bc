"""Simulates a long queue for little memory, with the real scheduler and without a model."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from ..journal import note
from ..report import Bar, Report, Table
from ..simulated import CELLS, SLOTS, Served, num_tokens, serve, shuffled

WAYS = (
    ("first come, retrieval order", "retrieval", 0),
    ("first come, exact order", "auto", 0),
    ("window of 8", "auto", 8),
    ("window of 32", "auto", 32),
)
LEAST = {64: 0.40, 256: 0.38}  # required share of cached tokens, by the number of waiting requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench queue`."""
    add = parser.add_argument
    add("--waiting", default="64,256,1024", help="numbers of requests that wait at once (default: %(default)s)")
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    """Serve the shuffled burst trace with each way to choose the next request. All requests are there from the start."""
    rows, bars = [], []
    for number in (int(number) for number in args.waiting.split(",")):
        found: dict[str, Served] = {}
        for name, policy, window in WAYS:
            print(f"  {number} waiting: {name}", file=sys.stderr, flush=True)
            one = found[name] = serve(shuffled(number, policy, args.seed), window)
            rows.append((number, name, one.cached, one.overtaken, one.p50, one.p95, one.choosing))
            note(waiting=number, way=name, **asdict(one))
        usual, fifo = found["window of 8"], found["first come, retrieval order"]
        if number in LEAST:
            bars.append(Bar(1, f"{number} waiting: share of tokens cached", usual.cached, LEAST[number], at_least=True))
        bars.append(Bar(1, f"{number} waiting: TTFT p95 over first come's", usual.p95 / fifo.p95, 1.2, unit="x"))
        if number == 256:
            bars.append(Bar(1, f"{number} waiting: choosing, an admission", usual.choosing, 200, unit=" us"))
    columns = ("waiting", "next", "cached", "overtaken at most", "TTFT p50 s", "p95", "choosing us")
    title = f"queue: the burst trace shuffled, {SLOTS} slots, {CELLS} cells, prompts of {num_tokens()} tokens"
    return Report("queue", [Table(title, columns, rows)], bars)
