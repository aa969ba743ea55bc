"""Traces of requests, with documents or without, generated from a seed or read from MT-RAG."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

# ---- Text ---------------------------------------------------------------------------------------------------------------
# English-like text of common words. Each seed gives another text, which is the same on every machine.


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Most of these words are one token, in large vocabularies and in the bench model's small one: about 1.2 tokens per word.
ADJECTIVES = _words(
    "old new large small long short high low open full empty clear simple single special direct final current general "
    "public private local common complex original recent useful important known real exact normal standard complete "
    "late third"
)
NOUNS = _words(
    "time name list number value line word part point place case order example letter test program system process "
    "service user group level range table record section title state position side color screen window head hand body "
    "child library language city house world country book page year game family market road friend"
)
VERBS = _words(
    "opened closed changed called used found made returned read created removed copied started followed replaced "
    "passed described added listed raised tested compared checked sorted accepted ignored expected required handled "
    "stored built moved turned joined"
)
PREPOSITIONS = _words("after before above below inside under around without during between over from with against within")
OPENERS = ("At the same time", "In the first place", "For this reason", "After that", "In most cases", "As a result")
OPENERS += ("In this order", "On the other side", "At the end of the year", "In other words")


def prose(seed: str, words: int) -> str:
    """Return sentences with `words` words or a few more. The same seed gives the same text."""
    rng = random.Random(seed)  # Python hashes a string seed with SHA-512, the same on every platform
    sentences: list[str] = []
    count = 0
    while count < words:
        sentence = _sentence(rng)
        count += len(sentence.split())
        sentences.append(sentence)
    return " ".join(sentences)


def question(seed: str) -> str:
    """Return a question of about fifteen words. The same seed gives the same question."""
    rng = random.Random(seed)
    first, second = _noun_phrase(rng), _noun_phrase(rng)
    return f"What did the {first} do when the {second} {rng.choice(VERBS)} it, and why did people remember it?"


def _sentence(rng: random.Random) -> str:
    clause = (
        f"the {_noun_phrase(rng)} {rng.choice(VERBS)} the {_noun_phrase(rng)} "
        f"{rng.choice(PREPOSITIONS)} the {_noun_phrase(rng)}"
    )
    if rng.random() < 0.5:
        return f"{rng.choice(OPENERS)}, {clause}."
    return f"{clause[0].upper()}{clause[1:]} and {rng.choice(VERBS)} a {_noun_phrase(rng)}."


def _noun_phrase(rng: random.Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


SYSTEM_PROMPT = (
    "You are a careful assistant. Answer the question with the help of the documents that come with it. "
    "Name the documents you used by their labels. If the documents do not hold the answer, say so in one sentence."
)


@dataclass(frozen=True, slots=True)
class Query:
    """One user turn: a question and its documents as (id, text), most relevant first."""

    session: str
    turn: int
    question: str
    documents: tuple[tuple[str, str], ...] = ()


def burst(
    queries: int = 200,
    regions: int = 50,
    documents_per_region: int = 10,
    burst: int = 10,
    k: int = 5,
    overlap: float = 0.6,
    words: int = 158,
    seed: int = 0,
) -> list[Query]:
    """Return bursts of queries. Each burst uses one region of documents.

    Successive queries of a burst share exactly `round(k * overlap)` documents. This is the workload of RAGCache++ (section
    4, Workload) and CacheWeaver: regions of 10 documents of about 200 tokens, bursts of 10, k = 5, overlap 60 %. The papers
    do not say how regions are drawn; here every region is used once before any region repeats. The retrieval rank is
    shuffled for every query. Raises ValueError if the regions are too small.
    """
    kept = round(k * overlap)
    if burst < 1:
        raise ValueError(f"bursts of {burst} queries: expected 1 or more")
    if documents_per_region < 2 * k - kept:
        raise ValueError(f"regions of {documents_per_region} documents cannot give {k} with only {kept} shared")
    rng = random.Random(f"burst {seed}")
    trace: list[Query] = []
    for region in _turns_of_regions(rng, regions):
        chosen: list[int] = []
        for _ in range(min(burst, queries - len(trace))):
            chosen = _next_documents(rng, chosen, available=documents_per_region, k=k, kept=kept)
            documents = tuple(_region_document(seed, region, number, words) for number in chosen)
            trace.append(Query(f"q{len(trace)}", 1, question(f"question {seed} {len(trace)}"), documents))
        if len(trace) >= queries:
            return trace
    return trace


def skewed(
    queries: int = 200,
    documents: int = 200,
    popular: float = 0.03,
    share: float = 0.6,
    k: int = 2,
    words: int = 395,
    seed: int = 0,
) -> list[Query]:
    """Return questions on documents, a few of which are popular.

    This is RAGCache's workload (sections 3.2 and 7): two documents per question, and 3 % of the documents get 60 % of the
    retrievals. The paper's documents have 3,718 tokens on average.

    popular: the popular documents' share of all documents.
    share: the popular documents' share of the retrievals.
    """
    rng, hot, trace = random.Random(f"skewed {seed}"), round(popular * documents), []
    for number in range(queries):
        chosen: dict[int, None] = {}
        while len(chosen) < k:
            chosen[rng.randrange(hot) if rng.random() < share else rng.randrange(hot, documents)] = None
        ranked = tuple((f"d{at}", prose(f"document {seed} {at}", words)) for at in chosen)
        trace.append(Query(f"q{number}", 1, question(f"question {seed} {number}"), ranked))
    return trace


def conversations(count: int = 20, turns: int = 3, words: int = 40, seed: int = 0, opening: int = 0) -> list[Query]:
    """Return chats without documents: the first turns of all chats, then all second turns, and so on.

    words: the words of a message.
    opening: the words of a chat's first message; 0: as `words`.
    """
    return [
        Query(f"c{session}", turn, f"{prose(f'chat {seed} {session} {turn}', size)} {question(f'{session} {turn}')}")
        for turn in range(1, turns + 1)
        for size in [opening if opening and turn == 1 else words]
        for session in range(count)
    ]


def mtrag(
    path: Path,
    retriever: str = "elser",
    query_form: str = "rewrite",
    k: int = 5,
    sessions: int | None = None,
    turns: int | None = None,
    active: int = 4,
) -> list[Query]:
    """Return MT-RAG's human conversations, with the documents that a real retriever ranked for each turn.

    path: the folder with `rankings.jsonl`, `documents.jsonl.gz` and `tasks.jsonl`, or its parent folder.
    active: the number of sessions that are interleaved turn by turn, before the next sessions start.

    Raises ValueError if no ranking matches, OSError if a file is missing.
    """
    folder = path / "mtrag_retrieved" if (path / "mtrag_retrieved").is_dir() else path
    texts = {row["id"]: row["text"].strip() for row in _rows(folder / "documents.jsonl.gz")}
    questions = {(row["session"], row["turn"]): row["question"] for row in _rows(folder / "tasks.jsonl")}
    by_session: dict[str, list[Query]] = {}
    for row in _rows(folder / "rankings.jsonl"):
        if (row["retriever"], row["query_form"]) == (retriever, query_form):
            documents = tuple((name, texts[name]) for name in row["documents"][:k])
            asked = questions[row["session"], row["turn"]]
            by_session.setdefault(row["session"], []).append(Query(row["session"], row["turn"], asked, documents))
    if not by_session:
        raise ValueError(f"no rankings of retriever {retriever!r} with query form {query_form!r} in {folder}")
    chats = [sorted(chat, key=lambda query: query.turn)[:turns] for chat in by_session.values()][:sessions]
    return [query for start in range(0, len(chats), active) for query in _interleaved(chats[start : start + active])]


def _turns_of_regions(rng: random.Random, regions: int) -> Iterator[int]:
    while True:
        yield from rng.sample(range(regions), regions)


def _next_documents(rng: random.Random, previous: Sequence[int], available: int, k: int, kept: int) -> list[int]:
    if previous:
        others = [number for number in range(available) if number not in previous]
        chosen = rng.sample(previous, kept) + rng.sample(others, k - kept)
    else:
        chosen = rng.sample(range(available), k)
    rng.shuffle(chosen)
    return chosen


def _region_document(seed: int, region: int, number: int, words: int) -> tuple[str, str]:
    return f"r{region}-d{number}", prose(f"document {seed} {region} {number}", words)


def _interleaved(chats: Sequence[Sequence[Query]]) -> list[Query]:
    return [query for turn in zip_longest(*chats) for query in turn if query is not None]


def _rows(path: Path) -> Iterator[dict]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        yield from map(json.loads, lines)
