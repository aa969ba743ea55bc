"""Draws the README's chart from a result file: python -m slotcache.bench.chart docs/benchmarks/ttft.json docs/ttft.svg"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, LABELS, ROW, TOP, LINE = 760, 340, 62, 34, 16  # pixels; LABELS: the space left of the bars
SCALE = WIDTH - LABELS - 60  # pixels of llama-server's bar
OURS, THEIRS, INK = "#2f81f7", "#afb8c1", "#6e7781"  # legible on light and on dark pages


def svg(results: Mapping) -> str:
    """Return a picture with a pair of bars for each workload: slotcache's over a pale bar of length 1 for llama-server.

    The conditions are below the bars, because the picture may be shown without the README.
    """
    rows, conditions = results["workloads"], [results[name] for name in ("arms", "engine", "model", "measured")]
    below = TOP + ROW * len(rows) + 8
    height = below + LINE * len(conditions)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif">',
        f"<title>{escape(results['figure'])}</title>",
        _text(LABELS, 20, "median time to the first token, llama-server = 1.00"),
        *(line for at, row in enumerate(rows) for line in _row(TOP + ROW * at, row)),
        *(_text(12, below + LINE * at, line, size=11) for at, line in enumerate(conditions)),
        "</svg>",
    ]
    return "\n".join(drawn) + "\n"


def _row(y: int, row: Mapping) -> Iterator[str]:
    """Yield the lines of a workload: its labels, its two bars, and its figure."""
    length = round(SCALE * row["ratio"])
    yield _text(LABELS - 12, y + 14, row["name"], size=14, anchor="end")
    yield _text(LABELS - 12, y + 30, row["about"], anchor="end")
    yield _text(LABELS - 12, y + 45, row["machine"], size=11, anchor="end")
    yield f'<rect x="{LABELS}" y="{y}" width="{SCALE}" height="34" rx="3" fill="{THEIRS}" fill-opacity="0.35"/>'
    yield f'<rect x="{LABELS}" y="{y}" width="{length}" height="34" rx="3" fill="{OURS}"/>'
    yield _text(LABELS + SCALE + 10, y + 22, f"{row['ratio']:.2f}", size=15)


def _text(x: int, y: int, text: str, size: int = 12, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'


def main(source: str, target: str) -> int:
    Path(target).write_text(svg(json.loads(Path(source).read_text("utf-8"))), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
