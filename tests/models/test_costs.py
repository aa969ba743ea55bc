"""Everything that was timed stands in models/times.py, and every tuning rule reads it from there."""

import ast
import io
import re
import tokenize
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from slotcache.models import split
from slotcache.models.hardware import Device
from slotcache.models.model import Model
from slotcache.models.times import (
    CELL,
    MIN_ROWS,
    MIN_ROWS_OF_BOTH,
    MIN_ROWS_OF_DEVICE,
    OTHER,
    PASS,
    TILE,
    TILE_CELL,
    WEIGHT,
    Times,
    costs_of,
    timed_costs,
)
from slotcache.slots.costs import NEVER, UNMEASURED, Costs, Profile
from support.on_device import needs_cpu

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "models" / "times.py"
ROOMS = ("slots", "ordering", "retrieval", "models", "server")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
ELSEWHERE = [path for path in FILES if path != PLACE]
OFF = ROOT / "slots" / "costs.py"  # where every rule is turned off
NAMES = {field.name for field in fields(Costs)}
TIMED = re.compile(r"\b(measured|timed)\b|\d ?(ns|us|µs|ms)\b")
ON_CPU = {
    "attention_width": 10,
    "num_parameters": 1000,
    "num_layer_parameters": 900,
    "device": None,
    "is_on_device": False,
    "split": split.ALL_CARDS,
}
MODEL = cast(Model, SimpleNamespace(**ON_CPU))
ELSEWHERE_THAN_ON_A_CPU = cast(Model, SimpleNamespace(device="RPC0", is_on_device=True))
ON_BOTH = cast(Model, SimpleNamespace(device="RPC0", is_on_device=False, split=split.ALL_CARDS))
CARD = Device(name="CUDA0", description="A card", kind="GPU", free=1 << 30, total=1 << 30)


@cache
def tree_of(path):
    return ast.parse(path.read_text())


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
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        made = [call for call in calls if ast.unparse(call.func).split(".")[-1] in ("Costs", "replace")]
        assert not [path for call in made if {keyword.arg for keyword in call.keywords} & NAMES], path


def test_no_name_of_a_cost_has_a_number_elsewhere():
    of_costs = [
        (str(path.relative_to(ROOT)), name)
        for path in sorted(set(ELSEWHERE) - {OFF})
        for name, value in numbers_by_name(tree_of(path))
        if is_number(value) and name.lower().split(".")[-1].lstrip("_") in NAMES
    ]
    assert of_costs == [("slots/job.py", "recompute_last")], "what a request has before its admission"


def test_no_constant_of_a_module_is_a_measured_one():
    for path in ELSEWHERE:
        text = path.read_text()
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
        for node in tree_of(path).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and is_number(node.value):
                comment = comments.get(node.lineno, "")
                is_setting = ast.unparse(node).startswith("SWITCH_INTERVAL")  # of the interpreter
                assert is_setting or not TIMED.search(comment), f"{path}: {ast.unparse(node)} {comment}"


def test_what_turns_every_rule_off_has_no_number_of_its_own():
    assert {getattr(UNMEASURED, name) for name in NAMES} <= {0, 1, NEVER}
    assert not UNMEASURED.pays_to_pad(63, 10**9, 1) and not UNMEASURED.pays_to_swap(10**12, 1, 1)


@needs_cpu
def test_the_costs_of_a_model_follow_from_its_size():
    costs = costs_of(MODEL, flash_attention="auto", kernel_size=512)
    assert (costs.tile, costs.recompute_last, costs.cell_ns, costs.tile_cell_ns) == (TILE, 1, CELL * 10, TILE_CELL * 10)
    assert costs.apart_from_cells == pytest.approx(PASS * 1000 / (TILE_CELL * 10))
    assert costs_of(MODEL, flash_attention="on", kernel_size=TILE - 1).tile == 1
    assert costs.step_ns(1, 0) == pytest.approx(PASS * 1000 + WEIGHT * 1000)
    assert costs.step_ns(TILE - 1, 1000) < costs.step_ns(1, 1000) * TILE, "rows of a step share its reading of the weights"
    off = costs_of(MODEL, flash_attention="off", kernel_size=512)
    assert (off.recompute_last, off.tile, off.apart_from_cells) == (MIN_ROWS, 1, NEVER)


