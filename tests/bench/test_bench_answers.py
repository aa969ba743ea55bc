"""`slotcache bench answers`: its figures against hand-made values, its prompts, and a run from folder to table."""

import gzip
import json
import re
from contextlib import closing
from itertools import islice
from math import isnan, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slotcache.bench.cli import main
from slotcache.bench.offline.answer_scores import Effect, bootstrap, cited, token_f1, words
from slotcache.bench.offline.answered_talks import AnsweredTalk, AnsweredTurn, made_up, of_mtrag
from slotcache.bench.offline.answers import WAYS, Answerer, Recorder, effect, ways_table
from slotcache.ordering.document import Document
from slotcache.server.config.settings import Settings
from slotcache.server.load import load

# ---- Figures --------------------------------------------------------------------------------------------------------------


def test_f1_counts_common_words_without_case_articles_punctuation_and_cited_ids():
    assert token_f1("The cat sat.", "a cat sat") == 1.0
    assert token_f1("the cat sat on the mat", "A dog sat") == pytest.approx(2 * 1 / (4 + 2))
    assert token_f1("cat cat", "cat") == pytest.approx(2 / 3)
    assert token_f1("dogs", "cats") == 0.0 and token_f1("", "cats") == 0.0 and token_f1("", "the") == 1.0
    assert words("Three boats [1a2b3c4d5e], not [four].") == ["three", "boats", "not", "four"]


def test_cited_ids_are_those_in_brackets_that_look_like_ids():
    text = "One [1a2b3c4d5e]. Two [1a2b3c4d5e, ffffff0000] in [2017], [see] 1234567890 [0123456789ab]."
    assert cited(text) == ["1a2b3c4d5e", "ffffff0000", "0123456789ab"]


def test_the_interval_is_over_conversations_and_not_over_turns():
    """Of two conversations drawn twice a quarter has only the one, a quarter only the other: these are the ends."""
    found = bootstrap([[(1.0, 1.0)] * 50, [(3.0, 1.0)] * 50, []])
    assert found == Effect(2.0, 1.0, 3.0, 2, 100)
    weighed = bootstrap([[(1.0, 10.0)], [(0.0, 30.0)]])
    assert (weighed.mean, weighed.low, weighed.high) == (pytest.approx(1 / 40), 0.0, pytest.approx(1 / 10))
    many = bootstrap([[(value, 1.0)] for value in (-1.0, 1.0) * 200])
    assert many.high - many.low == pytest.approx(2 * 1.96 / 20, rel=0.1)
    one, none = bootstrap([[(2.0, 4.0)]]), bootstrap([[]])
    assert one.shown() == "+0.500" and isnan(one.low) and weighed.shown() == "+0.025 [+0.000, +0.100]"
    assert one.verdict == none.verdict == "unknown" and none.shown() == "-"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-0.02, 0.02, "no effect"), (-0.03, 0.03, "unknown"), (-0.2, -0.1, "worse"), (0.001, 0.2, "better")],
)
def test_the_rule(low: float, high: float, verdict: str):
    assert Effect((low + high) / 2, low, high, 20, 99).verdict == verdict
    assert Effect((low + high) / 2, low, high, 19, 99).verdict == "unknown"


def test_turns_with_the_same_prompt_do_not_count():
    def turn(prompt: str, likelihood: float) -> dict[str, Any]:
        return {"prompt": prompt, "likelihood": likelihood, "tokens": 2, "f1": 0.0}

    ours = {"a": [turn("x", -4.0), turn("z", -6.0)], "b": [turn("x", -1.0)]}
    theirs = {"a": [turn("x", -9.0), turn("y", -4.0)], "b": [turn("x", -2.0)]}
    found = effect(ours, theirs, "likelihood", "tokens")
    assert (found.mean, found.turns, found.conversations) == (-1.0, 1, 1)


def test_a_line_of_the_table_has_shares_over_all_turns():
    def turn(tokens: int, likelihood: float, named: tuple[int, int, int], reused: int, ttft: float) -> dict[str, Any]:
        counts = dict(zip(("cited", "given", "right"), named, strict=True))
        reported = {"prompt": "x", "tokens": tokens, "likelihood": likelihood, "f1": 0.5, "exact": tokens == 1}
        return reported | counts | {"reused": reused, "length": 100, "ttft": ttft}

    turns = {
        "a": [turn(1, -2.0, (3, 2, 1), 10, 0.1), turn(3, -2.0, (1, 1, 0), 30, 0.2)],
        "b": [turn(4, -4.0, (0, 0, 0), 80, 9)],
    }
    none = turn(1, -1.0, (0, 0, 0), 0, 1.0)
    rows = {WAYS[0].name: turns, WAYS[1].name: {"a": [none, none], "b": [none]}}
    first, second = ways_table("a table", rows, WAYS[:2]).rows
    assert first[:5] == ("retrieval order", "-1.000", 0.5, pytest.approx(1 / 3), "4, 75%, 25%")
    assert first[5:7] == (pytest.approx(40.0), pytest.approx(200.0)) and second[4] == "0"


