"""The shape of the house: rules on the graph of imports, instead of caps on sizes.

As a script it prints how often each rule is broken, and with -v where: `python tests/test_house.py [ROOT] [-v]`. A rule that
the code breaks today has its count in CEILINGS, at most.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

ROOT = Path(sys.argv[1]) if __name__ == "__main__" and sys.argv[1:2] not in ([], ["-v"]) else Path(__file__).parents[1]
LAYERS = (  # top to bottom: a room imports rooms below it only
    "bench.scenarios bench.offline",
    "bench",
    "front",
    "server",
    "server.api",
    "server.service",
    "server.search",
    "server.chat",
    "server.formats server.engine",
    "server.http",
    "server.config",
    "models",
    "retrieval",
    "slots.store",
    "slots",
    "models.demo ordering",
)
COMMANDS = "server.cli"  # names the modules of its commands, which stand above it, as strings
LLAMA = "models.llama"
RAY = {"front.ray_app", "front.ray_router"}  # the modules that need Ray: nothing imports them
ENTRIES = RAY | {  # started or loaded by name: nothing has to import them
    "server.cli",
    "front.cli",
    "bench.cli",
    "bench.chart",
    "bench.faulty",
    "retrieval.reader",
    "server.api.routes",
    "ordering.langchain",
    "ordering.llamaindex",
    "slots.queue",
}
SAME_NAME = {"cli", "app", "settings"}  # one of each program
CEILINGS = {
    "classes_twice": 3,  # Engine: Ray's name of a replica. CacheOrder: two frameworks. Index: two public libraries
    "modules_twice": 1,  # conversations: a bench of those that the server stores
}
HOOKS = {  # callables that another object assigns, with the reason
    "take_now": "of one stream, for as long as its connection takes text at once",
    "on_computed": "a multi-token head is made of the runner whose states it reads",
}
CORE = {  # of slots/: the cache and its scheduler. All else there is a special case, which is handed to them
    *("scope", "reuse", "plan", "costs", "radix", "eviction", "device", "host", "prefix_tree", "record"),
    *("request", "job", "counters", "swap", "cells", "strategy", "slot"),
    *("groups", "queue", "turns", "seams", "scheduler", "check"),
}
KNOWN_BY_CORE: dict[str, str] = {}  # special cases that the core imports, with the reason
LEAST_LINES, ALONE = 40, 150


@cache
def modules() -> dict[str, ast.Module]:
    rooms = sorted({layer.split(".")[0] for row in LAYERS for layer in row.split()})
    paths = (path for room in rooms for path in sorted((ROOT / room).rglob("*.py")))
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): ast.parse(p.read_text("utf-8")) for p in paths}


def room(module: str) -> str:
    return module.rpartition(".")[0]


@cache
def imports() -> dict[str, set[str]]:
    """Each module with those it imports: relatively, by the package's name, or by a string that it hands to importlib."""
    return {name: {target for target in _imported(name, tree) if target != name} for name, tree in modules().items()}


