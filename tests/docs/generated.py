"""The parts of the documents that are made from code. `.venv/bin/python tests/docs/generated.py` writes them anew."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHART, RESULTS = ROOT / "docs/ttft.svg", ROOT / "docs/benchmarks/ttft.json"
SETTINGS, SCALE = ROOT / "docs/settings.md", ROOT / "docs/scale.md"
TABLE = re.compile(r"^\| flag \| environment \|.*?(?=^$|\Z)", re.M | re.S)
ARGUMENTS = re.compile(r"^\| argument \| environment \|.*?(?=^$|\Z)", re.M | re.S)
FOREIGN = re.compile(r"^\| llama-server's flag \|.*?(?=^$|\Z)", re.M | re.S)


def generated() -> dict[Path, str]:
    """Each file with generated parts, as it should be."""
    from slotcache.bench.chart import svg
    from slotcache.front.replicas import settings as replicas
    from slotcache.front.settings import HOSTING, OWN
    from slotcache.server.flags import llama
    from slotcache.server.flags.setting import as_markdown
    from slotcache.server.settings import SETTINGS as ALL

    settings = TABLE.sub(lambda _: as_markdown(ALL) + "\n", SETTINGS.read_text("utf-8"), count=1)
    settings = FOREIGN.sub(lambda _: llama.as_markdown() + "\n", settings, count=1)
    scale = TABLE.sub(lambda _: as_markdown((*OWN, *HOSTING)) + "\n", SCALE.read_text("utf-8"), count=1)
    scale = ARGUMENTS.sub(lambda _: replicas.as_markdown() + "\n", scale, count=1)
    return {CHART: svg(json.loads(RESULTS.read_text("utf-8"))), SETTINGS: settings, SCALE: scale}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    import conftest  # noqa: F401  makes slotcache importable from a bare checkout

    for path, text in generated().items():
        path.write_text(text, "utf-8")
