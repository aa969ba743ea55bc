"""How many prompt tokens a step computes: as many as running streams can wait for, in whole chunks."""

from __future__ import annotations

import math

from .costs import Costs
from .plan import Plan

TOLERANCE = 2.0  # how much longer than at its fastest a step of the budget may take


class PrefillBudget:
    """size: most prompt tokens a step may compute while others are generating, at the speed of a short context."""

    def __init__(self, size: int, costs: Costs) -> None:
        self.size = size
        self._chunk = costs.chunk
        self._fastest = math.inf  # seconds a prompt token took in the fastest step so far
        self._slowdown = 1.0  # how much longer it took in the last one

    def observe(self, plan: Plan, seconds: float) -> None:
        """A plan took so long. Tokens deep in a long prompt take several times as long as its first ones: the budget
        shrinks with that, so that what it really bounds is how long running streams wait."""
        if plan.num_tokens >= self._chunk:
            each = seconds / plan.num_tokens
            self._fastest = min(self._fastest, each)
            self._slowdown = each / self._fastest

    def room(self, most: int) -> int:
        """How many prompt tokens a step may compute now, where it could compute `most`."""
        slower = int(self.size * min(1.0, TOLERANCE / self._slowdown))
        return min(most, self.size, max(self._chunk, slower))


def chunk_size(left: int, room: int, costs: Costs) -> int:
    """How many of the `left` tokens to compute now: whole chunks, but not so that next to nothing is left over.

    Attention takes as long for a part of a chunk as for all of it. Where the room allows it, neither this
    chunk nor the last one is smaller than the `rest` of a prompt.
    """
    if left <= room:
        return left
    chunk, rest = costs.chunk, costs.rest
    size = room // chunk * chunk or room
    if left - size < chunk < size:
        size -= chunk
    return left - rest if left - size < rest <= left - rest else size
