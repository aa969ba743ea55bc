"""Generated models as llama.cpp reads them, through its plain C interface."""

import ctypes
from argparse import ArgumentParser
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slotcache.bench import random_models as module
from slotcache.bench import servers
from slotcache.bench.random_models import SHAPES, HybridShape, ModelShape, Vocabulary, built_in_model, generate, split, train
from slotcache.models import llama
from slotcache.models.errors import ModelError
from slotcache.models.model import Model
from slotcache.models.named_templates import DEFAULT_TEMPLATE
from support import more_llama

T = TypeVar("T")
SMALL_HYBRID = HybridShape(4, 128, 4, 2, 128, 512, 200, 512, delta_heads=4, delta_size=32)
SMALL = ModelShape(1, 64, 2, 1, 64, 320, 20, 512, "F32")


def present(value: T | None) -> T:
    assert value
    return value


class Engine:
    """A model and a context of it, with one thread (the models are too small for two) and without flash attention."""

    def __init__(self, path: Path, vocab_only: bool = False) -> None:
        params = llama.llama_model_default_params()
        # Plain kernels: the repacked ones are for speed, and stop on some virtual machines that promise AMX.
        params.vocab_only, params.use_extra_bufts = vocab_only, False
        self.model = present(llama.llama_model_load_from_file(str(path).encode(), params))
        self.vocab = present(llama.llama_model_get_vocab(self.model))
        self.size = llama.llama_vocab_n_tokens(self.vocab)
        self.eos, self.bos = int(llama.llama_vocab_eos(self.vocab)), int(llama.llama_vocab_bos(self.vocab))
        self._opened = None if vocab_only else self._context()

    @property
    def context(self) -> llama.llama_context_p:
        return present(self._opened)

    def _context(self) -> llama.llama_context_p:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = 512, 1, 1
        params.flash_attn_type = more_llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return present(llama.llama_init_from_model(self.model, params))

    def close(self) -> None:
        if self._opened:
            llama.llama_free(self._opened)
        llama.llama_model_free(self.model)

    def metadata(self, key: str) -> str:
        buffer: Any = ctypes.create_string_buffer(4096)
        assert llama.llama_model_meta_val_str(self.model, key.encode(), buffer, len(buffer)) >= 0, key
        return buffer.value.decode()

    def tokens(self, text: str, special: bool = False) -> list[int]:
        data = text.encode()
        ids = (llama.llama_token * (len(data) + 1))()
        count = llama.llama_tokenize(self.vocab, data, len(data), ids, len(ids), True, special)
        return ids[:count]

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        length = llama.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, True)
        return buffer.raw[:length]

    def forget(self) -> None:
        llama.llama_memory_clear(present(llama.llama_get_memory(self.context)), True)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return the logits behind the last token; the tokens continue the earlier ones."""
        ids = (llama.llama_token * len(tokens))(*tokens)
        assert llama.llama_decode(self.context, more_llama.llama_batch_get_one(ids, len(tokens))) == 0
        return np.ctypeslib.as_array(more_llama.llama_get_logits_ith(self.context, -1), (self.size,)).copy()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        self.forget()
        answer: list[int] = []
        tokens = prompt
        for _ in range(count):
            tokens = [int(self.logits(tokens).argmax())]
            answer += tokens
        return answer


@pytest.fixture(scope="module", autouse=True)
def one_training() -> Iterator[None]:
    """Trains each vocabulary once, and not for every model of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "train", cache(train))
        yield


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    return module.train(SHAPES["tiny"].vocabulary, SHAPES["tiny"].merges)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(generate(tmp_path_factory.mktemp("models") / "tiny.gguf", SHAPES["tiny"]))
    yield engine
    engine.close()


def test_the_model_is_what_its_shape_says(tiny: Engine) -> None:
    shape = SHAPES["tiny"]
    assert tiny.metadata("general.architecture") == "llama"
    assert tiny.metadata("general.name") == "tiny"
    assert tiny.metadata("tokenizer.chat_template") == DEFAULT_TEMPLATE
    assert tiny.size == shape.vocabulary
    assert llama.llama_model_n_ctx_train(tiny.model) == shape.context
    assert llama.llama_model_n_head_kv(tiny.model) == shape.kv_heads
    assert llama.llama_model_n_params(tiny.model) == shape.parameters + (2 * shape.layers + 1) * shape.width


