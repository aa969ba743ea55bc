"""Measures the effect of reuse on answers. A model in this process gets the documents of a turn in several ways.

The server's own builder makes the prompts, and its scheduler orders documents and reuses KV. This module runs the steps, so
that it can score an expected answer token by token. Before each turn, the documents are cached in another order, which is
drawn by a seed. Each conversation starts with an empty cache, so that points do not depend on each other.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from math import nan
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from msgspec import convert

from ...models.errors import ModelError, NoRoom
from ...models.model import Model
from ...models.rotation import Rotation
from ...models.sampling import Sampler
from ...models.sampling_params import GREEDY
from ...ordering.prompt import ASK_FOR_IDS, location_hint, rank_hint
from ...server.chat.body import ChatRequest
from ...server.chat.chat_prompt import ChatPrompt, DocumentSet, Fixed, Part, Tokenize
from ...server.config.settings import Settings
from ...server.http.api_errors import RequestError
from ...server.load import load
from ...server.service.service import Service
from ...slots.job import Job, Phase
from ...slots.radix import NO_TOKENS
from ...slots.request import Kind
from ...slots.scope import Scope
from .. import report as machine
from ..points import Points
from ..report import BenchError, Cell, Progress, Report, Table, mean, median
from ..servers import DATA_VARIABLE
from ..trace import SYSTEM_PROMPT
from .answer_scores import Effect, bootstrap, cited, token_f1, words
from .answered_talks import AnsweredTalk, made_up, of_mtrag

LONGEST, MOST = 4096, 64  # most tokens of a prompt with its answer, and of a greedy answer
BASE, MTRAG, MADE_UP = "retrieval order", "MT-RAG", "made-up"
_text = partial(Fixed, label="the hints", ends=False)

# ---- The ways to show documents: request fields, or a change of the prompt if there is no field for it. -----------------

Show = Callable[[DocumentSet, Sequence[str], Tokenize], tuple[list[Part], list[Part]]]
"""Takes documents with their order, all ids of the turn by rank, and a tokeniser. Returns the parts in place of the
documents, and the parts after the question."""


def _as_served(documents: DocumentSet, ranking: Sequence[str], tokenize: Tokenize) -> tuple[list[Part], list[Part]]:
    return [documents], []


def _hinted(write: Callable[[Sequence[str], Sequence[str]], str], *, after: bool = False) -> Show:
    """Return a function that shows documents with a hint.

    write: makes the hint from the ids in prompt order, and by rank.
    after: whether the hint is after the question.
    """

    def show(documents: DocumentSet, ranking: Sequence[str], tokenize: Tokenize) -> tuple[list[Part], list[Part]]:
        text = write([documents.documents[at].id for at in documents.order or ()], ranking)
        hint: list[Part] = [_text(tokenize(f"\n\n{text.strip()}" if after else text))] if text else []
        return ([documents], hint) if after else ([documents, *hint], [])

    return show


def _priority(order: Sequence[str], ranking: Sequence[str]) -> str:
    """Return a hint that names all documents by rank, as in RAGBoost (5.3)."""
    if list(order) == list(ranking):
        return ""
    named = " > ".join(f"[{id}]" for id in ranking)
    return f"Read the documents in this order of priority, and answer the question by them: {named}.\n\n"


def _silent(documents: DocumentSet, ranking: Sequence[str], tokenize: Tokenize) -> tuple[list[Part], list[Part]]:
    return [replace(documents, location=NO_TOKENS)], []


def _located(documents: DocumentSet, ranking: Sequence[str], tokenize: Tokenize) -> tuple[list[Part], list[Part]]:
    """Show documents by rank. In place of a repeated document, there is a reference to it."""
    shown: list[Part] = []
    ranks = {document.id: at for at, document in enumerate(documents.documents)}
    for id in ranking:
        if (at := ranks.get(id)) is None:
            shown.append(_text(tokenize(location_hint([id]))))
        else:
            one = replace(documents, documents=(documents.documents[at],), tokens=(documents.tokens[at],), order=(0,))
            shown.append(replace(one, location=NO_TOKENS, repeated=(), ranking=()))
    return shown, []


@dataclass(frozen=True, slots=True)
class ShownWay:
    """A way to show documents.

    fields: the fields of the request.
    show: changes the prompt.
    than: the way to compare it with, which differs in only one respect.
    best_last: whether the most relevant document is the last one.
    bare: whether there are no documents.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    show: Show = _as_served
    than: str = BASE
    best_last: bool = False
    bare: bool = False


