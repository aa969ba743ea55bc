"""The package as other pipelines import it."""

import ast
import doctest
import sys
from pathlib import Path

from slotcache import ordering


def test_the_example_runs() -> None:
    result = doctest.testmod(ordering)
    assert result.attempted > 0 and result.failed == 0


def test_every_public_name_exists() -> None:
    assert all(hasattr(ordering, name) for name in ordering.__all__)
    assert list(ordering.__all__) == sorted(ordering.__all__, key=lambda name: (not name.isupper(), name))


def test_it_needs_nothing_but_python() -> None:
    adapters = {"langchain.py", "llamaindex.py"}  # need optional libraries
    for path in Path(ordering.__path__[0]).glob("*.py"):
        if path.name in adapters:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert all(name.name.split(".")[0] in sys.stdlib_module_names for name in node.names), path
            if isinstance(node, ast.ImportFrom):
                assert node.level == 1 or (node.module or "").split(".")[0] in sys.stdlib_module_names, path