def _imported(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield from _known(".".join([*name.split(".")[: -node.level], *filter(None, [node.module])]), node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slotcache."):
            yield from _known((node.module or "").removeprefix("slotcache."), node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and name != COMMANDS:
            for text in (
                one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ):
                if (target := text.lstrip(".").removeprefix("slotcache.")) in modules():
                    yield target


def _known(base: str, node: ast.ImportFrom) -> Iterator[str]:
    for alias in node.names:
        target = next((t for t in (f"{base}.{alias.name}", base, f"{base}.__init__") if t in modules()), "")
        if target:
            yield target


def sizes() -> dict[str, int]:
    return {
        name: len((ROOT / name.replace(".", "/")).with_suffix(".py").read_text("utf-8").splitlines()) for name in modules()
    }


def layer_of(module: str) -> int:
    return next((i for i, row in enumerate(LAYERS) if room(module) in row.split()), -1)


def reachable(start: str) -> set[str]:
    seen, ahead = set(), [start]
    while ahead:
        new = imports()[ahead.pop()] - seen
        seen |= new
        ahead += new
    return seen


def circles() -> list[str]:
    return [name for name in modules() if name in reachable(name)]


def mutual_rooms() -> list[str]:
    pairs = {(room(a), room(b)) for a, targets in imports().items() for b in targets if room(a) != room(b)}
    return [
        f"{a} <-> {b}" for a, b in combinations(sorted({x for pair in pairs for x in pair}), 2) if {(a, b), (b, a)} <= pairs
    ]


def upward() -> list[str]:
    edges = ((a, b) for a, targets in imports().items() for b in targets if room(a) != room(b))
    return [f"{a} -> {b}" for a, b in edges if layer_of(b) <= layer_of(a)]


def classes_twice() -> list[str]:
    where = defaultdict(list)
    for name, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not name.startswith("bench"):
                where[node.name].append(name)
    return [f"{name}: {', '.join(found)}" for name, found in where.items() if len(found) > 1]


def modules_twice() -> list[str]:
    where = defaultdict(list)
    for name in modules():
        where[name.rpartition(".")[2]].append(name)
    return [f"{n}: {', '.join(f)}" for n, f in where.items() if len(f) > 1 and n not in SAME_NAME | {"__init__"}]


def late_imports() -> list[str]:
    """Imports inside functions hide the graph. Only the commands may: each loads its own module when it is called."""
    return [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        if name != COMMANDS
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.level
    ]


def absolute_imports() -> list[str]:
    """The package names itself only by relative imports, so that a bare checkout works."""
    rooms = {name.split(".")[0] for name in modules()} | {"slotcache"}
    return [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        for target in _absolute(node)
        if isinstance(node, ast.Import | ast.ImportFrom) and target.split(".")[0] in rooms
    ]


def _absolute(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def misplaced_ray() -> list[str]:
    needy = {
        name
        for name, tree in modules().items()
        if any(t.split(".")[0] == "ray" for n in ast.walk(tree) for t in _absolute(n))
    }
    users = [f"{a} imports {b}" for a, targets in imports().items() for b in targets & RAY]
    return [*(f"{name} needs Ray" for name in needy ^ RAY), *users]


def misplaced_llama_cpp() -> list[str]:
    """One module loads llama.cpp; none imports a package that has it. The rooms below know it not at all."""
    strangers = ("slots", "ordering", "retrieval", "front", "bench.scenarios")
    packages = re.compile(r"^\s*(import|from) (llama_cpp|xllamacpp)\b", re.M)
    importers = [path.stem for path in sorted((ROOT / "tests").rglob("*.py")) if packages.search(path.read_text("utf-8"))]
    importers += [name for name in modules() if packages.search(_text(name))]
    loaders = [name for name in modules() if name != LLAMA and re.search(r"\bCDLL\((?!None\))", _text(name))]
    users = [name for name, targets in imports().items() if name.startswith(strangers) and LLAMA in targets]
    return [*importers, *loaders, *users]


def special_cases_in_the_core() -> list[str]:
    """The scheduler knows protocols. What it can do without stands beside it, and who makes a server hands it over."""
    core = {f"slots.{name}" for name in CORE}
    edges = (
        f"{a} -> {b}"
        for a in sorted(core & imports().keys())
        for b in sorted(imports()[a])
        if b.startswith("slots.") and b not in core
    )
    return [*(edge for edge in edges if edge not in KNOWN_BY_CORE), *sorted(core - imports().keys())]


def hooks() -> list[str]:
    """Callables that one object assigns to an attribute of another: an arrow that no import shows. They are arguments."""
    product = {name: tree for name, tree in modules().items() if not name.startswith("bench")}
    declared = {
        node.target.attr if isinstance(node.target, ast.Attribute) else ast.unparse(node.target)
        for tree in product.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and "Callable" in ast.unparse(node.annotation)
    }
    found = ((name, *one) for name, tree in product.items() for node in ast.walk(tree) for one in _assigned(node))
    return [f"{name}:{line}: {attribute}" for name, attribute, line in found if attribute in declared - HOOKS.keys()]


def _assigned(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the attributes of other objects that a statement assigns, also by setattr, each with its line."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    for target in [part for whole in targets for part in (whole.elts if isinstance(whole, ast.Tuple) else [whole])]:
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) != "self":
            yield target.attr, target.lineno
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr") and isinstance(node.args[1], ast.Constant):
        yield str(node.args[1].value), node.lineno


def too_small() -> list[str]:
    return [f"{name}: {n}" for name, n in sizes().items() if n < LEAST_LINES and not name.endswith("__init__")]


def one_importer() -> list[str]:
    users = defaultdict(set)
    for a, targets in imports().items():
        for b in targets:
            users[b].add(a)
    small = (name for name, n in sizes().items() if n <= ALONE and not name.endswith("__init__") and name not in ENTRIES)
    return [f"{name}: {', '.join(users[name])}" for name in small if len(users[name]) < 2 and not name.startswith("bench.")]


def product() -> tuple[int, int]:
    """Return the modules and lines of the product: without bench, and without files that only make a folder a package."""
    found = {name: n for name, n in sizes().items() if not name.startswith("bench") and not name.endswith("__init__")}
    return len(found), sum(found.values())


def _text(module: str) -> str:
    return (ROOT / module.replace(".", "/")).with_suffix(".py").read_text("utf-8")


RULES = (
    circles,
    mutual_rooms,
    upward,
    classes_twice,
    modules_twice,
    late_imports,
    absolute_imports,
    misplaced_ray,
    misplaced_llama_cpp,
    special_cases_in_the_core,
    hooks,
)
SUSPECTS = (too_small, one_importer)  # printed, never tested: a size that is tested becomes the shape of the code


def pytest_generate_tests(metafunc) -> None:
    if "rule" in metafunc.fixturenames:
        metafunc.parametrize("rule", RULES, ids=lambda rule: rule.__name__)


def test_the_house_keeps_its_rules(rule) -> None:
    assert len(rule()) <= CEILINGS.get(rule.__name__, 0), "\n".join(rule())


if __name__ == "__main__":
    for one in RULES + SUSPECTS:
        broken = one()
        print(f"{one.__name__:20} {len(broken)}", *(f"\n    {line}" for line in broken[: 40 if "-v" in sys.argv else 0]))
    print(f"{'product':20} {product()[0]} modules, {product()[1]:,} lines")
