"""Figures that summarise many measurements."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isnan, nan


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of `values` lie, interpolated linearly; not a number for no values."""
    if not values:
        return nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; not a number for no values."""
    return sum(values) / len(values) if values else nan


def median(values: Sequence[float]) -> float:
    """Return the 50th percentile; not a number for no values."""
    return percentile(values, 0.5)


def f1(right: str, given: str) -> float:
    """Return the F1 score over the words of both answers, as in SQuAD."""
    left, other = right.lower().split(), given.lower().split()
    common = (Counter(left) & Counter(other)).total()
    return 2 * common / (len(left) + len(other)) if common else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, 50th and 95th percentile and maximum of `count` values, in the unit of the values."""

    count: int
    mean: float
    p50: float
    p95: float
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Summary":
        """Summarise `values`, without those that are not a number."""
        numbers = [value for value in values if not isnan(value)]
        return cls(
            count=len(numbers),
            mean=mean(numbers),
            p50=median(numbers),
            p95=percentile(numbers, 0.95),
            maximum=max(numbers, default=nan),
        )

    @classmethod
    def median_of(cls, rounds: Sequence["Summary"]) -> "Summary":
        """Return the median of each figure over repeated rounds, so that one disturbed round does not decide."""
        return cls(
            sum(summary.count for summary in rounds),
            *(median([getattr(summary, name) for summary in rounds]) for name in ("mean", "p50", "p95", "maximum")),
        )
