"""`slotcache bench attention`: turns of MT-RAG, with documents read jointly and separately."""

import gzip
import json

import numpy as np
import pytest
from slotcache.bench.cli import main
from slotcache.bench.offline.reading import WAYS, Reader, Turn
from slotcache.models.context import Context, ContextSettings
from slotcache.models.model import Model


def test_turns_are_read_in_each_way(tiny, tmp_path, capsys):
    texts = [{"id": f"p{at}", "text": f"The {name} has {at + 3} boats. " * 9} for at, name in enumerate(("smith", "baker"))]
    turns = [{"session": s, "turn": 1, "question": "How many?", "answer": "It has three boats."} for s in "ab"]
    ranking = {"retriever": "elser", "query_form": "rewrite", "documents": ["p1", "p0"]}
    ranked = [ranking | {"session": session, "turn": 1} for session in "ab"]
    with gzip.open(tmp_path / "documents.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, texts)))
    for name, rows in (("tasks", turns), ("rankings", ranked)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out.json"
    assert main(["attention", "-m", str(tiny), "--data", str(tmp_path), "-t", "1", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [row[0] for row in report["tables"][0]["rows"]] == list(WAYS) and len(report["data"]["turns"]) == 2
    for ways in report["data"]["turns"].values():
        assert all(likelihood < 0 for found in ways.values() for likelihood in found["likelihoods"])
        assert len(ways["joint"]["likelihoods"]) == len(ways["separate"]["likelihoods"])


@pytest.fixture(scope="module")
def reader(tiny):
    model = Model(tiny)
    return Reader(model, Context(model, ContextSettings(num_cells=1024, flash_attention="off", threads=1)))


def turn(*sizes):
    rng = np.random.default_rng(0)
    prefix, tail, answer, *documents = (rng.integers(1, 1000, size, np.int32) for size in (9, 8, 12, *sizes))
    return Turn("one", prefix, tuple(documents), tail, answer)


def test_one_document_read_separately_is_the_joint_prompt_and_the_second_one_is_not(reader):
    for sizes, is_near in (((40,), True), ((40, 50, 60), False)):
        joint, separate = (np.array(WAYS[way](reader, turn(*sizes)).likelihoods) for way in ("joint", "separate"))
        assert (np.abs(separate - joint).max() < 0.003) == is_near


def test_without_documents_none_counts(reader):
    none, empty = (WAYS[way](reader, of).likelihoods for way, of in (("no documents", turn(40, 50)), ("joint", turn())))
    assert np.abs(np.array(none) - empty).max() < 0.003
