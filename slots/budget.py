"""The prefill budget of a step: as many prompt tokens as running streams can wait for, in whole chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .costs import Costs
from .plan import Plan
from .profile import Profile
from .request import Request

AIM = 0.9  # share of the longest stall that a step aims at: steps take up to a tenth longer than their profile


class PrefillBudget:
    """size: most prompt tokens of a step while other requests decode. max_stall: seconds that its prompt tokens may take.

    The smaller one wins, but a step always has one chunk: part of a chunk takes about as long.
    """

    def __init__(self, size: int, max_stall: float, costs: Costs, profile: Profile) -> None:
        self.size, self.max_stall = size, max_stall
        self._chunk, self._profile = costs.chunk, profile
        self._slowdown = 1.0  # time of the last step over that of the profile

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from the time that a plan took, and let the profile learn. A draft's rows are no prompt tokens.

        The profile is a mean of many steps. One that took longer, beside other work on the machine or over the KV of many
        requests, makes the next ones smaller at once.
        """
        if plan.num_tokens < self._chunk or plan.has_drafts:
            return
        if self._profile.is_learnt:
            self._slowdown = max(1.0, seconds / self._profile.seconds_of(plan))
        self._profile.observe(plan, seconds)

    def limit(self, most: int, requests: Sequence[Request]) -> int:
        """Return how many tokens of these requests' prompts a step may compute now; it has room for `most`."""
        most = min(most, self.size)
        if self.max_stall == math.inf:
            return most
        depth = max((request.computed for request in requests), default=0)
        return min(most, max(self._chunk, self._profile.tokens_within(AIM * self.max_stall / self._slowdown, depth)))


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
