"""A draft model whose tokens are right by construction: its gain, and that which acceptance and costs predict."""

from __future__ import annotations

import argparse
import json
import os
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np

from ...models.context import Context, ContextSettings
from ...models.draft_model import DraftModel, open_draft_model
from ...models.errors import ModelError
from ...models.model import Model
from ...models.runner import Runner
from ...models.sampling import Sampler
from ...models.sampling_params import GREEDY
from ...slots.drafts import MODEL_ROWS, expected
from ...slots.lookup import Lookup
from ...slots.plan import Drop, Plan, Span, Trim
from ..journal import note
from ..random_models import SHAPES, cached_model
from ..report import Bar, BenchError, Cell, Report, Table, median
from ..servers import Server, free_port
from ..trace import prose
from .drafting import Answer, Streams

CELLS, PROMPT = 4096, 256
COLUMNS = (
    "draft model",
    "tokens/s off",
    "with it",
    "ratio",
    "accepted",
    "predicted",
    "of that",
    "llama-server",
    "its ratio",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench draft-model`."""
    add = parser.add_argument
    add("-m", "--model", type=Path, help="the served GGUF (default: a generated chain)")
    add(
        "--draft",
        type=Path,
        action="append",
        help="its draft model, or several (default: chains that agree at 0, 0.5, 0.7, 0.9)",
    )
    add("--llama-server", metavar="PATH", help="llama-server to compare with, started with -md")
    add("--llama-args", default="--spec-type draft-simple", metavar="'...'", help="more flags for it (default: %(default)s)")
    add("--answers", type=int, default=3, help="prompts (default: %(default)s)")
    add("--max-tokens", type=int, default=200, help="of an answer (default: %(default)s)")
    add("--rounds", type=int, default=3, help="with and without in turn; medians count (default: %(default)s)")
    add("-t", "--threads", type=int, default=os.cpu_count() or 1, help="default: %(default)s")
    add("-fa", "--flash-attn", choices=("on", "off", "auto"), default="auto", help="default: %(default)s")
    add("--json", type=Path, metavar="OUT", help="write everything measured to this file")


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens a second of one pair, in each round. share: of the checked tokens that were right. predicted: the ratio.

    theirs: of llama-server without a draft model, and with it; none were measured: empty.
    """

    name: str
    off: list[float]
    on: list[float]
    share: float
    predicted: float
    theirs: tuple[list[float], list[float]] = ((), ())  # type: ignore[assignment]

    @property
    def ratio(self) -> float:
        return median([on / off for on, off in zip(self.on, self.off, strict=True)])

    @property
    def cells(self) -> tuple[Cell, ...]:
        """A row of the table."""
        off, on = self.theirs
        their = median(on) / median(off) if off else None
        own = (self.name, median(self.off), median(self.on), self.ratio, self.share)
        return *own, self.predicted, self.ratio / self.predicted, median(on) if on else "", "" if their is None else their


def run(args: argparse.Namespace) -> Report:
    """Decode the same answers with a draft model and without, in turn."""
    agreements = {} if args.draft else {f"agrees at {share}": share for share in (0.0, 0.5, 0.7, 0.9)}
    drafts = {path.stem: path for path in args.draft or ()}
    for name, share in agreements.items():
        drafts[name] = cached_model(f"chain-draft-{share}", replace(SHAPES["chain-draft"], agreement=share))
    try:
        with ExitStack() as stack:
            model = stack.enter_context(closing(Model(args.model or cached_model("chain"))))
            settings = ContextSettings(
                num_cells=CELLS, flash_attention=args.flash_attn, threads=args.threads, num_sequences=64
            )
            bench = Bench(stack.enter_context(closing(Context(model, settings))), args)
            rows = [bench.pair(name, path) for name, path in drafts.items()]
    except ModelError as error:
        raise BenchError(error) from error
    bars = [Bar(1, "tokens/s with a draft model, of those without: the least", min(row.ratio for row in rows), 0.97, True)]
    useful = [row.ratio / row.predicted for row in rows if row.predicted > 1.1]
    if useful:
        bars.append(Bar(2, "tokens/s of those that acceptance and costs predict: the least", min(useful), 0.9, True))
    if args.llama_server:
        shares = [median(row.on) / median(row.theirs[1]) for row in rows if row.predicted > 1.1]
        bars.append(Bar(3, "tokens/s of llama-server's with the same pair: the least", min(shares, default=1.0), 0.9, True))
    title = f"draft models: one stream, {args.answers} answers of {args.max_tokens} tokens"
    return Report("draft-model", [Table(title, COLUMNS, [row.cells for row in rows])], bars)


class Bench:
    """The served model, with draft models one after the other."""

    def __init__(self, context: Context, args: argparse.Namespace) -> None:
        self._context, self._args = context, args
        self._runner = Runner(context)
        self._runner.warm_up()
        words = [
            np.asarray(context.model.tokenizer(prose(f"pair {number}", PROMPT)), np.int32) for number in range(args.answers)
        ]
        self._prompts = [np.resize(tokens, PROMPT) for tokens in words]

    def pair(self, name: str, path: Path) -> Measured:
        """Measure one draft model."""
        with closing(self._drafter(path)) as drafter:
            drafter.warm_up()
            seconds: dict[int, list[float]] = {}  # of a step by its rows
            first, further = [], []  # of a pass of the draft model: directly behind a step, and behind another pass
            plain, drafting = Streams(self._context, self._runner), Streams(self._context, self._runner, drafter=drafter)
            off, on = [], []
            answers: list[Answer] = []
            for number in range(self._args.rounds):
                self._measure_steps(seconds)
                for times, one in zip((first, further), self._pass_seconds(drafter), strict=True):
                    times.append(one)
                off.append(_speed(self._answers(plain, None)))
                answers = self._answers(drafting, True)
                on.append(_speed(answers))
                note(draft=name, round=number, off=off[-1], on=on[-1])
            share = _agreement(drafter, answers)
        steps = {rows: median(times) for rows, times in seconds.items()}
        predicted = _predicted(share, steps, median(first), median(further))
        return Measured(name, off, on, share, predicted, self._theirs(path))

    def _drafter(self, path: Path) -> DraftModel:
        settings = replace(self._context.settings, num_cells=CELLS)
        served, beside = self._context.model, self._runner.interrupt
        return open_draft_model(Model(path), settings, served, num_slots=4, beside=beside)

    def _answers(self, streams: Streams, asks: bool | None) -> list[Answer]:
        source = (lambda: Lookup(asks_model=True)) if asks else (lambda: None)
        answers: list[Answer] = []
        for prompt in self._prompts:
            streams.clear()
            answers += streams.answer([prompt], self._args.max_tokens, source)
        return answers

    def _measure_steps(self, seconds: dict[int, list[float]]) -> None:
        """Add the time of a step by its rows, in the middle of an answer: of the second one alike, and of the third."""
        sampler, depth = Sampler(self._context.model, GREEDY), PROMPT + self._args.max_tokens // 2
        tokens = np.resize(self._prompts[0], depth + MODEL_ROWS[-1])
        self._runner.clear()
        self._runner.run(Plan((), (Span(0, 0, 0, tokens[:depth], logits=False),)))
        for rows in (1, *MODEL_ROWS):
            span = Span(0, 0, depth, tokens[depth : depth + rows], logits=True, drafted=rows - 1)
            for number in range(3):
                began = perf_counter()
                self._runner.run(Plan((), (span,)), {0: sampler})
                if number:
                    seconds.setdefault(rows, []).append(perf_counter() - began)
                sampler.take_further()
                self._runner.apply(Trim(0, depth, depth + rows))
        self._runner.apply(Drop(0))
        sampler.close()

    def _pass_seconds(self, drafter: DraftModel) -> tuple[float, float]:
        """Return the time of a draft model's token directly behind a step, whose weights have left it cold, and later."""
        drafter.clear()
        runner, tokens, times = drafter._runner, self._prompts[0], []
        runner.run(Plan((), (Span(0, 0, 0, tokens, logits=False),)))
        self._runner.clear()
        for at in range(8):
            self._runner.run(Plan((), (Span(0, 0, at, tokens[at : at + 1], logits=False),)))
            for place in (PROMPT + 2 * at, PROMPT + 2 * at + 1):
                began = perf_counter()
                runner.run(Plan((), (Span(0, 0, place, tokens[:1], logits=True),)), drafter._samplers)
                times.append(perf_counter() - began)
        self._runner.clear()
        drafter.clear()
        return median(times[::2]), median(times[1::2])

    def _theirs(self, path: Path) -> tuple[list[float], list[float]]:
        """Return llama-server's tokens a second, without the draft model and with it."""
        if not self._args.llama_server:
            return [], []
        off, on = [], []
        for _ in range(self._args.rounds):
            off.append(self._served([]))
            on.append(self._served(["-md", str(path), *self._args.llama_args.split()]))
        return off, on

    def _served(self, more: list[str]) -> float:
        """Return the tokens a second of llama-server."""
        port, args = free_port(), self._args
        flags = ["-m", str(self._context.model.path), "-c", str(CELLS), "-np", "1", "-t", str(args.threads)]
        command = [args.llama_server, *flags, "-fa", args.flash_attn, "--host", "127.0.0.1", "--port", str(port), *more]
        tokens, seconds = 0, 0.0
        with Server(command, port) as server:
            for prompt in self._prompts[:1] + self._prompts:  # the first one warms it up
                body = {"prompt": prompt.tolist(), "n_predict": args.max_tokens, "temperature": 0, "cache_prompt": False}
                data = json.dumps(body | {"ignore_eos": True}).encode()
                asked = Request(f"{server.url}/completion", data, {"Content-Type": "application/json"})
                with build_opener(ProxyHandler({})).open(asked, timeout=600) as answer:
                    timings = json.load(answer)["timings"]
                if tokens or seconds:
                    tokens += timings["predicted_n"] - 1
                    seconds += timings["predicted_ms"] / 1000
                else:
                    seconds = 1e-9
        return tokens / seconds


def _speed(answers: list[Answer]) -> float:
    return sum(len(answer.tokens) - 1 for answer in answers) / sum(sum(answer.seconds) for answer in answers)


def _agreement(drafter: DraftModel, answers: list[Answer]) -> float:
    """Return the share of the answers' tokens that a draft model would have drafted."""
    runner, same = drafter._runner, []
    for answer in answers:
        tokens, first = answer.job.tokens[: answer.job.num_tokens], answer.job.num_prompt
        drafter.clear()
        runner.run(Plan((), (Span(0, 0, 0, tokens[:first], logits=False),)))
        for at in range(first, len(tokens) - 1):
            chosen = runner.run(Plan((), (Span(0, 0, at, tokens[at : at + 1], logits=True),)), drafter._samplers)
            same.append(chosen == [tokens[at + 1]])
    drafter.clear()
    return sum(same) / len(same)


def _predicted(share: float, steps: dict[int, float], first: float, further: float) -> float:
    """Return the most that tokens of which this share is right can gain.

    steps: seconds of a step by its rows. first, further: of the draft model's passes, which bring a row each.
    """
    times = {rows: (steps[rows] + first + further * (rows - 2)) / steps[1] for rows in MODEL_ROWS}
    return max(1.0, *((1 + expected(share, rows - 1)) / times[rows] for rows in MODEL_ROWS))
