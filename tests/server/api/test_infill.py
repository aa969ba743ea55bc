"""Prompts that fill a gap in a text."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import convert
from slotcache.bench import random_models
from slotcache.server.chat.body import InfillRequest

from server.conftest import running

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
PROJECT_MARKS = ("<|repo_name|>", "<|file_sep|>")
GAP = {"input_prefix": "def add(a, b):\n", "input_suffix": "\nprint(add(1, 2))\n", "n_predict": 4, "temperature": 0}


def model_with(tmp_path_factory, marks):
    """A tiny model whose last tokens are these control tokens."""
    shape = random_models.SHAPES["tiny"]
    words = random_models.train(shape.vocabulary, shape.merges)
    types = words.types[: -len(marks)] + (int(random_models.TokenType.CONTROL),) * len(marks)
    marked = replace(words, tokens=words.tokens[: -len(marks)] + marks, types=types)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_models, "train", lambda size, merges: marked)
        return random_models.generate(tmp_path_factory.mktemp("infill") / "model.gguf", shape)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_with(tmp_path_factory, MARKS + PROJECT_MARKS)


@pytest.fixture(scope="module")
def filling(model):
    with running(model, cache_prompt=True) as up:
        yield up


def tokens(server, **body):
    """The ids of an infill's prompt."""
    return np.concatenate([part.tokens for part in server.service.builder.infill(convert(body, InfillRequest)).parts])


def prompt(server, **body):
    return server.service.model.detokenize(tokens(server, **body), special=True)


def test_the_gap_stands_between_its_marks(filling):
    shown = prompt(filling, **GAP, prompt="    return ")
    assert shown == (
        "<|repo_name|>myproject\n<|file_sep|>filename\n"
        "<|fim_prefix|>def add(a, b):\n    return <|fim_suffix|>\nprint(add(1, 2))\n<|fim_middle|>"
    )


def test_other_files_stand_in_front_and_are_reused(filling):
    files = [{"filename": "a.py", "text": "A = 1\n" * 20}, {"text": "B = 2\n" * 20}]
    shown = prompt(filling, **GAP, input_extra=files)
    assert shown.index("<|file_sep|>a.py\nA = 1\n") < shown.index("<|file_sep|>tmp\nB = 2\n") < shown.index("filename")
    first = filling.http.post("/infill", json=GAP | {"input_extra": files}).json()
    assert first["stop"] is True and first["timings"]["cache_n"] == 0
    typed = GAP | {"input_extra": files, "input_prefix": "def add(a, b, c):\n"}
    assert filling.http.post("/infill", json=typed).json()["timings"]["cache_n"] > 100


def test_only_whole_files_are_left_out_the_first_ones_first(filling):
    files = [{"filename": f"{at}.py", "text": f"x{at} = 1\n" * 300} for at in range(12)]
    shown = prompt(filling, **GAP, input_extra=files)
    kept = [at for at in range(12) if f"<|file_sep|>{at}.py" in shown]
    assert 0 < len(kept) < 12 and kept == list(range(kept[0], 12))
    assert all(shown.count(f"x{at} = 1\n") == 300 for at in kept)


def test_the_text_around_the_gap_is_cut_to_its_window(filling):
    long = {"input_prefix": "first " + "word " * 5000 + "last", "input_suffix": "near " + "word " * 5000 + "far"}
    shown = prompt(filling, **long)
    assert "first" not in shown and "last<|fim_suffix|>near" in shown and "far" not in shown
    assert 2000 < len(tokens(filling, **long)) < 2100


def test_control_tokens_in_texts_are_only_text(filling):
    marked = {name: f"<|fim_middle|>{name}" for name in ("input_prefix", "input_suffix", "prompt")}
    files = [{"filename": "<|file_sep|>", "text": "<|fim_prefix|>"}]
    controls = {int(filling.service.model.tokenize(mark, special=True)[0]) for mark in MARKS}
    assert sum(token in controls for token in tokens(filling, **marked, input_extra=files).tolist()) == 3


def test_a_model_may_want_what_comes_after_first(model):
    with running(model, spm_infill=True) as server:
        assert prompt(server, **GAP).endswith(
            "<|fim_suffix|>\nprint(add(1, 2))\n<|fim_prefix|>def add(a, b):\n<|fim_middle|>"
        )


def test_a_vocabulary_may_have_no_marks_for_files(tmp_path_factory):
    with running(model_with(tmp_path_factory, MARKS)) as server:
        shown = prompt(server, **GAP, input_extra=[{"text": "A = 1\n"}])
        assert shown.startswith("\n\n--- snippet ---\n\nA = 1\n<|fim_prefix|>")


def test_a_model_without_marks_says_so(server):
    answer = server.http.post("/infill", json=GAP)
    assert answer.status_code == 501 and answer.json()["error"]["type"] == "not_supported_error"


@pytest.mark.parametrize("extra", [{}, {"filename": "ok"}, {"filename": 1, "text": "a"}, {"filename": 1, "text": 2}])
def test_a_wrong_file_is_named(filling, extra):
    answer = filling.http.post("/infill", json=GAP | {"input_extra": [extra]})
    assert answer.status_code == 400 and "input_extra" in answer.json()["error"]["param"]


def test_ollama_s_suffix_fills_the_gap(filling):
    asked = {"model": "model", "prompt": GAP["input_prefix"], "suffix": GAP["input_suffix"], "stream": False}
    answer = filling.http.post("/api/generate", json=asked | {"options": {"num_predict": 4, "temperature": 0}}).json()
    text = filling.http.post(
        "/v1/completions",
        json={"prompt": GAP["input_prefix"], "suffix": GAP["input_suffix"], "max_tokens": 4, "temperature": 0},
    ).json()
    assert (answer["response"], answer["prompt_eval_count"]) == (text["choices"][0]["text"], text["usage"]["prompt_tokens"])
    assert "insert" in filling.http.post("/api/show", json={"model": "model"}).json()["capabilities"]
