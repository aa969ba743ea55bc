"""Stretches of a prompt tokenised alone, long texts in slices, with vocabularies of several kinds."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from hypothesis import given
from hypothesis import strategies as st
from slotcache.models import llama, tokenizer
from slotcache.models.model import Model

CONTROLS = ["<unk>", "<s>", "</s>", "<|end|>"]
LINES = ["\n" * length for length in range(1, 8)]  # as Gemma has them


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A SentencePiece vocabulary without weights: bytes, some letters, and merges with and without a space in front."""
    words = ["\u2581", "a", "b", "c", "ab", "\u2581a", "\u2581ab"]
    tokens = [*CONTROLS, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 3, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(words)]
    scores = [0.0] * (len(tokens) - 2) + [1.0, 2.0]
    return vocabulary(tmp_path_factory.mktemp("spm") / "v.gguf", "llama", tokens, types, scores)


@pytest.fixture(scope="module")
def lined(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """One of bytes, with runs of lines as tokens of their own."""
    return of_bytes(tmp_path_factory.mktemp("bpe") / "v.gguf", CONTROLS)


@pytest.fixture(scope="module")
def crossing(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The same, and one control token may begin inside another, which is no longer."""
    return of_bytes(tmp_path_factory.mktemp("bpe") / "v.gguf", [*CONTROLS, ">>A<<", "<|ends|>"])


def of_bytes(path: Path, controls: list[str]) -> Model:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [chr(byte) for byte in printable] + [chr(256 + at) for at in range(len(others))]
    types = [TokenType.NORMAL] * 256 + [TokenType.CONTROL] * len(controls) + [TokenType.USER_DEFINED] * len(LINES)
    return vocabulary(path, "gpt2", [*characters, *controls, *LINES], types, pre="deepseek-llm")


def vocabulary(
    path: Path, kind: str, tokens: list[str], types: list[TokenType], scores: list[float] | None = None, pre: str = ""
) -> Model:
    """A vocabulary without weights. pre: how it cuts a text into words."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    if scores:
        writer.add_token_scores(scores)
        writer.add_add_space_prefix(True)
    else:
        writer.add_token_merges(["a b"])
        writer.add_tokenizer_pre(pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Model(path, vocab_only=True)


def pieces(model: Model, text: str, **options: bool) -> list[bytes]:
    return [model.piece(token) for token in model.tokenize(text, **options).tolist()]


def test_only_the_first_stretch_of_a_prompt_gets_a_space(spaced: Model) -> None:
    assert pieces(spaced, "ab", begin=True) == [b"", b" ab"]
    assert pieces(spaced, "ab") == [b"ab"]
    assert pieces(spaced, " ab") == [b" ab"]


def test_stretches_joined_are_the_text(spaced: Model) -> None:
    stretches = ["ab c", "\nab", " a", "\u00e9\n", "b"]
    joined = [token for text in stretches for token in spaced.tokenize(text).tolist()]
    assert b"".join(map(spaced.piece, joined)).decode() == "".join(stretches)


def test_control_tokens_at_the_start_of_a_stretch_stay_control_tokens(spaced: Model) -> None:
    assert spaced.tokenize("<|end|>ab", special=True).tolist()[0] == 3
    assert b"<|end|>" in b"".join(pieces(spaced, "<|end|>ab"))


def whole(model: Model, text: str, special: bool) -> list[int]:
    """Tokenise a text in one call of llama.cpp."""
    data = text.encode()
    ids = np.empty(4 * len(data) + 2, np.int32)
    count = llama.llama_tokenize(model.vocab, data, len(data), ids.ctypes.data, len(ids), False, special)
    return ids[:count].tolist()


FRAGMENTS = [
    *CONTROLS,
    *LINES,
    ">>A<<",
    "<|ends|>",
    "<|e",
    "nd|>",
    "<",
    ">",
    "a",
    "b",
    "ab",
    " ",
    " a",
    "  a",
    ".",
    "\r\n",
    "1",
    "\u4e2d",
    "\u00e9",
    "\t",
]


@pytest.mark.parametrize("kind", ["spaced", "lined", "crossing"])
@given(parts=st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=60), special=st.booleans())
def test_slices_joined_are_what_one_call_makes(
    kind: str, parts: list[str], special: bool, request: pytest.FixtureRequest
) -> None:
    model, text = request.getfixturevalue(kind), "".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "SLICE", 8)
        patch.setattr(tokenizer, "PIECE", 12)
        sliced = [model.tokenizer.begin, model.tokenize(text, special, begin=True)]
    assert sliced[1].tolist() == [*sliced[0].tolist(), *whole(model, text, special)]


CROSSING = ">>A<<|ends|>"


@pytest.mark.parametrize(
    ("kind", "unit"),
    [("spaced", unit) for unit in ("<|end|>", "a<s>", "\n", "\U0001f600")]
    + [("lined", unit) for unit in ("<|end|>", "a<s>", "\n", "\n\n\n", "a\n")]
    + [("crossing", unit) for unit in ("<|end|>", CROSSING)],
)
def test_no_call_takes_more_special_tokens_for_a_longer_text(kind: str, unit: str, request: pytest.FixtureRequest) -> None:
    """A call costs the square of those that it finds."""
    model, text = request.getfixturevalue(kind), unit * (200_000 // len(unit))
    slices = list(model.tokenizer.slices(text, special=True))
    most = tokenizer.LONGEST_RUN if unit == CROSSING else tokenizer.SLICE
    assert "".join(slices) == text and max(map(len, slices)) <= most + 20


@pytest.mark.parametrize("kind", ["spaced", "lined", "crossing"])
@pytest.mark.parametrize("unit", ["ab a, ", "a 1 . ", "a\n", "a b\n\n", "\u4e2d\u4e2d\n"])
def test_a_text_of_words_is_cut_where_a_token_begins(
    kind: str, unit: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "PIECE", 600)
    model, text = request.getfixturevalue(kind), unit * (6000 // len(unit))
    slices = list(model.tokenizer.slices(text, special=False))
    assert "".join(slices) == text and max(map(len, slices)) <= tokenizer.PIECE + 20
    assert model.tokenize(text, begin=True).tolist() == [*model.tokenizer.begin.tolist(), *whole(model, text, False)]


def test_a_vocabulary_with_a_token_across_a_space_has_no_cut_there(tmp_path: Path) -> None:
    words = ["\u2581", "a", "b", "a\u2581b", "b\na"]
    tokens = [*CONTROLS, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 3, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(words)]
    model = vocabulary(tmp_path / "v.gguf", "llama", tokens, types, [0.0] * len(tokens))
    text = "a b\na " * (tokenizer.MOST_IN_CALL // 2)
    slices = list(model.tokenizer.slices(text, special=False))
    assert min(map(len, slices[:-1])) >= tokenizer.MOST_IN_CALL // 2, "only so that no call takes too long"
    assert max(map(len, slices)) <= tokenizer.MOST_IN_CALL and "".join(slices) == text


def test_what_is_called_between_calls_may_end_them(lined: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def between() -> None:
        made.append(1)
        if len(made) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(lined.tokenizer, "between", between)
    with pytest.raises(KeyboardInterrupt):
        lined.tokenize("ab a " * 100_000)
    assert len(made) == 3


RUN = """
import sys
from pathlib import Path
from slotcache.models.model import Model
model = Model(Path(sys.argv[1]), vocab_only=True)
for unit in ("a", "1", "!", " ", "\u4e2d"):
    assert model.detokenize(model.tokenize(unit * 200_000)) == unit * 200_000
"""


def test_a_word_of_200000_letters_does_not_end_the_process(lined: Model) -> None:
    ran = subprocess.run([sys.executable, "-c", RUN, str(lined.path)], capture_output=True, timeout=120, text=True)
    assert ran.returncode == 0, ran.stderr


def test_a_long_run_is_cut_at_the_end_of_a_word(lined: Model) -> None:
    text = ("x" * 99 + ".") * 100
    slices = list(lined.tokenizer.slices(text, special=False))
    assert len(slices) > 1 and all(part.endswith("x") for part in slices[:-1])
    assert all(before + after in text for before, after in pairwise(slices))
    assert lined.tokenize(text).tolist() == whole(lined, text, False)


def test_the_longest_token_bounds_how_few_a_text_can_be(spaced: Model, lined: Model) -> None:
    assert (spaced.tokenizer.longest, lined.tokenizer.longest) == (7, 7)


@pytest.mark.parametrize(
    "text", ["ab", " ab", "  ab", "", "<|end|>", "a<|end|>ab", "<|end|> ab<|end|><|end|>\n", "c<|end|>  "]
)
def test_the_text_of_a_prompt_has_no_space_that_the_vocabulary_adds(spaced, lined, text):
    for model in (spaced, lined):
        assert model.prompt_text(model.tokenizer(text, special=True, begin=True)[len(model.tokenizer.begin) :]) == text