def test_made_up_answers_are_in_the_documents_that_are_right_and_in_no_other():
    talks = list(islice(made_up(4, seed=1), 3))
    assert talks == list(islice(made_up(4, seed=1), 3)) != list(islice(made_up(4, seed=2), 3))
    turns = [turn for talk in talks for turn in talk.turns]
    assert {len(turn.right) for turn in turns} == {1, 2}
    for turn in turns:
        sources = [document.id for document in turn.documents if turn.answer in document.text]
        assert len(turn.documents) == 4 and len(sources) <= 2 and turn.right <= {one.id for one in turn.documents}
        assert turn.right.intersection(sources) and (turn.answer not in turn.question)
    seen = [one.id for turn in talks[0].turns for one in turn.documents]
    assert len(set(seen)) < len(seen), "no document comes twice: nothing could be left out"


# ---- Prompts --------------------------------------------------------------------------------------------------------------

TEXTS = ["The smith has three boats. " * 4, "The baker has nine boats. " * 4, "The miller has a mill. " * 4]
DOCUMENTS = [Document.parse(text) for text in TEXTS]
IDS = [document.id for document in DOCUMENTS]


@pytest.fixture(scope="module")
def service(tiny):
    with closing(load(Settings(ctx_size=4096, cache_ram=0, parallel=1, threads=1, flash_attn="off"), tiny)) as service:
        yield service


@pytest.fixture(scope="module")
def answerer(service):
    return Answerer(service, most=4, seed=0)


def talk() -> AnsweredTalk:
    first = AnsweredTurn("How many?", "It has three boats.", tuple(DOCUMENTS), frozenset(IDS[:1]))
    second = AnsweredTurn("And the baker?", "Nine.", (DOCUMENTS[1], Document.parse("The inn is shut. " * 4)), frozenset())
    return AnsweredTalk("one", (first, second))


