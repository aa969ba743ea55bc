"""The policies against brute force, on random trees."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slotcache.ordering import POLICIES, Index, KnowledgeTree, Step, arrange
from slotcache.ordering.policy import BEST_PLACES, OrderRequest
from slotcache.ordering.tree import DocumentNode
from support.paths import PathTable, best_order, documents, indexes, saved, saved_by

guards = st.integers(0, 3)
waiting_sets = st.lists(st.sets(st.sampled_from("abcdefgx")), max_size=4)


@settings(max_examples=150, deadline=None)
@given(documents, indexes)
def test_auto_is_the_best_of_all_orders(keys: Sequence[str], index: Index) -> None:
    assert arrange(keys, index).order == best_order(index, keys)


@settings(max_examples=100, deadline=None)
@given(documents, indexes, guards, guards)
def test_auto_is_the_best_that_the_guard_allows(keys: Sequence[str], index: Index, first: int, last: int) -> None:
    arrangement = arrange(keys, index, keep_first=first, keep_last=last)
    assert arrangement.order == best_order(index, keys, first, last)


@settings(max_examples=150, deadline=None)
@given(documents, indexes, st.sampled_from(BEST_PLACES))
def test_auto_is_the_best_with_the_best_document_in_its_place(keys: Sequence[str], index: Index, best: str) -> None:
    assert arrange(keys, index, best=best).order == best_order(index, keys, best=best)


@settings(max_examples=100, deadline=None)
@given(documents, indexes, st.sampled_from(sorted(POLICIES)), st.sampled_from(["first", "last"]), waiting_sets)
def test_the_best_document_has_its_place_under_every_policy(
    keys: Sequence[str], index: Index, policy: str, best: str, waiting: list[set[str]]
) -> None:
    order = arrange(keys, index, policy, waiting=waiting, best=best).order
    assert sorted(order) == list(range(len(keys)))
    assert order[0 if best == "first" else -1] == 0


@settings(max_examples=100, deadline=None)
@given(documents, indexes, st.sampled_from(sorted(POLICIES)), guards, guards, waiting_sets)
def test_a_free_place_changes_no_order(
    keys: Sequence[str], index: Index, policy: str, first: int, last: int, waiting: list[set[str]]
) -> None:
    size = len(keys)
    begin = min(first, size)
    request = OrderRequest(keys, keys, first=begin, last=max(begin, size - last), waiting=waiting)
    middle = POLICIES[policy](request, index)
    arrangement = arrange(keys, index, policy, keep_first=first, keep_last=last, waiting=waiting, best="free")
    assert arrangement.order == (*range(request.first), *middle, *range(request.last, size))
    assert arrangement == arrange(keys, index, policy, keep_first=first, keep_last=last, waiting=waiting)


@settings(max_examples=150, deadline=None)
@given(documents, indexes, st.sampled_from(BEST_PLACES), st.sampled_from([0.0, 49.0, 50.0, 99.0, 100.0, 101.0, 1e9]))
def test_the_best_document_leaves_its_place_for_more_than_its_price(
    keys: Sequence[str], index: Index, best: str, price: float
) -> None:
    asked: list[tuple[float, float]] = []

    def pays(in_place: float, free: float) -> bool:
        asked.append((in_place, free))
        return free - in_place > price

    order = arrange(keys, index, best=best, pays=pays).order
    free, in_place = best_order(index, keys), best_order(index, keys, best="last" if best == "last" else "first")
    gained = [saved(index, [keys[i] for i in one]) for one in (in_place, free)]
    assert asked == [tuple(gained)]
    assert order == (free if gained[1] - gained[0] > price else in_place)


def test_what_is_to_stay_stands_in_front_of_the_best_document() -> None:
    tree = KnowledgeTree()
    tree.insert((key, 100) for key in "dcba")
    for best in ("free", "last"):
        assert arrange("abcd", tree, keep_first=1, best=best).is_rank
        assert arrange("abcd", tree, keep_last=1, best=best).order[-1] == 3
    assert arrange("abcd", tree, keep_last=1, best="first").order[::3] == (0, 3)


@settings(max_examples=100, deadline=None)
@given(documents, indexes, st.sampled_from(sorted(POLICIES)), guards, guards)
def test_every_policy_answers_with_a_permutation(
    keys: Sequence[str], index: Index, policy: str, first: int, last: int
) -> None:
    order = arrange(keys, index, policy, keep_first=first, keep_last=last).order
    size = len(keys)
    assert sorted(order) == list(range(size))
    assert order[:first] == tuple(range(size))[:first]
    assert order[max(0, size - last) :] == tuple(range(max(0, size - last), size))


@settings(max_examples=100, deadline=None)
@given(documents, indexes, st.sampled_from(["auto", "greedy"]))
def test_documents_without_reuse_keep_their_rank(keys: Sequence[str], index: Index, policy: str) -> None:
    arrangement = arrange(keys, index, policy)
    rest = arrangement.order[arrangement.reused_documents :]
    assert list(rest) == sorted(rest)


@settings(max_examples=100, deadline=None)
@given(documents, indexes, guards, guards)
def test_no_baseline_beats_auto_and_the_oracle_equals_it(keys: Sequence[str], index: Index, first: int, last: int) -> None:
    made = {policy: arrange(keys, index, policy, keep_first=first, keep_last=last) for policy in POLICIES}
    worth = {policy: saved_by(index, keys, arrangement) for policy, arrangement in made.items()}
    assert max(worth.values()) == worth["auto"]
    assert made["oracle"] == made["auto"]


@settings(max_examples=100, deadline=None)
@given(documents, indexes, st.sampled_from(sorted(POLICIES)))
def test_reported_reuse_equals_the_index(keys: Sequence[str], index: Index, policy: str) -> None:
    arrangement = arrange(keys, index, policy)
    position, tokens = index.start(), 0
    for i in arrangement.order[: arrangement.reused_documents]:
        step = index.follow(position, keys[i])
        assert step is not None
        position, tokens = step.position, tokens + step.tokens
    assert tokens == arrangement.reused_tokens
    rest = arrangement.order[arrangement.reused_documents :]
    assert not rest or index.follow(position, keys[rest[0]]) is None


def test_retrieval_reports_its_reuse() -> None:
    table = PathTable({("a",): (100, 100.0), ("a", "c"): (50, 50.0)})
    assert arrange("abc", table, "retrieval").reused_tokens == 100


def test_sorted_goes_by_name() -> None:
    tree = KnowledgeTree()
    assert arrange("cab", tree, "sorted").order == (1, 2, 0)
    assert arrange("cab", tree, "sorted", names=["d1", "d3", "d2"]).order == (0, 2, 1)


def test_recency_puts_the_last_used_first_and_the_unknown_last() -> None:
    tree = KnowledgeTree()
    tree.insert([("a", 100), ("b", 100)])
    tree.insert([("c", 100)])
    assert arrange("xaybc", tree, "recency").order == (4, 3, 1, 0, 2)
    assert arrange("xab", PathTable({}), "recency").is_rank, "this index does not know recency"


def test_greedy_follows_the_best_ranked_branch() -> None:
    tree = KnowledgeTree()
    tree.insert([("A", 100), ("B", 100)])
    tree.insert([("C", 100), ("D", 100), ("E", 100)])
    arrangement = arrange("ACDE", tree, "greedy")
    assert arrangement.is_rank and arrangement.reused_documents == 1
    assert arrange("ACDE", tree).reused_documents == 3


def test_the_oracle_declines_too_many_documents() -> None:
    tree = KnowledgeTree()
    with pytest.raises(ValueError, match="takes 8 documents, not 9"):
        arrange("abcdefghi", tree, "oracle")
    assert arrange("abcdefghi", tree, "oracle", keep_first=6).is_rank


def test_the_search_asks_little_where_the_whole_set_is_cached_in_many_orders() -> None:
    class Counted(KnowledgeTree):
        asked = 0

        def follow(self, position: DocumentNode, key: str) -> Step[DocumentNode] | None:
            self.asked += 1
            return super().follow(position, key)

    keys = [f"d{i}" for i in range(50)]
    tree = Counted(100_000)
    for start in range(50):
        for stride in (1, 3, 7, 9, 11, 13, 17, 19):
            tree.insert((keys[(start + stride * i) % 50], 100) for i in range(50))
    assert len(tree) > 10_000
    assert arrange(keys, tree).reused_documents == 50
    assert tree.asked < 10_000, "one path of 50 lookups per document, and no other branch is entered"


@settings(max_examples=100, deadline=None)
@given(documents, indexes, waiting_sets)
def test_waiting_requests_never_cost_reuse(keys: Sequence[str], index: Index, waiting: list[set[str]]) -> None:
    alone, helpful = arrange(keys, index), arrange(keys, index, waiting=waiting)
    assert saved_by(index, keys, helpful) >= saved_by(index, keys, alone)
    assert sorted(helpful.order) == sorted(alone.order)


@settings(max_examples=100, deadline=None)
@given(documents, st.sets(st.sampled_from("abcdefgx")))
def test_a_cold_start_shares_all_it_can_with_the_one_that_waits(keys: Sequence[str], other: set[str]) -> None:
    order = [keys[i] for i in arrange(keys, KnowledgeTree(), waiting=[other]).order]
    shared = len(other & set(keys))
    assert set(order[:shared]) == other & set(keys)
    ranks = [keys.index(key) for key in order]
    assert ranks[:shared] == sorted(ranks[:shared]) and ranks[shared:] == sorted(ranks[shared:])


def test_of_several_that_wait_the_most_are_helped_first() -> None:
    order = arrange("abcd", KnowledgeTree(), waiting=[set("cd"), set("cb"), set("ca"), set("d")]).order
    assert "".join("abcd"[i] for i in order) == "cabd"


def chain(size: int) -> tuple[list[str], KnowledgeTree]:
    keys = [f"d{i}" for i in range(size)]
    tree = KnowledgeTree(100_000)
    tree.insert((key, 100) for key in reversed(keys))
    return keys, tree


@pytest.mark.parametrize("best", BEST_PLACES)
@pytest.mark.parametrize("policy", ["auto", "greedy"])
def test_a_long_cached_path_costs_in_proportion_to_its_length(policy: str, best: str) -> None:
    keys, tree = chain(2000)
    asked = 0
    follow, after = tree.follow, tree.after

    class Counted(KnowledgeTree):
        def start(self) -> DocumentNode:
            return tree.start()

        def follow(self, position: DocumentNode, key: str) -> Step[DocumentNode] | None:
            nonlocal asked
            asked += 1
            return follow(position, key)

        def after(self, position: DocumentNode) -> set[str]:
            nonlocal asked
            found = set(after(position))
            asked += len(found)
            return found

    assert arrange(keys, Counted(), policy, best=best).reused_documents == (0 if best == "first" else 2000)
    assert asked < 5 * 2000
    asked = 0
    assert arrange(keys, Counted(), policy, best=best, pays=lambda in_place, free: free > in_place).reused_documents == 2000
    assert asked < 12 * 2000


def test_waiting_requests_cost_time_in_proportion_to_their_documents() -> None:
    class Counted(frozenset):
        asked = 0

        def __contains__(self, key: object) -> bool:
            Counted.asked += 1
            return super().__contains__(key)

    keys = [f"d{i}" for i in range(600)]
    waiting = [Counted(keys[at:] + keys[: at // 2]) for at in range(0, 600, 40)]
    order = arrange(keys, KnowledgeTree(), waiting=waiting).order
    assert sorted(order) == list(range(600))
    assert Counted.asked <= 3 * sum(map(len, waiting)) + 3 * len(keys) * len(waiting)


@settings(max_examples=100, deadline=None)
@given(documents, st.lists(st.sets(st.sampled_from("abcdefgx")), max_size=5))
def test_the_fast_way_to_share_is_the_greedy_one(keys: Sequence[str], waiting: list[set[str]]) -> None:
    order: list[int] = []
    rest, readers = list(range(len(keys))), list(waiting)
    while readers and rest and (most := max(sum(keys[i] in other for other in readers) for i in rest)):
        order.append(next(i for i in rest if sum(keys[i] in other for other in readers) == most))
        rest.remove(order[-1])
        readers = [other for other in readers if keys[order[-1]] in other]
    assert list(arrange(keys, KnowledgeTree(), waiting=waiting).order) == order + rest