@pytest.mark.parametrize("flash", ["on", "off", "auto"])
def test_before_it_is_timed_a_device_has_the_rules_off(flash):
    costs = costs_of(ELSEWHERE_THAN_ON_A_CPU, flash_attention=flash, kernel_size=512)
    assert costs == replace(OTHER, recompute_last=MIN_ROWS_OF_DEVICE if flash == "off" else 1)
    assert costs.apart_from_cells == costs.swap_from_tokens == NEVER
    assert not costs.pays_to_pad(63, 10**9, 1) and not costs.pays_to_swap(10**12, 1, 1)
    assert not costs.pays_to_offload(10**9, 10**9)


@pytest.mark.parametrize("model", [ON_BOTH, MODEL], ids=["half of the layers", "no layer"])
def test_without_flash_attention_a_card_beside_the_cpu_computes_large_batches(model, monkeypatch):
    """llama.cpp computes 32 tokens and more there, whatever holds the weights: fewer are rounded by the CPU."""
    monkeypatch.setattr(split, "devices", lambda: [CARD])
    assert costs_of(model, flash_attention="off", kernel_size=512).recompute_last == MIN_ROWS_OF_BOTH
    assert costs_of(model, flash_attention="on", kernel_size=512).recompute_last == 1


LIKE_A_CPU = Times(  # seconds that 2 cores take with a model of 114 M weights, in round numbers
    chunk_tokens=64,
    step=11e-3,
    chunk=60e-3,
    double=120e-3,
    depth=512,
    short_deep=300e-3,
    chunk_deep=70e-3,
    few=16,
    save=0.5e-3,
    restore=0.7e-3,
    save_few=0.05e-3,
    restore_few=0.1e-3,
    scattered=4,
    save_scattered=0.02e-3,
    idle=8192,
    step_idle=13e-3,
    chunk_idle=90e-3,
)
LIKE_A_CARD = Times(  # a card of 2022 with a model of 7 B weights, by arithmetic
    chunk_tokens=64,
    step=7e-3,
    chunk=12e-3,
    double=18e-3,
    depth=512,
    short_deep=12.1e-3,
    chunk_deep=12.2e-3,
    few=16,
    save=4e-3,
    restore=4e-3,
    save_few=0.2e-3,
    restore_few=0.2e-3,
    scattered=4,
    save_scattered=2.6e-3,  # 64 copies a token, of 10 us each
    idle=8192,
    step_idle=7.4e-3,
    chunk_idle=14e-3,
)


def test_times_like_a_cpu_s_lead_to_the_rules_of_the_cpu():
    costs = timed_costs(OTHER, LIKE_A_CPU)
    assert costs.tile == 64 and costs.pays_to_pad(63, 63 * 1000, 1000) and not costs.pays_to_pad(1, 100, 100)
    assert 30 < costs.swap_from_tokens < 70 and 10 < costs.cells_per_run < 100 and costs.restore_share < 0.02
    assert costs.apart_from_cells < 1000
    assert costs.scattered_tokens < 0.01
    assert costs.pays_to_offload(100, 4), "a prompt passes over idle cells for longer than their way back takes"


def test_times_like_a_card_s_leave_idle_kv_where_it_is():
    costs = timed_costs(OTHER, LIKE_A_CARD)
    assert costs.tile == 1 and not costs.pays_to_pad(63, 63 * 1000, 1000) and costs.apart_from_cells == NEVER
    assert costs.swap_from_tokens > 1000 and 0.03 < costs.restore_share < 0.1
    assert not costs.pays_to_offload(200, 50) and costs.pays_to_offload(1000, 200)
    assert costs.background_ns == OTHER.background_ns
    assert 3 < costs.scattered_tokens < 4, "64 copies of a token's KV take longer than to compute it"


