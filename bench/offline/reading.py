"""Documents that see each other against documents that are read separately: the likelihood of human answers.

Each turn of MT-RAG has a question, the documents that a retriever found, and an answer that a human wrote. The bench
computes the answer's tokens behind the prompt, with no server, and notes the logarithm of each one's probability, and the
most probable token, which should be that of the joint prompt. Orders of the documents drawn at random are the noise floor.
Prompts are computed by hand, as the server does it: see `slots/separate.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
from ...slots.plan import Drop, HostCopy, Operation, Plan, Restore, Save, Share, Span
from ..journal import note
from ..report import BenchError, Report, Table
from ..trace import SYSTEM_PROMPT, mtrag

CELLS, LONGEST = 8192, 4096  # of the pool; tokens of a prompt
MAIN, FRONT, ALONE = range(3)  # sequences: the prompt, its text before the documents, a document behind that text
ROWS = 32  # of logits, in one batch
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


@dataclass(frozen=True, slots=True)
class Found:
    """What a way comes to. likelihoods: logarithms, one for each token of the answer. choices: the most probable tokens."""

    likelihoods: list[float]
    choices: list[int]


class Recorder(Sampler):
    """Notes logits instead of choosing. expected: the tokens (int32) that follow, one for each row of logits."""

    def __init__(self, model: Model, expected: np.ndarray) -> None:
        super().__init__(model, GREEDY)
        self._expected = iter(expected.tolist())
        self.found = Found([], [])

    def choose(self, logits: np.ndarray, context: object, index: int) -> int:
        token, top = next(self._expected), float(logits.max())
        self.found.likelihoods.append(float(logits[token]) - top - float(np.log(np.exp(logits - top).sum())))
        self.found.choices.append(int(logits.argmax()))
        return token


class Reader:
    """Reads turns in one way or another. Raises BenchError for a model whose KV cannot be moved."""

    def __init__(self, model: Model, context: Context) -> None:
        self._model, self._batch, self._runner = model, context.batch, Runner(context)
        self._runner.warm_up()
        if not isinstance(rotation := self._runner.states.rotation, Rotation):
            raise BenchError(f"the KV of {model.path.name} cannot be moved: {rotation}")

    def joint(self, turn: Turn, order: int = 0) -> Found:
        """Answer behind documents that see those in front of them. order: 0 for their rank, else of a random one."""
        documents = list(turn.documents)
        if order:
            random.Random(f"{turn.name} {order}").shuffle(documents)
        prompt = np.concatenate([turn.prefix, *documents])
        self._compute(MAIN, 0, prompt)
        return self._answered(turn, len(prompt))

    def separate(self, turn: Turn, count: int | None = None) -> Found:
        """Answer behind documents that are read behind the prefix alone, and moved to their places. count: of them."""
        at = len(turn.prefix)
        self._compute(FRONT, 0, turn.prefix)
        self._apply(Share(FRONT, MAIN, 0, at))
        for document in turn.documents[:count]:
            copy = self._read(len(turn.prefix), document)
            self._apply(Restore(copy, MAIN, at, at + len(copy), distance=at - copy.start))
            at += len(copy)
        self._apply(Drop(FRONT))
        return self._answered(turn, at)

    def _read(self, start: int, document: np.ndarray) -> HostCopy:
        copy = HostCopy(start, start + len(document))
        self._apply(Share(FRONT, ALONE, 0, start))
        self._compute(ALONE, start, document)
        self._apply(Save(ALONE, copy))
        self._apply(Drop(ALONE))
        return copy

    def _answered(self, turn: Turn, start: int) -> Found:
        """Compute the end of a prompt behind `start`, and then the answer. Ends the main sequence."""
        self._compute(MAIN, start, turn.tail[:-1])
        start += len(turn.tail) - 1
        given, recorder = np.concatenate([turn.tail[-1:], turn.answer[:-1]]), Recorder(self._model, turn.answer)
        for first in range(0, len(given), ROWS):
            places = range(first, min(first + ROWS, len(given)))
            spans = tuple(Span(0, MAIN, start + at, given[at : at + 1], logits=True) for at in places)
            self._runner.run(Plan((), spans), {0: recorder})
        self._apply(Drop(MAIN))
        recorder.close()
        return recorder.found

    def _compute(self, sequence: int, start: int, tokens: np.ndarray) -> None:
        for at in range(0, len(tokens), self._batch):
            span = Span(0, sequence, start + at, tokens[at : at + self._batch], logits=False)
            self._runner.run(Plan((), (span,)))

    def _apply(self, *operations: Operation) -> None:
        self._runner.run(Plan(operations))


WAYS: dict[str, Callable[[Reader, Turn], Found]] = {
    "joint": Reader.joint,
    "no documents": lambda reader, turn: reader.separate(turn, count=0),
    "random order": lambda reader, turn: reader.joint(turn, 1),
    "another random order": lambda reader, turn: reader.joint(turn, 2),
    "separate": Reader.separate,
}


# ---- The scenario -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench attention`."""
    add = parser.add_argument
    add("-m", "--model", type=Path, required=True, help="GGUF whose answers are looked at: one that was trained")
    add("--data", type=Path, required=True, help="folder of MT-RAG (`mtrag_retrieved`)")
    add("--turns", type=int, default=300, help="default: %(default)s")
    add("--longest", type=int, default=LONGEST, help="tokens of a turn; longer ones are left out (default: %(default)s)")
    add("-k", type=int, default=4, help="documents of a turn (default: %(default)s)")
    add("-t", "--threads", type=int, default=0, help="0: llama.cpp's choice")


