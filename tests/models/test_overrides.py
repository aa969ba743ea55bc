"""What flags put in place of a model file's own: metadata, the scale of rotary positions, also of weights loaded again."""

import ctypes
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from gguf import RopeScalingType
from slotcache.models import llama
from slotcache.models.context import Context, ContextSettings
from slotcache.models.embedding import EmbedderSettings, EmbeddingModel
from slotcache.models.errors import ModelError
from slotcache.models.learning import subject_of
from slotcache.models.model import Model
from slotcache.models.overrides import MetadataOverride, RopeScaling, metadata_rows, parse_metadata
from slotcache.models.rotation import Rotation, is_same
from slotcache.models.runner import Runner
from slotcache.slots.plan import Drop, HostCopy, Plan, Save, Span
from support.architectures import FEED_FORWARD, HEADS, KV_HEADS, WIDTH, TinyModel, recurrent

SMALL = ContextSettings(num_cells=512, batch=64, num_sequences=4, threads=1, flash_attention="off")
YARN = RopeScaling(kind="yarn", scale=0.25, original=2048, ext_factor=0.5, attn_factor=1.5, beta_fast=24.0, beta_slow=2.0)
TOKENS = np.arange(300, 340, dtype=np.int32)


def llama_of(path, scaling=None, factor=4.0):
    """A Llama; scaling: of its positions, as its file says."""
    with TinyModel(path, "llama") as model:
        model.set_metadata(layer_norm_rms_eps=1e-6, rope_dimension_count=WIDTH // HEADS, feed_forward_length=FEED_FORWARD)
        model.set_metadata(head_count=HEADS, head_count_kv=KV_HEADS)
        if scaling is not None:
            model.set_metadata(rope_scaling_type=scaling, rope_scaling_factor=factor)
        for _, block in model.blocks("attn", "ffn"):
            model.attention(block)
            model.feed_forward(block)
        model.ones("output_norm", WIDTH)
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return llama_of(tmp_path_factory.mktemp("models") / "plain.gguf")


def logits(context):
    runner = Runner(context)
    runner.batch.fill((Span(0, 0, 0, TOKENS, logits=True),))
    assert llama.llama_decode(context.handle, runner.batch.struct) == 0
    found = runner.logits(1)[0].copy()
    runner.apply(Drop(0))
    return found


def scaled(**given: Any) -> RopeScaling:
    return RopeScaling(**given)


def opened(path, **given: Any) -> Model:
    return Model(path, **given)


def logits_of(path, **given):
    with closing(Model(path, **given)) as model, closing(Context(model, SMALL)) as context:
        return logits(context)


# ---- metadata -----------------------------------------------------------------------------------------------------------


def test_metadata_is_parsed_as_llama_server_has_it():
    text = 'a.b=int:-3,c=float:1e4,d=bool:false,e=str:x=y:z,"f=str:one, two"'
    assert [(one.key, one.value) for one in parse_metadata(text)] == [
        *(("a.b", -3), ("c", 1e4), ("d", False)),
        *(("e", "x=y:z"), ("f", "one, two")),
    ]
    assert [str(one) for one in parse_metadata("a=bool:true,b=float:0.5")] == ["a=bool:true", "b=float:0.500000"]
    assert parse_metadata("") == () and metadata_rows(()) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a", "KEY=TYPE:VALUE"),
        ("a=int", "is no int"),
        ("a=int:", "is no int"),
        ("a=int:1.5", "is no int"),
        ("a=int:9223372036854775808", "is no int"),
        ("a=float:inf", "is no float"),
        ("a=bool:yes", "is no bool"),
        ("a=text:b", "a type of int, float, bool, str"),
        ("=int:1", "KEY=TYPE:VALUE"),
        ("a=str:" + "é" * 64, "at most 127 bytes"),
        ("k" * 128 + "=int:1", "at most 127 bytes"),
        ("a=int:1,a=int:2", "a has a value already"),
    ],
)
def test_metadata_that_is_none_is_refused_with_its_text(text, why):
    with pytest.raises(ModelError, match=f"^--override-kv .*{why}"):
        parse_metadata(text)


