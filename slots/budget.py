"""The prefill budget of a step: as many prompt tokens as running streams can wait for, in whole chunks."""

from __future__ import annotations

import math
from collections.abc import Callable

from .costs import Costs
from .plan import Plan
from .profile import Profile

AIM = 0.9  # share of the longest stall that a step aims at: steps take up to a tenth longer than their profile


class PrefillBudget:
    """size: most prompt tokens of a step while other requests decode. max_stall: seconds that its prompt tokens may take.

    The smaller one wins, but a step always has one chunk: part of a chunk takes about as long.

    The time of a token grows with the cells that attention passes over: those of all requests, not of its own alone.
    """

    def __init__(self, size: int, max_stall: float, costs: Costs, profile: Profile) -> None:
        self.size, self.max_stall = size, max_stall
        self._chunk, self._profile = costs.chunk, profile
        self._by_cells = Profile(costs.chunk)  # with the cells in use for the depth
        self._slowdown = 1.0  # time of the last step over what was expected

    def observe(self, plan: Plan, seconds: float, cells: int) -> None:
        """Learn from the time that a plan took, and let the profile learn. A draft's rows are no prompt tokens.

        cells: those in use on the device, the plan's own tokens not among them. A step that took longer than the mean of
        many, beside other work on the machine, makes the next ones smaller at once.
        """
        tokens = plan.num_tokens
        if tokens < self._chunk or plan.has_drafts:
            return
        if self._by_cells.is_learnt:
            self._slowdown = max(1.0, seconds / self._by_cells.seconds(cells, tokens))
        self._by_cells.learn(tokens, cells + tokens / 2, seconds)
        self._profile.observe(plan, seconds)

    def limit(self, most: int, cells: Callable[[int], int]) -> int:
        """Return how many prompt tokens a step may compute now; it has room for `most`.

        cells: a function from a number of tokens to the cells in use while a step computes them. A large step may swap out
        the cells of other requests.
        """
        most = min(most, self.size)
        if self.max_stall == math.inf or not most:
            return most
        within = self._within(cells(most))
        if (in_use := cells(within)) > cells(most):
            within = self._within(in_use)  # too few for a swap
        return min(most, max(self._chunk, within))

    def _within(self, cells: int) -> int:
        return self._by_cells.tokens_within(AIM * self.max_stall / self._slowdown, cells)


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