def shown(service: Any, answerer: Answerer, name: str, monkeypatch: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the prompts that a way answers, each once, and its figures."""
    prompts: list[str] = []
    answered = answerer._answered

    def look(prompt: Any, talk: Any, at: int, scope: Any) -> dict[str, Any]:
        layout = prompt.arrange(service.engine.scheduler.tree, scope)
        prompts.append(service.model.detokenize(layout.ids, special=True))
        return answered(prompt, talk, at, scope)

    monkeypatch.setattr(answerer, "_answered", look)
    way = next(way for way in WAYS if way.name == name)
    return prompts, answerer.measure(way, talk())


HINTS = {
    "retrieval order": "",
    "exact order": "",
    "exact order + hint": r"Most relevant: {ranked}",
    "exact order + priority": r"order of priority, .*: {all}\.\n\nHow many",
    "exact order + hint behind": r"How many\?\s+Most relevant: {ranked}",
    "best last": "",
    "best last + hint": r"Most relevant: {ranked}",
    "left out + reference": r"inn is shut.*See \[{second}\] above\.\n\nAnd the",
    "left out + reference in place": r"How many.*See \[{second}\] above\.\n\n\[\w+\]\nThe inn is shut",
    "left out in silence": "",
    "separate": "",
    "no documents": "",
}


@pytest.mark.parametrize("name", HINTS)
def test_a_way_shows_the_documents_as_it_says(service, answerer, monkeypatch, name):
    (first, second), rows = shown(service, answerer, name, monkeypatch)
    order = [IDS.index(id) for id in re.findall(r"\[(\w{10})\]\nThe (?:smith|baker|miller)", first)]
    assert order == ([] if name == "no documents" else order) and (len(order) == 3 or not order)
    if name.startswith("exact"):
        assert order != [0, 1, 2]
    elif name.startswith("best"):
        assert order[-1] == 0
    else:
        assert order in ([], [0, 1, 2])
    named = {"ranked": rf"\[?{IDS[0]}", "all": " > ".join(rf"\[{id}\]" for id in IDS), "second": IDS[1]}
    pattern = HINTS[name].format(**named) if HINTS[name] else ""
    text = second if "left out" in name else first
    assert re.search(pattern, text, re.DOTALL), text
    if not pattern:
        assert not re.search(r"Most relevant|See \[|priority", first + second)
    assert second.count("The baker has nine") == (0 if name == "no documents" else 4 if "left out" in name else 8)
    assert second.startswith(first[: first.index("How many") + 9]), "the first turn stands in the second as it was shown"
    assert [row["tokens"] for row in rows] == [len(service.model.tokenize(turn.answer)) for turn in talk().turns]


def test_a_recorder_gives_what_is_expected_and_adds_up_logarithms(service):
    with closing(Recorder(service.model, np.array([1, 2], np.int32))) as recorder:
        assert recorder.choose(np.log(np.array([1.0, 3.0, 1.0], np.float32)), None, 0) == 1
        assert recorder.choose(np.log(np.array([1.0, 3.0, 4.0], np.float32)) + 300, None, 0) == 2
    assert recorder.likelihood == pytest.approx(log(3 / 5) + log(4 / 8), abs=1e-5)


def test_a_likelihood_is_that_of_the_answer_after_the_prompt(service, answerer, monkeypatch):
    """An answer that the model itself gives is more probable to it than a human's."""
    way, one = WAYS[0], talk()
    figures = answerer.measure(way, AnsweredTalk("probe", one.turns[:1]))[0]
    assert -50 < figures["likelihood"] / figures["tokens"] < 0
    own = AnsweredTurn(one.turns[0].question, figures["answer"], one.turns[0].documents, frozenset())
    again = answerer.measure(way, AnsweredTalk("probe", (own,)))[0]
    assert again["likelihood"] / again["tokens"] > figures["likelihood"] / figures["tokens"]
    assert again["answer"] == figures["answer"] and again["f1"] == 1.0 and again["exact"]


def test_exact_order_reuses_what_retrieval_order_computes(answerer):
    """All documents are cached in another order; in retrieval order at most the first of them is of use."""
    (ranked, exact, separate) = (
        answerer.measure(next(way for way in WAYS if way.name == name), talk())[0]
        for name in ("retrieval order", "exact order", "separate")
    )
    assert exact["reused"] > 2 * ranked["reused"] and exact["length"] == ranked["length"]
    assert separate["reused"] > 2 * ranked["reused"] and separate["prompt"] != ranked["prompt"]


# ---- A run ----------------------------------------------------------------------------------------------------------------


def folder(path: Path) -> Path:
    texts = [{"id": f"p{at}", "text": text} for at, text in enumerate(TEXTS)]
    turns = [{"session": s, "turn": n, "question": "How many?", "answer": "Three boats."} for s in "ab" for n in (1, 2)]
    ranking = {"retriever": "elser", "query_form": "rewrite", "documents": ["p1", "p0", "p2"]}
    ranked = [ranking | {"session": session, "turn": turn} for session in "ab" for turn in (1, 2)]
    with gzip.open(path / "documents.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, texts)))
    for name, rows in (("tasks", turns), ("rankings", ranked)):
        (path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "qrels.tsv").write_text("session\tturn\tdocument\na\t1\tp0\nb\t2\tp9\n")
    return path


def test_mtrag_brings_documents_in_rank_and_those_that_people_marked(tmp_path):
    talks = list(of_mtrag(folder(tmp_path), 2))
    assert [one.name for one in talks] == ["a", "b"] and [len(one.turns) for one in talks] == [2, 2]
    first = talks[0].turns[0]
    assert [one.id for one in first.documents] == [IDS[1], IDS[0]] and first.right == {IDS[0]}
    assert first.answer == "Three boats." and not talks[1].turns[1].right


def test_a_run_makes_tables_and_goes_on_where_it_was_stopped(tiny, tmp_path, capsys):
    out = tmp_path / "out.json"
    given = [
        "answers",
        "-m",
        str(tiny),
        "--data",
        str(folder(tmp_path)),
        "-t",
        "1",
        "-n",
        "3",
        "-k",
        "3",
        "--json",
        str(out),
    ]
    given += ["--turns", "2", "--longest", "2000", "--out", str(tmp_path / "points")]
    assert main([*given, "--ways", "left out in silence"]) == 0
    points = tmp_path / "points" / "answers.jsonl"
    before = points.read_text()
    assert main([*given, "--ways", "left out in silence,exact order + hint,separate"]) == 0
    assert points.read_text().startswith(before)
    measured = [row["point"] for row in map(json.loads, points.read_text().splitlines()) if "point" in row]
    assert len({(one["kind"], one["talk"], one["way"]) for one in measured}) == len(measured) == 2 * 6
    report = json.loads(out.read_text())
    tables = report["tables"]
    names = [
        "retrieval order",
        "exact order",
        "exact order + hint",
        "left out + reference",
        "left out in silence",
        "separate",
    ]
    assert [[row[0] for row in table["rows"]] for table in tables[::2]] == [names, names]
    beside = [row[0] for row in tables[1]["rows"]]
    assert beside == ["exact order + hint / exact order", "left out in silence / left out + reference"]
    turns = report["data"]["turns"]["MT-RAG"]
    assert {name: [len(rows) for rows in talks.values()] for name, talks in turns.items()} == {name: [2] for name in names}
    compared = {(one["kind"], one["way"], one["than"]): one for one in report["data"]["effects"]}
    silent = compared["MT-RAG", "left out in silence", "retrieval order"]
    assert (silent["turns"], silent["conversations"]) == (1, 1), "nothing is left out of a first turn"
    assert "MT-RAG: 2 turns of 1 conversations" in capsys.readouterr().err


def test_unknown_ways_and_missing_data_are_refused(tiny, tmp_path, capsys):
    given = ["answers", "-m", str(tiny), "--out", str(tmp_path / "points")]
    assert main([*given, "--ways", "best first"]) == 2
    assert main([*given, "--data", str(tmp_path / "none")]) == 2
    printed = capsys.readouterr().err
    assert "--ways best first: expected some of retrieval order, " in printed and "no MT-RAG in" in printed
