"""Answer quality of the embedded model: do moved documents and an unrepeated history change its answers?"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ...models.demo import FILE as MODEL
from ...models.demo.corpus import Corpus, CorpusDocument
from ...models.demo.freer import FreerCorpus, FreerQuestion
from ...models.training.world.conversation import Author, Conversation
from ...models.training.world.curriculum import SHIPPED, held_out
from ...models.training.world.recipe import Recipe
from ...models.training.world.wording import UNKNOWN
from ...models.training.world.words import Words
from ...ordering.stages import read_along
from ..arms import Arm
from ..client import Client, EncodedRequest, Result
from ..dialect import ChatDialect
from ..error import BenchError
from ..options import add_options
from ..progress import Progress
from ..report import Bar, Report, Table
from ..server import ServerOptions, slotcache_command
from ..stats import f1, mean

PATH = "/v1/chat/completions"
MAX_TOKENS = 60
STAGE = 0.02  # s of a stage of a search: enough to prefill its documents


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """One question of a session. documents: in retrieval rank."""

    documents: tuple[CorpusDocument, ...]
    question: str
    answer: str


Session = tuple[AskedQuestion, ...]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to ask: fields of the request. reads_along: documents are also sent during the search."""

    name: str
    fields: dict[str, Any]
    reads_along: bool = False


RANKED = Way("retrieval order", {"document_order": "retrieval"})
HINTED = Way("exact order, order hint", {"document_order": "auto", "order_hint": True})
WAYS = (
    RANKED,
    Way("exact order", {"document_order": "auto", "order_hint": False}),
    HINTED,
    Way("de-duplicated, location hint", {"document_order": "auto", "order_hint": True, "dedup": "auto"}),
    Way("read while they are searched", {"document_order": "auto", "order_hint": True}, reads_along=True),
    Way("cache off", {"document_order": "retrieval", "cache_prompt": False}),
    *(
        Way(f"read separately, {k} link tokens", {"documents_attention": "separate", "link_tokens": k})
        for k in (0, 8, 16, 32)
    ),
)


