"""A device is timed once for each model, and its times are kept."""

import json
import logging
import os
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import pytest
from slotcache.models import times as times_module
from slotcache.models import timing
from slotcache.models.context import Context, ContextSettings
from slotcache.models.errors import RunnerError
from slotcache.models.hardware import Device
from slotcache.models.model import Model, Override
from slotcache.models.runner import Runner
from slotcache.models.times import (
    CPU,
    NOISE,
    OTHER,
    TILE,
    Times,
    keep_times,
    kept_times,
    summarize,
    timed_costs,
    timed_tiles,
    times_on,
)
from slotcache.models.timing import DEEP, SCATTERED, SMALLEST, Timing, fastest, learn_costs, subject_of
from support.architectures import hybrid, recurrent
from support.on_device import ON_DEVICE

SMALL = ContextSettings(num_cells=2048, batch=256, flash_attention="auto", threads=1, num_sequences=32)
CARD = Device(name="CUDA0", description="A card", kind="GPU", free=1 << 30, total=1 << 30)


@pytest.fixture(scope="module")
def context(tiny):
    model = Model(tiny)
    context = Context(model, SMALL)
    yield context
    context.close()
    model.close()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "slotcache" / "times"


@pytest.fixture(scope="module")
def times(context):
    return Timing(context).run()


@pytest.fixture
def wide(context, monkeypatch):
    """A context whose tiles are timed."""
    monkeypatch.setattr(Model, "size", SMALLEST)
    with closing(
        Context(context.model, replace(SMALL, num_cells=2048, batch=512, micro_batch=512, flash_attention="on"))
    ) as wide:
        yield wide


def test_all_kinds_of_work_are_timed_and_the_pool_is_left_empty(context, times):
    assert all(getattr(times, field.name) > 0 for field in fields(times))
    assert times.step < times.double and times.few < times.depth < times.idle <= SMALL.num_cells
    costs = timed_costs(OTHER, times)
    assert 0 < costs.restore_share <= 1 and costs.swap_from_tokens > 0 and costs.spill_ns > 0
    runner = Runner(context)
    for start in range(0, context.num_cells, 128):  # every cell is free
        runner.compute_zeros(start, start + 128)
    runner.clear()


def test_times_are_kept_for_one_device_one_build_and_one_model(context, times, folder, monkeypatch):
    subject = subject_of(context, CARD)
    assert kept_times(subject) is None
    keep_times(subject, times)
    assert kept_times(subject) == times
    monkeypatch.setattr(context.model, "overrides", (Override("exps", "CPU"),))
    elsewhere = subject_of(context, CARD)
    monkeypatch.setattr(context.model, "overrides", ())
    monkeypatch.setattr(context.model, "repack", True)
    repacked = subject_of(context, CARD)
    monkeypatch.setattr(context.model, "repack", False)
    for other in (
        elsewhere,
        replace(subject, engine=["9", *subject.engine[1:]]),
        replace(subject, model=[*subject.model[:-1], 7]),
        repacked,
        subject_of(context, replace(CARD, description="Another card")),
    ):
        assert kept_times(other) is None
    assert list(times_on(CARD)) == [(context.model.description, times)]
    assert not list(times_on(replace(CARD, name="CUDA1")))
    assert "ms" in summarize(times)


def test_without_a_folder_times_are_kept_for_the_process(context, times, monkeypatch):
    monkeypatch.setattr(times_module, "_folder", lambda: Path(__file__) / "times")  # within a file
    subject = subject_of(context, CARD)
    assert kept_times(subject) is None
    keep_times(subject, times)
    assert kept_times(subject) == times and kept_times(replace(subject, engine=["9"])) is None


@pytest.mark.parametrize(
    "damage", [b"", b"[]", b"{}", b"\xff", b'{"times": 1}', b'{"times": {"step": -1}}', 65_000 * b"["], ids=range(7)
)
def test_a_damaged_file_is_as_none(context, times, folder, damage):
    subject = subject_of(context, CARD)
    keep_times(subject, times)
    (file,) = folder.iterdir()
    file.write_bytes(damage)
    assert kept_times(subject) is None and not list(times_on(CARD))
    keep_times(subject, times)
    content, depth = file.read_bytes(), f'"depth": {times.depth}'.encode()
    name = json.dumps([context.model.description])[1:-1].encode()
    for right, wrong in (
        (f'"step": {times.step}'.encode(), b'"step": NaN'),
        (depth, b'"depth": Infinity'),
        (depth, b'"depth": 1e999'),
        (content[content.index(b'"model": [') : content.index(b'"settings"')], b'"model": [], '),
    ):
        assert name in content and right in content
        file.write_bytes(content.replace(right, wrong))
        assert kept_times(subject) is None and not list(times_on(CARD))
    file.unlink()
    os.mkfifo(file)
    assert kept_times(subject) is None, "a pipe is not waited for"


