"""Who may import whom: the folders' dependencies, as the README's architecture section states them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "slots": set(),
    "ordering": set(),
    "models": {"slots"},
    "server": {"slots", "ordering", "models", "bench"},  # bench: the command line, and the demo starts servers with it
    "bench": {"ordering", "models", "slots"},  # models, slots: the bench model, and what is measured without a server
}
FILES = [path for folder in ALLOWED for path in (ROOT / folder).rglob("*.py")]


def siblings(path: Path) -> set[str]:
    """The folders of ours that a file imports from."""
    found = set()
    level = len(path.relative_to(ROOT).parts)  # of an import that begins at the package itself
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == level:
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("slotcache"):
            found.add("absolute import")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_folder_imports_what_it_must_not(path):
    assert siblings(path) <= ALLOWED[path.relative_to(ROOT).parts[0]]


def test_the_engine_knows_no_tokens_of_llama_cpp_outside_models():
    for path in FILES:
        if path.relative_to(ROOT).parts[0] in ("slots", "ordering", "bench"):
            assert "llama_cpp" not in path.read_text().replace("llama_cpp_python", "").replace("llama_cpp_ex", "")
