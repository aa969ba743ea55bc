"""Starts with less memory than the model wants: fewer cells and slots, or one line that says what is missing."""

from dataclasses import replace

import pytest
from slotcache.bench.random_models import SHAPES, generate
from slotcache.models import split
from slotcache.models.context import Use, breakdown
from slotcache.models.errors import ModelError
from slotcache.models.hardware import HOST, INTEGRATED, Device, devices, free_memory
from slotcache.server.config.settings import Settings
from slotcache.server.engine import fit as fitting
from slotcache.server.engine.fit import MOST_COUNTED, READ_AGAIN, Fitting, Measure, fit
from support.architectures import delta, mixture

from ..conftest import running
from ..test_cli import run

MIB = 1 << 20
ON_DEVICE = any(device.is_gpu for device in devices())
pytestmark = pytest.mark.skipif(ON_DEVICE, reason="the CPU's memory is the limit without a device alone")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model with much KV: 8 KiB a token, 64 MiB for the context that it was trained for."""
    shape = replace(SHAPES["tiny"], width=256, heads=4, kv_heads=4, layers=8, context=8192)
    return generate(tmp_path_factory.mktemp("models") / "wide.gguf", shape)


def chosen(path, **given):
    """The settings that fit, with the use of the device in MiB."""
    settings, decision = fit(Settings(threads=1, **given), path)
    assert decision is not None
    return settings, sum(use.total for use in decision.chosen.uses) / MIB


def test_with_enough_memory_all_stays_as_it_is_wanted(wide):
    settings, _ = chosen(wide)
    assert (settings.ctx_size, settings.parallel, settings.gpu_layers, settings.n_cpu_moe) == (8192, 4, -1, 0)


def test_the_context_shrinks_with_the_memory(wide):
    sizes = []
    for cap in (55, 60, 65, 70, 75):
        settings, takes = chosen(wide, device_memory=cap)
        assert cap - 4 < takes <= cap and settings.ctx_size % 256 == 0 and settings.parallel == 4
        sizes.append(settings.ctx_size)
    assert sizes == sorted(set(sizes)) and sizes[0] >= 4096 and sizes[-1] < 8192


@pytest.mark.parametrize("cap", [45, 60])
def test_a_server_takes_no_more_than_its_cap_and_answers(wide, cap):
    """Bytes as llama.cpp counts them of the real context, not of the simulated one that was measured before."""
    with running(wide, device_memory=cap, ctx_size=0, fit_ctx=1024, flash_attn="auto") as server:
        real = breakdown(server.service.context.handle)
        assert sum(use.total for use in real) <= cap * MIB
        props = server.http.get("/props").json()
        (device,) = props["memory"]["devices"]
        assert device["name"] == "CPU" and device["most"] == cap * MIB
        assert (device["weights"], device["kv"], device["compute"]) == (real[0].weights, real[0].kv, real[0].compute)
        assert any(line.startswith("fitted: ") for line in props["memory"]["decision"])
        assert props["default_generation_settings"]["n_ctx"] == props["settings"]["ctx_size"] < 8192
        assert server.chat("word " * 300)["usage"]["completion_tokens"] == 4


def test_a_flag_stays_as_it_is_given(wide):
    assert chosen(wide, ctx_size=3072, device_memory=60)[0].ctx_size == 3072
    with pytest.raises(ModelError, match=r"8,192 cells .*: CPU lacks [\d,]+ MiB of .*; it fits with -c \d+$"):
        fit(Settings(ctx_size=8192, device_memory=60), wide)


def test_below_the_least_context_the_line_says_what_would_fit(wide):
    with pytest.raises(ModelError, match=r"it fits with -c (\d+)$") as refused:
        fit(Settings(fit_ctx=6000, device_memory=60), wide)
    cells = int(str(refused.value).rpartition(" ")[2])
    assert chosen(wide, ctx_size=cells, device_memory=60)[0].ctx_size == cells
    with pytest.raises(ModelError, match="CPU lacks"):
        fit(Settings(ctx_size=cells + 512, device_memory=60), wide)


def test_where_the_memory_to_leave_free_is_not_there_less_of_it_stays(wide):
    settings, decision = fit(Settings(fit_target=free_memory() // MIB), wide)
    assert decision is not None and settings.ctx_size == 8192
    assert any(line.startswith("of --fit-target only ") for line in decision.lines())
    assert free_memory() // 4 < decision.margin < free_memory()


def test_no_flag_helps_where_the_weights_do_not_fit(wide):
    with pytest.raises(ModelError, match=r"CPU lacks .*256 cells and a slot do not fit either"):
        fit(Settings(device_memory=1), wide)


def test_slots_go_where_each_has_states_of_its_own(tmp_path):
    path = delta(tmp_path / "delta.gguf")
    _, whole = chosen(path, ctx_size=256)
    settings, takes = chosen(path, ctx_size=256, device_memory=int(whole))
    assert settings.parallel < 4 and takes <= int(whole)
    default = Settings(ctx_size=256, device_memory=int(whole), given=frozenset({"parallel"}))  # -np 4
    for given in (default, replace(default, parallel=5)):
        with pytest.raises(ModelError, match=r"it fits with .*-np [123]"):
            fit(given, path)


def test_without_a_fit_the_start_ends_with_what_was_missing(wide):
    result = run("serve", "-m", wide, "--port", 1, "--fit", "off", "--device-memory", 60)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("slotcache: ")]
    assert "CPU lacks" in line and "--fit chooses" in line and "it fits with -c " in line
    with pytest.raises(ModelError, match=r"it fits with -c \d+$"):
        fit(Settings(fit=False, fit_ctx=8000, device_memory=60), wide)
    assert fit(Settings(fit=False, ctx_size=4096, device_memory=60), wide)[0].ctx_size == 4096


def test_doctor_prints_the_decision_and_why(wide):
    printed = run("doctor", "-m", wide, "--device-memory", 60).stdout
    assert "memory of CPU: at most 60 MiB (--device-memory)" in printed
    assert "wanted: 8,192 cells (-c), 4 slots (-np): CPU lacks" in printed and "fitted: " in printed
    assert "CPU: " in printed and ": weights " in printed and ", compute buffer " in printed
    refused = run("doctor", "-m", wide, "--device-memory", 1)
    assert refused.returncode == 2 and "CPU lacks" in refused.stderr


def test_a_context_that_nothing_holds_is_refused_at_once(wide):
    """llama.cpp would take 50 bytes a cell to count it."""
    with pytest.raises(ModelError, match=r"CPU lacks [\d,]+ MiB.*it fits with -c \d+"):
        fit(Settings(fit=False, ctx_size=1 << 30, threads=1), wide)


def test_more_cells_than_are_counted_lie_on_a_line(wide):
    """8 KiB a cell, and what the mask takes."""
    settings = Settings(ctx_size=MOST_COUNTED, threads=1)
    measure = Measure(settings, wide)
    one, twice = (measure(replace(settings, ctx_size=times * MOST_COUNTED))[0] for times in (1, 2))
    measure.close()
    assert (one.kv, twice.kv) == (MOST_COUNTED * 8192, 2 * MOST_COUNTED * 8192)
    assert twice.weights == one.weights and one.compute < twice.compute < 2 * one.compute


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A model with the KV of Qwen2.5 7B, 57 KB a token, which was trained for long contexts; its weights are small."""
    shape = replace(SHAPES["tiny"], width=512, heads=8, kv_heads=8, feed_forward=32, layers=28, context=131072)
    return generate(tmp_path_factory.mktemp("models") / "long.gguf", shape)


