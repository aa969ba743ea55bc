"""Documents that see each other against documents that are read separately: the likelihood of human answers.

Each turn of MT-RAG has a question, the documents that a retriever found, and an answer that a human wrote. The bench
computes the answer's tokens behind the prompt, with no server, and notes the logarithm of each one's probability, and the
most probable token, which should be that of the joint prompt. Orders of the documents drawn at random are the noise floor.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...models.context import Context, ContextSettings
from ...models.marks import TextPiece
from ...models.model import Model
from ...models.named_templates import DEFAULT_TEMPLATE
from ...models.rotation import Rotation
from ...models.runner import Runner
from ...models.sampling import Sampler
from ...models.sampling_params import GREEDY
from ...models.template import ChatTemplate
from ...ordering.document import Document
from ...ordering.prompt import document_text
from ...slots.plan import Drop, HostCopy, Plan, Restore, Save, Share, Span
from ..journal import note
from ..report import BenchError, Report, Table
from ..trace import SYSTEM_PROMPT, Query, mtrag

MAIN, FRONT, ALONE = 0, 1, 2  # sequences
ROWS = 32  # of logits, in one batch
CELLS, LONGEST = 8192, 4096  # of the pool; tokens of a prompt
WORST = 5  # turns to list


@dataclass(frozen=True, slots=True)
class Turn:
    """A question as tokens (int32). prefix: up to the first document. tail: behind the last one. answer: a human's."""

    name: str
    prefix: np.ndarray
    documents: tuple[np.ndarray, ...]
    tail: np.ndarray
    answer: np.ndarray

    @property
    def num_tokens(self) -> int:
        return sum(map(len, (self.prefix, *self.documents, self.tail, self.answer)))


