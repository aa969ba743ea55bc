"""Everything that was timed stands in models/costs.py, and every tuning rule reads it from there."""

import ast
import io
import re
import tokenize
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from slotcache.models.costs import CELL, CPU, GPU, MIN_ROWS, PASS, TILE, TILE_CELL, costs_of
from slotcache.models.model import Model
from slotcache.slots.costs import NEVER, UNMEASURED, Costs

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "models" / "costs.py"
ROOMS = ("slots", "ordering", "retrieval", "models", "server")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
ELSEWHERE = [path for path in FILES if path != PLACE and not path.is_relative_to(ROOT / "models" / "training")]
OFF = ROOT / "slots" / "costs.py"  # where every rule is turned off
NAMES = {field.name for field in fields(Costs)}
TIMED = re.compile(r"\b(measured|timed)\b|\d ?(ns|us|µs|ms)\b")
MODEL = cast(Model, SimpleNamespace(attention_width=10, num_parameters=1000, num_layer_parameters=900))


def is_number(node):
    return (isinstance(node, ast.Constant) and type(node.value) in (int, float)) or ast.unparse(node).endswith(".inf")


def numbers_by_name(tree):
    """(name, number) of every assignment, default of a parameter and keyword argument."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
                yield ast.unparse(target), value
            case ast.arguments():
                positional = [*node.posonlyargs, *node.args][::-1]
                yield from ((arg.arg, default) for arg, default in zip(positional, node.defaults[::-1], strict=False))
                yield from ((arg.arg, value) for arg, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value)
            case ast.keyword(arg=str(name), value=value):
                yield name, value


def test_costs_are_made_and_changed_in_one_place():
    for path in set(ELSEWHERE) - {OFF}:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        made = [call for call in calls if ast.unparse(call.func).split(".")[-1] in ("Costs", "replace")]
        assert not [path for call in made if {keyword.arg for keyword in call.keywords} & NAMES], path


def test_no_name_of_a_cost_has_a_number_elsewhere():
    of_costs = [
        (str(path.relative_to(ROOT)), name)
        for path in sorted(set(ELSEWHERE) - {OFF})
        for name, value in numbers_by_name(ast.parse(path.read_text()))
        if is_number(value) and name.lower().split(".")[-1].lstrip("_") in NAMES
    ]
    assert of_costs == [("slots/request.py", "rest")], "what a request has before its admission"


def test_no_constant_of_a_module_is_a_measured_one():
    for path in ELSEWHERE:
        text = path.read_text()
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and is_number(node.value):
                comment = comments.get(node.lineno, "")
                is_setting = ast.unparse(node).startswith("SWITCH_INTERVAL")  # of the interpreter
                assert is_setting or not TIMED.search(comment), f"{path}: {ast.unparse(node)} {comment}"


def test_what_turns_every_rule_off_has_no_number_of_its_own():
    assert {getattr(UNMEASURED, name) for name in NAMES} <= {0, 1, NEVER}
    assert not UNMEASURED.pays_to_pad(63, 10**9, 1) and not UNMEASURED.pays_to_swap(10**6, 10**6, 1, 1)


def test_the_costs_of_a_model_follow_from_its_size():
    costs = costs_of(MODEL, flash_attention="auto", kernel_size=512, on_gpu=False)
    assert (costs.tile, costs.rest, costs.cell_ns, costs.tile_cell_ns) == (TILE, 1, CELL * 10, TILE_CELL * 10)
    assert costs.apart_from_cells == pytest.approx(PASS * 1000 / (TILE_CELL * 10))
    assert costs_of(MODEL, flash_attention="on", kernel_size=TILE - 1, on_gpu=False) == CPU
    off = costs_of(MODEL, flash_attention="off", kernel_size=512, on_gpu=False)
    assert (off.rest, off.tile, off.apart_from_cells) == (MIN_ROWS, 1, NEVER)


@pytest.mark.parametrize("flash", ["on", "off", "auto"])
def test_a_gpu_has_costs_of_its_own(flash):
    costs = costs_of(MODEL, flash_attention=flash, kernel_size=512, on_gpu=True)
    assert costs == replace(GPU, rest=MIN_ROWS if flash == "off" else 1)
    assert costs.apart_from_cells == costs.swap_from_tokens == NEVER
    assert not costs.pays_to_pad(63, 10**9, 1) and not costs.pays_to_swap(10**6, 10**6, 1, 1)


def test_padding_pays_where_one_by_one_takes_longer_than_a_tile():
    costs = costs_of(MODEL, flash_attention="auto", kernel_size=512, on_gpu=False)
    assert not costs.pays_to_pad(1, 100, 100), "a tile for one token costs more"
    assert costs.pays_to_pad(63, 63 * 1000, 1000)
    assert not costs.pays_to_pad(64, 64 * 1000, 1000), "it is a tile"