def test_an_answer_ends_with_im_end_and_nothing_is_put_in_front(tiny: Engine) -> None:
    assert tiny.piece(tiny.eos) == b"<|im_end|>"
    assert tiny.piece(tiny.bos) == b"<|endoftext|>"
    assert not llama.llama_vocab_get_add_bos(tiny.vocab)
    assert not llama.llama_vocab_get_add_eos(tiny.vocab)


def test_it_loads_as_a_vocabulary_alone(tmp_path: Path) -> None:
    engine = Engine(generate(tmp_path / "m.gguf", SMALL), vocab_only=True)
    assert engine.size == SMALL.vocabulary
    assert b"".join(map(engine.piece, engine.tokens("Hello, world"))) == b"Hello, world"
    engine.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40))
def test_tokens_joined_are_the_text(tiny: Engine, text: str) -> None:
    assert b"".join(map(tiny.piece, tiny.tokens(text))) == text.encode()


@pytest.mark.parametrize("text", ["The statement's value, it's\n\n  42 of  them!", "naïve café, 漢字 🙂\t\r\n x"])
def test_llama_cpp_applies_the_merges_in_the_words_they_were_trained_on(tiny: Engine, words: Vocabulary, text: str) -> None:
    symbols = [symbol for word in split(text) for symbol in apply_merges(word, words)]
    assert tiny.tokens(text) == [words.tokens.index(symbol) for symbol in symbols]


def apply_merges(word: str, words: Vocabulary) -> list[str]:
    ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(words.merges)}
    symbols = list(word)
    while len(symbols) > 1:
        rank, at = min((ranks.get(pair, len(ranks)), at) for at, pair in enumerate(pairwise(symbols)))
        if rank == len(ranks):
            break
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    return symbols


def test_special_tokens_in_a_users_text_stay_text(tiny: Engine) -> None:
    end = tiny.eos
    assert tiny.tokens("<|im_end|>", special=True) == [end]
    as_text = tiny.tokens("Hello <|im_end|>")
    assert end not in as_text
    assert b"".join(map(tiny.piece, as_text)) == b"Hello <|im_end|>"


@pytest.mark.parametrize("prompt", ["hello", "<|im_start|>user\nWhat is a class?<|im_end|>\n<|im_start|>assistant\n"])
def test_greedy_decoding_wanders_and_does_not_end(tiny: Engine, prompt: str) -> None:
    answer = tiny.greedy(tiny.tokens(prompt, special=True), 100)
    assert len(set(answer)) > 50
    assert len(set(answer[-20:])) > 10
    assert b"".join(map(tiny.piece, answer)).isascii()
    assert not any(llama.llama_vocab_is_eog(tiny.vocab, token) for token in answer)


def test_what_comes_next_hangs_on_the_far_past(tiny: Engine) -> None:
    rest = tiny.tokens("and the value of this expression is")
    first, second = (tiny.greedy(tiny.tokens(start) + rest, 20) for start in ("one ", "two "))
    assert first != second


def test_exact_gives_the_same_logits_however_the_prompt_is_cut(tmp_path: Path) -> None:
    engine = Engine(generate(tmp_path / "exact.gguf", SHAPES["exact"]))
    tokens = engine.tokens("If the expression is a name, the name is looked up in the namespace. " * 4)
    whole = engine.logits(tokens)
    for size in (1, 7, len(tokens) - 1):
        engine.forget()
        logits = [engine.logits(tokens[start : start + size]) for start in range(0, len(tokens), size)]
        assert np.array_equal(logits[-1], whole), f"{size} tokens at a time"
    engine.close()


