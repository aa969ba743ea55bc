"""The prefill budget of a step: as many prompt tokens as running streams can wait for, in whole chunks."""

from __future__ import annotations

import math

from .costs import Costs
from .plan import Plan

TOLERANCE = 2.0  # how much longer than at its fastest a step of the budget may take


class PrefillBudget:
    """size: most prompt tokens of a step while other requests decode, at the speed of a short context."""

    def __init__(self, size: int, costs: Costs) -> None:
        self.size = size
        self._chunk = costs.chunk
        self._fastest = math.inf  # seconds a prompt token took in the fastest step so far
        self._slowdown = 1.0  # how much longer it took in the last one

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from the time that a plan took.

        Tokens deep in a long prompt take several times as long as its first ones. The budget shrinks accordingly, so it
        bounds the time that running streams wait.
        """
        if plan.num_tokens >= self._chunk:
            each = seconds / plan.num_tokens
            self._fastest = min(self._fastest, each)
            self._slowdown = each / self._fastest

    def limit(self, most: int) -> int:
        """Return how many prompt tokens a step may compute now; it has room for `most`."""
        slower = int(self.size * min(1.0, TOLERANCE / self._slowdown))
        return min(most, self.size, max(self._chunk, slower))


def chunk_size(left: int, most: int, costs: Costs) -> int:
    """Return how many of the `left` tokens to compute now: whole chunks, but without a tiny remainder.

    Attention takes as long for a part of a chunk as for all of it. If `most` allows it, neither this chunk nor the last
    one is smaller than the `rest` of a prompt.
    """
    if left <= most:
        return left
    chunk, rest = costs.chunk, costs.rest
    size = most // chunk * chunk or most
    if left - size < chunk < size:
        size -= chunk
    return left - rest if left - size < rest <= left - rest else size
