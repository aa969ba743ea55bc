"""Summaries of measurements."""

import statistics
from math import isnan, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.bench.report import Summary, median, percentile

VALUES = st.lists(st.floats(0, 1e6), min_size=2, max_size=50)


@given(VALUES)
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    assert [percentile(values, i / 20) for i in range(1, 20)] == pytest.approx(cuts)
    assert median(values) == pytest.approx(statistics.median(values))


def test_ends_and_single_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0) == 1.0
    assert percentile([3.0, 1.0, 2.0], 1) == 3.0
    assert percentile([7.0], 0.95) == 7.0
    assert isnan(percentile([], 0.5))


def test_a_summary_leaves_out_what_is_not_a_number() -> None:
    assert Summary.of([1.0, nan, 3.0]) == Summary(count=2, mean=2.0, p50=2.0, p95=2.9, maximum=3.0)
    assert isnan(Summary.of([]).maximum)


def test_one_disturbed_round_does_not_decide() -> None:
    rounds = [Summary.of([1.0]), Summary.of([100.0]), Summary.of([2.0])]
    assert Summary.median_of(rounds) == Summary(count=3, mean=2.0, p50=2.0, p95=2.0, maximum=2.0)
