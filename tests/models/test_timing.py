"""A device is timed once for each model, without the first use of its kernels, and its times are kept."""

import json
import logging
import os
from contextlib import closing
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from slotcache.models import split, timing
from slotcache.models import times as times_module
from slotcache.models.context import Context, ContextSettings
from slotcache.models.errors import RunnerError
from slotcache.models.hardware import Device
from slotcache.models.learning import learn_costs, subject_of
from slotcache.models.model import Model, Override
from slotcache.models.repacking import SMALLEST
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
    without_contradictions,
)
from slotcache.models.timing import BOUND, DEEP, SCATTERED, DeviceTiming, TileTiming
from slotcache.slots.costs import NEVER
from slotcache.slots.plan import Restore, Save
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


class Clock:
    """A clock that moves with the work alone. Each kind of work takes `first` seconds more at its first use.

    slow: how many times as long as usual all work takes, that beside idle cells `beside` times.
    """

    def __init__(self, monkeypatch, first: float = 0.0, slow: float = 1.0, beside: float = 1.0) -> None:
        self.now, self.first, self.slow, self.beside, self.seen = 0.0, first, slow, beside, set()
        compute, apply = Runner.compute_zeros, Runner.apply

        def timed_compute(runner, start, stop, *sequences, drafted=0):
            compute(runner, start, stop, *sequences, drafted=drafted)
            is_beside = max(sequences, default=0) > 1
            seconds = (1e-3 + 1e-4 * (stop - start)) * (1 + start / 1000) * (1.5 * self.beside if is_beside else 1)
            self.pass_by((stop - start, start > 0, sequences, drafted), seconds)

        def timed_apply(runner, operation):
            apply(runner, operation)
            if isinstance(operation, Save | Restore):
                self.pass_by((type(operation), len(operation.copy)), 1e-4 + 1e-6 * len(operation.copy))

        monkeypatch.setattr(Runner, "compute_zeros", timed_compute)
        monkeypatch.setattr(Runner, "apply", timed_apply)
        monkeypatch.setattr(timing, "perf_counter", lambda: self.now)

    def pass_by(self, kind, seconds: float) -> None:
        self.now += self.slow * seconds + (0 if kind in self.seen else self.first)
        self.seen.add(kind)


@pytest.fixture(scope="module")
def times(context):
    with pytest.MonkeyPatch.context() as patch:
        Clock(patch)
        return DeviceTiming(context).run()


@pytest.fixture
def card(context, folder, monkeypatch):
    """A context of a device, real or pretended, which has its costs again at the end."""
    if not ON_DEVICE:
        monkeypatch.setattr(context.model, "device", CARD)
    known, context.costs = context.costs, OTHER
    yield context
    context.costs, context.times = known, None


@pytest.fixture
def wide(context, monkeypatch):
    """A context whose tiles are timed."""
    monkeypatch.setattr(Model, "size", SMALLEST)
    with closing(
        Context(context.model, replace(SMALL, num_cells=2048, batch=512, micro_batch=512, flash_attention="on"))
    ) as wide:
        yield wide


def test_all_kinds_of_work_are_timed_and_the_pool_is_left_empty(context, times):
    assert all(getattr(times, field.name) > 0 for field in fields(times) if field.name != "cuts")
    assert (
        times.step < times.step_rows < times.chunk < times.double and times.few < times.depth < times.idle <= SMALL.num_cells
    )
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


@pytest.mark.skipif(ON_DEVICE, reason="the costs of the CPU")
def test_a_small_model_on_the_cpu_is_not_timed(context, folder):
    costs = context.costs
    learn_costs(context)
    assert context.costs is costs and context.times is None and not folder.exists()


def test_a_device_is_timed_once(card, caplog, monkeypatch):
    Clock(monkeypatch)
    with caplog.at_level(logging.INFO, "slotcache"):
        learn_costs(card)
        first = card.times
        learn_costs(card)
    assert first and card.times == first and card.costs == timed_costs(card.costs, first)
    assert [line.split()[0] for line in caplog.messages] == ["timing", "timed", *[f"{card.model.device.name}:"] * 2]


def test_the_first_use_of_a_kernel_is_in_no_time(context, times, monkeypatch):
    """A card compiles it then: one token took 13 ms, and beside idle cells, for the first time, 13,986 ms."""
    clock = Clock(monkeypatch, first=1.0)
    cold = DeviceTiming(context).run()
    assert clock.now > 10 and asdict(cold) == pytest.approx(asdict(times))
    assert timed_costs(OTHER, cold).pays_to_offload(1000, 0) == timed_costs(OTHER, times).pays_to_offload(1000, 0)


