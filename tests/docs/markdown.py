"""Markdown taken apart: code blocks, tables, headings, links."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "models/demo/MODEL_CARD.md"])
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.M | re.S)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block of code. place: file and line."""

    place: str
    language: str
    text: str


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def blocks(path: Path, language: str) -> list[Block]:
    text = path.read_text("utf-8")
    return [
        Block(
            f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 2}", language, textwrap.dedent(found["text"])
        )
        for found in FENCE.finditer(text)
        if found["language"] == language
    ]


def without_blocks(path: Path) -> str:
    return FENCE.sub("", path.read_text("utf-8"))


def rows(text: str) -> Iterator[list[str]]:
    """The cells of each row of each table, but for headings."""
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("|") and not line.startswith("|---") and not following.startswith("|---"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    _, _, rest = text.partition(f"\n{heading}\n")
    assert rest, f"there is no heading {heading!r}"
    return re.split(rf"^#{{1,{level}}} ", rest, maxsplit=1, flags=re.M)[0]


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