def test_metadata_of_flags_stands_in_for_the_files_and_is_what_the_model_reports(plain):
    with closing(Model(plain, metadata=parse_metadata("llama.context_length=int:4096,general.name=str:Other"))) as model:
        assert model.context_train == 4096 and model.metadata("llama.context_length") == "4096"
        assert model.metadata("general.name") == "Other" and not [*model.without_effect()]
        assert [*model.described_flags()] == ["metadata: llama.context_length=int:4096, general.name=str:Other"]
        assert model.altered
    with closing(Model(plain)) as model:
        assert model.context_train == 8192 and not [*model.described_flags()] and model.altered == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("qwen2.context_length=int:9", "llama.cpp reads no such key of plain.gguf"),
        ("llama.context_length=float:9", "it is of type int"),
        ("tokenizer.chat_template=str:no", "llama.cpp reads no such key"),
    ],
)
def test_metadata_that_nothing_reads_is_reported_and_changes_nothing(plain, text, why):
    with closing(Model(plain, metadata=parse_metadata(text))) as model:
        (line,) = model.without_effect()
        assert line.startswith(f"--override-kv {parse_metadata(text)[0]} has no effect") and why in line
        assert model.metadata("llama.context_length") == "8192" and model.context_train == 8192
        assert model.metadata("qwen2.context_length") is None


@pytest.mark.parametrize("text", ["llama.rope.freq_base=float:500", "llama.attention.layer_norm_rms_epsilon=float:0.5"])
def test_weights_that_are_loaded_again_have_the_same_metadata(plain, text):
    given, usual = parse_metadata(text), logits_of(plain)
    expected = logits_of(plain, metadata=given)
    assert not np.array_equal(expected, usual)
    with closing(Model(plain, metadata=given, may_unload=True)) as model, closing(Context(model, SMALL)) as context:
        assert np.array_equal(logits(context), expected)
        context.unload()
        context.open()
        assert np.array_equal(logits(context), expected)


def test_a_vocabulary_that_stays_has_the_metadata_of_flags(plain):
    given = parse_metadata("tokenizer.ggml.add_bos_token=bool:true,tokenizer.ggml.eos_token_id=int:7")
    with closing(Model(plain)) as usual, closing(Model(plain, metadata=given, may_unload=True)) as model:
        assert usual.eos != model.eos == usual.text_of(7)
        assert len(model.tokenizer.begin) == 1 and len(usual.tokenizer.begin) == 0
        assert not [*model.without_effect()] and model.num_vocab == usual.num_vocab


# ---- rotary positions ---------------------------------------------------------------------------------------------------


def test_positions_are_scaled_as_a_file_would_say(plain, tmp_path):
    linear = llama_of(tmp_path / "linear.gguf", RopeScalingType.LINEAR)
    yarn = llama_of(tmp_path / "yarn.gguf", RopeScalingType.YARN)
    usual = logits_of(plain)
    by_flags = logits_of(plain, rope_scaling=RopeScaling(kind="linear", scale=0.25))
    assert np.array_equal(by_flags, logits_of(linear)) and not np.array_equal(by_flags, usual)
    by_flags = logits_of(plain, rope_scaling=RopeScaling(kind="yarn", scale=0.25))
    assert np.array_equal(by_flags, logits_of(yarn)) and not np.array_equal(by_flags, logits_of(linear))
    assert np.array_equal(logits_of(yarn, rope_scaling=RopeScaling(kind="none")), usual)
    base = logits_of(plain, rope_scaling=RopeScaling(base=500.0))
    assert np.array_equal(base, logits_of(plain, metadata=parse_metadata("llama.rope.freq_base=float:500")))
    one_by_one = (
        *({}, {"original": 2048}, {"ext_factor": 0.5}, {"ext_factor": 0.0}, {"ext_factor": 0.0, "attn_factor": 1.5}),
        *({"beta_fast": 2.0}, {"beta_slow": 0.1}),
    )
    found = [logits_of(plain, rope_scaling=scaled(kind="yarn", scale=0.25, **given)) for given in one_by_one]
    assert len({one.tobytes() for one in found}) == len(found)


@pytest.mark.parametrize(
    ("scaling", "trained"),
    [
        (RopeScaling(kind="yarn", scale=0.25), 32768),
        (RopeScaling(kind="yarn", scale=1 / 3), 24576),
        (RopeScaling(kind="yarn", scale=0.5, original=3000), 6000),
        (RopeScaling(kind="yarn"), 8192),
        (RopeScaling(kind="linear", scale=0.25), 8192),
        (RopeScaling(scale=0.25, base=1e6), 8192),
    ],
)
def test_yarn_lengthens_the_known_context_as_llama_cpp_counts_it(plain, scaling, trained):
    for kind in ({}, {"is_simulated": True}, {"may_unload": True}, {"vocab_only": True}):
        with closing(opened(plain, rope_scaling=scaling, **kind)) as model:
            assert model.context_train == trained, kind
            if kind.get("may_unload"):
                Context(model, SMALL).close()
                assert llama.llama_model_n_ctx_train(model.handle) == trained  # as it counts them with such a context


