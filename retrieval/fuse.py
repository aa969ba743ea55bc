"""Several rankings to one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

K = 10.0  # the first ranks count more with a smaller one; with the usual 60 a fusion was worse than vectors alone


def fuse(rankings: Sequence[tuple[Sequence[int], float]], k: float = K) -> list[tuple[int, float]]:
    """Return the numbers of weighted rankings in one order, the best first: reciprocal rank fusion (Cormack et al., 2009).

    rankings: numbers, the best first, each with a weight. The scores lie between 0 and 1: 1 is the first of all rankings.
    """
    scores: defaultdict[int, float] = defaultdict(float)
    full = sum(weight for _, weight in rankings) / (k + 1)
    for numbers, weight in rankings:
        for rank, number in enumerate(numbers, 1):
            scores[number] += weight / (k + rank) / full
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
