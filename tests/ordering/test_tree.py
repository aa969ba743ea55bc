"""The knowledge tree against a plain table of paths."""

import sys
from collections.abc import Iterator
from threading import Thread

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from slotcache.ordering import KnowledgeTree, arrange
from slotcache.ordering.tree import DocumentNode

Path = tuple[str, ...]
paths = st.lists(st.sampled_from("abcde"), min_size=1, max_size=6, unique=True).map(tuple)


def cached_paths(tree: KnowledgeTree, keys: str = "abcde") -> dict[Path, int]:
    found: dict[Path, int] = {}
    open_: list[tuple[Path, DocumentNode]] = [((), tree.start())]
    for path, position in open_:
        for key in keys:
            if (step := tree.follow(position, key)) is not None:
                found[*path, key] = step.tokens
                open_.append(((*path, key), step.position))
    return found


class TreeMachine(RuleBasedStateMachine):
    """The model: every path with its tokens and the time of its last use; the oldest leaf is evicted first."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = KnowledgeTree(max_nodes=8)
        self.tokens: dict[Path, int] = {}
        self.used: dict[Path, int] = {}
        self.time = 0

    @rule(path=paths, tokens=st.integers(1, 3))
    def insert(self, path: Path, tokens: int) -> None:
        self.tree.insert((key, tokens) for key in path)
        self.time += 1
        for n in range(1, len(path) + 1):
            self.tokens[path[:n]], self.used[path[:n]] = tokens, self.time
        while len(self.tokens) > 8:
            parents = {path[:-1] for path in self.tokens}
            self.evict(min(set(self.tokens) - parents, key=self.used.__getitem__))

    @rule(path=paths)
    def forget(self, path: Path) -> None:
        leaving = [known for known in self.tokens if known[: len(path)] == path]
        assert self.tree.forget(path) == len(leaving)
        for known in leaving:
            self.evict(known)

    def evict(self, path: Path) -> None:
        del self.tokens[path], self.used[path]

    @invariant()
    def agrees(self) -> None:
        self.tree.check()
        assert len(self.tree) == len(self.tokens)
        assert cached_paths(self.tree) == self.tokens


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_least_recently_served_leaf_is_evicted_first() -> None:
    tree = KnowledgeTree(max_nodes=4)
    tree.insert([("a", 1), ("b", 1)])
    tree.insert([("c", 1), ("d", 1)])
    tree.insert([("a", 1)])  # b keeps its age
    tree.insert([("e", 1)])
    assert cached_paths(tree) == {("a",): 1, ("c",): 1, ("c", "d"): 1, ("e",): 1}


def test_a_path_longer_than_the_tree_keeps_its_prefix() -> None:
    tree = KnowledgeTree(max_nodes=2)
    tree.insert([("a", 1), ("b", 1), ("c", 1)])
    assert cached_paths(tree) == {("a",): 1, ("a", "b"): 1}


def test_forgetting_nothing_in_particular_forgets_everything() -> None:
    tree = KnowledgeTree()
    tree.insert([("a", 1), ("b", 1)])
    assert tree.forget("ax") == 0
    assert tree.forget([]) == 2
    assert len(tree) == 0
    tree.insert([("a", 1)])
    assert cached_paths(tree) == {("a",): 1}


def test_recency_is_remembered_for_as_many_documents_as_nodes() -> None:
    tree = KnowledgeTree(max_nodes=2)
    for key in "abc":
        tree.insert([(key, 1)])
    assert tree.recency("a") is None
    first, second = tree.recency("b"), tree.recency("c")
    assert first is not None and second is not None and first < second


def test_a_failing_order_leaves_no_trace() -> None:
    tree = KnowledgeTree()
    with pytest.raises(ValueError):
        tree.insert([("a", 1), ("b",)])  # type: ignore[list-item]
    assert len(tree) == 0
    tree.check()


def test_a_tree_remembers_something() -> None:
    with pytest.raises(ValueError, match="1 or more: got 0"):
        KnowledgeTree(0)


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Switch threads after every few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_threads")
def test_threads_keep_the_invariants() -> None:
    tree = KnowledgeTree(max_nodes=50)
    failures: list[BaseException] = []

    def serve(shift: int) -> None:
        try:
            for i in range(300):
                keys = [str((i * shift + j * shift) % 13) for j in range(5)]
                order = arrange(keys, tree).order
                tree.insert((keys[j], 10) for j in order)
                if i % 7 == 0:
                    tree.forget(keys[:2])
        except BaseException as error:
            failures.append(error)

    threads = [Thread(target=serve, args=(shift,)) for shift in (1, 2, 3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    tree.check()


def test_the_engines_report_corrects_the_tree():
    tree = KnowledgeTree()
    served = [("a", 100), ("b", 100), ("c", 100)]
    tree.insert(served)
    tree.report(served, 300)
    assert arrange(["c", "b", "a"], tree).reused_tokens == 300
    tree.insert([("a", 100), ("b", 100), ("d", 100)])
    tree.report([("a", 100), ("b", 100), ("c", 100)], 120)  # it had evicted b, and so both documents after it
    assert arrange(["d", "b", "a"], tree).reused_tokens == 200
    assert arrange(["c", "b", "a"], tree).reused_tokens == 300
    tree.check()
