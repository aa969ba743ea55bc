"""`slotcache bench attention`: turns of MT-RAG, looked at and kept."""

import gzip
import json

from slotcache.bench.cli import main


def test_turns_are_looked_at_and_a_second_run_goes_on(tiny, tmp_path, capsys):
    texts = [{"id": f"p{at}", "text": f"The {name} has {at + 3} boats. " * 9} for at, name in enumerate(("smith", "baker"))]
    turns = [{"session": "s", "turn": turn, "question": "How many?", "answer": "It has three boats."} for turn in (1, 2)]
    ranking = {"retriever": "elser", "query_form": "rewrite", "documents": ["p1", "p0"]}
    ranked = [ranking | {"session": "s", "turn": turn} for turn in (1, 2)]
    with gzip.open(tmp_path / "documents.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, texts)))
    for name, rows in (("tasks", turns), ("rankings", ranked)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kept, out = tmp_path / "kept.jsonl", tmp_path / "out.json"
    common = ["attention", "-m", str(tiny), "--data", str(tmp_path), "-t", "1", "--kept", str(kept), "--shuffles", "1"]
    assert main([*common, "--turns", "1"]) == 0
    first = kept.read_text()
    assert main([*common, "--turns", "9", "--json", str(out)]) == 0
    assert kept.read_text().startswith(first) and len(kept.read_text().splitlines()) == 2
    ways = json.loads(first)[1]
    assert set(ways) == {"joint", "no documents", "shuffled 1", "separate"}
    assert all(likelihood < 0 for likelihoods, _ in ways.values() for likelihood in likelihoods)
    joint, separate = ways["joint"][0], ways["separate"][0]
    assert len(joint) == len(separate) and joint != separate
    assert "2 turns of MT-RAG" in capsys.readouterr().out
