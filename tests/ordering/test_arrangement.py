"""The order of a request's documents: worked cases, the guard, errors."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from slotcache.ordering import POLICIES, Arrangement, KnowledgeTree, Step, arrange
from slotcache.ordering.policy import BEST_PLACES
from slotcache.ordering.tree import DocumentNode
from support.paths import PathTable

FIGURE_5 = ["123", "126", "140"]  # RAGBoost


def tree_of(paths: list[str], tokens: int = 200) -> KnowledgeTree:
    tree = KnowledgeTree()
    for path in paths:
        tree.insert((key, tokens) for key in path)
    return tree


def ordered(request: str, arrangement: Arrangement) -> str:
    return "".join(request[i] for i in arrangement.order)


@pytest.mark.parametrize(
    ("cached", "request_", "order", "reused"),
    [
        ([], "cab", "cab", 0),
        (FIGURE_5, "214", "124", 2),
        (FIGURE_5, "192", "129", 2),
        (FIGURE_5, "578", "578", 0),
        (["ABCD"], "ABCFD", "ABCDF", 4),  # CacheWeaver, figure 2
        (["123"], "2341", "1234", 3),
        (["ABC"], "XCA", "AXC", 1),  # only a contiguous prefix is reused
        (["TGB"], "RGL", "RGL", 0),
        (["AB", "CDE"], "ACDE", "CDEA", 3),  # the greedy walk takes A and stops at one
        (["AB", "BA"], "BA", "BA", 2),
        (["AB", "CD"], "CXA", "CXA", 1),  # a tie goes to retrieval rank
    ],
)
def test_worked_cases(cached: list[str], request_: str, order: str, reused: int) -> None:
    arrangement = arrange(request_, tree_of(cached))
    assert ordered(request_, arrangement) == order
    assert arrangement.reused_documents == reused
    assert arrangement.reused_tokens == 200 * reused
    assert arrangement.is_rank == (order == request_)


def test_a_trimmed_path_is_not_expected() -> None:
    tree = tree_of(["ABC"])
    assert tree.forget("AB") == 2
    assert arrange("CBA", tree) == Arrangement((2, 0, 1), reused_documents=1, reused_tokens=200)


def test_a_restore_is_not_free() -> None:
    class HostTier(KnowledgeTree):
        def follow(self, position: DocumentNode, key: str) -> Step[DocumentNode] | None:
            step = super().follow(position, key)
            return replace(step, saved=step.saved / 2) if step and key == "A" else step

    tree = HostTier()
    tree.insert([("A", 200)])
    tree.insert([("B", 200)])
    assert arrange("AB", tree) == Arrangement((1, 0), reused_documents=1, reused_tokens=200)


def test_longer_documents_are_worth_more_than_more_documents() -> None:
    tree = KnowledgeTree()
    tree.insert([("a", 100), ("b", 100)])
    tree.insert([("c", 300)])
    assert arrange("abc", tree) == Arrangement((2, 0, 1), reused_documents=1, reused_tokens=300)


def test_text_after_a_cached_set_counts() -> None:
    paths = {tuple(path): (100, 100.0) for path in ("a", "ab", "b", "ba")}
    assert arrange("ab", PathTable(paths)).is_rank
    assert arrange("ab", PathTable(paths, {("b", "a"): 1.0})).order == (1, 0)
    assert arrange("abc", PathTable(paths, {("b", "a"): 1.0})).is_rank, "c is missing, so nothing behind b, a is reused"


def test_documents_kept_last_count_too() -> None:
    table = PathTable({tuple(path): (100, 100.0) for path in ("a", "ab", "b", "ba", "bac")})
    assert arrange("abc", table, keep_last=1) == Arrangement((1, 0, 2), reused_documents=3, reused_tokens=300)
    assert arrange("abd", table, keep_last=1).is_rank


def test_a_document_stands_in_a_prompt_once_even_if_it_was_served_twice() -> None:
    assert arrange("ba", tree_of(["aab", "ab"])) == Arrangement((1, 0), reused_documents=2, reused_tokens=400)
    assert arrange("ba", tree_of(["aab"])) == Arrangement((1, 0), reused_documents=1, reused_tokens=200)


def test_nothing_is_reused_after_an_uncached_start() -> None:
    table = PathTable({("b",): (100, 100.0)}, cached=False)
    for policy in POLICIES:
        assert arrange("ab", table, policy) == Arrangement((0, 1), 0, 0)


def test_the_guard_keeps_documents_in_place() -> None:
    tree = tree_of(["dcba", "acbd"])
    assert ordered("abcd", arrange("abcd", tree, keep_first=1)) == "acbd"
    assert ordered("bacd", arrange("bacd", tree, keep_first=1)) == "bacd", "nothing is cached behind b"
    assert ordered("abcd", arrange("abcd", tree, keep_last=1)) == "acbd"
    assert arrange("abcd", tree, keep_first=3, keep_last=3).is_rank
    assert arrange("abcd", tree, keep_first=9).is_rank
    assert arrange("abcd", tree, keep_last=9).is_rank


@pytest.mark.parametrize(("best", "order"), [("free", "abcd"), ("first", "badc"), ("last", "acdb")])
def test_the_best_document_stands_first_or_last(best: str, order: str) -> None:
    """b is the best one: in front of all others, or behind their best order, never in between."""
    assert ordered("bacd", arrange("bacd", tree_of(["abcd", "bad", "ac"]), best=best)) == order


def test_the_text_after_a_set_counts_where_the_best_document_is_last() -> None:
    paths = {tuple(path): (100, 100.0) for path in ("b", "bc", "bca", "c", "cb", "cba")}
    assert arrange("abc", PathTable(paths), best="last").order == (1, 2, 0)
    assert arrange("abc", PathTable(paths, {("c", "b", "a"): 1.0}), best="last").order == (2, 1, 0)


def test_no_documents() -> None:
    for policy in POLICIES:
        for best in BEST_PLACES:
            assert arrange([], tree_of(["ab"]), policy, best=best) == Arrangement((), 0, 0)
            assert arrange([], tree_of(["ab"]), policy, best=best, pays=lambda in_place, free: True) == Arrangement((), 0, 0)


def test_errors_say_what_would_be_right() -> None:
    tree = KnowledgeTree()
    with pytest.raises(ValueError, match="unknown ordering policy 'best': expected one of auto, retrieval, sorted"):
        arrange("ab", tree, "best")
    with pytest.raises(ValueError, match="unknown place of the best document 'middle': expected one of free, first, last"):
        arrange("ab", tree, best="middle")
    with pytest.raises(ValueError, match="document 'a' is given twice"):
        arrange("aba", tree)
    with pytest.raises(ValueError, match="0 or more: got 0 and -1"):
        arrange("ab", tree, keep_last=-1)
    with pytest.raises(ValueError, match="one name for each of 2 documents, got 1"):
        arrange("ab", tree, "sorted", names=["a"])


SEEDED = """
import random, runpy, sys
runpy.run_path(sys.argv[1])
from slotcache.ordering import POLICIES, Document, KnowledgeTree, arrange
rng, tree = random.Random(3), KnowledgeTree(60)
documents = [Document(f"d{i}", f"text {i}").key for i in range(9)]
for _ in range(200):
    keys = rng.sample(documents, 6)
    print([arrange(keys, tree, policy) for policy in POLICIES])
    tree.insert((key, 100) for key in rng.sample(documents, 4))
"""


def test_the_same_under_any_hash_seed() -> None:
    conftest = Path(__file__).parents[1] / "conftest.py"
    command = [sys.executable, "-c", SEEDED, str(conftest)]
    outputs = {
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True).stdout
        for seed in ("0", "1", "77")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == 200
