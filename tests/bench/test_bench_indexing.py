"""The scenario of a stream beside files that are read, against a real server."""

import json
from pathlib import Path
from typing import Any

from slotcache.bench.cli import main
from slotcache.bench.random_models import built_in_model
from slotcache.bench.scenarios.indexing import SECTIONS
from support.encoders import bert


def test_files_are_read_beside_the_stream_and_vectors_wait(tmp_path: Path, capsys: Any) -> None:
    out, encoder = tmp_path / "out.json", bert(tmp_path / "bert.gguf")
    sizes = ["--files", "2", "--windows", "2", "--quiet", "0.3", "-c", "20000", "-t", "1"]
    models = ["-m", str(built_in_model()), "--embedding-model", str(encoder)]
    assert main(["indexing", *models, *sizes, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    measured = report["data"]["measured"]
    assert [window["chunks"] for window in measured["busy"]] == [2 * SECTIONS] * 2
    assert len(measured["quiet"]) == 3 and all(window["tokens"] > 0 for window in measured["quiet"] + measured["busy"])
    assert measured["vectors"] == 0 < measured["vectors_later"]
    assert [bar["number"] for bar in report["bars"]] == [1, 2, 3, 4]


def test_a_server_that_runs_already_is_refused(capsys: Any) -> None:
    assert main(["indexing", "--url", "http://127.0.0.1:1"]) == 2
    assert "leave --url out" in capsys.readouterr().err
