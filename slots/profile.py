"""The time to compute prompt tokens here, learnt from the steps that were run."""

from __future__ import annotations

import math

from .plan import Plan

MEMORY = 0.98  # weight of all earlier steps beside a new one
OUTLIER = 4  # times its profile that a step counts at most: the machine may have been paused meanwhile


class Profile:
    """T(cached, new), the seconds that `new` tokens behind `cached` ones take (RAGCache, section 5.1).

    RAGCache measures a grid at start and interpolates in it. The time of a token is a fixed share and one that grows with
    its depth, so a line through the steps that run anyway is as good. It costs no time at start and follows the machine.
    min_tokens: smaller steps take about as long as one of this size, so they are left out.
    """

    def __init__(self, min_tokens: int = 1) -> None:
        self._min_tokens = min_tokens
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of tokens: weight, depth, depth squared, seconds, seconds times depth
        self._fixed, self._by_depth = 1.0, 0.0  # seconds a token, and a token and position in front of it

    @property
    def is_learnt(self) -> bool:
        """Whether a step has been observed, so that the unit is seconds."""
        return self._sums[0] > 0

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from the time that a plan took."""
        self.learn(plan.num_tokens, mean_depth(plan), seconds)

    def learn(self, tokens: int, depth: float, seconds: float) -> None:
        """Learn from the time that tokens took at a mean depth."""
        if tokens < self._min_tokens:
            return
        if self.is_learnt:
            seconds = min(seconds, OUTLIER * tokens * (self._fixed + self._by_depth * depth))
        each = seconds / tokens
        new = (1.0, depth, depth * depth, each, each * depth)
        self._sums = tuple(MEMORY * old + tokens * value for old, value in zip(self._sums, new, strict=True))
        self._fit()

    def seconds(self, cached: int, new: int) -> float:
        """Return T(cached, new). Before the first step the unit is not seconds: each token costs one."""
        return new * (self._fixed + self._by_depth * (cached + new / 2))

    def cost(self, cached: int, new: int) -> float:
        """Return T(cached, new) a token, over that of the mean token so far.

        Costs of different times compare: those from before the first step, and those of a machine that was slower then.
        """
        mean = self._sums[3] / self._sums[0] if self.is_learnt else 1.0
        return self.seconds(cached, new) / new / mean

    def tokens_within(self, seconds: float, cached: int) -> int:
        """Return the most tokens behind `cached` ones that take at most `seconds`; 0 before the first step."""
        if not self.is_learnt:
            return 0
        first, growth = self._fixed + self._by_depth * cached, self._by_depth / 2  # of n tokens: n * first + n * n * growth
        return math.floor(2 * seconds / (first + math.sqrt(first * first + 4 * growth * seconds)))

    def _fit(self) -> None:
        """Least squares; a flat line until depths differ, and never one that falls."""
        weight, depth, squares, seconds, products = self._sums
        spread = weight * squares - depth * depth
        slope = (weight * products - depth * seconds) / spread if spread > 1e-9 * weight * squares else 0.0
        fixed = (seconds - slope * depth) / weight
        if slope < 0 or fixed <= 0:
            slope, fixed = 0.0, seconds / weight
        self._fixed, self._by_depth = fixed, slope


def mean_depth(plan: Plan) -> float:
    """Return the mean position of a plan's tokens; the plan has some."""
    return sum(len(span.tokens) * (span.start + span.stop) / 2 for span in plan.spans) / plan.num_tokens