def test_what_no_time_can_show_has_no_price():
    free = replace(LIKE_A_CARD, step_idle=7e-3, chunk_idle=12e-3)
    costs = timed_costs(OTHER, free)
    assert costs.swap_from_tokens == NEVER and not costs.pays_to_offload(10**6, 10**6)
    unmoved = Times(chunk_tokens=64, step=7e-3, chunk=12e-3, double=18e-3)
    costs = timed_costs(OTHER, unmoved)
    assert replace(costs, pass_ns=0.0, row_ns=0.0, token_ns=0.0) == OTHER
    alone = timed_costs(OTHER, Times(chunk_tokens=64, step=7e-3))
    assert alone == replace(OTHER, row_ns=pytest.approx(7e6), token_ns=pytest.approx(7e6)), "a chunk is no faster"
    moved = replace(LIKE_A_CARD, idle=0, step_idle=0.0, chunk_idle=0.0)
    costs = timed_costs(OTHER, moved)
    assert 0.03 < costs.restore_share < 0.1 and costs.swap_from_tokens == NEVER and not costs.pays_to_offload(10**9, 10**9)


def test_times_report_what_a_row_of_a_draft_takes():
    """A step of one row takes as long as it was timed; each row more a 64th of 6 ms, or of 60 ms."""
    card, cpu = timed_costs(OTHER, LIKE_A_CARD), timed_costs(OTHER, LIKE_A_CPU)
    for costs, times, eight in ((card, LIKE_A_CARD, 1.09), (cpu, LIKE_A_CPU, 1.60)):
        assert costs.step_ns(1, 0) == pytest.approx(1e9 * times.step)
        assert costs.step_ns(8, 0) / costs.step_ns(1, 0) == pytest.approx(eight, abs=0.01)


def test_a_row_is_cheap_where_few_of_them_are_computed_together():
    """A token alone may take less than a 64th of a chunk: the time of a few together tells what one more takes."""
    few = replace(LIKE_A_CPU, step=0.5e-3, rows=4, step_rows=0.8e-3)
    costs = timed_costs(OTHER, few)
    assert (costs.pass_ns, costs.row_ns) == (pytest.approx(0.4e6), pytest.approx(0.1e6))
    assert timed_costs(OTHER, replace(few, rows=0)).pass_ns == 0.0
    assert costs.token_ns == pytest.approx(60e6 / 64)


def test_a_background_step_is_sized_by_times_before_one_was_run():
    costs, profile = replace(timed_costs(OTHER, LIKE_A_CARD), background_ns=40e6), Profile()
    assert costs.background_tokens(profile, 0) == pytest.approx(33.1e-3 * 64 / 6e-3, abs=2)
    assert replace(costs, pass_ns=50e6).background_tokens(profile, 0) == 1
    assert OTHER.background_tokens(profile, 0) == 1, "of a device that was not timed"
    profile.learn(64, 0.0, 64 * 20e-3)
    assert replace(costs, recompute_last=9).background_tokens(profile, 0) == 9, "fewer would be rounded otherwise"
    assert costs.background_tokens(profile, 0) == 2 and costs.background_tokens(profile, 10**6) >= 1


@pytest.mark.parametrize("strange", [{"rows": 1}, {"depth": 0}, {"few": 0}, {"save": 0.0}, {"scattered": 9, "few": 0}])
def test_times_of_a_strange_file_are_as_unknown_ones(strange):
    assert timed_costs(OTHER, replace(LIKE_A_CPU, **({"rows": 4, "step_rows": 20e-3} | strange))).pass_ns >= 0


def test_padding_pays_where_one_by_one_takes_longer_than_a_tile():
    costs = costs_of(MODEL, flash_attention="auto", kernel_size=512)
    assert not costs.pays_to_pad(1, 100, 100), "a tile for one token costs more"
    assert costs.pays_to_pad(63, 63 * 1000, 1000)
    assert not costs.pays_to_pad(64, 64 * 1000, 1000), "it is a tile"
