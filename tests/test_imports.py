"""Which module may import which: the rules that docs/architecture.md states, as a table.

A module is named by its path from the root, with dots. A prefix stands for a module or for a folder with all in it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("slots", "ordering", "retrieval", "models", "server", "front", "bench")
COMMAND_LINE = "server.cli"
RAY = ("front.ray_app", "front.ray_router")  # the modules that need Ray: nothing imports them
MOST_MODULES, MOST_SERVER_MODULES = 24, 14  # of a folder; of server/ without its folders


@dataclass(frozen=True)
class Rule:
    """What the modules of a room may import: only these, and never those. Imports within the room are always allowed.

    flat: the rule holds for the modules of the folder itself, and not for those of its folders. apart: nor for these.
    """

    room: str
    only: tuple[str, ...] | None = None
    never: tuple[str, ...] = ()
    flat: bool = False
    apart: tuple[str, ...] = ()

    def holds_for(self, module: str) -> bool:
        if module in self.apart:
            return False
        return module.rpartition(".")[0] == self.room if self.flat else is_in(module, self.room)

    def allows(self, target: str) -> bool:
        if self.holds_for(target):
            return True
        return not is_in(target, *self.never) and (self.only is None or is_in(target, *self.only))


RULES = (
    Rule("slots", only=()),
    Rule("ordering", only=()),
    Rule("retrieval", only=("ordering",)),
    Rule("retrieval.extract", only=("retrieval.chunks", "retrieval.files", "ordering")),
    Rule("models", only=("slots",)),
    Rule("server", only=("slots", "ordering", "retrieval", "models")),
    Rule("bench", only=("slots", "ordering", "retrieval", "models")),
    Rule(
        "front",
        only=("ordering", "server.edge", "server.errors", "server.flags", "server.log", "server.settings"),
        never=RAY,
        apart=RAY,
    ),
    Rule("front.ray_router", only=("front.replicas",)),
    Rule("front.ray_app", only=("front", "server", "models.hardware")),
    Rule(
        "server.routes",
        only=(
            "server.engine.view",
            "server.service",
            "server.vectors",
            "server.retrieving",
            "server.wire",
            "server.errors",
            "server.settings",
            "server.flags.setting",
            "server.chat.builder",
            "server.chat.answer",
        ),
    ),
    Rule("server.engine", never=("server.chat", "server.routes", "server.service")),
    Rule("server.chat", never=("server.engine", "server.routes", "server.service")),
    Rule("server.flags", only=("server.settings", "models.samplers.parameters")),
    Rule("server.vectors", never=("server.engine", "server.routes", "server.service")),
    Rule("server.retrieving", never=("server.engine", "server.routes", "server.service")),
    Rule("server.log", only=("server.errors",)),
    Rule("server.edge", only=("server.errors", "server.settings", "server.flags.setting")),
    Rule("bench", never=("slots",), flat=True),
    Rule(
        "bench.scenarios",
        only=("bench", "models.demo", "models.training.world", "ordering.stages"),
        never=("bench.offline", "bench.cli"),
    ),
    Rule("bench.offline", never=("bench.scenarios", "bench.cli")),
)

# From the ground up. A module imports from its own floor and from those below.
FLOORS = (
    ("slots", "ordering"),
    ("retrieval",),
    ("models",),
    ("server.settings", "server.errors", "server.flags", "server.log"),
    ("server.edge", "server.wire", "server.provenance", "server.fitting"),
    ("server.chat", "server.engine"),
    ("server.vectors",),
    ("server.retrieving",),
    ("server.idle", "server.metrics", "server.intake", "server.service"),
    ("server.routes",),
    ("server",),
    ("front",),
    ("bench",),
    ("bench.scenarios", "bench.offline"),
    ("bench.cli",),
    (COMMAND_LINE,),
)


@dataclass(frozen=True)
class Import:
    """One import of a module of ours by another one."""

    source: str
    target: str
    line: int
    is_late: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def is_in(module: str, *prefixes: str) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


@cache
def modules() -> dict[str, Path]:
    paths = (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))
    return {name_of(path): path for path in paths}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports() -> tuple[Import, ...]:
    return tuple(found for name, path in modules().items() for found in imports_of(name, path))


def imports_of(name: str, path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text("utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    late = {inner for function in functions for inner in ast.walk(function) if isinstance(inner, ast.ImportFrom)}
    folder = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
            where = ".".join(filter(None, base))
            for alias in node.names:
                inside = f"{where}.{alias.name}" if where else alias.name
                target = inside if inside in modules() else where
                yield Import(name, target, node.lineno, node in late)


def floor_of(module: str) -> int:
    """The floor whose prefix says most of the module's name."""
    return max((len(prefix), floor) for floor, names in enumerate(FLOORS) for prefix in names if is_in(module, prefix))[1]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.room)
def test_no_room_imports_what_it_must_not(rule):
    offenders = [
        str(found)
        for found in imports()
        if found.source != COMMAND_LINE and rule.holds_for(found.source) and not rule.allows(found.target)
    ]
    assert not offenders, "\n".join(offenders)


def test_no_import_goes_upwards():
    offenders = [str(found) for found in imports() if floor_of(found.target) > floor_of(found.source)]
    assert not offenders, "\n".join(offenders)


def test_no_modules_import_each_other_in_a_circle():
    targets: dict[str, set[str]] = {}
    for found in imports():
        targets.setdefault(found.source, set()).add(found.target)

    def reachable(start: str) -> set[str]:
        seen, ahead = set(), [start]
        while ahead:
            new = targets.get(ahead.pop(), set()) - seen
            seen |= new
            ahead += new
        return seen

    circles = {module for module in targets if module in reachable(module)}
    assert not circles


def test_only_the_command_line_imports_inside_functions():
    offenders = [str(found) for found in imports() if found.is_late and found.source != COMMAND_LINE]
    assert not offenders, "\n".join(offenders)


def test_the_package_names_itself_only_by_relative_imports():
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(is_in(name, "slotcache", *ROOMS) for name in names), f"{path}:{getattr(node, 'lineno', 0)}"


def test_the_folders_are_small_enough_to_look_through():
    folders = {path.parent for path in modules().values()}
    sizes = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: size for name, size in sizes.items() if size > MOST_MODULES} == {}
    assert sizes["server"] <= MOST_SERVER_MODULES


def test_ray_is_only_known_in_two_modules():
    needy = {name for name, path in modules().items() if re.search(r"^(from|import) ray\b", path.read_text("utf-8"), re.M)}
    assert needy == set(RAY)
    assert not [str(found) for found in imports() if found.target in RAY]


def test_llama_cpp_is_only_known_in_models():
    for name, path in modules().items():
        if is_in(name, "slots", "ordering", "retrieval", "bench"):
            assert "llama_cpp" not in path.read_text("utf-8").replace("llama_cpp_python", "").replace("llama_cpp_ex", "")
