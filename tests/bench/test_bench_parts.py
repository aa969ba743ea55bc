"""MT-RAG part by part, with real servers: each part of slotcache adds reuse."""

import gzip
import json
from pathlib import Path
from typing import Any

from slotcache.bench.cli import main
from slotcache.bench.random_models import built_in_model

RANKINGS = {("a", 1): "201", ("b", 1): "120", ("a", 2): "132", ("b", 2): "103"}


def write(folder: Path) -> None:
    texts = {str(number): f"Page {number} tells of the canal, the school and the castle. " * 5 for number in range(4)}
    rows = {
        "documents.jsonl.gz": [{"id": name, "title": "", "text": text} for name, text in texts.items()],
        "tasks.jsonl": [{"session": s, "turn": t, "question": f"What of {s}, {t}?"} for s, t in RANKINGS],
        "rankings.jsonl": [
            {"session": s, "turn": t, "retriever": "elser", "query_form": "rewrite", "documents": list(ranked)}
            for (s, t), ranked in RANKINGS.items()
        ],
    }
    for name, values in rows.items():
        text = "".join(json.dumps(value) + "\n" for value in values).encode()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)


def test_every_part_adds_reuse(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path)
    report = tmp_path / "out.json"
    sizes = ["-c", "4096", "-t", "1", "--max-tokens", "2"]
    assert (
        main(["mtrag", "-m", str(built_in_model()), "--data", str(tmp_path), "--parts", *sizes, "--json", str(report)]) == 0
    )
    (table,) = json.loads(report.read_text())["tables"]
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    own, shared, order, fewer, queue = rows.values()
    assert next(iter(rows)) == "own history only" and not any(row["errors"] for row in rows.values())
    assert own["cached"] < order["cached"] and shared["cached"] <= order["cached"]
    assert fewer["prompt tokens"] < order["prompt tokens"], "what the conversation holds is not shown again"
    assert queue["cached"] == fewer["cached"], "nobody waits here"