RANKED = {"document_order": "retrieval", "order_hint": False, "dedup": "off"}
EXACT = RANKED | {"document_order": "auto"}
LESS = RANKED | {"dedup": "auto"}
WAYS = (
    ShownWay(BASE, RANKED),
    ShownWay("no documents", RANKED, bare=True),
    ShownWay("exact order", EXACT),
    ShownWay("exact order + hint", EXACT | {"order_hint": True}, than="exact order"),
    ShownWay("exact order + priority", EXACT, _hinted(_priority), "exact order"),
    ShownWay("exact order + hint behind", EXACT, _hinted(rank_hint, after=True), "exact order"),
    ShownWay("best last", EXACT, best_last=True),
    ShownWay("best last + hint", EXACT, _hinted(rank_hint), "best last", best_last=True),
    ShownWay("left out + reference", LESS),
    ShownWay("left out + reference in place", LESS, _located, "left out + reference"),
    ShownWay("left out in silence", LESS, _silent, "left out + reference"),
    ShownWay("separate", {"documents_attention": "separate", "dedup": "off"}),
)

# ---- Answers of a model -------------------------------------------------------------------------------------------------


class Recorder(Sampler):
    """A sampler that chooses the expected tokens, and adds up their log-probabilities."""

    def __init__(self, model: Model, expected: np.ndarray) -> None:
        super().__init__(model, GREEDY)
        self._expected, self.likelihood = iter(expected.tolist()), 0.0

    def choose(self, logits: np.ndarray, context: object, index: int) -> int:
        token, top = next(self._expected), float(logits.max())
        self.likelihood += float(logits[token]) - top - float(np.log(np.exp(logits - top).sum()))
        return token


