"""The parts of the documents that are made from code. `.venv/bin/python tests/docs/generated.py` writes them anew."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHART, RESULTS = ROOT / "docs/ttft.svg", ROOT / "docs/benchmarks/ttft.json"
SETTINGS, SCALE, MODULES = ROOT / "docs/settings.md", ROOT / "docs/scale.md", ROOT / "docs/modules.md"
ROOMS = ("server", "models", "slots", "ordering", "retrieval", "front", "bench")
TABLE = re.compile(r"^\| flag \| environment \|.*?(?=^$|\Z)", re.M | re.S)
ARGUMENTS = re.compile(r"^\| argument \| environment \|.*?(?=^$|\Z)", re.M | re.S)
FOREIGN = re.compile(r"^\| llama-server's flag \|.*?(?=^$|\Z)", re.M | re.S)


def generated() -> dict[Path, str]:
    """Each file with generated parts, as it should be."""
    from slotcache.bench.chart import svg
    from slotcache.front import replica_settings as replicas
    from slotcache.front.settings import HOSTING, OWN
    from slotcache.server.config import flags as llama
    from slotcache.server.config.settings import SETTINGS as ALL
    from slotcache.server.config.settings import as_markdown

    settings = TABLE.sub(lambda _: as_markdown(ALL) + "\n", SETTINGS.read_text("utf-8"), count=1)
    settings = FOREIGN.sub(lambda _: llama.as_markdown() + "\n", settings, count=1)
    scale = TABLE.sub(lambda _: as_markdown((*OWN, *HOSTING)) + "\n", SCALE.read_text("utf-8"), count=1)
    scale = ARGUMENTS.sub(lambda _: replicas.as_markdown() + "\n", scale, count=1)
    return {CHART: svg(json.loads(RESULTS.read_text("utf-8"))), SETTINGS: settings, SCALE: scale, MODULES: modules()}


def modules() -> str:
    """The table of the modules: the first line of each one's docstring."""
    lines = [
        "# The modules",
        "",
        "Made from the first lines of their docstrings. [Architecture](architecture.md) says how they fit together.",
    ]
    folders = {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    for folder in sorted(folders, key=lambda path: (ROOMS.index(path.relative_to(ROOT).parts[0]), str(path))):
        lines += ["", f"## `{folder.relative_to(ROOT)}/`", "", "| file | purpose |", "|---|---|"]
        for path in sorted(folder.glob("*.py")):
            said = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            if said and path.name != "__init__.py":
                lines.append(f"| `{path.name}` | {said.splitlines()[0].replace('|', '/')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    import conftest  # noqa: F401  makes slotcache importable from a bare checkout

    for path, text in generated().items():
        path.write_text(text, "utf-8")
