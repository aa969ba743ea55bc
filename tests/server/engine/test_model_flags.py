"""llama-server's flags for positions, metadata and devices, in a server: KV of other flags is never taken."""

from contextlib import closing
from dataclasses import replace

import pytest
from slotcache.bench.random_models import SHAPES, generate
from slotcache.models.hardware import devices
from slotcache.models.overrides import AS_TRAINED, RopeScaling, parse_metadata
from slotcache.server.config.settings import Settings, SettingsError
from slotcache.server.engine.fit import fit, open_beside, open_model, rope_scaling_of
from support.architectures import mixture
from support.on_device import loads_two, needs_cpu

from ..conftest import cached, running
from ..test_cli import run
from .test_sleep import HOUR, doze

BODY = {"messages": [{"role": "user", "content": "Who built the canal, the school and the castle? " * 4}], "max_tokens": 8}
FLAGS = [
    {"rope_freq_base": 500.0},
    {"rope_freq_base": 501.0},
    {"rope_scaling": "linear", "rope_scale": 2.0},
    {"rope_scaling": "yarn", "rope_scale": 2.0},
    {"rope_scaling": "yarn", "rope_scale": 2.0, "yarn_orig_ctx": 1000},
    {"rope_scaling": "yarn", "rope_scale": 2.0, "yarn_ext_factor": 0.5},
    {"rope_scaling": "yarn", "rope_scale": 2.0, "yarn_attn_factor": 2.0},
    {"rope_scaling": "yarn", "rope_scale": 2.0, "yarn_beta_slow": 2.0},
    {"rope_scaling": "yarn", "rope_scale": 2.0, "yarn_beta_fast": 20.0},
    {"override_kv": "llama.attention.layer_norm_rms_epsilon=float:0.1"},
    {"device": "none"},
]


def test_kv_on_disk_is_taken_by_the_flags_that_made_it_alone(tiny, tmp_path):
    """Each set of flags finds nothing at its first start, and its own KV at the second, with the same answer."""
    answers = []
    for flags in ({}, *FLAGS):
        with running(tiny, cache_dir=str(tmp_path), **flags) as up:
            first = up.chat(**BODY)
            assert cached(first) == 0, flags
            assert up.chat(**BODY)["choices"] == first["choices"]
            answers.append((first, up.http.get("/props").json()["system_fingerprint"]))
    assert len({print for _, print in answers}) == len(answers)
    for flags, (first, print) in zip(({}, *FLAGS[-3:]), (answers[0], *answers[-3:]), strict=True):
        with running(tiny, cache_dir=str(tmp_path), **flags) as up:
            again, rest = up.chat(**BODY), up.service.context.costs.recompute_last
            assert cached(again) == again["usage"]["prompt_tokens"] - rest, flags
            assert again["choices"] == first["choices"] and up.http.get("/props").json()["system_fingerprint"] == print


def test_a_slot_file_of_other_flags_is_refused(tiny, tmp_path):
    with running(tiny, slot_save_path=str(tmp_path), **FLAGS[0]) as up:
        up.chat(**BODY, id_slot=0)
        assert up.http.post("/slots/0?action=save", json={"filename": "one"}).json()["n_saved"] > 0
        assert up.http.post("/slots/0?action=restore", json={"filename": "one"}).status_code == 200
    for flags in ({}, FLAGS[1]):
        with running(tiny, slot_save_path=str(tmp_path), **flags) as up:
            assert up.http.post("/slots/0?action=restore", json={"filename": "one"}).status_code == 400