@pytest.mark.parametrize("quantisation", ["F32", "F16", "Q8_0", "Q4_0"])
def test_every_quantisation_computes(tmp_path: Path, quantisation: str) -> None:
    engine = Engine(generate(tmp_path / "m.gguf", replace(SMALL, quantisation=quantisation)))
    logits = engine.logits(engine.tokens("Hello there"))
    assert np.isfinite(logits).all()
    assert 1 < logits[:256].std() < 5
    engine.close()


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_weights_have_the_mean_and_spread_that_was_asked_for(kind: str) -> None:
    quantisation = GGMLQuantizationType[kind]
    tensor = module._random(np.random.default_rng(1), 4096, quantisation, np.array([0.5, 0.02] * 16, dtype=np.float32))
    matrix = tensor if kind in ("F32", "F16") else quants.dequantize(tensor, quantisation).reshape(32, 4096)
    assert matrix.shape == (32, 4096)
    assert np.abs(matrix[::2].mean()) < 0.01
    assert matrix[::2].std() == pytest.approx(0.5, rel=0.02)
    assert matrix[1::2].std() == pytest.approx(0.02, rel=0.02)


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    first, again, other = (
        generate(tmp_path / str(number) / "m.gguf", SMALL, seed=seed).read_bytes()
        for number, seed in enumerate((0, 0, 1))
        if not (tmp_path / str(number)).mkdir()
    )
    assert first == again
    assert first != other
    assert len(first) == len(other)


def test_an_interrupted_model_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"the old one")

    def interrupt(*of: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_random", interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(path, SMALL)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"the old one"]


def test_the_built_in_model_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", SMALL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = built_in_model()
    written = path.stat().st_ino
    assert path.parent == tmp_path / "slotcache"
    assert built_in_model() == path
    assert path.stat().st_ino == written


def test_a_user_without_a_home_is_informed_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")  # as for a container's user who is in no list of users

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ModelError, match=r"cannot be written.*: Not a directory: name a model with -m, or .*XDG_CACHE_HOME"):
        built_in_model()


def test_two_may_ask_for_the_built_in_model_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: built_in_model(tmp_path, "small"), range(4)))
    assert list(paths) == list(tmp_path.iterdir())
    assert len(GGUFReader(paths.pop()).tensors) == 1 + 9 * SMALL.layers + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantisation": "Q3_K"}, "quantisation 'Q3_K' is not one of F32, F16, Q8_0, Q4_0"),
        ({"heads": 3}, r"the width \(64\) must be an even number for each of 3 heads"),
        ({"heads": 4, "kv_heads": 3}, r"the heads \(4\) must be a multiple of the KV heads \(3\)"),
        ({"feed_forward": 100, "quantisation": "Q8_0"}, r"the feed-forward size \(100\) must be a multiple of 32"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_a_hybrid_is_what_its_shape_says(tmp_path: Path) -> None:
    shape = replace(SMALL_HYBRID, quantisation="Q8_0")
    engine = Engine(generate(tmp_path / "hybrid.gguf", shape))
    assert llama.llama_model_is_hybrid(engine.model)
    arrays = sum(values.size for _, values in shape.arrays())
    assert llama.llama_model_n_params(engine.model) == shape.parameters + arrays
    answer = engine.greedy(engine.tokens("Tell me more about it."), 32)
    assert len(set(answer)) > 16 and engine.eos not in answer
    engine.close()
    model = Model(tmp_path / "hybrid.gguf", 0)
    assert model.attention_width == shape.width and model.kv_bytes("f16", "f16") == 2 * 2 * shape.kv_width
    model.close()


def test_the_bench_model_may_be_a_hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "bench-hybrid", SMALL_HYBRID)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parser = ArgumentParser()
    servers.add_options(parser)
    path = servers.bench_model(parser.parse_args(["--bench-model", "hybrid"]))
    assert GGUFReader(path).get_field("general.architecture").contents() == "qwen35"  # type: ignore[union-attr]


def test_the_named_shapes() -> None:
    bench = SHAPES["bench"]
    assert bench.parameters == pytest.approx(112e6, rel=0.01)
    assert 2 * bench.layers * bench.kv_width * 2 == 6 * 1024
    assert SHAPES["bench-hybrid"].parameters == pytest.approx(113e6, rel=0.01)
    assert SHAPES["tiny"].width // SHAPES["tiny"].heads % 32 == 0
    assert SHAPES["qwen2.5-7b"].parameters == pytest.approx(7.1e9, rel=0.01)
    assert SHAPES["llama-3.1-8b"].parameters == pytest.approx(7.5e9, rel=0.01)
