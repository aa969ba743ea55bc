"""`slotcache bench disk`, small: real servers, a real kill."""

import json
from pathlib import Path
from typing import Any

from slotcache.bench.cli import main

SMALL = ["--prompts", "4", "--prompt-tokens", "400", "-c", "1024", "--cache-ram", "1", "--max-tokens", "4", "-t", "1"]


def test_prompts_come_back_from_disk_and_after_a_kill(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    assert main(["disk", "-m", str(tiny), *SMALL, "--records", "300", "--pairs", "1", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    asked, made, pairs = report["tables"]
    assert [row[0] for row in asked["rows"]] == ["cold", "again", "after a kill"]
    assert [row[5] for row in asked["rows"]] == ["4/4"] * 3, "the same texts"
    assert asked["rows"][0][4] < 0.5 and report["data"]["asked"]["after a kill"][0]["cached_tokens"] > 300
    assert [row[0] for row in made["rows"]] == ["heads read", "index read"] and all(row[4] > 0 for row in made["rows"])
    assert {row[0] for row in pairs["rows"]} == {"with a disk", "without"}
