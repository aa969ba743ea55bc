"""The parts of the documents that are made from code. `.venv/bin/python tests/docs/generated.py` writes them anew."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CHART, RESULTS = ROOT / "docs/ttft.svg", ROOT / "docs/benchmarks/ttft.json"
SETTINGS, SCALE = ROOT / "docs/settings.md", ROOT / "docs/scale.md"
TABLE = re.compile(r"^\| flag, variable \|.*?(?=^$|\Z)", re.M | re.S)
LEVELS = re.compile(r"^## The settings that matter first$.*?(?=^## Flags of llama-server$)", re.M | re.S)
ARGUMENTS = re.compile(r"^\| argument \| environment \|.*?(?=^$|\Z)", re.M | re.S)
REPORT = re.compile(r"(?<=^```json\n).*?(?=^```$)", re.M | re.S)
VARIES = (
    "lane",
    "slot",
    "source",
    "reordered",
)  # of a report: they hang on time, as does whether earlier KV is still on the device
WIDTH = 125  # of a line
FLAGS_HEAD = ("| flag, variable | default | what it does |", "|---|---|---|")
FOREIGN = re.compile(r"^\| llama-server's flag \|.*?(?=^$|\Z)", re.M | re.S)


def generated() -> dict[Path, str]:
    """Each file with generated parts, as it should be."""
    from slotcache.bench.chart import svg
    from slotcache.front.settings import OWN

    settings = _with(levels(), LEVELS, SETTINGS.read_text("utf-8"))
    settings = _with(llama_table(), FOREIGN, settings)
    scale = _with(flags_table(OWN), TABLE, SCALE.read_text("utf-8"))
    scale = _with(arguments_table(), ARGUMENTS, scale)
    return {CHART: svg(json.loads(RESULTS.read_text("utf-8"))), SETTINGS: settings, SCALE: scale}


def _with(table: str, place: re.Pattern[str], page: str) -> str:
    """A page with a table in its place, which it must have."""
    text, number = place.subn(lambda _: table, page, count=1)
    assert number == 1, f"a page has no place for the table of {place.pattern}"
    return text


def levels() -> str:
    """Return two tables of a server's settings as `--help` has them, the first of each topic, and then the rest."""
    from slotcache.server.config.settings import SETTINGS as ALL
    from slotcache.server.config.topics import TOPICS

    known = {setting.name: setting for setting in ALL}
    parts: list[str] = []
    for heading, level in (("The settings that matter first", "first"), ("All other settings", "rest")):
        lines: list[str] = []
        for topic in TOPICS:
            if names := getattr(topic, level):
                lines += [f"| **{topic.title.capitalize()}** | | |", *map(flags_row, (known[name] for name in names))]
        parts.append(f"## {heading}\n\n{_lines(*FLAGS_HEAD, *lines)}")
    return "\n".join(parts) + "\n"


def flags_table(settings) -> str:
    """A table of settings that flags and variables give."""
    return _lines(*FLAGS_HEAD, *map(flags_row, settings))


def flags_row(setting) -> str:
    """A row of it: flags and variables stand one below the other in its first column."""
    from slotcache.server.config.settings import written

    flags, variables = ("`, `".join(names) for names in (setting.flags, setting.variables))
    choices = f" ({', '.join(f'`{choice}`' for choice in setting.choices if choice)})" if setting.choices else ""
    return f"| `{flags}`<br>`{variables}` | {written(setting.default) or '-'} | {setting.help}{choices} |"


def arguments_table() -> str:
    """The table of the settings that only a deployment on Ray Serve has."""
    from slotcache.front.replica_settings import OWN
    from slotcache.server.config.settings import written

    rows = [f"| `{one.name}` | `{one.variable}` | {written(one.default)} | {one.help} |" for one in OWN]
    return _lines("| argument | environment | default | what it does |", "|---|---|---|---|", *rows)


def llama_table() -> str:
    """The table of llama-server's flags that no setting stands for."""
    from slotcache.server.config.flags import REFUSED, SO_HERE, WITHOUT_EFFECT

    def code(rows) -> str:
        return ", ".join(f"`{name}`" for names, _, _ in rows for name in names.split())

    effects = (("no effect: ", WITHOUT_EFFECT), ("refused: ", REFUSED))
    reported = [f"| {code(rows)} | {effect}{says} |" for effect, groups in effects for says, rows in groups.items()]
    accepted = f"| {code(SO_HERE)} | accepted: it is so here, or nothing depends on it |"
    return _lines("| llama-server's flag | here |", "|---|---|", *reported, accepted)


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def with_report(page: str, report: dict[str, object]) -> str:
    """The README with a report as its sample. What varies stays as it is there."""
    from docs.markdown import blocks

    reported = json.loads(blocks(README, "json")[0].text)
    return _with(
        packed(report | {name: reported[name] for name in VARIES if name in reported and name in report}), REPORT, page
    )


def packed(fields: dict[str, object]) -> str:
    """An object of JSON, with as many fields in a line as it has room for."""
    lines = [" "]
    for at, (name, value) in enumerate(fields.items(), 1):
        text = f" {json.dumps(name)}: {json.dumps(value)}{',' * (at < len(fields))}"
        if len(lines[-1] + text) > WIDTH:
            lines.append(" ")
        lines[-1] += text
    return _lines("{", *lines, "}")


def asked_report(url: str) -> dict[str, object]:
    """The report that the README's example gets from a server of the built-in model, whose cache is empty."""
    from docs.markdown import blocks
    from docs.test_blocks import run

    names: dict[str, Any] = {"__name__": "document"}
    run(blocks(README, "python")[0], names, url)
    return names["answer"].slotcache


def write() -> None:
    """Write the generated parts anew. A server of the built-in model answers the README's questions."""
    from server.conftest import running
    from slotcache.models.demo import FILE

    for path, text in generated().items():
        path.write_text(text, "utf-8")
    with running(FILE, flash_attn="auto") as server:
        README.write_text(with_report(README.read_text("utf-8"), asked_report(server.url)), "utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    import conftest  # noqa: F401  makes slotcache importable from a bare checkout

    write()
