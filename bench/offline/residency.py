"""The price of idle KV on the device, and of its way to host memory and back."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter

import numpy as np

from ...models.context import Context, ContextSettings
from ...models.errors import ModelError
from ...models.model import Model
from ...models.runner import Runner
from ...models.sampling import Sampler
from ...models.sampling_params import Sampling
from ...slots.plan import Drop, HostCopy, Plan, Restore, Save, Share, Span, Trim
from ..journal import note
from ..report import BenchError, Report, Table, median
from ..servers import bench_model

# ---- A pool of KV cells in this process, filled and emptied by hand through the server's own runner. --------------------

IDLE_RUN = 1024
"""Tokens of each idle sequence."""
MOVED, RUNNING, IDLE = 0, 1, 32
"""Sequences: the one that saved KV comes back to, the first of those that run, the first idle one."""
MOST_STREAMS = IDLE - RUNNING


class Pool:
    """Its methods return the seconds that they took. Token ids are arbitrary; sampling is greedy."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.runner = Runner(context)
        self._samplers = dict.fromkeys(range(IDLE), Sampler(context.model, Sampling(temperature=0)))
        self.num_idle = 0
        self._idle_copy: HostCopy | None = None
        self._tokens = np.random.default_rng(0).integers(0, min(4000, context.model.num_vocab), 1 << 16, np.int32)

    def warm_up(self) -> None:
        """Run a first batch of each size: it pays for buffers and graphs."""
        self.runner.warm_up()
        self.prefill(RUNNING, 2 * self.context.batch)
        for at in range(4):
            self.step([RUNNING], 2 * self.context.batch + at)
        self.drop(RUNNING)

    def prefill(self, sequence: int, length: int) -> float:
        """Compute `length` tokens into an empty sequence, batch by batch."""
        began, size = perf_counter(), self.context.batch
        for start in range(0, length, size):
            stop = min(start + size, length)
            span = Span(sequence, sequence, start, self._tokens[start:stop], logits=stop == length)
            self.runner.run(Plan((), (span,), num_spare=self._num_spare - stop), self._samplers)
        return perf_counter() - began

    def step(self, sequences: Sequence[int], position: int) -> float:
        """Decode one token of each sequence at `position`."""
        token = self._tokens[position : position + 1]
        spans = tuple(Span(sequence, sequence, position, token, logits=True) for sequence in sequences)
        began = perf_counter()
        self.runner.run(Plan((), spans, num_spare=self._num_spare - position - len(sequences)), self._samplers)
        return perf_counter() - began

    def save(self, sequence: int, length: int) -> tuple[float, HostCopy]:
        """Copy a sequence's first tokens to host memory, as the server does. Return the seconds and the copy."""
        copy = HostCopy(0, length)
        began = perf_counter()
        self.runner.apply(Save(sequence, copy))
        return perf_counter() - began, copy

    def restore(self, copy: HostCopy, sequence: int) -> float:
        """Restore `copy` into new cells of an empty sequence."""
        began = perf_counter()
        self.runner.apply(Restore(copy, sequence, copy.start, copy.stop))
        return perf_counter() - began

    def share(self, source: int, targets: Sequence[int], length: int) -> None:
        """Let `targets` share the first tokens of `source`."""
        for target in targets:
            self.runner.apply(Share(source, target, 0, length))

    def trim(self, sequence: int, start: int, stop: int) -> None:
        """Remove the tokens of a sequence from `start` to `stop`."""
        self.runner.apply(Trim(sequence, start, stop))

    def drop(self, *sequences: int) -> None:
        """Empty sequences."""
        for sequence in sequences:
            self.runner.apply(Drop(sequence))

    def keep_idle(self, num_cells: int) -> None:
        """Fill the pool up to `num_cells` idle cells, with copies of one run: the content does not change the cost."""
        if self._idle_copy is None and num_cells:
            self.prefill(RUNNING, IDLE_RUN)
            _, self._idle_copy = self.save(RUNNING, IDLE_RUN)
            self.drop(RUNNING)
        while self._idle_copy and self.num_idle < num_cells:
            self.restore(self._idle_copy, IDLE + self.num_idle // IDLE_RUN)
            self.num_idle += IDLE_RUN

    @property
    def _num_spare(self) -> int:
        """Cells that no idle sequence holds."""
        return self.context.num_cells - self.num_idle


SPARE = 512
"""Cells beyond those that are measured."""
Figures = dict[str, float]
"""By name: seconds, tokens, bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench residency`."""
    add = parser.add_argument
    add("-m", "--model", type=Path, help="GGUF to measure (default: the bench model, generated once)")
    add("--idle", type=_numbers, default=(0, 4096, 12288), help="idle cells (default: 0,4096,12288)")
    add("--lengths", type=_numbers, default=(200, 1000, 5000), help="tokens to save and restore (default: 200,1000,5000)")
    add("--streams", type=_numbers, default=(1, 8), help="streams that decode (default: 1,8)")
    add("--prompt-tokens", type=int, default=1024, help="tokens prefilled, which the streams share (default: %(default)s)")
    add("--steps", type=int, default=24, help="decode steps of a repetition (default: %(default)s)")
    add("--repeats", type=int, default=3, help="repetitions, of which the median counts (default: %(default)s)")
    add("-t", "--threads", type=int, default=os.cpu_count() or 1, help="default: %(default)s")
    add("-b", "--batch-size", type=int, default=512, help="most tokens a step computes (default: %(default)s)")
    add("-ub", "--ubatch-size", type=int, default=512, help="most tokens a kernel computes (default: %(default)s)")
    add("-ngl", "--gpu-layers", type=int, default=9999, help="layers on the GPU (default: all)")
    add("-fa", "--flash-attn", choices=("on", "off", "auto"), default="auto", help="default: %(default)s")
    add("--repack", choices=("on", "off"), default="off", help="weight repacking (default: %(default)s)")
    add("--json", type=Path, metavar="OUT", help="write everything measured to this file")
    parser.set_defaults(llama_server=None)


def run(args: argparse.Namespace) -> Report:
    """Move KV of each length out of and into an otherwise empty pool, then fill it with more and more idle cells."""
    if max(args.streams) > MOST_STREAMS:
        raise BenchError(f"--streams {max(args.streams)}: at most {MOST_STREAMS}")
    running = args.prompt_tokens + max(args.streams) * args.steps
    num_cells = max(max(args.idle) + running, 2 * max(args.lengths), 2 * args.batch_size) + SPARE
    settings = ContextSettings(
        num_cells=num_cells,
        batch=args.batch_size,
        micro_batch=args.ubatch_size,
        flash_attention=args.flash_attn,
        threads=args.threads,
    )
    try:
        model = Model(bench_model(args), args.gpu_layers, repack=args.repack == "on")
        with closing(model), closing(Context(model, settings)) as context:
            pool = Pool(context)
            pool.warm_up()
            moves = [_move(pool, length, args.repeats) for length in args.lengths]
            steps = [_beside(pool, idle, args) for idle in sorted(args.idle)]
    except ModelError as error:
        raise BenchError(error) from error
    return Report(
        "residency", [_moves(moves), _steps(steps, args)], data={"moves": moves, "steps": steps, "cells": num_cells}
    )


def _move(pool: Pool, length: int, repeats: int) -> Figures:
    """Return the seconds to compute `length` tokens, to save them to host memory and to restore them."""
    computed, saved, restored, size = [], [], [], 0
    for _ in range(repeats):
        computed.append(pool.prefill(RUNNING, length))
        seconds, copy = pool.save(RUNNING, length)
        saved.append(seconds)
        size = 0 if copy.data is None else copy.data.nbytes
        restored.append(pool.restore(copy, MOVED))
        pool.drop(RUNNING, MOVED)
    first = {"first_save": saved[0], "first_restore": restored[0]}
    found: Figures = {
        "tokens": length,
        "bytes": size,
        "compute": median(computed),
        "save": median(saved),
        "restore": median(restored),
    } | first
    note(**found)
    return found


def _beside(pool: Pool, idle: int, args: argparse.Namespace) -> Figures:
    """Return the seconds of a prefill and of decode steps while idle sequences hold `idle` cells."""
    pool.keep_idle(idle)
    prompt, prefills = args.prompt_tokens, []
    steps: dict[int, list[float]] = {streams: [] for streams in args.streams}
    for _ in range(args.repeats):
        prefills.append(pool.prefill(RUNNING, prompt))
        for streams in args.streams:
            running = range(RUNNING, RUNNING + streams)
            pool.share(RUNNING, running[1:], prompt)
            steps[streams] += [pool.step(running, prompt + at) for at in range(args.steps)]
            pool.drop(*running[1:])
            pool.trim(RUNNING, prompt, prompt + args.steps)
        pool.drop(RUNNING)
    decode = {f"step_{streams}": median(seconds) for streams, seconds in steps.items()}
    found: Figures = {"idle_cells": pool.num_idle, "prefill": median(prefills)} | decode
    note(**found)
    return found


def _moves(rows: Sequence[Figures]) -> Table:
    columns = ("tokens", "MiB", "compute ms", "save ms", "restore ms", "save GB/s", "restore GB/s", "compute / restore")
    return Table(
        "residency: KV to host memory and back",
        columns,
        [
            (
                str(row["tokens"]),
                row["bytes"] / 2**20,
                *(1000 * row[name] for name in ("compute", "save", "restore")),
                *(row["bytes"] / row[name] / 1e9 for name in ("save", "restore")),
                row["compute"] / row["restore"],
            )
            for row in rows
        ],
    )


def _steps(rows: Sequence[Figures], args: argparse.Namespace) -> Table:
    return Table(
        f"residency: a prefill of {args.prompt_tokens} tokens, and decode steps behind them, beside idle cells",
        ("idle cells", "prefill tokens/s", *(f"step of {streams} ms" for streams in args.streams)),
        [
            (
                str(row["idle_cells"]),
                args.prompt_tokens / row["prefill"],
                *(1000 * row[f"step_{streams}"] for streams in args.streams),
            )
            for row in rows
        ],
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
