"""The index of records: what continues a prompt, in what order records leave, and what it takes in memory and time."""

import math
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.slots.radix import Node, common_prefix
from slotcache.slots.scope import Scope
from slotcache.slots.store.record_file import MOST_COST, MOST_USES
from slotcache.slots.store.record_index import MOST_COMPARED, RecordIndex

S = Scope.shared("s")
PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)
RUNS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 7), st.integers(1, 8)), min_size=1, max_size=30)


def ids(*tokens):
    return np.array(tokens, np.int32)


def stands_on(one, other):
    """Return whether a record (start, tokens) needs a part of another one's run."""
    (start, tokens), (before, path) = one, other
    common = common_prefix(np.array(tokens), np.array(path))
    return before < start and min(common, start) > before


def filled(paths, runs, data):
    """An index, and its records by key as (start, tokens); some have left again."""
    index, records = RecordIndex(), {}
    for number, (which, start, length) in enumerate(runs):
        path = paths[which % len(paths)]
        start = min(start, len(path) - 1)
        tokens = path[: start + length]
        if (start, tuple(tokens)) in records.values():
            continue
        worth = {"frequency": data.draw(st.integers(1, 3)), "token_cost": data.draw(st.sampled_from([0.0, 0.5, 1.0]))}
        index.add(str(number), S, start, ids(*tokens), size=1, used=number, **worth)
        records[str(number)] = (start, tuple(tokens))
        if data.draw(st.booleans()):
            index.use(data.draw(st.sampled_from(sorted(records))), 100 + number)
        if data.draw(st.booleans()):
            evict_next(index, records)
    return index, records


def place(entry, index):
    """Where a record stands, and when it leaves. The clock of an index begins anew with each start."""
    return entry.start, entry.stop, max(entry.priority - index._age, 0.0), *entry.place[1:]


def evicted(index):
    gone = index.evict()
    assert gone is not None
    return gone.key


def evict_next(index, records):
    gone = index.evict()
    assert not [key for key, one in records.items() if stands_on(one, records[gone.key])]
    del records[gone.key]
    return gone.key


@given(PATHS, RUNS, st.data())
def test_prefixes_are_evicted_last_also_after_a_restart(paths, runs, data):
    index, records = filled(paths, runs, data)
    again = RecordIndex()
    again.restore(index.stored())
    places = [{key: place(one, kept) for key, one in kept.entries.items()} for kept in (again, index)]
    assert again._age == 0 and places[0].items() <= places[1].items()
    for one in (index, again):
        left = {key: record for key, record in records.items() if key in one.entries}
        while left:
            evict_next(one, left)
        assert not one.roots and one.num_bytes == 0


@given(PATHS, RUNS, st.data())
def test_what_continues_a_prompt_covers_it_but_for_its_holes(paths, runs, data):
    index, records = filled(paths, runs, data)
    for tokens in paths:
        reached = data.draw(st.integers(0, len(tokens)))
        stretches = index.continuing(S, ids(*tokens), reached)
        ends = {key: (start, common_prefix(ids(*path), ids(*tokens))) for key, (start, path) in records.items()}
        covered = {at for start, stop in ends.values() for at in range(max(start, reached), stop)}
        assert covered == {at for one in stretches for at in range(one.start, one.stop)}
        for one, later in pairwise(stretches):
            assert one.stop < later.start
        for one in stretches:
            at = one.start
            for entry in one.entries:
                assert ends[entry.key][0] <= at
                at = ends[entry.key][1]
            assert at >= one.stop


def test_a_prompt_continues_from_the_deepest_state_of_each_stretch():
    index = RecordIndex()
    for start, stop, state in [(0, 4, True), (4, 6, False), (6, 9, True), (11, 12, True), (12, 13, False), (15, 16, False)]:
        index.add(f"{start}", S, start, ids(*range(stop)), size=1, used=0, has_state=state)

    def continuing(tokens, reached):
        return [([one.key for one in each.entries], *each[1:]) for each in index.continuing(S, tokens, reached)]

    prompt = ids(*range(20))
    assert continuing(prompt, 0) == [(["0", "4", "6"], 0, 9), (["11"], 11, 12)]
    assert continuing(prompt[:8], 0) == [(["0"], 0, 4)], "a state stands for all of its tokens"
    assert continuing(prompt, 5) == [(["4", "6"], 5, 9), (["11"], 11, 12)]
    assert continuing(prompt, 9) == [(["11"], 11, 12)] and continuing(prompt, 12) == []


