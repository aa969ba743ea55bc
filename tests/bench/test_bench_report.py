"""Tables, bars and the JSON result."""

import json
from math import nan
from pathlib import Path

from slotcache.bench.report import Bar, Report, Table


def test_a_bar_says_whether_it_is_met() -> None:
    assert Bar(2, "ratio", 0.6, 0.65).text() == "bar 2  ratio: 0.60 (at most 0.65) met"
    assert Bar(6, "gap", 3.2, 3.0, unit="x").text() == "bar 6  gap: 3.20x (at most 3.00x) MISSED"
    assert Bar(5, "speed", 0.95, 0.9, at_least=True).is_met
    assert not Bar(5, "speed", 0.85, 0.9, at_least=True).is_met
    assert not Bar(2, "ratio", nan, 0.65).is_met
    assert "not measured" in Bar(2, "ratio", nan, 0.65).text()


def test_json_holds_everything_and_no_nan(tmp_path: Path) -> None:
    report = Report(
        "burst", [Table("t", ("a",), [(nan,)])], bars=[Bar(2, "b", 0.5, 1.0)], notes=["note"], data={"runs": ({"x": nan},)}
    )
    report.write(tmp_path / "new" / "out.json", {"cpu": "one"})
    value = json.loads((tmp_path / "new" / "out.json").read_text())
    assert value["machine"] == {"cpu": "one"}
    assert value["tables"] == [{"title": "t", "columns": ["a"], "rows": [[None]]}]
    assert value["bars"][0]["measured"] == 0.5 and value["bars"][0]["met"] is True
    assert value["data"] == {"runs": [{"x": None}]}