def run(args: argparse.Namespace) -> Report:
    """Read turns in each way until there are `--turns` of them."""
    model = Model(args.model)
    reader = Reader(model, Context(model, ContextSettings(num_cells=CELLS, threads=args.threads)))
    found: dict[str, dict[str, Found]] = {}
    for turn, _ in zip(turns_of(model, args), range(args.turns), strict=False):
        found[turn.name] = {name: way(reader, turn) for name, way in WAYS.items()}
        note(turn=turn.name, ways={name: asdict(one) for name, one in found[turn.name].items()})
        print(f"{len(found)} of {args.turns}: {turn.name}", file=sys.stderr, flush=True)
    columns = ("way", "log-likelihood", "less than joint", "+-", "worst turn", "top-1 as jointly")
    lines = [(way, *(f"{value:.3f}" for value in _figures(list(found.values()), way))) for way in WAYS if found]
    title = f"{args.model.name}: {len(found)} turns of MT-RAG, {args.k} documents each"
    costs = sorted(
        (np.mean(ways["separate"].likelihoods) - np.mean(ways["joint"].likelihoods), name) for name, ways in found.items()
    )
    notes = [f"separate costs most in {name}: {-cost:.3f} a token" for cost, name in costs[:WORST]]
    data = {turn: {name: asdict(one) for name, one in ways.items()} for turn, ways in found.items()}
    return Report("attention", [Table(title, columns, lines)], notes=notes, data={"turns": data})


def turns_of(model: Model, args: argparse.Namespace) -> Iterator[Turn]:
    """Yield the turns with documents and an answer, in the order of the trace. Raises BenchError without the data."""
    folder = args.data / "mtrag_retrieved" if (args.data / "mtrag_retrieved").is_dir() else args.data
    try:
        queries = mtrag(folder, k=args.k)
        lines = (folder / "tasks.jsonl").read_text("utf-8").splitlines()
    except OSError as error:
        raise BenchError(f"no MT-RAG in {args.data}: {error}") from None
    answers = {(row["session"], row["turn"]): row["answer"] for row in map(json.loads, lines)}
    template = ChatTemplate(model.chat_template or DEFAULT_TEMPLATE, model.bos, model.eos, model.tokenizer.controls)
    history: dict[str, list[dict[str, str]]] = {}
    for query in queries:
        before, answer = history.setdefault(query.session, []), answers[query.session, query.turn].strip()
        asked = [{"role": "system", "content": SYSTEM_PROMPT}, *before, {"role": "user", "content": query.question}]
        history[query.session] = [*before, asked[-1], {"role": "assistant", "content": answer}]
        prefix, tail = _around_documents(model, template.pieces(asked))
        documents = tuple(model.tokenize(document_text(Document(*document))) for document in query.documents)
        turn = Turn(f"{query.session}-{query.turn}", prefix, documents, tail, model.tokenize(answer))
        if len(turn.documents) > 1 and len(turn.answer) > 1 and turn.num_tokens < args.longest:
            yield turn


def _around_documents(model: Model, pieces: Sequence[TextPiece]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens (int32) in front of the last message, where documents stand, and those from it on."""
    last = max(piece.message for piece in pieces if piece.message is not None)
    tokens = [model.tokenize(piece.text, special=piece.message is None and not piece.is_plain) for piece in pieces]
    asked = next(at for at, piece in enumerate(pieces) if piece.message == last)
    return np.concatenate([model.tokenizer.begin, *tokens[:asked]]).astype(np.int32), np.concatenate(tokens[asked:])


def _figures(rows: Sequence[dict[str, Found]], way: str) -> tuple[float, ...]:
    """Return a way's likelihood a token, over all tokens; joint's less that, and the standard error; that of the worst turn.

    Then how many most probable tokens are joint's.
    """
    ours, joint = ([np.array(row[name].likelihoods) for row in rows] for name in (way, "joint"))
    losses = np.array([(theirs - own).sum() for own, theirs in zip(ours, joint, strict=True)])
    sizes = np.array([len(own) for own in ours])
    total, loss = sizes.sum(), losses.sum() / sizes.sum()
    error = np.sqrt(np.square(losses - loss * sizes).sum() * len(rows) / max(len(rows) - 1, 1)) / total
    pairs = (pair for row in rows for pair in zip(row[way].choices, row["joint"].choices, strict=True))
    same = sum(one == other for one, other in pairs) / total
    return np.concatenate(ours).mean(), loss, error, (losses / sizes).max(), same