@dataclass(slots=True)
class Score:
    """The results of questions: (right answer, answer given, the request's result)."""

    answers: list[tuple[str, str, Result]] = field(default_factory=list)

    @property
    def exact_match(self) -> float:
        return mean([float(right == given) for right, given, _ in self.answers])

    @property
    def f1(self) -> float:
        return mean([f1(right, given) for right, given, _ in self.answers])

    @property
    def refused(self) -> float:
        """The share of answers that say that the documents hold no answer."""
        return mean([float(given == UNKNOWN) for _, given, _ in self.answers])

    @property
    def reused(self) -> float:
        """The share of prompt tokens that came from the cache."""
        results = [result for _, _, result in self.answers]
        return sum(one.cached_tokens for one in results) / max(sum(one.prompt_tokens for one in results), 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `slotcache bench quality`."""
    add_options(parser)
    parser.set_defaults(model=MODEL)
    add = parser.add_argument
    add("--count", type=int, default=100, help="generated conversations of each kind (default: %(default)s)")
    add("--questions", type=int, default=100, help="of each written set (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--one-way", action="store_true", help="only in exact order with hints, and not in all ways")


def run(args: argparse.Namespace) -> Report:
    """Ask two-turn conversations and the bundled questions in every way, and every kind of question in one way."""
    options = ServerOptions(
        args.model,
        context=args.ctx_size,
        lanes=args.parallel,
        threads=args.threads,
        flash_attention=args.flash_attn,
        repack=args.repack,
    )
    arm = Arm(
        "slotcache", ChatDialect(), None if args.url else lambda port: slotcache_command(options, port), args.url or ""
    )
    with arm.up() as url:
        return asyncio.run(_measure(url, args))


def generated(recipe: Recipe, count: int, seed: str) -> list[Session]:
    """Return conversations about names that training saw only by chance."""
    words = Words.load()
    author = Author(Random(f"held out {seed}"), words, frozenset(words["reserved"]))
    return [_session(author.write(recipe)) for _ in range(count)]


def bundled(count: int, turns: int) -> list[Session]:
    """Return sessions of `turns` questions each, from the first `count` questions of the bundled corpus."""
    corpus = Corpus.load()
    asked = []
    for one in corpus.questions[:count]:
        documents = tuple(corpus.documents[name] for name in one.ranked)
        asked.append(AskedQuestion(documents, one.question, one.answer))
    return [tuple(asked[at : at + turns]) for at in range(0, len(asked), turns)]


async def ask(client: Client, session: Session, way: Way, scope: str) -> list[tuple[str, str, Result]]:
    """Return right answer, answer and result of each turn. The given answers are the history of later turns."""
    messages: list[dict[str, Any]] = []
    answers: list[tuple[str, str, Result]] = []
    for turn in session:
        messages.append(message := _message(turn))
        body: dict[str, Any] = {"messages": messages, "documents": message["documents"], "max_tokens": MAX_TOKENS}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"cache_prompt": True, "cache_scope": scope, "dedup": "off"} | way.fields
        last = {"role": "user", "content": message["content"]}
        body["messages"] = [*messages[:-1], last]
        if way.reads_along:
            await _read_along(client, body)
        result = await client.send(EncodedRequest(PATH, json.dumps(body).encode()))
        if result.error:
            raise BenchError(f"{turn.question}: {result.error}")
        answers.append((turn.answer, result.text, result))
        messages.append({"role": "assistant", "content": result.text})
    return answers


async def _read_along(client: Client, body: dict[str, Any]) -> None:
    """Speculate on a search of two stages: all but the best document, worst first, then all in rank."""
    failed: list[str] = []

    async def post(path: str, body: dict[str, Any]) -> None:
        async with client.http.post(path, json=body) as answer:
            if answer.status != 200:
                failed.append(f"{path}: {await answer.text()}")

    async def stages() -> AsyncIterator[list[Any]]:
        for found in (body["documents"][:0:-1], body["documents"]):
            yield found
            await asyncio.sleep(STAGE)

    await read_along(post, {name: value for name, value in body.items() if name != "documents"}, stages())
    if failed:
        raise BenchError(failed[0])


async def _measure(url: str, args: argparse.Namespace) -> Report:
    recipes = held_out(SHIPPED)
    talks = generated(recipes["repeated"], args.count, f"ways {args.seed}")
    joined = generated(recipes["joined"], args.count, f"ways joined {args.seed}")
    data: dict[str, Any] = {}
    async with Client(url, ChatDialect()) as client:
        rows, generated_ones, joined_ones = [], dict[str, Score](), dict[str, Score]()
        for way in (HINTED,) if args.one_way else WAYS:
            sets = (talks, bundled(args.questions, 2), joined)
            scores = [await _score(client, sessions, way, way.name) for sessions in sets]
            rows.append((way.name, *(figure for one in scores for figure in (one.exact_match, one.f1, one.reused))))
            generated_ones[way.name], joined_ones[way.name] = scores[0], scores[2]
            data[way.name] = [[(right, given) for right, given, _ in one.answers] for one in scores]
        kinds, answerable, unknown = [], Score(), Score()
        for name, recipe in recipes.items():
            sessions = generated(recipe, args.count, f"{name} {args.seed}")
            score = await _score(client, sessions, HINTED, name, last=True)
            kinds.append((name, score.exact_match, score.f1))
            data[name] = [one[:2] for one in score.answers]
            if name == "unknown":
                unknown = score
            else:
                answerable.answers += [one for one in score.answers if one[0] != UNKNOWN]
        freer = await _freer(client, args.questions)
        data["freer wording"] = [(one.question, one.answers, given) for one, given in freer]
    sets = ("two turns", "bundled", "over two documents")
    columns = ("way", *(column for name in sets for column in (f"{name}: EM", "F1", "reused")))
    tables = [
        Table(
            f"quality: {args.count} conversations of each kind, {args.questions} bundled questions",
            columns,
            rows,
        ),
        Table(f"the last answers of {args.count} conversations of each kind, exact order and order hint",
              ("kind", "EM", "F1"), kinds),
        Table("questions about documents in freer wording", ("asked", "answered"), [(len(freer), _answered(freer))]),
    ]  # fmt: skip
    found = {name: score for name, score, _ in kinds}
    (bundled_ones,) = (row[4] for row in rows if row[0] == HINTED.name)
    bars = [*_bars(found, bundled_ones, unknown, answerable), *_moved(generated_ones)]
    bars.append(Bar(7, "answered, freer wording", _answered(freer), 0.75, at_least=True))
    bars += _joined(joined_ones)
    return Report("quality", tables, bars=bars, data=data)


def _bars(kinds: dict[str, float], bundled: float, unknown: Score, answerable: Score) -> list[Bar]:
    return [
        Bar(1, "exact match, 5 documents", kinds["5 documents"], 0.95, at_least=True),
        Bar(2, "exact match, two turns", kinds["two turns"], 0.90, at_least=True),
        Bar(3, "unanswerable detected", unknown.refused, 0.85, at_least=True),
        Bar(4, "wrong refusals", answerable.refused, 0.05),
        Bar(5, "exact match, bundled questions", bundled, 0.85, at_least=True),
    ]


def _moved(scores: dict[str, Score]) -> list[Bar]:
    """Return how far exact match in each way is from the first way, over the generated questions."""
    plain, *others = scores.items()
    return [
        Bar(
            6,
            f"exact match over {len(score.answers)} questions, {name}: moved by",
            abs(score.exact_match - plain[1].exact_match),
            0.01,
        )
        for name, score in others
    ]


def _joined(scores: dict[str, Score]) -> list[Bar]:
    """Return exact match over two documents, and what each way of reading them separately loses of it."""
    together = scores.get(RANKED.name, scores[HINTED.name]).exact_match
    bars = [Bar(8, "exact match over two documents", together, 0.5, at_least=True)]
    return bars + [
        Bar(9, f"exact match over two documents, {way.name}: lost", together - scores[way.name].exact_match, 0.03)
        for way in WAYS
        if way.name in scores and "documents_attention" in way.fields
    ]


async def _score(client: Client, sessions: Sequence[Session], way: Way, scope: str, last: bool = False) -> Score:
    score = Score()
    with Progress(scope, len(sessions)) as progress:
        for session in sessions:
            answers = await ask(client, session, way, scope)
            score.answers += answers[-1:] if last else answers
            progress.step(f"exact match {score.exact_match:.2f}")
    return score


async def _freer(client: Client, count: int) -> list[tuple[FreerQuestion, str]]:
    """Return the first `count` questions in freer wording with their answers; the five documents stand in a fixed order."""
    corpus, given = FreerCorpus.load(), []
    for one in corpus.questions[:count]:
        documents = tuple(corpus.documents[name] for name in one.shown)
        session = (AskedQuestion(documents, one.question, one.answers[0]),)
        given += [(one, text) for _, text, _ in await ask(client, session, WAYS[0], "freer wording")]
    return given


def _answered(given: Sequence[tuple[FreerQuestion, str]]) -> float:
    return mean([float(one.is_answered_by(text)) for one, text in given])


def _session(conversation: Conversation) -> Session:
    """Return the turns with full documents: whether to show or to point to a document is decided by the way of asking."""
    pages = {page.id: page for turn in conversation.turns for page in turn.documents}
    turns = []
    for turn in conversation.turns:
        names = turn.rank or [*(page.id for page in turn.documents), *turn.above]
        documents = tuple(CorpusDocument(name, pages[name].title, pages[name].text) for name in names)
        turns.append(AskedQuestion(documents, turn.question, turn.answer))
    return tuple(turns)


def _message(turn: AskedQuestion) -> dict[str, Any]:
    documents = [{"id": one.id, "text": one.text, "title": one.title} for one in turn.documents]
    return {"role": "user", "content": turn.question, "documents": documents}