def test_a_small_model_on_the_cpu_is_not_timed_and_a_device_once(context, folder, caplog, monkeypatch):
    if not ON_DEVICE:
        costs = context.costs
        learn_costs(context)
        assert context.costs is costs and context.times is None and not folder.exists()
        monkeypatch.setattr(context.model, "device", CARD)
    with caplog.at_level(logging.INFO, "slotcache"):
        learn_costs(context)
        first = context.times
        learn_costs(context)
    assert first and context.times == first and context.costs == timed_costs(context.costs, first)
    assert [line.split()[0] for line in caplog.messages] == ["timing", "timed", *[f"{context.model.device.name}:"] * 2]


@pytest.mark.skipif(ON_DEVICE, reason="the costs of the CPU")
def test_the_tiles_of_a_larger_model_on_the_cpu_are_timed_once(wide, folder, caplog):
    known = wide.costs
    assert known.tile == TILE
    with caplog.at_level(logging.INFO, "slotcache"):
        learn_costs(wide)
        first, costs = wide.times, wide.costs
        wide.costs = known
        learn_costs(wide)
    assert first and first.chunk_tokens == TILE and first.depth >= DEEP and not first.save, "moves are not timed"
    assert wide.times == first and wide.costs == costs == timed_tiles(known, first)
    assert wide.unit == wide.costs.token_ns / known.token_ns
    beginnings = ("timing the CPU, once", "timed the CPU in ", "the CPU: a token ", "the CPU: a token ")
    assert all(line.startswith(one) for line, one in zip(caplog.messages, beginnings, strict=True))


@pytest.mark.skipif(ON_DEVICE, reason="the costs of the CPU")
def test_a_cpu_that_takes_long_is_not_timed_for_long(wide, folder, monkeypatch):
    known, computed = wide.costs, []
    compute = Runner.compute_zeros
    monkeypatch.setattr(timing, "SLOW", 0.0)
    monkeypatch.setattr(Runner, "compute_zeros", lambda self, *span: computed.append(span) or compute(self, *span))
    learn_costs(wide)
    assert wide.costs == known and wide.unit == 1 and wide.times and not wide.times.depth
    assert max(stop for _, stop, _ in computed) == TILE and list(folder.iterdir()), "the next start does not try again"


@pytest.mark.skipif(ON_DEVICE, reason="the costs of the CPU")
@pytest.mark.parametrize("most", range(0, 30, 5))
def test_a_server_that_ends_times_no_more(wide, folder, most, monkeypatch):
    known, asked, computed = wide.costs, [], []
    compute = Runner.compute_zeros
    monkeypatch.setattr(Runner, "compute_zeros", lambda self, *span: computed.append(span) or compute(self, *span))
    learn_costs(wide, lambda: asked.append(1) or len(asked) <= most)
    if len(asked) > most:
        assert len(computed) == most and wide.costs is known and wide.times is None and not folder.exists()
    for start in range(0, wide.num_cells, 512):  # the pool was left empty
        Runner(wide).compute_zeros(start, start + 512)


@pytest.mark.skipif(ON_DEVICE, reason="the costs of the CPU")
def test_a_batch_that_fails_leaves_no_cells(wide, folder, monkeypatch, caplog):
    compute, number = Runner.compute_zeros, iter(range(100))

    def fail(self, *span):
        compute(self, *span)
        if next(number) == 5:
            raise RunnerError("no memory")

    monkeypatch.setattr(Runner, "compute_zeros", fail)
    learn_costs(wide)
    assert wide.times is None and "the CPU could not be timed: no memory" in caplog.messages
    for start in range(0, wide.num_cells, 512):
        compute(Runner(wide), start, start + 512)


@pytest.mark.skipif(ON_DEVICE, reason="the costs of the CPU")
def test_the_cpu_is_not_timed_beside_a_card_which_computes_its_large_batches(wide, folder, monkeypatch):
    monkeypatch.setattr(timing, "devices", lambda: [CARD])
    learn_costs(wide)
    assert wide.times is None and not folder.exists()


@pytest.mark.skipif(ON_DEVICE, reason="the costs of the CPU")
def test_positions_that_a_model_was_not_trained_for_are_not_timed(wide, folder, monkeypatch):
    """llama.cpp ends the process one position beyond those that are learnt."""
    monkeypatch.setattr(wide.model, "context_train", 512)
    compute, last = Runner.compute_zeros, []
    monkeypatch.setattr(Runner, "compute_zeros", lambda self, *span: last.append(span[1]) or compute(self, *span))
    learn_costs(wide)
    assert wide.times and max(last) <= 512