GIB = 1 << 30
OTHERS = int(4.68e9) + 300 * MIB - 60 * MIB  # bytes that Qwen2.5 7B takes beyond that model: weights, and logits


def long_context(monkeypatch, path, free, **given):
    """The cells that are chosen where that much memory is free."""
    monkeypatch.setattr("slotcache.server.engine.fit.free_memory", lambda: free)
    return fit(Settings(threads=1, **given), path)[0].ctx_size


def test_an_agent_s_prompt_fits_a_7b_model_on_12_gib(long, monkeypatch):
    assert long_context(monkeypatch, long, 12 * GIB - OTHERS) >= 32768


def test_the_default_context_grows_with_the_memory_and_leaves_the_host_tier_its_part(long, monkeypatch):
    free = [4 * GIB, 21 * GIB // 4, 7 * GIB, 64 * GIB]
    sizes = [long_context(monkeypatch, long, one) for one in free]
    assert sizes[0] == 16384 < sizes[1] < sizes[2] < sizes[3] == 65536 and all(size % 256 == 0 for size in sizes)
    without = long_context(monkeypatch, long, free[1], cache_ram=0)
    assert without - sizes[1] == pytest.approx(2 * GIB / 57344, abs=2000)
    assert long_context(monkeypatch, long, 64 * GIB, ctx_size=102_400) == 102_400
    assert long_context(monkeypatch, long, 64 * GIB, fit=False) == 16384
    assert long_context(monkeypatch, long, 64 * GIB, device_memory=2048) < 40_000


def test_no_context_is_shorter_than_the_least_that_a_flag_names(long, monkeypatch):
    assert long_context(monkeypatch, long, 64 * GIB, fit_ctx=40_000, device_memory=2560) >= 40_000
    assert long_context(monkeypatch, long, 64 * GIB, fit_ctx=100_000) == 100_096
    with pytest.raises(ModelError, match=r"does not fit with 40,192 cells .*it fits with -c \d+$"):
        long_context(monkeypatch, long, 64 * GIB, fit_ctx=40_000, device_memory=2048)


def test_a_least_context_between_two_whole_numbers_of_cells_is_rounded_up(wide):
    sizes = [chosen(wide, fit_ctx=5000, device_memory=cap)[0].ctx_size for cap in range(58, 70, 3)]
    assert sizes[0] >= 5120 and not any(size % 256 for size in sizes)


def test_other_models_count_within_the_cap(wide, tmp_path):
    file = tmp_path / "embedder.gguf"
    file.write_bytes(bytes(10 * MIB))
    alone = Settings(threads=1, device_memory=200)
    for settings, takes in (
        (replace(alone, embedding_model=str(file)), 10),
        (replace(alone, rerank_model=str(file)), 10),
        (replace(alone, draft_model=str(wide)), wide.stat().st_size / MIB),
    ):
        _, decision = fit(settings, wide)
        assert decision is not None and decision.limits[HOST].most(0) == pytest.approx((200 - takes) * MIB, abs=1)
    with pytest.raises(ModelError, match="and 10 MiB of other models: CPU lacks"):
        fit(Settings(threads=1, device_memory=10, embedding_model=str(file)), wide)


def test_the_kv_of_a_draft_model_shrinks_with_the_context(wide):
    alone, drafting = Settings(threads=1, device_memory=100), Settings(threads=1, device_memory=100, draft_model=str(wide))
    cells = [fit(settings, wide)[0].ctx_size for settings in (alone, drafting)]
    assert cells[0] == 8192 > cells[1] > 256, "with fewer cells both fit"
    with pytest.raises(ModelError, match=r"it fits with -c \d+$"):
        fit(replace(drafting, ctx_size=8192), wide)


# ---- Devices that are not here: cards, and GPUs that have their memory of the host's ------------------------------------


class FakeMeasure:
    """Counts a model whose layers take 100 MiB of weights and 1 KiB of KV a cell each. gpus: have those on GPUs evenly."""

    def __init__(self, model, *gpus: str) -> None:
        self.model, self._gpus = model, gpus

    def __call__(self, settings: Settings) -> tuple[Use, ...]:
        total = self.model.num_layers + 1
        on_gpus = total if settings.gpu_layers < 0 else min(settings.gpu_layers, total)
        shares = [(name, on_gpus / len(self._gpus)) for name in self._gpus] + [(HOST, total - on_gpus)]
        return tuple(Use(n, int(s * 100 * MIB), int(s * (settings.ctx_size or 4096) * 1024), MIB) for n, s in shares)


def on_fakes(monkeypatch, path, found: list[Device], free: int, **given):
    """The decision on a machine with these devices and as many MiB of free host memory, and the MiB that each gets."""
    monkeypatch.setattr(split, "devices", lambda: found)
    monkeypatch.setattr(fitting, "free_memory", lambda: free * MIB)
    settings = replace(Settings(threads=1, ctx_size=4096, fit_target=0), **given)
    measure = Measure(settings, path)
    try:
        gpus = [device.name for device in found if device.is_gpu]
        decision = Fitting(settings, FakeMeasure(measure.model, *gpus)).decide()  # type: ignore[arg-type]
    finally:
        measure.close()
    return decision, {use.device: use.total // MIB for use in decision.chosen.uses}


def gpu(number: int, kind: str, free: int) -> Device:
    return Device(f"Vulkan{number}", "a GPU", kind, free * MIB, 2 * free * MIB)


@pytest.mark.parametrize("free, fits", [(1000, True), (940, True), (800, False)])
def test_an_integrated_gpu_takes_of_the_host_s_memory(monkeypatch, wide, free, fits):
    """900 MiB of weights: the driver would give all of them, the host has less."""
    decision, takes = on_fakes(monkeypatch, wide, [gpu(0, INTEGRATED, 4000)], free)
    lines = list(decision.lines())
    most = free if fits else free // 2
    assert lines[1].startswith(f"memory of CPU and of Vulkan0: at most {most:,} MiB")
    if fits:
        assert decision.chosen.placement == decision.wanted.placement and 900 < takes["Vulkan0"] < free
    else:
        assert READ_AGAIN in lines and takes["Vulkan0"] + 40 <= free and takes[HOST] > 0  # those of the rest are mapped


def test_a_card_has_memory_of_its_own(monkeypatch, wide):
    decision, takes = on_fakes(monkeypatch, wide, [gpu(0, "GPU", 4000)], 200)
    assert decision.chosen.placement == decision.wanted.placement and takes["Vulkan0"] > 900
    assert not any("CPU and of" in line for line in decision.lines())


def test_without_a_fit_the_line_reports_what_an_integrated_gpu_takes(monkeypatch, wide):
    with pytest.raises(ModelError, match=r"CPU lacks [\d,]+ MiB of 9\d\d MiB \(weights 0 MiB, .*, Vulkan0 9\d\d MiB\)"):
        on_fakes(monkeypatch, wide, [gpu(0, INTEGRATED, 4000)], 30, fit=False, device_memory=2000)


def test_several_cards_are_counted(monkeypatch, wide):
    decision, _ = on_fakes(monkeypatch, wide, [gpu(0, "GPU", 4000), gpu(1, "GPU", 4000)], 4000)
    assert "9 of 9 layers on 2 GPUs (-ngl)" in decision.described(decision.chosen.placement)


@pytest.mark.parametrize(
    "given, reported",
    [
        ({}, ["5 of 5 layers on the GPU (-ngl)"]),
        ({"gpu_layers": 2}, ["2 of 5 layers on the GPU (-ngl)"]),
        ({"n_cpu_moe": 3}, ["5 of 5 layers on the GPU (-ngl)", "the experts of the first 3 layers in host memory (-ncmoe)"]),
        (
            {"cpu_moe": True},
            ["5 of 5 layers on the GPU (-ngl)", "the experts of the first 4 layers in host memory (-ncmoe)"],
        ),
        ({"override_tensor": "a=CPU"}, ["5 of 5 layers on the GPU (-ngl)", "tensors elsewhere (-ot)"]),
    ],
)
def test_overrides_are_reported(monkeypatch, tmp_path, given, reported):
    path = mixture(tmp_path / "mixture.gguf", layers=4)
    decision, _ = on_fakes(monkeypatch, path, [gpu(0, "GPU", 4000)], 4000, **given)
    assert decision.described(decision.chosen.placement).split(", ")[2:] == reported
