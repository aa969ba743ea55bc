"""Drafts from the prompt: what they gain where answers quote it, what they cost where none is right. Without a server."""

from __future__ import annotations

import argparse
import json
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...models.context import Context, ContextSettings
from ...models.errors import ModelError
from ...models.model import Model
from ...models.runner import Runner
from ...slots.lookup import Lookup
from ..journal import note
from ..report import Bar, BenchError, Cell, Report, Table, median
from ..servers import DATA_VARIABLE, bench_model
from ..trace import prose
from .drafting import SLOTS, Always, Answer, Source, Streams

CELLS = 8192
MOST_PROMPT, MOST_ANSWER = 1000, 150  # tokens of a conversation's documents, and of a reference
COLUMNS = ("answers of", "number", "tokens", "tokens/s off", "lookup", "ratio", "median ratio", "drafted", "accepted")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench drafts`."""
    add = parser.add_argument
    add("-m", "--model", type=Path, help="GGUF for forced answers (default: the bench model, generated once)")
    add(
        "--quoting",
        type=Path,
        metavar="GGUF",
        help="a model that can quote, such as SmolLM2, for the other parts",
    )
    add("--data", type=Path, default=os.environ.get(DATA_VARIABLE), help="folder with mtrag/, whose answers are forced")
    add("--references", type=int, default=40, help="answers of MT-RAG (default: %(default)s)")
    add("--passages", type=int, default=8, help="passages to quote (default: %(default)s)")
    add("--same", type=int, default=0, help="prompts whose texts are compared with those of wrong drafts (default: none)")
    add("--max-tokens", type=int, default=120, help="of an answer that is not forced (default: %(default)s)")
    add("--rounds", type=int, default=3, help="of the random-weight model; the median counts (default: %(default)s)")
    add("--max-stall", type=int, default=200, help="ms that drafts beside other streams may take (default: %(default)s)")
    add("-t", "--threads", type=int, default=os.cpu_count() or 1, help="default: %(default)s")
    add("-fa", "--flash-attn", choices=("on", "off", "auto"), default="auto", help="default: %(default)s")
    add("--json", type=Path, metavar="OUT", help="write everything measured to this file")


def run(args: argparse.Namespace) -> Report:
    """Decode the same answers with and without drafts, in turn."""
    rows: list[Measured] = []
    bars: list[Bar] = []
    notes: list[str] = []
    try:
        with closing(Model(bench_model(args))) as model, closing(_context(model, args)) as context:
            bench = Bench(context, args)
            rows.append(bench.random())
            bars.append(Bar(1, "tokens/s of the random-weight model, of those without", rows[-1].ratio, 0.99, at_least=True))
            if args.data:
                rows += bench.forced(args.data)
                bars.append(Bar(2, "tokens/s of forced references, of those without", rows[-2].ratio, 1.5, at_least=True))
            bars.append(bench.gaps())
        if args.quoting:
            with closing(Model(args.quoting)) as model, closing(_context(model, args)) as context:
                bench = Bench(context, args)
                rows.append(bench.free())
                if args.same:
                    bars += bench.same(notes)
    except ModelError as error:
        raise BenchError(error) from error
    title = "drafts: one stream, with `draft` off and lookup in turn"
    return Report("drafts", [Table(title, COLUMNS, [row.cells for row in rows])], bars, notes)


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Answers to the same prompts, without drafts and with them."""

    name: str
    pairs: tuple[tuple[Answer, Answer], ...]

    @property
    def speeds(self) -> tuple[float, float]:
        """Tokens a second behind the first token, of all answers together."""
        without, drafted = (
            sum(len(pair[arm].tokens) - 1 for pair in self.pairs) / sum(sum(pair[arm].seconds) for pair in self.pairs)
            for arm in (0, 1)
        )
        return without, drafted

    @property
    def ratio(self) -> float:
        without, drafted = self.speeds
        return drafted / without

    @property
    def cells(self) -> tuple[Cell, ...]:
        """A row of the table."""
        drafts = [pair[1].job.request.draft for pair in self.pairs]
        drafted = sum(draft.num_drafted for draft in drafts if draft)
        accepted = sum(draft.num_accepted for draft in drafts if draft)
        tokens = sum(len(pair[0].tokens) - 1 for pair in self.pairs)
        ratios = [one.speed / other.speed for other, one in self.pairs if one.seconds and other.seconds]
        return self.name, len(self.pairs), tokens, *self.speeds, self.ratio, median(ratios), drafted, accepted

    def best_half(self, name: str) -> Measured:
        """Return the answers of which most tokens were drafted and right."""
        ordered = sorted(self.pairs, key=lambda pair: -pair[1].share_drafted)
        return Measured(name, tuple(ordered[: max(len(ordered) // 2, 1)]))


def _context(model: Model, args: argparse.Namespace) -> Context:
    settings = ContextSettings(num_cells=CELLS, flash_attention=args.flash_attn, threads=args.threads, num_sequences=64)
    return Context(model, settings)


class Bench:
    """One model, with arms that take turns."""

    def __init__(self, context: Context, args: argparse.Namespace) -> None:
        self._context, self._args = context, args
        self._runner = Runner(context)
        self._runner.warm_up()

    def random(self) -> Measured:
        """Prompts without a sense: what is drafted is hardly ever right."""
        prompts = [self._tokens(prose(f"random {number}", 300)) for number in range(2)]
        limit = self._args.max_tokens
        return self._measure("random weights", prompts * self._args.rounds, limit)

    def forced(self, path: Path) -> list[Measured]:
        """The human answers of MT-RAG, token by token; and the half of them that drafts help most."""
        prompts, answers = [], []
        for documents, question, answer in references(path, self._args.references):
            prompts.append(self._tokens(f"{documents}\n\n{question}\n\n")[-MOST_PROMPT:])
            answers.append(self._tokens(answer)[:MOST_ANSWER])
        found = self._measure("MT-RAG, forced", prompts, 0, answers)
        return [found, found.best_half("the half of them that quotes most")]

    def free(self) -> Measured:
        """A passage to be repeated word for word; the model writes what it likes."""
        return self._measure("a model asked to quote", self._quotes(self._args.passages, 150), self._args.max_tokens)

    def gaps(self) -> Bar:
        """Return the longest step of four streams that quote, over what it may take."""
        streams = Streams(self._context, self._runner, max_stall=self._args.max_stall / 1000)
        text = self._tokens(prose("gaps", 200))
        prompts = [np.concatenate((text[place:], text[:place])) for place in range(SLOTS)]
        forced = [prompt[: self._args.max_tokens] for prompt in prompts]
        plain = streams.answer(prompts, 0, lambda: None, forced)
        drafted = streams.answer(prompts, 0, Lookup, forced)
        step, longest = median([one for answer in plain for one in answer.seconds]), max(max(one.seconds) for one in drafted)
        limit = 1000 * step + self._args.max_stall
        return Bar(3, "longest step of four streams that quote", 1000 * longest, limit, unit=" ms")

    def same(self, notes: list[str]) -> list[Bar]:
        """Compare greedy texts: right drafts with wrong ones of as many rows, and with single rows."""
        prompts, limit = self._quotes(self._args.same, 40), 24
        right, wrong, alone = (
            [self._greedy(prompt, limit, source) for prompt in prompts]
            for source in (lambda: Always(True), lambda: Always(False), _none)
        )
        plain, equal = 0, sum(one.tokens == other.tokens for one, other in zip(right, wrong, strict=True))
        for one, other in zip(right, alone, strict=True):
            at = first_difference(one, other)
            plain += at is None
            if at is not None:
                notes.append(f"differs from single rows at token {at}, margin of the logits there {other.margins[at]:.3f}")
        accepted = sum(one.job.request.draft.num_accepted for one in right if one.job.request.draft)
        notes.append(f"{accepted} tokens accepted in {len(right)} answers of at most {limit}")
        return [
            Bar(4, "greedy texts as with wrong drafts of as many rows", equal / len(right), 1.0, at_least=True),
            Bar(5, "greedy texts as with single rows", plain / len(right), 0.98, at_least=True),
        ]

    def _greedy(self, prompt: np.ndarray, limit: int, source: Source) -> Answer:
        """Answer a prompt in an empty pool, with drafts of one length if the source has any."""
        (answer,) = Streams(self._context, self._runner, fixed=True).answer([prompt], limit, source)
        return answer

    def _measure(self, name: str, prompts: list[np.ndarray], limit: int, forced: list[np.ndarray] | None = None) -> Measured:
        """Answer one prompt after the other, each without drafts and with them."""
        without, drafted = Streams(self._context, self._runner), Streams(self._context, self._runner)
        pairs: list[tuple[Answer, Answer]] = []
        for place, prompt in enumerate(prompts):
            told = [forced[place]] if forced else []
            (slow,) = without.answer([prompt], limit, _none, told)
            without.clear()
            (fast,) = drafted.answer([prompt], limit, Lookup, told)
            drafted.clear()
            pairs.append((slow, fast))
            note(answers=name, prompt=place, without=slow.speed, drafted=fast.speed)
        return Measured(name, tuple(pairs))

    def _quotes(self, count: int, words: int) -> list[np.ndarray]:
        passages = [prose(f"passage {number}", words) for number in range(count)]
        return [
            self._tokens(f"{passage}\n\nThe passage above once more, word for word:\n\n{' '.join(passage.split()[:4])}")
            for passage in passages
        ]

    def _tokens(self, text: str) -> np.ndarray:
        return np.asarray(self._context.model.tokenizer(text), np.int32)


def references(path: Path, count: int) -> list[tuple[str, str, str]]:
    """Return MT-RAG's documents, question and human answer of `count` turns, from all over the file. Raises BenchError."""
    file = path / "mtrag" / "conversations.jsonl" if (path / "mtrag").is_dir() else path / "conversations.jsonl"
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError as error:
        raise BenchError(f"--data {path}: {error}") from None
    turns = [turn for line in lines for turn in json.loads(line)["turns"] if turn["documents"] and len(turn["answer"]) > 80]
    step = max(len(turns) // max(count, 1), 1)
    return [
        ("\n\n".join(document["text"] for document in turn["documents"]), turn["question"], turn["answer"])
        for turn in turns[::step][:count]
    ]


def first_difference(one: Answer, other: Answer) -> int | None:
    """Return the first token at which two answers part; None if they are equal."""
    pairs = zip(one.tokens, other.tokens, strict=False)
    return next((place for place, (first, second) in enumerate(pairs) if first != second), None)


def _none() -> Lookup | None:
    return None
