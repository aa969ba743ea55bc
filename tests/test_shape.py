"""How large things may grow: files, the four hub classes, calls, and the holes in the types and in the prose."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from prose import LIMIT as MOST_INDEFINITE
from prose import count, project_files, prose_of

ROOT = Path(__file__).parents[1]
ROOMS = ("slots", "ordering", "retrieval", "models", "server", "front", "bench")
HUBS = {"Engine": "server", "Service": "server", "Scheduler": "slots", "PrefixTree": "slots"}
MOST_LINES, MOST_METHODS = 200, 16  # of a hub
MOST_FILE_LINES = 300
MOST_ARGUMENTS = 4  # by position: from five on, a reader of the call cannot tell which is which
MOST_ANY = 40  # in the rooms that a server consists of
FOREIGN = ("llama_cpp", "torch", "np", "logger", "raw")  # calls into these take what their libraries take
FOREIGN_METHODS = {"view", "expand", "reshape", "Call"}  # of tensors and of Jinja's syntax trees


@cache
def parsed() -> dict[str, ast.Module]:
    paths = (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text("utf-8")) for path in paths}


def is_foreign(call: ast.Call) -> bool:
    """Whether the function called is another library's, so that its signature is not ours to choose."""
    root = call.func
    while isinstance(root, ast.Attribute | ast.Call):
        root = root.value if isinstance(root, ast.Attribute) else root.func
    named = isinstance(call.func, ast.Attribute) and call.func.attr in FOREIGN_METHODS
    return named or (isinstance(root, ast.Name) and root.id in FOREIGN)


def test_no_file_is_too_long():
    sizes = {name: len((ROOT / name).read_text("utf-8").splitlines()) for name in parsed()}
    assert {name: size for name, size in sizes.items() if size > MOST_FILE_LINES} == {}


@pytest.mark.parametrize("hub", HUBS)
def test_the_hubs_fit_on_a_few_screens(hub):
    found = [
        node
        for name, tree in parsed().items()
        if name.startswith(HUBS[hub] + "/")
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == hub
    ]
    assert len(found) == 1, f"expected one class {hub} in {HUBS[hub]}/"
    lines = (found[0].end_lineno or 0) - found[0].lineno + 1
    methods = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in found[0].body)
    assert (lines <= MOST_LINES, methods <= MOST_METHODS) == (True, True), f"{hub}: {lines} lines, {methods} methods"


def test_no_call_passes_many_arguments_by_position():
    offenders = [
        f"{name}:{node.lineno} {ast.unparse(node.func)}: {len(node.args)} arguments"
        for name, tree in parsed().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and len(node.args) > MOST_ARGUMENTS and not is_foreign(node)
    ]
    assert not offenders, "\n".join(offenders)


def test_few_types_are_left_open():
    found = {
        name: number
        for name, tree in parsed().items()
        if not name.startswith("bench/")
        and (number := sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree)))
    }
    assert sum(found.values()) <= MOST_ANY, f"{sum(found.values())} of {MOST_ANY}: {found}"


def test_the_prose_is_definite():
    words, indefinite = 0, 0
    for path in project_files():
        length, found = count(prose_of(path))
        words, indefinite = words + length, indefinite + found.total()
    rate = 100 * indefinite / words
    assert rate <= MOST_INDEFINITE, f"{rate:.2f} in 100 words: `make prose` says where"
