"""Documents that see each other against documents that are read separately: the likelihood of human answers.

Each turn of MT-RAG has a question, the documents that a retriever found, and an answer that a human wrote. The bench
computes the answer's tokens behind the prompt, with no server, and notes the logarithm of each one's probability, and the
most probable token, which should be that of the joint prompt. Orders of the documents drawn at random are the noise floor.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ...models.context import Context, ContextSettings
from ...models.marks import TextPiece
from ...models.model import Model
from ...models.named_templates import DEFAULT_TEMPLATE
from ...models.template import ChatTemplate
from ...ordering.document import Document
from ...ordering.prompt import document_text
from ..journal import note
from ..report import BenchError, Report, Table
from ..trace import SYSTEM_PROMPT, mtrag
from .reading import WAYS, Case, Reader, Turn

CELLS, LONGEST = 8192, 4096  # of the pool; tokens of a prompt
NUM_SEQUENCES = 256
WORST = 5  # turns to list
SEEN = ("joint", "separate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench attention`."""
    add = parser.add_argument
    add("-m", "--model", type=Path, required=True, help="GGUF whose answers are looked at: one that was trained")
    add("--data", type=Path, required=True, help="folder of MT-RAG (`mtrag_retrieved`)")
    add("--turns", type=int, default=300, help="default: %(default)s")
    add("--longest", type=int, default=LONGEST, help="tokens of a turn; longer ones are left out (default: %(default)s)")
    add("-k", type=int, default=4, help="documents of a turn (default: %(default)s)")
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY", help="beside `joint`: all by default")
    add("-t", "--threads", type=int, default=0, help="0: llama.cpp's choice")
    add("--kept", type=Path, metavar="FILE", help="a file of finished turns, to go on after a break")
    add("--json", type=Path, metavar="OUT", help="write everything measured to this file")


def run(args: argparse.Namespace) -> Report:
    """Look at turns until there are `--turns` of them, those of `--kept` included."""
    model = Model(args.model)
    settings = ContextSettings(num_cells=CELLS, num_sequences=NUM_SEQUENCES, threads=args.threads)
    reader = Reader(model, Context(model, settings))
    kept = Kept(args.kept)
    for turn in turns_of(model, args):
        if len(kept.rows) >= args.turns:
            break
        if turn.name not in kept.rows:
            kept.add(turn.name, look_at(reader, turn, args.ways))
            note(turn=turn.name, ways=kept.rows[turn.name])
            print(f"{len(kept.rows)} of {args.turns}: {turn.name}", file=sys.stderr, flush=True)
    return report(kept.rows, args)


def look_at(reader: Reader, turn: Turn, ways: Sequence[str]) -> dict[str, dict]:
    """Return what each way comes to, with the joint prompt as the first."""
    case = Case(reader, turn)
    found = {way: asdict(WAYS[way](case)) for way in dict.fromkeys(["joint", *ways])}
    case.close()
    return found


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
        turn = Turn(
            name=f"{query.session}-{query.turn}",
            prefix=prefix,
            documents=tuple(model.tokenize(document_text(Document(*document))) for document in query.documents),
            tail=tail,
            answer=model.tokenize(answer),
        )
        if len(turn.documents) > 1 and len(turn.answer) > 1 and turn.num_tokens < args.longest:
            yield turn


def _around_documents(model: Model, pieces: Sequence[TextPiece]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens (int32) in front of the last message, where documents stand, and those from it on."""
    last = max(piece.message for piece in pieces if piece.message is not None)
    tokens = [model.tokenize(piece.text, special=piece.message is None and not piece.is_plain) for piece in pieces]
    asked = next(at for at, piece in enumerate(pieces) if piece.message == last)
    return np.concatenate([model.tokenizer.begin, *tokens[:asked]]).astype(np.int32), np.concatenate(tokens[asked:])


def report(rows: dict[str, dict], args: argparse.Namespace) -> Report:
    """Return the table of all ways, and the turns in which separate reading costs most."""
    ways = list(next(iter(rows.values()))) if rows else []
    columns = ("way", "log-likelihood", "less than joint", "+-", "worst turn", "top-1 as jointly", "top-1 right", "computed")
    lines = [(way, *(f"{value:.3f}" for value in _figures(list(rows.values()), way))) for way in ways]
    title = f"{args.model.name}: {len(rows)} turns of MT-RAG, {args.k} documents each"
    means = ((name, [float(np.mean(row[way]["likelihoods"])) for way in SEEN if way in row]) for name, row in rows.items())
    costs = sorted((values[1] - values[0], name) for name, values in means if values[1:])
    notes = [f"separate costs most in {name}: {-cost:.3f} a token" for cost, name in costs[:WORST]]
    return Report("attention", [Table(title, columns, lines)], notes=notes, data={"turns": rows})


def _figures(rows: Sequence[dict], way: str) -> tuple[float, ...]:
    """Return a way's likelihood a token, over all tokens; joint's less that, and the standard error; that of the worst turn.

    Then how many most probable tokens are joint's, and how many the answer's, and the share of prompts that is computed.
    """
    ours, joint = ([np.array(row[name]["likelihoods"]) for row in rows] for name in (way, "joint"))
    losses = np.array([(theirs - own).sum() for own, theirs in zip(ours, joint, strict=True)])
    sizes = np.array([len(own) for own in ours])
    total, loss = sizes.sum(), losses.sum() / sizes.sum()
    error = np.sqrt(np.square(losses - loss * sizes).sum() * len(rows) / max(len(rows) - 1, 1)) / total
    pairs = (pair for row in rows for pair in zip(row[way]["choices"], row["joint"]["choices"], strict=True))
    same = sum(one == other for one, other in pairs) / total
    right = sum(row[way]["right"] for row in rows) / total
    computed = sum(row[way]["computed"] for row in rows) / len(rows)
    return np.concatenate(ours).mean(), loss, error, (losses / sizes).max(), same, right, computed