@pytest.mark.parametrize("first", [0.5, 4.0, 12.0, 40.0])
def test_the_timing_of_a_device_has_a_bound(card, first, folder, caplog, monkeypatch):
    """What comes behind it is unknown, and no rule is decided by it; two later starts go on, and no more."""
    clock, reported = Clock(monkeypatch, first=first), []
    with caplog.at_level(logging.INFO, "slotcache"):
        learn_costs(card, lambda doing: reported.append(doing) is None)
    assert clock.now <= max(BOUND, first) + 1 and reported[0] == f"timing {card.model.device.name}, 1 of 9: a token"
    assert any("2 of 9: a chunk" in line for line in caplog.messages) == (2 < first < 30), "a slow one shows where it is"
    times, costs = card.times, card.costs
    if first == 0.5:
        assert times.idle and times.save_scattered
    elif first == 4.0:
        assert times.double and times.rows and not times.save and costs.swap_from_tokens == NEVER
    else:
        assert bool(times.chunk) == (first < 30) and not times.double
        assert not costs.pays_to_offload(10**9, 10**9), "idle KV stays"
    assert times.cuts == (first > 0.5)
    for _ in range(3):  # the kernels that were compiled by earlier starts take no time any more
        learn_costs(card)
    assert bool(card.times.idle) == (first < 10) and bool(card.times.rows) == (first < 30)
    assert card.times.cuts == (3 if first > 10 else 0)
    last = clock.now
    learn_costs(card)
    assert clock.now - last < 0.1, "one look whether a token takes as long"


def test_a_slow_device_is_timed_with_a_token_and_a_chunk(card, folder, monkeypatch):
    clock = Clock(monkeypatch, slow=350.0)
    learn_costs(card)
    assert card.times.chunk > timing.SLOW and not card.times.double and clock.now < BOUND and list(folder.iterdir())


def test_times_that_contradict_each_other_are_left_out_and_not_kept(card, folder, caplog, monkeypatch):
    clock = Clock(monkeypatch, beside=100.0)
    with caplog.at_level(logging.INFO, "slotcache"):
        learn_costs(card)
    assert card.times.step and not card.times.idle and not folder.exists()
    assert any("contradict each other" in line for line in caplog.messages)
    assert not card.costs.pays_to_offload(10**9, 10**9)
    clock.beside = 1.0
    learn_costs(card)
    assert card.times.idle and list(folder.iterdir())


@pytest.mark.parametrize(
    ("wrong", "unknown"),
    [
        ({"double": 1.0}, ["double"]),
        ({"step_rows": 1.0}, ["rows", "step_rows"]),
        ({"chunk_deep": 9.0}, ["chunk_deep", "short_deep"]),
        ({"short_deep": 9.0}, ["chunk_deep", "short_deep"]),
        ({"save_few": 9.0}, ["save", "save_few", "restore", "restore_few"]),
        ({"restore_few": 9.0}, ["save", "save_few", "restore", "restore_few"]),
        ({"step_idle": 1.0}, ["idle", "step_idle", "chunk_idle"]),
        ({"chunk_idle": 1.0}, ["idle", "step_idle", "chunk_idle"]),
    ],
)
def test_which_times_contradict_each_other(times, wrong, unknown):
    assert without_contradictions(times) == times
    doubtful = without_contradictions(replace(times, **wrong))
    assert doubtful == replace(times, **dict.fromkeys(unknown, 0))
    assert timed_costs(OTHER, doubtful).pass_ns > 0


@pytest.mark.parametrize(("slow", "is_again"), [(1.0, False), (4.0, False), (0.25, False), (6.0, True), (0.1, True)])
def test_a_device_with_another_speed_is_timed_again(card, slow, is_again, caplog, monkeypatch):
    """A busy machine's times are not kept for ever."""
    clock = Clock(monkeypatch)
    learn_costs(card)
    first, clock.slow = card.times, slow
    with caplog.at_level(logging.INFO, "slotcache"):
        learn_costs(card)
    assert (card.times != first) == is_again == any("takes another time" in line for line in caplog.messages)


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
    starts = ("timing the CPU, once", "timed the CPU in ", "the CPU: a token ", "the CPU: a token ")
    assert all(line.startswith(one) for line, one in zip(caplog.messages, starts, strict=True))


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
    learn_costs(wide, lambda _: asked.append(1) or len(asked) <= most)
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
    monkeypatch.setattr(split, "devices", lambda: [CARD])
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
    monkeypatch.setattr(TileTiming, "_batch", lambda self, *span: next(seconds))
    times = TileTiming(wide).run()
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
    Clock(monkeypatch)
    monkeypatch.setattr(DeviceTiming, "_runs_are_apart", lambda self: False)
    times = DeviceTiming(context).run()
    steps = {name: getattr(times, name) for name in ("step", "chunk", "double", "rows", "step_rows")}
    assert all(steps.values()) and times == Times(chunk_tokens=times.chunk_tokens, **steps)
    assert summarize(times).count("ms") == 2


@pytest.mark.parametrize(("generate", "is_apart"), [(hybrid, True), (recurrent, False)])
def test_saves_of_a_model_that_cannot_be_cut_are_timed_where_its_runs_are_apart(generate, is_apart, tmp_path):
    with closing(Model(generate(tmp_path / "model.gguf"))) as model, closing(Context(model, SMALL)) as context:
        times, states = DeviceTiming(context).run(), Runner(context)
        assert (times.scattered, bool(times.save_scattered)) == ((SCATTERED, True) if is_apart else (0, False))
        assert not times.idle and ("scattered" in summarize(times)) == is_apart
        slow = replace(times, save_scattered=9.0)
        assert (timed_costs(OTHER, slow).scattered_tokens > 1) == is_apart
        assert "saves" in subject_of(context, CARD).settings
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
