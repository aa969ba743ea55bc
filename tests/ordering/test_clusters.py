"""Document sets in an order that shares the most, against all orders that there are."""

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st
from slotcache.ordering.clusters import depth_first

LENGTHS = {"a": 5.0, "b": 3.0, "c": 3.0, "d": 2.0, "e": 1.0}
sets_of_documents = st.lists(st.sets(st.sampled_from("abcde"), max_size=4), max_size=5)


def as_sets(*texts):
    return [dict.fromkeys(text, 1.0) for text in texts]


def computed(order, sets):
    """The lengths computed by a cache that holds the last prompt alone; what the next one shares with it comes first."""
    total, last = 0.0, []
    for at in order:
        shared = []
        for key in last:
            if key not in sets[at]:
                break
            shared.append(key)
        rest = sorted(set(sets[at]) - set(shared))
        total += sum(LENGTHS[key] for key in rest)
        last = [*shared, *rest]
    return total


def test_those_that_share_follow_one_another():
    assert depth_first(as_sets("abc", "f", "bad", "ae")) == [0, 2, 3, 1]
    assert depth_first(as_sets("xy", "pq", "yx", "qp", "xz")) == [0, 2, 4, 1, 3]


def test_the_longer_document_makes_the_branch():
    sets = [{"a": 1.0, "long": 9.0}, {"a": 1.0}, {"long": 9.0}, {"a": 1.0, "b": 1.0}]
    assert depth_first(sets) == [0, 2, 1, 3]


def test_nothing_shared_keeps_the_order():
    assert depth_first([]) == []
    assert depth_first(as_sets("a", "", "b", "c")) == [0, 1, 2, 3]


@given(sets_of_documents)
def test_each_request_comes_once(found):
    sets = [{key: LENGTHS[key] for key in sorted(keys)} for keys in found]
    assert sorted(depth_first(sets)) == list(range(len(sets)))


def test_many_alike_take_no_deep_recursion():
    keys = {f"d{number}": 1.0 for number in range(2000)}
    assert depth_first([keys, keys, keys]) == [0, 1, 2]
    assert sorted(depth_first([{"a": 1.0, f"d{number % 200}": 1.0} for number in range(2000)])) == list(range(2000))


def test_no_order_of_few_sets_is_much_better():
    sets = [{key: LENGTHS[key] for key in keys} for keys in ("ab", "cd", "abe", "ce", "a")]
    best = min(computed(order, sets) for order in permutations(range(len(sets))))
    assert computed(depth_first(sets), sets) <= 1.2 * best < computed(range(len(sets)), sets)
