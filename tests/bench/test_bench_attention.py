"""`slotcache bench attention`: turns of MT-RAG, looked at and kept; documents read in many ways."""

import gzip
import json

import numpy as np
import pytest
from slotcache.bench.cli import main
from slotcache.bench.offline.reading import WAYS, Case, Reader, Turn, again
from slotcache.models.context import Context, ContextSettings
from slotcache.models.model import Model


def test_turns_are_looked_at_and_a_second_run_goes_on(tiny, tmp_path, capsys):
    texts = [{"id": f"p{at}", "text": f"The {name} has {at + 3} boats. " * 9} for at, name in enumerate(("smith", "baker"))]
    turns = [{"session": s, "turn": 1, "question": "How many?", "answer": "It has three boats."} for s in "ab"]
    ranking = {"retriever": "elser", "query_form": "rewrite", "documents": ["p1", "p0"]}
    ranked = [ranking | {"session": session, "turn": 1} for session in "ab"]
    with gzip.open(tmp_path / "documents.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, texts)))
    for name, rows in (("tasks", turns), ("rankings", ranked)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kept, out = tmp_path / "kept.jsonl", tmp_path / "out.json"
    common = ["attention", "-m", str(tiny), "--data", str(tmp_path), "-t", "1", "--kept", str(kept)]
    assert main([*common, "--turns", "1"]) == 0
    first = kept.read_text()
    assert main([*common, "--turns", "9", "--json", str(out)]) == 0
    assert kept.read_text().startswith(first) and len(kept.read_text().splitlines()) == 2
    ways = json.loads(first)[1]
    assert set(ways) == set(WAYS)
    assert all(likelihood < 0 for found in ways.values() for likelihood in found["likelihoods"])
    joint, separate = ways["joint"]["likelihoods"], ways["separate"]["likelihoods"]
    assert len(joint) == len(separate) and joint != separate
    assert "2 turns of MT-RAG" in capsys.readouterr().out


@pytest.fixture(scope="module")
def case(tiny):
    model = Model(tiny)
    reader = Reader(model, Context(model, ContextSettings(num_cells=1024, flash_attention="off", threads=1)))
    rng = np.random.default_rng(0)
    prefix, *documents, tail, answer = (rng.integers(1, model.num_vocab, size, np.int32) for size in (9, 40, 50, 60, 8, 12))
    return Case(reader, Turn("one", prefix, tuple(documents), tail, answer))


def test_all_computed_again_is_the_joint_prompt(case):
    joint, separate = (np.array(WAYS[way](case).likelihoods) for way in ("joint", "separate"))
    whole = again(Case.heads, 1.0)(case)
    assert np.abs(separate - joint).max() > 0.01
    assert np.abs(np.array(whole.likelihoods) - joint).max() < 0.003
    assert whole.computed == 110 / 167 and WAYS["separate"](case).computed == 0


def test_a_share_computed_again_stands_in_between(case):
    joint, separate, part = (
        np.array(way(case).likelihoods) for way in (WAYS["joint"], WAYS["separate"], again(Case.heads, 0.4))
    )
    assert 0 < np.abs(part - joint).mean() < np.abs(separate - joint).mean()
