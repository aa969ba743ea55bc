"""The trainer against the plain algorithm, and the layout that GGUF requires."""

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st
from slotcache.bench.random_models import Pair, Vocabulary, byte_alphabet, count_words, learn_merges, train


def plain_merges(words: dict[str, int], limit: int) -> list[Pair]:
    """Sennrich's algorithm as published: count all pairs, merge the best pair everywhere, repeat."""
    spelt = {tuple(word): count for word, count in words.items()}
    merges: dict[Pair, None] = {}
    while len(merges) < limit:
        counts = Counter[Pair]()
        for word, count in spelt.items():
            for pair in pairwise(word):
                counts[pair] += count
        best = min(counts, key=lambda pair: (-counts[pair], pair), default=None)
        if best is None or counts[best] < 2:
            break
        merges[best] = None
        merged = Counter[tuple[str, ...]]()
        for word, count in spelt.items():
            merged[merge(word, best)] += count
        spelt = merged
    return list(merges)


def merge(word: tuple[str, ...], pair: Pair) -> tuple[str, ...]:
    out, at = [], 0
    while at < len(word):
        step = 2 if word[at : at + 2] == pair else 1
        out.append("".join(word[at : at + step]))
        at += step
    return tuple(out)


@given(st.dictionaries(st.text(alphabet="abc", min_size=1, max_size=9), st.integers(1, 9), max_size=12), st.integers(0, 15))
def test_merges_are_those_of_the_plain_algorithm(words: dict[str, int], limit: int) -> None:
    assert learn_merges(Counter(words), limit) == plain_merges(words, limit)


def test_merges_do_not_hang_on_the_hash_seed() -> None:
    root = str(Path(__file__).parents[2])
    code = (
        "import sys; from types import ModuleType; package = sys.modules['slotcache'] = ModuleType('slotcache')\n"
        f"package.__path__ = [{root!r}]\n"
        "from slotcache.bench.random_models import count_words, learn_merges\n"
        "print(learn_merges(count_words(['she sells sea shells by the sea shore; the shells she sells'] * 2), 30))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        for seed in ("1", "2", "3")
    ]
    assert runs[0].stdout.startswith(b"[('")
    assert runs[0].stdout == runs[1].stdout == runs[2].stdout


def test_words_are_cut_as_qwen2_cuts_them() -> None:
    text = "I'll pay 42 euros, ça va?\n\n  It's  fine_x"
    words = [
        "I",
        "'ll",
        "Ġpay",
        "Ġ",
        "4",
        "2",
        "Ġeuros",
        ",",
        "ĠÃ§a",
        "Ġva",
        "?ĊĊ",
        "Ġ",
        "ĠIt",
        "'s",
        "Ġ",
        "Ġfine",
        "_x",
    ]
    assert count_words([text, text]) == Counter([*words, *words])


def test_the_byte_alphabet_is_gpt2s() -> None:
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert [alphabet[byte] for byte in (0, 10, 32, 33, 126, 127, 160, 161, 173, 255)] == list("ĀĊĠ!~ġł¡Ńÿ")


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return train(1000, 400)


def test_every_token_has_one_id_and_a_type(vocabulary: Vocabulary) -> None:
    assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == len(vocabulary.types) == 1000
    assert vocabulary.tokens[:256] == tuple(byte_alphabet())


def test_special_tokens_then_padding(vocabulary: Vocabulary) -> None:
    special = vocabulary.types.index(TokenType.CONTROL)
    assert vocabulary.tokens[special : special + 4] == ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unused_0|>")
    assert set(vocabulary.types[:special]) == {TokenType.NORMAL}
    assert set(vocabulary.types[special : special + 3]) == {TokenType.CONTROL}
    assert set(vocabulary.types[special + 3 :]) == {TokenType.UNUSED}
    assert (vocabulary.bos, vocabulary.eos) == (special, special + 2)


def test_merges_are_made_of_tokens_and_make_tokens(vocabulary: Vocabulary) -> None:
    assert len(vocabulary.merges) == len(set(vocabulary.merges)) == 400
    tokens = set(vocabulary.tokens)
    for pair in vocabulary.merges:
        left, right = pair.split(" ")
        assert {left, right, left + right} <= tokens


def test_english_words_are_tokens(vocabulary: Vocabulary) -> None:
    assert {"Ġthe", "Ġand", "Ġis"} <= set(vocabulary.tokens)


def test_too_small_a_size_is_refused() -> None:
    with pytest.raises(ValueError, match="658 tokens are too few for 256 bytes, 400 merges and 3 special tokens"):
        train(658, 400)
