"""The parts of the documents that are made from code are as the code makes them."""

import json
import re

from slotcache.bench.cli import SCENARIOS
from slotcache.front.settings import HOSTING

from docs.generated import RESULTS, generated
from docs.markdown import CODE, ROOT, read, rows, section


def test_generated_parts_are_fresh():
    stale = [str(path.relative_to(ROOT)) for path, text in generated().items() if path.read_text("utf-8") != text]
    assert not stale, f"run `.venv/bin/python tests/docs/generated.py` to write {stale} anew"


def test_the_front_s_page_names_the_server_s_flags_that_it_has():
    prose = [line for line in section(read("docs/scale.md"), "## Settings").splitlines() if not line.startswith("|")]
    named = {code for line in prose for code in CODE.findall(line) if code.startswith("--")}
    assert named == {setting.flags[-1] for setting in HOSTING}


def test_the_figures_of_the_chart_stand_in_the_benchmarks():
    page = read("docs/benchmarks.md")
    for row in json.loads(RESULTS.read_text("utf-8"))["workloads"]:
        assert f"{row['ratio']:.2f}" in page and f"{row['ratio']:.2f}" in read("README.md")
        if row["slotcache_ms"]:
            assert f"{row['slotcache_ms']:,}" in page and f"{row['llama_server_ms']:,}" in page
            assert round(row["slotcache_ms"] / row["llama_server_ms"], 2) == row["ratio"]


def test_the_chart_names_its_conditions():
    """Who sees the picture elsewhere has nothing but the picture."""
    results, drawn = json.loads(RESULTS.read_text("utf-8")), read("docs/ttft.svg")
    reported = [results[name] for name in ("arms", "engine", "model", "measured")]
    assert all(f">{text}<" in drawn for text in reported + [row["machine"] for row in results["workloads"]])


def test_every_scenario_is_described():
    described = {cells[0].strip("`") for cells in rows(section(read("docs/benchmarks.md"), "## Scenarios"))}
    assert described == set(SCENARIOS)


def test_the_glossary_is_in_order():
    terms = re.findall(r"^\*\*(.+?)\*\*: ", read("docs/glossary.md"), re.M)
    assert terms == sorted(terms, key=str.lower) and len(terms) == len(set(terms)) < 30