def test_yarn_lets_a_request_be_longer_than_the_model_was_trained_for(tmp_path):
    trained = 1024
    short = generate(tmp_path / "short.gguf", replace(SHAPES["tiny"], context=trained))
    flags = {"rope_scaling": "yarn", "rope_scale": 2.0, "ctx_size": 3 * trained}
    with running(short, ctx_size=3 * trained) as up:
        assert up.service.submitter.limit == trained
    with running(short, **flags) as up:
        props = up.http.get("/props").json()
        assert props["default_generation_settings"]["n_ctx"] == 2 * trained
        (meta,) = (one["meta"] for one in up.http.get("/v1/models").json()["data"])
        assert meta["n_ctx_train"] == 2 * trained
        assert (
            f"rotary positions: scaling yarn, frequencies times 0.5; trained for {2 * trained:,} tokens"
            in (props["memory"]["decision"])
        )
        long = "word " * (trained // 2 + 100)
        assert up.chat(messages=[{"role": "user", "content": long}], max_tokens=4)["usage"]["prompt_tokens"] > trained
    assert fit(Settings(rope_scaling="yarn", rope_scale=2.0), short)[0].ctx_size == 2 * trained


def test_linear_scaling_leaves_the_known_length_and_metadata_sets_it(tiny):
    flags = Settings(rope_scaling="linear", rope_scale=2.0, override_kv="llama.context_length=int:12345")
    with closing(open_model(flags, tiny, is_simulated=True)) as model:
        assert model.context_train == 12345


def test_a_model_beside_keeps_its_own_metadata_and_positions(tiny):
    flags = Settings(**FLAGS[3], override_kv="llama.context_length=int:12345")
    with closing(open_beside(flags, str(tiny), is_simulated=True)) as model:
        assert model.rope_scaling == AS_TRAINED and model.metadata_overrides == () and model.context_train != 12345


@loads_two
def test_a_draft_model_drafts_by_its_own_positions_beside_scaled_ones(tiny):
    with running(tiny, **FLAGS[0]) as alone, running(tiny, draft_model=str(tiny), **FLAGS[0]) as up:
        assert up.service.engine.draft_model.context.model.rope_scaling == AS_TRAINED
        assert up.service.model.rope_scaling == RopeScaling(base=500.0)
        assert up.chat(**BODY)["choices"] == alone.chat(**BODY)["choices"]


def test_two_scales_are_refused_and_one_is_the_other_s_inverse():
    assert rope_scaling_of(Settings(rope_scale=4.0)) == rope_scaling_of(Settings(rope_freq_scale=0.25))
    with pytest.raises(SettingsError, match="--rope-scale and --rope-freq-scale"):
        rope_scaling_of(Settings(rope_scale=4.0, rope_freq_scale=0.25))


def test_a_sleep_changes_nothing_of_it(tiny):
    """Weights that leave memory come back with the same metadata and positions."""
    flags = {"override_kv": "llama.attention.layer_norm_rms_epsilon=float:0.1", "rope_freq_base": 500.0}
    with running(tiny, **flags) as up:
        expected = up.chat(**BODY)["choices"]
    with running(tiny, sleep_idle_seconds=HOUR, **flags) as up:
        assert up.chat(**BODY)["choices"] == expected
        doze(up)
        assert up.chat(**BODY)["choices"] == expected


def test_doctor_and_the_log_report_flags_and_those_without_effect(tiny):
    reported = run(
        *("doctor", "-m", tiny, "--rope-scaling", "yarn", "--rope-scale", 2, "--override-kv", "llama.no_key=int:1"),
        *("--override-kv", "llama.attention.layer_norm_rms_epsilon=float:0.1", "-dev", "none"),
    )
    assert reported.returncode == 0, reported.stderr
    assert "rotary positions: scaling yarn, frequencies times 0.5; trained for " in reported.stdout
    assert "metadata: llama.attention.layer_norm_rms_epsilon=float:0.100000" in reported.stdout
    assert "--override-kv llama.no_key=int:1 has no effect: llama.cpp reads no such key of tiny.gguf" in reported.stdout
    assert "layers on no GPU (--split-mode layer)" in reported.stdout
    refused = run("doctor", "-m", tiny, "-dev", "nowhere")
    assert refused.returncode == 2 and "--device nowhere: expected none" in refused.stderr


@pytest.mark.parametrize(("given", "cells"), [(100, 256), (300, 512), (512, 512)])
def test_a_context_that_is_raised_is_told_as_it_is(tiny, caplog, given, cells):
    with caplog.at_level("INFO", "slotcache"), running(tiny, ctx_size=given) as up:
        assert up.http.get("/props").json()["default_generation_settings"]["n_ctx"] == cells
    assert f"fits as it is: {cells} cells (-c)" in caplog.text
    assert (f"-c {given} is raised to {cells}: llama.cpp allocates cells by 256" in caplog.text) == (given != cells)


@needs_cpu
def test_flags_for_several_gpus_are_reported_where_there_is_none(tiny):
    reported = run("doctor", "-m", tiny, "-sm", "none", "-mg", 0, "-ts", "3,1")
    assert (
        reported.returncode == 0
        and "have no effect: there is no GPU" in reported.stdout
        and "fits as it is" in reported.stdout
    )


@needs_cpu
def test_flags_for_a_gpu_are_reported_where_there_is_none(tiny, tmp_path):
    experts = mixture(tmp_path / "mixture.gguf")
    for path, given, expected in (
        (tiny, Settings(), []),
        (tiny, Settings(gpu_layers=0), []),
        (tiny, Settings(gpu_layers=20, device="none"), ["--gpu-layers has no effect: there is no GPU to use"]),
        (tiny, Settings(gpu_layers=-2), ["--gpu-layers has no effect: there is no GPU to use"]),
        (tiny, Settings(n_cpu_moe=2), ["--n-cpu-moe and --cpu-moe have no effect: tiny.gguf has no experts"]),
        (experts, Settings(cpu_moe=True), ["--n-cpu-moe and --cpu-moe have no effect: there is no GPU to use"]),
    ):
        with closing(open_model(given, path, is_simulated=True)) as model:
            assert [*model.without_effect()] == expected


def test_a_start_says_it_in_its_log(tiny, caplog):
    with caplog.at_level("INFO", "slotcache"), running(tiny, override_kv="llama.no_key=int:1", rope_freq_base=500.0):
        pass
    assert "rotary positions: base 500.0" in caplog.text
    (line,) = [one for one in caplog.records if "llama.no_key" in one.message]
    assert line.levelname == "WARNING"
    assert parse_metadata("llama.no_key=int:1") and devices()
