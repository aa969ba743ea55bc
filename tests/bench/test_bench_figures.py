"""The figures that the scenarios compute from results."""

from math import isnan

import pytest
from slotcache.bench.client import PromptSizer, Result, Run
from slotcache.bench.comparison import differences, reused
from slotcache.bench.scenarios.cached import ttft_over_step
from slotcache.bench.scenarios.conversations import Continuation, continuations
from slotcache.bench.scenarios.decoding import shared_speed
from slotcache.bench.scenarios.stall import Stall, gaps_within
from slotcache.bench.server_api import DocumentUse
from slotcache.bench.trace import Query


def used(*documents: tuple[str, int]) -> Result:
    """Return a result that used documents of 10 tokens; the numbers are the cached tokens of each."""
    return Result(0.0, 1.0, (0.5,), documents=tuple(DocumentUse(name, 10, cached) for name, cached in documents))


def test_only_whole_leading_documents_count_as_reused() -> None:
    (four,) = trace_of("dabc")
    assert reused(four, used(("a", 10), ("b", 10), ("c", 4), ("d", 10))) == 2
    assert reused(four, used(("a", 0), ("b", 10), ("c", 10), ("d", 10))) == 0
    assert reused(Query("s", 1, "?"), used(("a", 10))) == 0


def test_documents_of_earlier_turns_are_not_counted() -> None:
    (two,) = trace_of("cd")
    assert reused(two, used(("a", 10), ("b", 10), ("d", 10), ("c", 0))) == 1


def trace_of(*sets: str) -> tuple[Query, ...]:
    return tuple(Query(str(i), 1, "?", tuple((name, name) for name in names)) for i, names in enumerate(sets))


def test_reuse_equals_the_search_over_all_earlier_orders() -> None:
    queries = trace_of("abc", "bcd", "cab", "xcb")
    results = (
        used(("a", 0), ("b", 0), ("c", 0)),
        used(("b", 0), ("c", 0), ("d", 0)),
        used(("a", 10), ("b", 10), ("c", 10)),
        used(("b", 10), ("c", 10), ("x", 0)),
    )
    assert differences(Run(queries, results, 1.0)) == ([], 4)


def test_a_missed_reuse_is_found_and_named() -> None:
    queries = trace_of("abc", "cba")
    results = (used(("a", 0), ("b", 0), ("c", 0)), used(("c", 0), ("b", 0), ("a", 0)))
    found, compared = differences(Run(queries, results, 1.0))
    assert compared == 2 and [one.text() for one in found] == ["query 1: predicted 3, reported 0, used c, b, a"]


def test_idle_prefill_is_not_a_difference() -> None:
    results = used(("a", 0), ("b", 0), ("c", 0)), used(("b", 10), ("c", 10), ("d", 0)), used(("c", 0), ("b", 0), ("a", 0))
    run = Run(trace_of("abc", "bcd", "cba"), results, 1.0)
    assert [(one.predicted, one.reported) for one in differences(run)[0]] == [(0, 2), (3, 0)]
    assert [(one.predicted, one.reported) for one in differences(run, more_is_right=True)[0]] == [(3, 0)]


def test_results_without_documents_are_not_compared() -> None:
    assert differences(Run(trace_of("a"), (Result(0.0, 1.0, error="no"),), 1.0)) == ([], 0)


def test_a_continuation_computes_its_new_tokens_and_one() -> None:
    queries = (Query("s", 1, "?"), Query("t", 1, "?"), Query("s", 2, "?"), Query("t", 2, "?"))
    first = Result(0.0, 1.0, prompt_tokens=100, completion_tokens=16)
    warm = Result(0.0, 1.0, prompt_tokens=150, cached_tokens=115)
    cold = Result(0.0, 1.0, prompt_tokens=150, cached_tokens=60)
    turns = list(continuations(Run(queries, (first, first, warm, cold), 1.0)))
    assert turns == [Continuation("s", 2, new=34, computed=35), Continuation("t", 2, new=34, computed=90)]
    assert [turn.is_warm for turn in turns] == [True, False]


def test_speed_counts_only_while_all_streams_run() -> None:
    # One token each 0.1 s; the second stream starts at 0.5 s, the first ends at 1.0 s: both run for half a second.
    one = Result(10.0, 1.0, tuple(i / 10 for i in range(1, 11)), completion_tokens=10)
    two = Result(10.4, 1.0, tuple(i / 10 for i in range(1, 11)), completion_tokens=10)
    assert shared_speed([one, two]) == pytest.approx(20.0)
    assert shared_speed([one]) == pytest.approx(10.0)
    assert isnan(shared_speed([one, Result(20.0, 1.0, (0.1, 0.2), completion_tokens=2)]))


def test_a_chunk_of_two_tokens_counts_as_two() -> None:
    one = Result(0.0, 1.0, (0.1, 0.2, 0.3), completion_tokens=6)
    assert shared_speed([one]) == pytest.approx(20.0)


def test_the_longest_gap_is_the_one_that_overlaps_the_prefill() -> None:
    arrivals = [0.0, 5.0, 5.1, 5.6, 5.7, 9.0]
    assert max(gaps_within(arrivals, 5.2, 5.65)) == pytest.approx(0.5)
    assert max(gaps_within(arrivals, 5.65, 8.0)) == pytest.approx(3.3), "a gap that outlasts the prefill counts"
    assert gaps_within(arrivals, 10.0, 11.0) == []


def test_a_gap_is_excused_where_one_tile_takes_longer_than_is_allowed() -> None:
    tiles = Stall(640, 3.0, 0.02, (*[0.2] * 5, 0.9, *[0.3] * 6))
    assert tiles.usual_longest == pytest.approx(0.3), "one slow step is no tile"
    assert Stall(64, 1.0, 0.02, (0.2, 0.4)).usual_longest == pytest.approx(0.3)
    stall = Stall(640, 2.0, 0.02, (0.1, 0.33))
    assert stall.excess(0.1) == pytest.approx(0.33 / 0.12)
    assert stall.excess(0.1, tile=0.3) == pytest.approx(1.1)
    assert stall.excess(0.5, tile=0.3) == pytest.approx(0.33 / 0.52)


def test_the_first_answer_fills_the_cache_and_is_not_counted() -> None:
    first, again = Result(0.0, 9.0, (8.0, 8.1)), Result(0.0, 1.0, (0.2, 0.3, 0.4))
    assert ttft_over_step([first, again, again]) == pytest.approx(2.0)


def test_a_sized_prompt_has_as_many_words_as_its_tokens_take() -> None:
    sizer = PromptSizer(per_word=1.25, fixed=50)
    query = sizer.query("one", 300)
    assert len(query.question.split()) == 201, "its name and 200 words"
    assert query != sizer.query("two", 300) and query.question.split()[0] != sizer.query("two", 300).question.split()[0]