class Answerer:
    """Answers the turns of conversations.

    service: a loaded service whose engine is not started.
    most: the most tokens of a greedy answer.
    """

    def __init__(self, service: Service, most: int, seed: int) -> None:
        self._service, self._most, self._seed = service, most, seed
        self._model, self._scheduler, self._runner = service.model, service.engine.scheduler, service.engine.runner
        if not self._model.can_trim:
            raise BenchError(f"the KV of {self._model.path.name} cannot be cut: no order of documents would reuse any")
        self._runner.warm_up()
        self.can_separate = isinstance(self._runner.states.rotation, Rotation)
        self._tokenize: Tokenize = partial(service.builder.tokens, "")

    def fitting(self, talk: AnsweredTalk, longest: int) -> AnsweredTalk:
        """Return the turns before the first turn that is too long: `longest` tokens or more, including its answer.

        The length is measured in retrieval order.
        """
        for at, turn in enumerate(talk.turns):
            try:
                length = self._prompt(WAYS[0], talk, at).num_tokens + max(self._most, len(self._model.tokenize(turn.answer)))
            except RequestError:
                length = longest
            if length >= longest:
                return AnsweredTalk(talk.name, talk.turns[:at])
        return talk

    def measure(self, way: ShownWay, talk: AnsweredTalk) -> list[dict[str, Any]]:
        """Return the figures of each turn of a conversation. Earlier turns in the history are shown in the same way."""
        scope, orders, rows = Scope.shared(f"{way.name} {talk.name}"), list[Sequence[int]](), list[dict[str, Any]]()
        for at in range(len(talk.turns)):
            asked = self._prompt(way, talk, at)
            if not way.bare:
                orders.append(self._order(self._shown(way, asked, talk, orders), scope, f"{self._seed} {talk.name} {at}"))
            rows.append({"turn": at + 1, **self._answered(self._shown(way, asked, talk, orders), talk, at, scope)})
        self._scheduler.tree.forget(scope)
        return rows

    def _order(self, prompt: ChatPrompt, scope: Scope, seed: str) -> Sequence[int]:
        """Cache the last documents of a prompt in a random order. Return the order that the server then chooses."""
        at, last = [(at, part) for at, part in enumerate(prompt.parts) if isinstance(part, DocumentSet)][-1]
        if last.documents:
            drawn = replace(last, order=_drawn(seed, last), hint=None, location=NO_TOKENS)
            self._compute(type(prompt)([*prompt.parts[:at], drawn]), scope, Sampler(self._model, GREEDY), 1)
        placed = prompt.arrange(self._scheduler.tree, scope).documents
        return [last.keys.index(document.key) for document in placed[len(placed) - len(last.keys) :]]

    def _prompt(self, way: ShownWay, talk: AnsweredTalk, at: int) -> ChatPrompt:
        """Return the prompt of a turn, as the server builds it."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": f"{SYSTEM_PROMPT} {ASK_FOR_IDS}"}]
        for turn in talk.turns[: at + 1]:
            given = [{"id": one.id, "text": one.text, "title": one.title} for one in turn.documents]
            documents = {} if way.bare else {"documents": given[::-1] if way.best_last else given}
            messages += [{"role": "user", "content": turn.question, **documents}]
            messages += [{"role": "assistant", "content": turn.answer}]
        more = {"keep_last": 1} if way.best_last else {}
        return self._service.builder.chat(convert({"messages": messages[:-1], **way.fields, **more}, ChatRequest)).prompt

    def _shown(self, way: ShownWay, asked: ChatPrompt, talk: AnsweredTalk, orders: Sequence[Sequence[int]]) -> ChatPrompt:
        """Return a prompt with its documents shown in a way. orders: the orders of its first sets of documents. Later sets
        stay as they are.
        """
        parts, moved, number = list[Part](), list[Part](), 0
        for part in asked.parts:
            if isinstance(part, Fixed):
                parts += [part, *(moved if part.is_question else [])]
                moved = [] if part.is_question else moved
            elif number < len(orders):
                ranking = [document.id for document in talk.turns[number].documents]
                here, moved = way.show(replace(part, order=tuple(orders[number])), ranking, self._tokenize)
                parts, number = [*parts, *here], number + 1
            else:
                parts.append(part)
        return type(asked)(parts)

    def _answered(self, prompt: ChatPrompt, talk: AnsweredTalk, at: int, scope: Scope) -> dict[str, Any]:
        """Answer a prompt greedily, then score the expected answer. Return the figures."""
        turn, expected = talk.turns[at], self._model.tokenize(talk.turns[at].answer)
        job, tokens, ttft = self._compute(prompt, scope, Sampler(self._model, GREEDY), self._most)
        recorder = Recorder(self._model, expected)
        self._compute(prompt, scope, recorder, len(expected))
        answer = self._model.detokenize(np.array([one for one in tokens if not self._model.is_end(one)], np.int32))
        named, given = cited(answer), {document.id for one in talk.turns[: at + 1] for document in one.documents}
        return {
            "prompt": blake2b(job.layout.tokens.tobytes(), digest_size=8).hexdigest(),
            "likelihood": recorder.likelihood,
            "tokens": len(expected),
            "exact": words(answer) == words(turn.answer),
            "f1": token_f1(answer, turn.answer),
            "cited": len(named),
            "given": len(given.intersection(named)),
            "right": len(turn.right.intersection(named)),
            "reused": job.reuse.cached,
            "length": job.num_prompt,
            "ttft": ttft,
            "answer": answer,
        }

    def _compute(self, prompt: ChatPrompt, scope: Scope, sampler: Sampler, limit: int) -> tuple[Job, list[int], float]:
        """Compute a prompt and up to `limit` tokens of its answer. Return the job, the tokens, and the seconds to the first.

        Raises BenchError if there is no room for the prompt.
        """
        request = replace(self._service.submitter.idle_prefill(prompt, scope, Kind.CLIENT).request, limit=limit)
        began, ttft, tokens = perf_counter(), nan, list[int]()
        with closing(sampler):
            job = self._scheduler.submit(request)
            while job.phase is not Phase.DONE:
                plan = self._scheduler.plan()
                for _, error in self._scheduler.take_rejected():
                    raise BenchError(f"a prompt of {prompt.num_tokens:,} tokens: {error}")
                try:
                    sampled = self._runner.run(plan, {request.id: sampler})
                except NoRoom:
                    if not self._scheduler.refuse():
                        raise
                    continue
                for _, token in self._scheduler.commit(plan, sampled):
                    ttft = ttft if tokens else perf_counter() - began
                    tokens.append(token)
                    if len(tokens) == limit or self._model.is_end(token):
                        self._scheduler.finish(job)
        return job, tokens, ttft


def _drawn(seed: str, documents: DocumentSet) -> tuple[int, ...]:
    """Return a random order that differs from the rank, if possible. Documents that must be last stay last."""
    size = len(documents.documents)
    movable = range(size - documents.keep_last)
    rng, order = random.Random(seed), list(movable)
    while len(movable) > 1 and order == list(movable):
        rng.shuffle(order)
    return (*order, *range(len(movable), size))


# ---- The scenario -------------------------------------------------------------------------------------------------------

Figures = dict[str, list[dict[str, Any]]]  # of turns, by conversation
Rows = dict[str, Figures]  # by way


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `slotcache bench answers`."""
    add = parser.add_argument
    add("-m", "--model", type=Path, required=True, help="a trained GGUF, since random weights give no answers")
    add("--data", type=Path, default=os.environ.get(DATA_VARIABLE), help="MT-RAG's folder; without it, only generated turns")
    every = ",".join(way.name for way in WAYS)
    add("--ways", default=every, help="some of %(default)s; the ways to compare them with are added (default: all)")
    add("--turns", type=int, default=0, help="turns of each kind, in whole conversations; 0: all, or 160 generated ones")
    add("-k", type=int, default=4, help="documents of a turn (default: %(default)s)")
    add("--longest", type=int, default=LONGEST, help="tokens of a turn; a conversation ends there (default: %(default)s)")
    add("-n", "--max-tokens", type=int, default=MOST, help="tokens of a greedy answer (default: %(default)s)")
    add("--out", type=Path, default=Path("answers"), help="folder of points, which are measured once (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("-t", "--threads", type=int, default=0, help="threads; 0: one for each fast core")
    add("-ngl", "--gpu-layers", type=int, default=-1, help="layers on the GPU; -1: as many as fit")


def run(args: argparse.Namespace) -> Report:
    """Measure the points that the folder does not have yet. Return a table for each kind of turns, with a row per way."""
    ways = _ways(args.ways)
    kept = Points(args.out / "answers.jsonl", machine.describe)
    shape = {"ctx_size": 2 * args.longest, "threads": args.threads, "gpu_layers": args.gpu_layers}
    try:
        service = load(Settings(model=str(args.model), parallel=1, cache_ram=0, **shape), args.model)
    except ModelError as error:
        raise BenchError(str(error)) from None
    with closing(service):
        answerer, notes = Answerer(service, args.max_tokens, args.seed), list[str]()
        if not answerer.can_separate and any(way.name == "separate" for way in ways):
            notes.append(f"no separate: the KV of {args.model.name} cannot be moved")
            ways = [way for way in ways if way.name != "separate"]
        found = {kind: _measured(answerer, ways, kind, kept, args) for kind in [MTRAG] * bool(args.data) + [MADE_UP]}
    tables, effects = list[Table](), list[dict[str, Any]]()
    for kind, rows in found.items():
        tables.append(ways_table(f"{args.model.name}, {kind}, {args.k} documents a turn", rows, ways))
        compared = [(way, than) for way in ways for than in dict.fromkeys((BASE, way.than)) if than != way.name]
        for way, than in compared:
            loss = effect(rows[way.name], rows[than], "likelihood", "tokens")
            effects.append({"kind": kind, "way": way.name, "than": than, "verdict": loss.verdict, **asdict(loss)})
        own = [(f"{way.name} / {than}", *_compared(rows, way.name, than)) for way, than in compared if than != BASE]
        if own:
            tables.append(Table(f"{kind}: beside the way without it", ("way / beside", *COMPARED), own))
    data = {"points": str(kept.path), "effects": effects, "turns": found}
    return Report("answers", tables, notes=[*notes, *kept.notes()], data=data)


def _ways(names: str) -> list[ShownWay]:
    """Return the ways with these names, and the ways to compare them with. Raises BenchError."""
    known = {way.name: way for way in WAYS}
    asked = [name.strip() for name in names.split(",")]
    if wrong := [name for name in asked if name not in known]:
        raise BenchError(f"--ways {wrong[0]}: expected some of {', '.join(known)}")
    wanted = {BASE, *asked, *(known[name].than for name in asked)}
    return [way for way in WAYS if way.name in wanted]


def _measured(answerer: Answerer, ways: Sequence[ShownWay], kind: str, kept: Points, args: argparse.Namespace) -> Rows:
    chosen, num_turns = list[AnsweredTalk](), 0
    for talk in of_mtrag(args.data, args.k) if kind == MTRAG else islice(made_up(args.k, args.seed), args.turns or 40):
        if args.turns and num_turns >= args.turns:
            break
        if (fitting := answerer.fitting(talk, args.longest)).turns:
            chosen.append(fitting)
            num_turns += len(fitting.turns)
    print(f"{kind}: {num_turns} turns of {len(chosen)} conversations", file=sys.stderr, flush=True)
    about = {"model": args.model.name, "bytes": args.model.stat().st_size, "kind": kind, "k": args.k}
    about |= {"longest": args.longest, "most": args.max_tokens, "seed": args.seed}
    rows: Rows = {way.name: {} for way in ways}
    with Progress(kind, len(chosen) * len(ways)) as progress:
        for talk in chosen:
            for way in ways:
                point = about | {"talk": talk.name, "way": way.name}
                figures = kept.point(point, lambda way=way, talk=talk: {"turns": answerer.measure(way, talk)})
                rows[way.name][talk.name] = figures["turns"]
                progress.step()
    return rows


def effect(ours: Figures, theirs: Figures, name: str, per: str = "") -> Effect:
    """Compare two ways over the turns in which their prompts differ.

    name: the figure to compare.
    per: the figure with its number of items; empty: each turn is one item.
    """
    return bootstrap(
        [
            [
                (own[name] - other[name], own[per] if per else 1)
                for own, other in zip(turns, theirs[talk], strict=True)
                if own["prompt"] != other["prompt"]
            ]
            for talk, turns in ours.items()
        ]
    )


COMPARED = ("nats a token, 95 %", "F1, 95 %", "turns that differ", "of conversations", "by the rule")


def _compared(rows: Rows, way: str, than: str) -> tuple[Cell, ...]:
    loss, f1 = effect(rows[way], rows[than], "likelihood", "tokens"), effect(rows[way], rows[than], "f1")
    return loss.shown(), f1.shown(), loss.turns, loss.conversations, loss.verdict


def ways_table(title: str, rows: Rows, ways: Sequence[ShownWay]) -> Table:
    """Return a table with a row for each way: its figures over all turns, and its difference from retrieval order."""
    columns = ("way", "log-likelihood", "F1", "exact", "cited, given, right", "reused %", "TTFT p50 ms", *COMPARED)
    lines: list[tuple[Cell, ...]] = []
    for way in ways:
        turns = [turn for talk in rows[way.name].values() for turn in talk]
        total = {name: sum(turn[name] for turn in turns) for name in ("likelihood", "tokens", "reused", "length")}
        num, *found = (sum(turn[name] for turn in turns) for name in ("cited", "given", "right"))
        named = ", ".join([str(num), *(f"{one / num:.0%}" for one in found if num)])
        if not turns:
            continue
        figures = (
            f"{total['likelihood'] / total['tokens']:.3f}",
            *(mean([turn[n] for turn in turns]) for n in ("f1", "exact")),
        )
        reuse = (100 * total["reused"] / total["length"], 1000 * median([turn["ttft"] for turn in turns]))
        compared = ("", "", "", "", "") if way.name == BASE else _compared(rows, way.name, BASE)
        lines.append((way.name, *figures, named, *reuse, *compared))
    return Table(f"{title}, compared with {BASE}", columns, lines)
