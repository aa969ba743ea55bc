"""A batch on a real server, and chats beside it."""

import json
from pathlib import Path
from typing import Any

from slotcache.bench.cli import main


def test_each_prompt_of_a_batch_is_answered_and_chats_beside_it_too(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    sizes = [
        "-m",
        str(tiny),
        "-c",
        "8192",
        "-t",
        "1",
        "--max-tokens",
        "2",
        "--requests",
        "12",
        "--chats",
        "2",
        "--pause",
        "0",
    ]
    assert main(["batch-http", *sizes, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    times, waits = report["tables"]
    (row,) = times["rows"]
    assert row[0] == "slotcache" and row[-1] == 0
    assert 0 < row[3] < row[2], "prompts of one region share documents"
    assert [(name, count) for name, count, *_ in waits["rows"]] == [("alone", 2), ("beside", 2)]
    assert [bar["limit"] for bar in report["bars"]] == [1.3], "without llama-server there is no ratio"


def test_a_server_that_runs_is_refused(capsys: Any) -> None:
    assert main(["batch-http", "--url", "http://127.0.0.1:1"]) == 2
    assert "leave --url out" in capsys.readouterr().err
