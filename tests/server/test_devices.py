"""What a server tells of its devices: a line at the start, `/props`, `/metrics`; and what it does where a card fails."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from slotcache.models import builds, gate, hardware, learning
from slotcache.models.context import DevicePart, Use, breakdown
from slotcache.models.hardware import HOST, Device, devices
from slotcache.server import load
from slotcache.server.config.settings import Settings
from slotcache.server.doctor import doctor
from slotcache.server.load import describe, described_place
from support.architectures import mixture
from support.encoders import bert
from support.on_device import ON_DEVICE, keep_hidden, needs_device

from .conftest import running

MIB = 1 << 20
CPU = Device(HOST, "a CPU", "CPU", 4 << 30, 8 << 30)
FIRST, SECOND = (Device(f"CUDA{number}", f"card {number}", "GPU", 1 << 30, 2 << 30) for number in range(2))


def part(device: Device, layers: int | None, weights: int | None) -> DevicePart:
    return DevicePart(device, layers, None if weights is None else Use(device.name, weights * MIB, MIB, MIB))


@pytest.mark.parametrize(
    "parts, reported",
    [
        ([part(CPU, 31, 120)], "all layers on the CPU"),
        ([part(FIRST, 31, 110), part(CPU, 0, 10)], "31 of 31 layers on CUDA0 (card 0) with 110 MiB of weights"),
        ([part(FIRST, 21, 71), part(CPU, 10, 50)], "21 of 31 layers on CUDA0 (card 0) with 71 MiB of weights"),
        (
            [part(FIRST, 20, 70), part(SECOND, 11, 40), part(CPU, 0, 10)],
            "20 of 31 layers on CUDA0 (card 0) with 70 MiB of weights, "
            "11 of 31 layers on CUDA1 (card 1) with 40 MiB of weights",
        ),
        ([part(FIRST, 0, 0), part(SECOND, 31, 1), part(CPU, 0, 9)],
         "31 of 31 layers on CUDA1 (card 1) with 1 MiB of weights"),
        ([part(FIRST, 0, 30), part(CPU, 31, 10)], "0 of 31 layers on CUDA0 (card 0) with 30 MiB of weights"),
        ([part(FIRST, None, 30), part(CPU, None, 10)], "layers on CUDA0 (card 0) with 30 MiB of weights"),
        ([part(FIRST, None, None), part(CPU, None, None)], "layers on CUDA0 (card 0)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_place_of_a_model_is_reported_by_its_layers_and_its_bytes(parts, reported):
    assert described_place(parts) == reported


def test_props_and_metrics_show_what_each_device_has(tiny):
    with running(tiny) as server:
        service = server.service
        real = {use.device: use for use in breakdown(service.context.handle)}
        text = server.http.get("/metrics").text
        shown = {row["name"]: row for row in server.http.get("/props").json()["device"]["devices"]}
        assert list(shown)[-1] == HOST and (len(shown) == 2) == ON_DEVICE
        assert sum(row["layers"] for row in shown.values()) == service.model.num_layers + 1
        assert shown[next(iter(shown))]["layers"] == service.model.num_layers + 1, "the first device has all"
        for name, row in shown.items():
            use = real[name]
            assert (row["weights"], row["kv"], row["compute"]) == (use.weights, use.kv, use.compute)
            labels = f'description="{row["description"]}",device="{name}",kind="{row["kind"]}"'
            assert f"slotcache_device_info{{{labels}}} 1.0" in text
            values = {"memory": "total", "free": "free", "weights": "weights", "kv": "kv", "compute": "compute"}
            for metric, field in values.items():
                assert server.metric(f"slotcache_device_{metric}_bytes", device=name) == row[field]
            assert server.metric("slotcache_device_layers", device=name) == row["layers"]
        assert sum(row["weights"] for row in shown.values()) > 0 < sum(row["kv"] for row in shown.values())
        line = describe(service.context, service.settings, service.parts)
        assert ("all layers on the CPU" in line) != ON_DEVICE and line.startswith(f"{tiny.name}: ")


def test_metrics_show_the_times_of_the_device_that_was_timed(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(learning, "SMALLEST", 0)  # so that a CPU is timed, too
    with running(tiny, is_timed=True, flash_attn="auto") as server:
        times, device = server.service.context.times, next(iter(server.service.parts)).device.name
        assert times.step > 0 < times.chunk
        assert server.metric("slotcache_device_step_seconds", device=device) == times.step
        chunk = server.metric("slotcache_device_chunk_seconds", device=device, tokens=str(times.chunk_tokens))
        assert chunk == times.chunk


def test_nobody_asks_a_device_for_its_memory_while_it_computes(tiny, monkeypatch):
    with running(tiny) as server:
        for module in ("split", "context", "hardware"):
            monkeypatch.setattr(f"slotcache.models.{module}.devices", lambda: pytest.fail("a device was asked"))
        assert "slotcache_device_free_bytes{" in server.http.get("/metrics").text
        assert server.http.get("/props").json()["device"]["devices"]


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return mixture(tmp_path_factory.mktemp("models") / "mixture.gguf")


@needs_device
@pytest.mark.parametrize(
    "given, layers, weights",
    [
        ({}, 1.0, 0.7),
        ({"gpu_layers": 3}, 3 / 7, 0.3),
        ({"cpu_moe": True}, 1.0, 0.01),
        ({"override_tensor": r"blk\..*=CPU"}, 1.0, 0.0),
    ],
)
def test_overrides_are_seen_in_the_weights(experts, given, layers, weights):
    service = load.load(Settings(ctx_size=1024, threads=1, **given), experts)
    first, *_, host = service.parts
    total = service.model.num_layers + 1
    assert (first.layers, host.layers) == (on := round(layers * total), total - on)
    assert first.use and host.use
    share = first.use.weights / (first.use.weights + host.use.weights)
    assert weights <= share <= weights + 0.4
    reported = f"{first.layers} of {total} layers on {first.device} with "
    assert reported in describe(service.context, service.settings, service.parts)
    service.close()


# ---- A card that fails --------------------------------------------------------------------------------------------------

CARD = Device("Vulkan0", "a card", "GPU", 1 << 30, 1 << 30)


@pytest.fixture
def failing(monkeypatch, tmp_path):
    """A card is found, unless there is a real device, and its trial fails. What this process hides comes back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_hidden(monkeypatch)
    code = "raise SystemExit('it is computed wrongly')"
    monkeypatch.setattr(builds, "command", lambda *_: [sys.executable, "-c", code])
    found = devices() if ON_DEVICE else [CARD, *devices()]
    monkeypatch.setattr(gate, "devices", lambda: devices() if hardware.is_without_card() else found)
    for cached_once in (hardware.unused_card, load._log_unused):
        cached_once.cache_clear()
    yield found[0]
    hardware.unused_card.cache_clear()


