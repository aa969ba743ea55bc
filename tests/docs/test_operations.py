"""The examples of docs/operations.md: rules and a dashboard over metrics that exist, files that the programs accept."""

import json
import os
import re
import shutil
import subprocess

import pytest
from slotcache.server.config.flags import Parser, add_arguments
from slotcache.server.config.settings import SETTINGS

from docs.markdown import CODE, DOCUMENTS, ROOT, read, rows

EXAMPLES = ROOT / "examples"
METRIC = re.compile(r"\bslotcache_[a-z_]+")
PARTS = ("_bucket", "_sum", "_count")  # of a histogram
TOOLS = {
    "promtool check rules": "alerts.yaml",
    "promtool check config": "prometheus.yaml",
    "caddy validate --adapter caddyfile --config": "Caddyfile",
}


def known_metrics():
    """Metrics of the documents, which are held to the server, and their kinds."""
    reported = [cells for page in ("docs/metrics.md", "docs/scale.md") for cells in rows(read(page))]
    return {name: cells[1] for cells in reported for name in CODE.findall(cells[0]) if METRIC.fullmatch(name)}


@pytest.mark.parametrize("name", ["alerts.yaml", "grafana.json"])
def test_every_metric_of_an_example_is_one_of_the_server(name):
    known, used = known_metrics(), set(METRIC.findall(read(f"examples/{name}")))
    histograms = {name + part for name, kind in known.items() if kind.startswith("histogram") for part in PARTS}
    assert len(used) > 5 and used - known.keys() - histograms == set()


def test_the_dashboard_is_whole():
    panels = json.loads(read("examples/grafana.json"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 12
    for panel in panels:
        assert panel["title"] and all(METRIC.search(target["expr"]) for target in panel["targets"])
        for target in panel["targets"]:
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            by = set(re.findall(r"by \((\w+)\)", target["expr"]))
            assert not by or labels <= by, f"{panel['title']}: a legend names a label that its sum has lost"


@pytest.mark.parametrize("tool", TOOLS)
def test_an_example_is_accepted_by_its_program(tool, tmp_path):
    if shutil.which(tool.split()[0]) is None:
        pytest.skip(f"needs {tool.split()[0]}")
    asked = [*tool.split(), str(EXAMPLES / TOOLS[tool])]
    ran = subprocess.run(asked, capture_output=True, text=True, env=os.environ | {"HOME": str(tmp_path)})
    assert ran.returncode == 0, ran.stdout + ran.stderr


def of_unit(name):
    return re.findall(rf"^{name}=(.*)$", read("examples/slotcache.service"), re.M)


def test_the_unit_starts_a_server_with_flags_and_variables_that_exist(monkeypatch):
    (line,) = of_unit("ExecStart")
    program, command, *flags = line.split()
    assert program.endswith("/slotcache") and command == "serve" and flags[:1] == ["--config"]
    parser = Parser()
    add_arguments(parser)
    parser.parse_args(flags[2:])
    variables = [one.partition("=")[0] for line in of_unit("Environment") for one in line.split()]
    assert {*variables} <= {setting.variable for setting in SETTINGS} | {"XDG_CACHE_HOME", "HF_HOME"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path):
    (program,) = {line.split()[0] for line in of_unit("ExecStart")}
    unit = tmp_path / "slotcache.service"
    unit.write_text(read("examples/slotcache.service").replace(program, shutil.which("true") or "/bin/true"))
    ran = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert ran.returncode == 0 and "slotcache.service" not in ran.stderr, ran.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_suggests_a_cache_folder_that_is_the_program_s_own(path):
    text = path.read_text("utf-8")
    assert not re.search(r"(--cache-dir|slotcache cache [^|\n]*) ~/\.cache/slotcache(?![\w-])", text)