def test_a_file_that_is_scaled_already_is_scaled_anew(tmp_path):
    path = llama_of(tmp_path / "yarn.gguf", RopeScalingType.YARN)
    for scale, trained in ((0.25, 8192), (0.125, 8192 * 8)):
        with closing(Model(path, rope_scaling=RopeScaling(scale=scale))) as model:
            assert model.context_train == trained


def test_a_factor_of_attention_beside_extrapolation_is_reported(plain):
    """llama.cpp computes it by itself there."""
    for given, lines in (({}, 1), ({"ext_factor": 0.5}, 1), ({"ext_factor": 0.0}, 0), ({"kind": "linear"}, 0)):
        with closing(
            Model(plain, rope_scaling=scaled(**{"kind": "yarn", "scale": 0.25, "attn_factor": 1.5} | given))
        ) as model:
            assert len([line for line in model.without_effect() if "--yarn-attn-factor" in line]) == lines, given


def test_a_model_without_rotary_positions_stays_as_long_as_it_is(tmp_path):
    with closing(Model(recurrent(tmp_path / "recurrent.gguf"), rope_scaling=RopeScaling(kind="yarn", scale=0.25))) as model:
        assert model.context_train == 8192
        (line,) = model.without_effect()
        assert "recurrent.gguf has no rotary positions" in line


@pytest.mark.parametrize("scaling", [YARN, RopeScaling(base=500.0), RopeScaling(kind="linear", scale=0.25)])
def test_runs_move_by_the_scaled_angles(plain, scaling):
    """Documents at other positions: the angles are measured in the context that has the flags."""
    found = []
    for given in ({}, {"rope_scaling": scaling}):
        settings = ContextSettings(num_cells=2048, num_sequences=64, threads=1, flash_attention="off")
        with closing(opened(plain, **given)) as model, closing(Context(model, settings)) as context:
            runner = Runner(context)
            runner.warm_up()
            rotation = runner.states.rotation
            assert isinstance(rotation, Rotation), rotation
            runs = {}
            for start in (0, 700):
                copy = HostCopy(start, start + 1)
                runner.run(Plan(spans=(Span(0, 0, start, TOKENS[:1], logits=False),), afterwards=()))
                runner.run(Plan((Save(0, copy), Drop(0))))
                runs[start] = copy.data
            assert is_same(rotation.attention, rotation.moved(runs[0], 700), runs[700], 700)
            found.append((rotation, runs))
    (usual, _), (_, runs) = found
    assert not is_same(usual.attention, usual.moved(runs[0], 700), runs[700], 700)


def test_vectors_of_the_served_model_have_its_positions(plain):
    made = []
    for given in ({}, {"rope_scaling": YARN}):
        with closing(opened(plain, **given)) as model:
            embedder = EmbeddingModel(model, EmbedderSettings(pooling="mean"))
            made.append(embedder.vectors([TOKENS])[0])
            embedder.close()
    assert not np.array_equal(*made)


def test_times_belong_to_what_flags_say(plain):
    found = []
    for given in ({}, {"rope_scaling": YARN}, {"metadata": parse_metadata("llama.rope.freq_base=float:500")}):
        with closing(opened(plain, **given)) as model, closing(Context(model, SMALL)) as context:
            found.append(subject_of(context, None).settings)
    assert len({repr(settings) for settings in found}) == 3


def test_all_parameters_arrive(plain):
    params = llama.llama_context_default_params()
    YARN.apply(params)
    assert (params.rope_scaling_type, params.rope_freq_base, params.yarn_orig_ctx) == (2, 0.0, 2048)
    factors = params.rope_freq_scale, params.yarn_ext_factor, params.yarn_attn_factor
    assert (*factors, params.yarn_beta_fast, params.yarn_beta_slow) == (0.25, 0.5, 1.5, 24.0, 2.0)
    params, usual = llama.llama_context_default_params(), llama.llama_context_default_params()
    RopeScaling().apply(params)
    size = ctypes.sizeof(params)
    assert ctypes.string_at(ctypes.addressof(params), size) == ctypes.string_at(ctypes.addressof(usual), size)
    assert str(YARN).startswith("scaling yarn, frequencies times 0.25, tokens before YaRN 2048, ")
    assert MetadataOverride("a", True).row().tag == 2
