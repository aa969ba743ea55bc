"""Count the indefinite words in docstrings, comments and documents: `make prose`, or with files as arguments.

Prose whose subjects are indefinite ("what nobody needs goes where it may") reads like a riddle. Well-kept projects have
0.1 to 0.4 such words in 100. The limit is 1.0 for all prose of the project together.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("server", "slots", "ordering", "retrieval", "models", "front", "bench", "examples")
LIMIT = 1.0  # indefinite words in 100
INDEFINITE = re.compile(
    r"\b(what|whatever|who|whoever|nobody|somebody|everybody|others|such|so many|so much|so long|there|goes on)\b", re.I
)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
CODE = re.compile(r"```.*?```|`[^`\n]*`|^    .*$", re.S | re.M)  # of a Markdown document


def prose_of(path: Path) -> str:
    """The docstrings and comments of a Python file; of a document all but its code."""
    text = path.read_text("utf-8")
    return " ".join(_docstrings_and_comments(text)) if path.suffix == ".py" else CODE.sub(" ", text)


def count(prose: str) -> tuple[int, Counter[str]]:
    """The number of words, and how often each indefinite one is among them."""
    return len(WORD.findall(prose)), Counter(match.group().lower() for match in INDEFINITE.finditer(prose))


def project_files() -> list[Path]:
    """All prose of the project, tests left out."""
    code = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [*code, *sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def main(arguments: list[str]) -> int:
    """Print the rate of each file, the worst last, and of all together. 1: it is above the limit."""
    rates, words, found = [], 0, Counter[str]()
    for path in [Path(name).resolve() for name in arguments] or project_files():
        length, some = count(prose_of(path))
        words, found = words + length, found + some
        rates.append((100 * some.total() / max(length, 1), some.total(), str(path.relative_to(ROOT))))
    for rate, number, name in sorted(rates):
        print(f"{rate:5.2f} {number:4d} {name}")
    rate = 100 * found.total() / max(words, 1)
    print(", ".join(f"{word} {number}" for word, number in found.most_common()))
    print(f"{found.total()} indefinite words in {words:,}: {rate:.2f} in 100, of at most {LIMIT}")
    return int(rate > LIMIT)


def _docstrings_and_comments(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