def test_a_server_whose_card_fails_computes_on_the_cpu_alone(tiny, failing, caplog, tmp_path):
    """The models beside it, and batches so large that llama.cpp would have a card compute them, too."""
    beside = bert(tmp_path / "encoder.gguf")
    with (
        caplog.at_level("DEBUG", "slotcache.llama"),
        running(tiny, embedding_model=str(beside), draft_model=str(tiny), draft="model") as server,
    ):
        assert server.chat("word " * 400)["usage"]["completion_tokens"] == 4
        assert server.openai.embeddings.create(model="encoder", input="a text").data[0].embedding
        shown = server.http.get("/props").json()["device"]
        assert shown["name"] == HOST and [row["name"] for row in shown["devices"]] == [HOST]
        assert shown["unused"].startswith(f"{failing} is not used: it fails a trial with a small model: it is computed ")
        assert [use.device for use in breakdown(server.service.context.handle)] == [HOST]
    buffers = [line for line in caplog.messages if "buffer size" in line]
    assert buffers and not any(failing.name in line for line in buffers)
    assert shown["unused"] in caplog.messages, "told at the start"


def test_layers_for_a_card_that_fails_are_refused_at_the_start(tiny, failing):
    with pytest.raises(gate.ModelError, match=r"-ngl 2: .* is not used: it fails a trial .*; without -ngl the CPU computes"):
        load.load(Settings(ctx_size=512, gpu_layers=2, threads=1), tiny)
    load.load(replace(Settings(ctx_size=512, threads=1), gpu_layers=0), tiny).close()


def test_doctor_reports_a_card_that_fails(failing, capsys):
    assert doctor(Settings(gpu_layers=2)) == 2
    assert f"slotcache: -ngl 2: {failing} is not used: it fails a trial" in capsys.readouterr().err
    assert doctor(Settings()) == 0
    assert f"GPU offload: no. {failing} is not used: it fails a trial with a small model: " in capsys.readouterr().out


@needs_device
def test_doctor_reports_that_the_device_passes(capsys):
    assert doctor(Settings()) == 0
    printed = capsys.readouterr().out
    assert f"tried on {devices()[0]}: it works there, too" in printed and "GPU offload: yes" in printed


@pytest.mark.parametrize(("free", "lent"), [(9, 0), (13, 0), (14, 3)])
def test_a_step_borrows_what_is_free_beside_a_full_host_tier(monkeypatch, free, lent):
    """For a pool of 3 bytes beside a host tier of 8."""
    monkeypatch.setattr(load, "free_memory", lambda: free)
    assert load._lent_bytes(3, 8) == lent