def test_a_prefix_that_very_many_records_share_takes_no_more_time():
    index = RecordIndex()
    for number in range(40 * MOST_COMPARED):
        index.add(f"{number}", S, 0, ids(7, 7, number, 1, 2), size=1, used=number)
    for number in (0, 39 * MOST_COMPARED):
        (((entry,), start, stop),) = index.continuing(S, ids(7, 7, number, 1, 2, 3), 0)
        assert (entry.key, start, stop) == (f"{number}", 0, 5)
    for number in range(40 * MOST_COMPARED):
        assert evict_next(index, {f"{at}": (0, (at,)) for at in range(40 * MOST_COMPARED)}) == f"{number}"
    assert not index.roots


def test_a_run_of_an_index_has_no_room_for_kv():
    node = RecordIndex().add("0", S, 0, ids(1, 2), size=1, used=0).node
    assert 2 * sys.getsizeof(node) <= sys.getsizeof(Node(ids(1, 2), 0, None))
    assert (node.ready, node.in_use, node.children, node.documents) == (0, 0, {}, {})


def test_what_is_used_often_or_dear_stays_and_grows_old():
    index = RecordIndex()
    for number, (frequency, cost) in enumerate([(1, 1.0), (1, 1.0), (1, 3.0)]):
        index.add(f"{number}", S, 0, ids(number, 1), size=1, used=number, frequency=frequency, token_cost=cost)
    index.use("0", 9)
    assert evicted(index) == "1"
    for number in range(3, 6):  # each counts from the worth of what left last
        index.add(f"{number}", S, 0, ids(number, 1), size=1, used=10 + number, token_cost=1.0)
    assert [evicted(index) for _ in range(5)] == ["0", "3", "4", "5", "2"]


@pytest.mark.parametrize("priority", [-math.inf, -1.0, math.inf, math.nan, 1e300, 3.0])
@pytest.mark.parametrize("clock", [0.0, 1e300, -1e300])
def test_what_a_file_says_of_the_worth_of_records_is_bounded(priority, clock):
    index = RecordIndex()
    entry = index.add("0", S, 0, ids(1, 2), size=1, used=0, frequency=1 << 52, token_cost=1e5)
    entry.priority, index._age = priority, clock
    again = RecordIndex()
    again.restore(index.stored())
    (kept,) = again.entries.values()
    assert (kept.frequency, kept.token_cost) == (MOST_USES, MOST_COST)
    assert 0 <= kept.priority <= MOST_USES * MOST_COST and again._age == 0


@pytest.mark.parametrize(
    "wrong",
    [{"token_cost": math.nan}, {"token_cost": math.inf}, {"token_cost": -1.0}, {"frequency": -1}, {"frequency": 1 << 60}],
)
def test_a_file_with_a_worth_that_is_none_is_a_value_error(wrong):
    index = RecordIndex()
    index.add("0", S, 0, ids(1, 2), size=1, used=0, **wrong)
    with pytest.raises(ValueError):
        RecordIndex().restore(index.stored())


@pytest.mark.parametrize("clock", [math.nan, math.inf])
def test_a_file_without_a_clock_is_a_value_error(clock):
    index = RecordIndex()
    index._age = clock
    with pytest.raises(ValueError):
        RecordIndex().restore(index.stored())


def test_a_file_of_anything_else_is_a_value_error():
    for content in (b"", b"junk", RecordIndex().stored()[:-1], b"\x92\x01\x90\x00"):
        with pytest.raises(ValueError):
            RecordIndex().restore(content)