class Recorder(Sampler):
    """Notes logits instead of choosing: likelihoods are logarithms, choices the most probable tokens.

    expected: the tokens (int32) that follow, one for each row of logits.
    """

    def __init__(self, model: Model, expected: np.ndarray) -> None:
        super().__init__(model, GREEDY)
        self._expected = iter(expected.tolist())
        self.likelihoods: list[float] = []
        self.choices: list[int] = []

    def choose(self, logits: np.ndarray, context: object, index: int) -> int:
        token, top = next(self._expected), float(logits.max())
        self.likelihoods.append(float(logits[token]) - top - float(np.log(np.exp(logits - top).sum())))
        self.choices.append(int(logits.argmax()))
        return token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench attention`."""
    add = parser.add_argument
    add("-m", "--model", type=Path, required=True, help="GGUF whose answers are looked at: one that was trained")
    add("--data", type=Path, required=True, help="folder of MT-RAG (`mtrag_retrieved`)")
    add("--turns", type=int, default=300, help="default: %(default)s")
    add("-k", type=int, default=4, help="documents of a turn (default: %(default)s)")
    add("--shuffles", type=int, default=2, help="random orders of each turn (default: %(default)s)")
    add("-t", "--threads", type=int, default=0, help="0: llama.cpp's choice")
    add("--kept", type=Path, metavar="FILE", help="a file of finished turns, to go on after a break")
    add("--json", type=Path, metavar="OUT", help="write everything measured to this file")


def run(args: argparse.Namespace) -> Report:
    """Look at turns until there are `--turns` of them, those of `--kept` included."""
    model = Model(args.model)
    settings = ContextSettings(num_cells=CELLS, num_sequences=64, threads=args.threads)
    reader = Reader(model, Context(model, settings))
    kept = Kept(args.kept)
    for turn in turns_of(model, args.data, args.k):
        if len(kept.rows) >= args.turns:
            break
        if turn.name not in kept.rows:
            kept.add(turn.name, reader.look_at(turn, args.shuffles))
            note(turn=turn.name, ways=kept.rows[turn.name])
            print(f"{len(kept.rows)} of {args.turns}: {turn.name}", file=sys.stderr, flush=True)
    return report(kept.rows, args)


class Kept:
    """Finished turns, by name: for each way the likelihoods and the choices. path: a file with a line for each."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text("utf-8").splitlines() if path and path.exists() else []
        self.rows: dict[str, dict] = dict(json.loads(line) for line in lines)

    def add(self, name: str, ways: dict) -> None:
        self.rows[name] = ways
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, ways]) + "\n")


class Reader:
    """Computes prompts by hand, as the server does. Raises BenchError for a model whose KV cannot be moved."""

    def __init__(self, model: Model, context: Context) -> None:
        self._model, self._batch, self._runner = model, context.batch, Runner(context)
        self._runner.warm_up()
        if not isinstance(self._runner.states.rotation, Rotation):
            raise BenchError(f"the KV of {model.path.name} cannot be moved: {self._runner.states.rotation}")

    def look_at(self, turn: Turn, shuffles: int) -> dict[str, tuple[list[float], list[int]]]:
        """Return the likelihoods and the choices of a turn, by way."""
        self._compute(FRONT, 0, turn.prefix)
        ranks = list(range(len(turn.documents)))
        found = {"joint": self._jointly(turn, ranks), "no documents": self._jointly(turn, [])}
        for number in range(shuffles):
            order = random.Random(f"{turn.name} {number}").sample(ranks, len(ranks))
            found[f"shuffled {number + 1}"] = self._jointly(turn, order)
        copies = [self._read(turn, document) for document in turn.documents]
        found["separate"] = self._separately(turn, copies)
        self._apply(Drop(FRONT))
        return found

    def _jointly(self, turn: Turn, order: Sequence[int]) -> tuple[list[float], list[int]]:
        self._apply(Share(FRONT, MAIN, 0, len(turn.prefix)))
        text = np.concatenate([*(turn.documents[at] for at in order), turn.tail])
        return self._answered(turn, len(turn.prefix), text)

    def _separately(self, turn: Turn, copies: Sequence[HostCopy]) -> tuple[list[float], list[int]]:
        prefix = at = len(turn.prefix)
        self._apply(Share(FRONT, MAIN, 0, prefix))
        for document, copy in zip(turn.documents, copies, strict=True):
            self._apply(Restore(copy, MAIN, at, at + len(document), distance=at - prefix))
            at += len(document)
        return self._answered(turn, at, turn.tail)

    def _read(self, turn: Turn, document: np.ndarray) -> HostCopy:
        """Return a copy of a document's KV behind the prefix."""
        prefix = len(turn.prefix)
        copy = HostCopy(prefix, prefix + len(document))
        self._apply(Share(FRONT, ALONE, 0, prefix))
        self._compute(ALONE, prefix, document)
        self._apply(Save(ALONE, copy), Drop(ALONE))
        return copy

    def _answered(self, turn: Turn, start: int, text: np.ndarray) -> tuple[list[float], list[int]]:
        """Compute the rest of a prompt behind `start`, and then the answer. Ends the main sequence."""
        self._compute(MAIN, start, text[:-1])
        start += len(text) - 1
        given, recorder = np.concatenate([text[-1:], turn.answer[:-1]]), Recorder(self._model, turn.answer)
        for first in range(0, len(given), ROWS):
            places = range(first, min(first + ROWS, len(given)))
            spans = tuple(Span(0, MAIN, start + at, given[at : at + 1], logits=True) for at in places)
            self._runner.run(Plan((), spans), {0: recorder})
        self._apply(Drop(MAIN))
        recorder.close()
        return recorder.likelihoods, recorder.choices

    def _compute(self, sequence: int, start: int, tokens: np.ndarray) -> None:
        for at in range(0, len(tokens), self._batch):
            part = tokens[at : at + self._batch]
            self._runner.run(Plan((), (Span(0, sequence, start + at, part, logits=False),)))

    def _apply(self, *operations: Share | Drop | Save | Restore) -> None:
        self._runner.run(Plan(operations))


def turns_of(model: Model, data: Path, k: int) -> Iterator[Turn]:
    """Yield the turns with documents and an answer, in the order of the trace. Raises BenchError without the data."""
    folder = data / "mtrag_retrieved" if (data / "mtrag_retrieved").is_dir() else data
    try:
        queries = mtrag(folder, k=k)
        lines = (folder / "tasks.jsonl").read_text("utf-8").splitlines()
    except OSError as error:
        raise BenchError(f"no MT-RAG in {data}: {error}") from None
    answers = {(row["session"], row["turn"]): row["answer"] for row in map(json.loads, lines)}
    template = ChatTemplate(model.chat_template or DEFAULT_TEMPLATE, model.bos, model.eos, model.tokenizer.controls)
    history: dict[str, list[dict[str, str]]] = {}
    for query in queries:
        before, answer = history.setdefault(query.session, []), answers[query.session, query.turn].strip()
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, *before, {"role": "user", "content": query.question}]
        history[query.session] = [*before, messages[-1], {"role": "assistant", "content": answer}]
        turn = _turn(model, template.pieces(messages), query, answer)
        if len(turn.documents) > 1 and len(turn.answer) > 1 and turn.num_tokens < LONGEST:
            yield turn


def _turn(model: Model, pieces: Sequence[TextPiece], query: Query, answer: str) -> Turn:
    """pieces: of the conversation with the query's question as its last message."""
    last = max(piece.message for piece in pieces if piece.message is not None)
    tokens = [model.tokenize(piece.text, special=piece.message is None and not piece.is_plain) for piece in pieces]
    asked = next(at for at, piece in enumerate(pieces) if piece.message == last)
    texts = (document_text(Document(name, text)) for name, text in query.documents)
    return Turn(
        name=f"{query.session}-{query.turn}",
        prefix=np.concatenate([model.tokenizer.begin, *tokens[:asked]]).astype(np.int32),
        documents=tuple(model.tokenize(text) for text in texts),
        tail=np.concatenate(tokens[asked:]),
        answer=model.tokenize(answer),
    )


def report(rows: dict[str, dict], args: argparse.Namespace) -> Report:
    """Return the table of all ways, and the turns in which separate reading costs most."""
    ways = list(next(iter(rows.values()))) if rows else []
    lines = [(way, *(f"{value:.3f}" for value in _figures(rows.values(), way))) for way in ways]
    columns = ("way", "log-likelihood a token", "less than joint", "worst turn", "top-1 agreement with joint")
    title = f"{args.model.name}: {len(rows)} turns of MT-RAG, {args.k} documents each"
    costs = sorted((_mean(row["separate"][0]) - _mean(row["joint"][0]), name) for name, row in rows.items())
    notes = [f"separate costs most in {name}: {-cost:.3f} a token" for cost, name in costs[:WORST]]
    return Report("attention", [Table(title, columns, lines)], notes=notes, data={"turns": rows})


def _figures(rows: Iterable[dict], way: str) -> tuple[float, float, float, float]:
    """Return a way's likelihood a token, over all tokens; joint's less that; the same of the worst turn; agreement."""
    rows = list(rows)
    ours, joint = ([value for row in rows for value in row[name][0]] for name in (way, "joint"))
    worst = max(_mean(row["joint"][0]) - _mean(row[way][0]) for row in rows)
    pairs = [pair for row in rows for pair in zip(row[way][1], row["joint"][1], strict=True)]
    return _mean(ours), _mean(joint) - _mean(ours), worst, sum(one == other for one, other in pairs) / len(pairs)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