@pytest.mark.skipif(ON_DEVICE, reason="the costs of the CPU")
def test_each_time_of_a_tile_is_the_least_of_some_turns(wide, monkeypatch):
    """A machine that slows down between two of them makes attention seem slow, or to take no time at all."""
    seconds = iter([9.0, 9.0, 9.0, 0.01, *[3.0, 5.0, 6.0, 4.0], *[2.0, 7.0, 5.0, 6.0], *[4.0, 4.0, 8.0, 8.0]])
    monkeypatch.setattr(timing, "TURNS", 3)
    monkeypatch.setattr(Timing, "_batch", lambda self, *span: next(seconds))
    times = Timing(wide).run(moves=False)
    assert (times.chunk, times.double, times.short_deep, times.chunk_deep) == (2.0, 4.0, 5.0, 4.0)
    assert times.step == 9.0 and next(seconds, None) is None


def test_tiles_pay_by_the_times_of_the_machine():
    """Of a prompt of 26 tokens behind 256, where 64 take 48 ms: it takes 30 ms, or 110 where attention is slow."""
    known = replace(CPU, tile=TILE, token_ns=1e6, cell_ns=5e3, tile_cell_ns=2e4, pass_ns=1e7, row_ns=2e6)
    times = Times(chunk_tokens=64, step=0.002, chunk=0.043, double=0.086, depth=256, short_deep=0.064, chunk_deep=0.048)
    seen, together = 26 * 269, 282
    fast, slow = (timed_tiles(known, replace(times, short_deep=seconds)) for seconds in (0.064, 0.270))
    assert not fast.pays_to_pad(26, seen, together) and slow.pays_to_pad(26, seen, together)
    scale = fast.token_ns / known.token_ns
    assert (fast.pass_ns, fast.row_ns) == pytest.approx((scale * known.pass_ns, scale * known.row_ns))
    assert timed_tiles(known, replace(times, double=times.chunk)) is known, "as if a token took no time"
    assert timed_tiles(known, replace(times, chunk_tokens=1)) is known, "of a forged file"
    most = 1e9 * NOISE * times.chunk / times.depth
    for deep in (0.042, 0.044):  # as if a deep chunk took less, or as little more as is noise
        unclear = timed_tiles(known, replace(times, chunk_deep=deep, short_deep=deep))
        assert (unclear.tile_cell_ns, unclear.cell_ns) == pytest.approx((most, most / 63)), "attention takes no more"
    few = timed_tiles(replace(known, tile_cell_ns=1.0), replace(times, chunk_deep=0.042))
    assert few.tile_cell_ns == pytest.approx(scale), "by the constant it takes less"


def test_models_whose_runs_do_not_move_have_the_times_of_steps_alone(context, monkeypatch):
    monkeypatch.setattr(Model, "can_trim", False)
    times = Timing(context).run()
    assert times == Times(chunk_tokens=times.chunk_tokens, step=times.step, chunk=times.chunk, double=times.double)
    assert summarize(times).count("ms") == 2


@pytest.mark.parametrize(("generate", "is_apart"), [(hybrid, True), (recurrent, False)])
def test_saves_of_a_model_that_cannot_be_cut_are_timed_where_its_runs_are_apart(generate, is_apart, tmp_path):
    with closing(Model(generate(tmp_path / "model.gguf"))) as model, closing(Context(model, SMALL)) as context:
        times, states = Timing(context).run(), Runner(context)
        assert (times.scattered, bool(times.save_scattered)) == ((SCATTERED, True) if is_apart else (0, False))
        assert not times.idle and ("scattered" in summarize(times)) == is_apart
        slow = replace(times, save_scattered=9.0)
        assert (timed_costs(OTHER, slow).scattered_tokens > 1) == is_apart
        assert subject_of(context, CARD).settings[-1] == "saves"
        states.compute_zeros(0, 4)  # the pool was left empty
        states.clear()


@pytest.mark.parametrize(("cells", "batch", "timed"), [(64, 64, 32), (2048, 40, 20), (2048, 20, 0)])
def test_small_pools_and_batches_are_timed_as_far_as_they_go(context, cells, batch, timed, folder, monkeypatch):
    settings = replace(SMALL, num_cells=cells, batch=batch, micro_batch=batch, num_sequences=4)
    small = Context(context.model, settings)
    monkeypatch.setattr(context.model, "device", CARD)
    learn_costs(small)
    assert (small.times.chunk_tokens if small.times else 0) == timed
    small.close()


def test_a_slow_act_is_done_once(monkeypatch):
    clock = iter([0.0, 0.1, 1.0, 1.2, 2.0, 2.1, 5.0, 9.0, 9.0])
    monkeypatch.setattr(timing, "perf_counter", lambda: next(clock))
    done = []
    assert fastest(lambda: done.append("act"), lambda: done.append("undo")) == pytest.approx(0.1)
    assert done == ["act", "undo"] * 3
    assert fastest(lambda: done.append("slow")) == 4.0 and done.count("slow") == 1
    clock = iter([0.0, 5.0, 5.0, 9.0])
    assert fastest(lambda: done.append("twice"), fewest=2) == 4.0 and done.count("twice") == 2
