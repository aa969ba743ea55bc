"""What is remembered about text: within bounds, and each scope for itself."""

import tracemalloc

import numpy as np
import pytest
from slotcache.server.chat.tokens import AnswerMemory, TokenCache


def one_token(text: str) -> np.ndarray:
    return np.array([len(text)], np.int32)


def test_a_text_is_cut_once_in_each_scope() -> None:
    cut: list[str] = []

    def tokenize(text: str) -> np.ndarray:
        cut.append(text)
        return one_token(text)

    cache = TokenCache(tokenize)
    for scope in ("a", "a", "b", "b"):
        assert cache(scope, "text").tolist() == [4]
    assert cut == ["text", "text"], "the time that it takes says nothing about another scope"


@pytest.mark.parametrize("length", [1, 10_000, 400_000])
def test_all_that_is_kept_is_counted(length: int) -> None:
    """Short texts of one token are mostly overhead, long ones mostly text."""
    number = 8000 if length < 400_000 else 20
    cache, answers = TokenCache(one_token, 1 << 20), AnswerMemory(1 << 20)
    tracemalloc.start()
    try:
        for at in range(number):
            cache("", f"{at:08}" + "x" * length)
            answers.remember("", f"{at:08}" + "x" * length, np.zeros(1, np.int32))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < cache.num_bytes <= 1 << 20 and taken <= 1.2 * (2 << 20)


def test_what_alone_is_too_large_takes_nothing_elses_place() -> None:
    answers = AnswerMemory(10_000)
    answers.remember("", "short", one_token("short"))
    answers.remember("", "x" * 20_000, one_token("long"))
    assert answers.recall("", "short") is not None and answers.recall("", "x" * 20_000) is None
