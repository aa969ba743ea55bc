"""The time of steps with several rows a stream, as a multiple of those with one."""

from __future__ import annotations

from ..costs import Costs

SMOOTHING = 0.2  # weight of a new step
UNKNOWN = 0.02  # of a step: a row more where no cost is known, until one has run
OUTLIER = 3.0  # times the mean: more is not the step's, but the machine's


class Pace:
    """Multiples are learnt from the steps that run, by their size up to a power of two. For a size that has not run, the
    costs tell it, corrected by as much as they were wrong about those that have.

    A multiple stays true where another process slows the machine, and nearly so where the context grows.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._plain: dict[int, float] = {}  # seconds of a step, by streams
        self._multiples: dict[tuple[int, int], float] = {}  # by streams, and bits of the number of rows
        self._correction: float | None = None  # of the time that the costs tell for drafted rows

    def multiple(self, streams: int, rows: int, depth: int) -> float:
        """Return the time of a step of `rows` rows over that of one with a row a stream. depth: cells that a row sees."""
        learnt = self._multiples.get((streams, _size(rows)))
        if learnt is not None:
            return learnt
        return 1 + (1.0 if self._correction is None else self._correction) * self._told(streams, rows, depth)

    def _told(self, streams: int, rows: int, depth: int) -> float:
        """Return the time of drafted rows by the costs, over that of a step without them."""
        plain = self._costs.step_ns(streams, depth)
        return max(self._costs.step_ns(rows, depth) / plain - 1, 0.0) if plain else UNKNOWN * (rows - streams)

    def seconds(self, streams: int) -> float:
        """Return the time of a step with a row a stream; 0 before the first."""
        return self._plain.get(streams, 0.0)

    def observe(self, streams: int, rows: int, *, depth: int, seconds: float) -> float:
        """Learn from a step; return its multiple, 1 for one without drafts."""
        plain = self._plain.get(streams)
        if rows == streams:
            self._plain[streams] = seconds if plain is None else _smoothed(plain, seconds)
            return 1.0
        if plain is None:
            return 1.0
        key, multiple = (streams, _size(rows)), seconds / plain
        known = self._multiples.get(key)
        self._multiples[key] = multiple if known is None else _smoothed(known, multiple)
        if told := self._told(streams, rows, depth):
            new = max(multiple - 1, 0.0) / told
            self._correction = new if self._correction is None else _smoothed(self._correction, new)
        return multiple


def _size(rows: int) -> int:
    return (rows - 1).bit_length()


def _smoothed(mean: float, new: float) -> float:
    return mean + SMOOTHING * (min(new, OUTLIER * mean) - mean)
