"""Runs at other positions: a moved run is the one that llama.cpp computes there, but for rounding."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from gguf import RopeScalingType
from slotcache.models.context import Context, ContextSettings
from slotcache.models.model import Model
from slotcache.models.rotation import Rotation, is_same
from slotcache.models.runner import Runner
from slotcache.slots.plan import Drop, HostCopy, Plan, Restore, Save, Span
from support.architectures import FEED_FORWARD, HEADS, KV_HEADS, LAYERS, WIDTH, TinyModel, windowed

ROUNDING = 20  # times as much: activations are rounded to 8 bits in each layer
NUM_CELLS, HEAD = 2048, WIDTH // HEADS
TOKENS = np.random.default_rng(0).integers(300, 900, 40).astype(np.int32)


def neox(path: Path) -> Path:
    """StableLM: halves of a head are pairs, and only half of a head turns."""
    with TinyModel(path, "stablelm") as model:
        model.set_metadata(layer_norm_eps=1e-5, rope_dimension_count=HEAD // 2, rope_freq_base=10_000.0)
        _layers(model)
        model.matrix("output", 1024, WIDTH)
        for name in ["output_norm", *(f"blk.{layer}.{norm}_norm" for layer in range(LAYERS) for norm in ("attn", "ffn"))]:
            model.numbers(f"{name}.bias", np.zeros(WIDTH))
    return path


def scaled(path: Path) -> Path:
    """A Llama whose angles are a quarter of the usual ones, and divided by the factors of a tensor."""
    with TinyModel(path, "llama") as model:
        model.set_metadata(layer_norm_rms_eps=1e-6, rope_dimension_count=HEAD, rope_scaling_type=RopeScalingType.LINEAR)
        model.set_metadata(rope_scaling_factor=4.0)
        model.numbers("rope_freqs.weight", np.linspace(1, 8, HEAD // 2))
        _layers(model)
    return path


def yarn(path: Path) -> Path:
    """A Qwen2 with YaRN, which turns some pairs more than others and makes keys larger."""
    with TinyModel(path, "qwen2") as model:
        model.set_metadata(layer_norm_rms_eps=1e-6, rope_scaling_type=RopeScalingType.YARN, rope_scaling_factor=4.0)
        model.set_metadata(rope_scaling_orig_ctx_len=2048)
        _layers(model)
        for layer in range(LAYERS):
            for name, size in (("q", WIDTH), ("k", HEAD * KV_HEADS), ("v", HEAD * KV_HEADS)):
                model.numbers(f"blk.{layer}.attn_{name}.bias", model.random(size))
    return path


def _layers(model: TinyModel) -> None:
    model.set_metadata(feed_forward_length=FEED_FORWARD, head_count=HEADS, head_count_kv=KV_HEADS)
    for _, block in model.blocks("attn", "ffn"):
        model.attention(block)
        model.feed_forward(block)
    model.ones("output_norm", WIDTH)


@contextmanager
def runner_of(path: Path, flash: str = "off", kind: str = "f16", value: str = "f16"):
    model = Model(path)
    settings = ContextSettings(
        num_cells=NUM_CELLS, num_sequences=64, threads=1, flash_attention=flash, cache_type_k=kind, cache_type_v=value
    )
    context = Context(model, settings)
    runner = Runner(context)
    runner.warm_up()
    yield runner
    context.close()
    model.close()


def run_of(runner: Runner, tokens: np.ndarray, start: int) -> np.ndarray:
    """Compute tokens that begin at a position and see nothing else."""
    copy = HostCopy(start, start + len(tokens))
    runner.run(Plan(spans=(Span(0, 0, start, tokens, logits=False),), afterwards=()))
    runner.run(Plan((Save(0, copy), Drop(0))))
    assert copy.data is not None
    return copy.data


@pytest.fixture(scope="module", params=["norm", "neox", "scaled", "yarn"])
def path(request, tiny, tmp_path_factory):
    if request.param == "norm":
        return tiny
    make = {"neox": neox, "scaled": scaled, "yarn": yarn}[request.param]
    return make(tmp_path_factory.mktemp("models") / f"{request.param}.gguf")


@pytest.mark.parametrize(("flash", "kind"), [("off", "f16"), ("on", "f16"), ("off", "f32")])
def test_a_moved_token_is_the_token_that_was_computed_there(path, flash, kind):
    with runner_of(path, flash, kind) as runner:
        rotation = runner.states.rotation
        assert isinstance(rotation, Rotation), rotation
        for token in TOKENS[:3]:
            original = run_of(runner, token[None], 0)
            for distance in (1, 77, 1024, NUM_CELLS - 2):
                there = run_of(runner, token[None], distance)
                moved = rotation.moved(original, distance)
                assert is_same(rotation.attention, moved, there, distance)
                assert np.array_equal(moved[:28], there[:28])  # down to the cell's position
                assert not is_same(rotation.attention, rotation.moved(original, distance + 1), there, distance)


def test_a_run_moves_as_a_whole_and_stays_as_it_was(path):
    """All that a token sees of its own run is relative, so that a run behind no other moves, too."""
    with runner_of(path, kind="f32", value="f32") as runner:
        rotation = runner.states.rotation
        assert isinstance(rotation, Rotation), rotation
        original = run_of(runner, TOKENS, 3)
        before = original.copy()
        moved = rotation.moved(original, 500)
        there = run_of(runner, TOKENS, 503)
        assert is_same(rotation.attention, moved, there, 500 * ROUNDING)
        assert not is_same(rotation.attention, rotation.moved(original, 499), there, 500 * ROUNDING)
        assert np.array_equal(original, before)
        assert runner.states.accepts(moved, 503, 503 + len(TOKENS))


def test_a_restored_run_can_be_moved_in_part(tiny):
    with runner_of(tiny, kind="f32") as runner:
        rotation, copy = runner.states.rotation, HostCopy(3, 43)
        assert isinstance(rotation, Rotation), rotation
        copy.data = run_of(runner, TOKENS, 3)
        saved = HostCopy(110, 130)
        runner.run(Plan((Restore(copy, 5, 110, 130, distance=100), Save(5, saved), Drop(5))))
        assert saved.data is not None
        expected = rotation.moved(runner.states.cut(copy.data, 10, 30), 100)
        assert runner.states.accepts(saved.data, 110, 130)
        assert is_same(rotation.attention, saved.data, expected, 0)


def test_a_model_is_not_moved_where_keys_are_rounded_to_blocks_or_a_window_passes_them(tiny, tmp_path):
    with runner_of(tiny, "on", "q8_0", "q8_0") as runner:
        assert runner.states.rotation == "its keys are neither f16 nor f32"
    with runner_of(windowed(tmp_path / "windowed.gguf")) as runner:
        assert runner.states.rotation == "a sliding window passes its KV"
