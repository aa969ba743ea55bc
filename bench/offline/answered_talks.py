"""Provides conversations over documents with expected answers: MT-RAG's, and generated conversations."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ...ordering.document import Document, parse_documents
from ..report import BenchError
from ..trace import Query, mtrag, prose

TURNS = 4  # turns of a generated conversation, each about another place
FILLER = 40  # meaningless words in a generated document
PLACES = ("Bar Cor Dun Fel Gar Hol Kel Mer Nor Tal", "ba le mi ro sa", "dor ley nd rick ton")
PEOPLE = (
    "Anna Boris Clara David Edith Felix Greta Henry Irene Jacob",
    "Abbot Baker Cooper Draper Fisher Glover Mason Potter",
)


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """A question with its expected answer.

    documents: the documents for the question, most relevant first.
    right: the ids of the documents with the answer, as marked by people or by the generator.
    """

    question: str
    answer: str
    documents: tuple[Document, ...]
    right: frozenset[str]


@dataclass(frozen=True, slots=True)
class AnsweredTalk:
    """A conversation."""

    name: str
    turns: tuple[AnsweredTurn, ...]


def of_mtrag(data: Path, k: int) -> Iterator[AnsweredTalk]:
    """Yield MT-RAG's conversations with a retriever's documents for each turn. Raises BenchError if data is missing."""
    folder = data / "mtrag_retrieved" if (data / "mtrag_retrieved").is_dir() else data
    try:
        queries, rows = mtrag(folder, k=k), (folder / "tasks.jsonl").read_text("utf-8").splitlines()
        marks = (folder / "qrels.tsv").read_text("utf-8").splitlines()[1:]
    except OSError as error:
        raise BenchError(f"no MT-RAG in {data}: {error}") from None
    answers = {(row["session"], row["turn"]): row["answer"].strip() for row in map(json.loads, rows)}
    right: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for session, turn, name in (line.split("\t") for line in marks):
        right[session, int(turn)].add(name)
    talks: defaultdict[str, list[Query]] = defaultdict(list)
    for query in queries:
        talks[query.session].append(query)
    for session, asked in talks.items():
        ids = {name: Document.parse(text).id for query in asked for name, text in query.documents}
        turns: list[AnsweredTurn] = []
        for query in asked:
            marked = frozenset(ids[name] for name in right[session, query.turn] if name in ids)
            documents = parse_documents([text for _, text in query.documents])
            turns.append(AnsweredTurn(query.question, answers[session, query.turn], documents, marked))
        yield AnsweredTalk(session, tuple(turns))


def made_up(k: int, seed: int) -> Iterator[AnsweredTalk]:
    """Yield generated conversations without end.

    Turns ask alternately for a fact in one document and for a fact that needs two. The first document names the mayor of a
    place; the second says where the mayor was born. Each conversation has its own places and people. A turn also gets
    documents that only other turns of the conversation need.
    """
    for number in count():
        rng = random.Random(f"answers {seed} {number}")
        places = _drawn(rng, 2 * TURNS, PLACES, "")
        people = _drawn(rng, TURNS, PEOPLE, " ")
        facts: list[tuple[Document, Document]] = []
        for at, (place, person) in enumerate(zip(places, people, strict=False)):
            filler = [prose(f"{seed} {number} {at} {side}", FILLER) for side in "ab"]
            texts = (
                f"The mayor of {place} is {person}. {filler[0]}",
                f"{person} was born in {places[TURNS + at]}. {filler[1]}",
            )
            facts.append((Document.parse(texts[0]), Document.parse(texts[1])))
        turns: list[AnsweredTurn] = []
        for at, own in enumerate(facts):
            needed = own[: 1 + at % 2]
            others = [one for pair in facts for one in pair if one not in needed]
            documents = (*needed, *rng.sample(others, min(max(k - len(needed), 0), len(others))))
            asked = (f"Who is the mayor of {places[at]}?", f"Where was the mayor of {places[at]} born?")[at % 2]
            answer = (people[at], places[TURNS + at])[at % 2]
            right = frozenset(one.id for one in needed)
            turns.append(AnsweredTurn(f"{asked} Answer with the name alone.", answer, documents, right))
        yield AnsweredTalk(f"made-up {number}", tuple(turns))


def _drawn(rng: random.Random, size: int, parts: tuple[str, ...], between: str) -> list[str]:
    """Return `size` different names, each a random choice from every part."""
    names: dict[str, None] = {}
    while len(names) < size:
        names[between.join(rng.choice(part.split()) for part in parts)] = None
    return list(names)
