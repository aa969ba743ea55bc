"""What a token costs to compute and to restore, and the budget of a step.

`models/times.py` makes the server's only `Costs` from measured constants. Every tuning rule takes its numbers from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from .plan import Plan

NEVER = math.inf  # a threshold that is never reached: its rule is off
GUESSED_NS = 1e6  # guessed time to compute a token, before the first step


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of one model on one device. A threshold of NEVER turns a rule off; by default every rule is off.

    chunk: prompt tokens that attention computes together; a smaller batch takes about as long.
    background_step: prompt tokens of a background step; they are lost when a new request aborts the step.
    background_ns: most time of a background step on a device that cannot abort steps; 0: steps can be aborted.
    recompute_last: the fewest tokens of a prompt to compute in one batch, so that no bit depends on the cache. The last
        `recompute_last` tokens of a prompt are always computed.
    min_shared: uncached tokens that two requests must share before the second waits for the first to compute them.
    restore_share: time to restore KV from host memory, as a share of the time to compute it.
    apart_from_cells: with this many cells in use or more, decode and prefill take less time in separate steps.
    swap_from_tokens: a step of more tokens than this that sees none of the cells in use is faster if they are swapped out.
    cells_per_run: the fixed time to move a run, as the number of cells that could be moved in that time.
    scattered_tokens: the time to save one more stretch of cells, as the tokens computed in that time; 0: it takes no time.
    spill_ns: time to move an idle cell to host memory, and back when it is used again.
    idle_token_ns, idle_step_ns: time that an idle cell costs if it stays: for each prompt token, and for each decode step.
    tile: query tokens of one tile of the attention kernel; 1: the kernel has no tiles.
    token_ns: time of one more token in a batch of whole tiles.
    cell_ns, tile_cell_ns: attention time for each cell that one token sees, and for each cell that a whole tile sees.
    pass_ns, row_ns: time to read all weights once, and of one more token in a batch with its row of logits; 0: unknown.
    """

    chunk: int = 1
    background_step: int = 1
    background_ns: float = 0.0
    recompute_last: int = 1
    min_shared: int = 1
    restore_share: float = 0.0
    apart_from_cells: float = NEVER
    swap_from_tokens: float = NEVER
    cells_per_run: int = 0
    scattered_tokens: float = 0.0
    spill_ns: float = 0.0
    idle_token_ns: float = 0.0
    idle_step_ns: float = 0.0
    tile: int = 1
    token_ns: float = 0.0
    cell_ns: float = 0.0
    tile_cell_ns: float = 0.0
    pass_ns: float = 0.0
    row_ns: float = 0.0

    def scaled(self, share: float) -> Costs:
        """Return the costs of a model with this share of the weights and of the layers."""
        names = ("token_ns", "cell_ns", "tile_cell_ns", "pass_ns", "row_ns")
        return replace(self, **{name: share * getattr(self, name) for name in names})

    def step_ns(self, rows: int, depth: int) -> float:
        """Return the time (ns) of a step of `rows` tokens with logits, each of which sees `depth` cells."""
        attention, tiles = self.cell_ns * rows * depth, -(-rows // self.tile)
        if rows < self.tile:
            attention = min(attention, self.tile_cell_ns * depth + self.token_ns * (self.tile - rows))
        elif self.tile > 1:
            attention = self.tile_cell_ns * depth * tiles
        return self.pass_ns + rows * self.row_ns + attention

    def background_tokens(self, profile: Profile, cached: int) -> int:
        """Return how many prompt tokens a background step computes after `cached` ones, if nothing else runs.

        A time limit never lowers the number below `recompute_last`, because a smaller batch rounds differently from the
        batch of a client's request.
        """
        if not self.background_ns:
            return self.background_step
        if profile.is_learnt:
            return max(profile.tokens_within(self.background_ns / 1e9, cached), self.recompute_last)
        each = max(self.token_ns, self.row_ns) or math.inf  # an untimed device learns from the prompts of clients
        return max(int((self.background_ns - self.pass_ns) / each), self.recompute_last)

    def pays_to_pad(self, size: int, seen: int, together: int) -> bool:
        """Return whether a batch of `size` tokens takes longer than a whole tile.

        seen: the cells that the tokens see, added up over all tokens.
        together: how many different cells these are.
        """
        if size >= self.tile:
            return False
        return self.cell_ns * seen > self.tile_cell_ns * together + self.token_ns * (self.tile - size)

    def pays_to_swap(self, num_passed: int, num_used: int, num_pieces: int) -> bool:
        """Return whether a swap makes steps faster: attention then no longer passes over cells that the steps do not see.

        num_passed: the unseen cells, counted once for each token.
        num_used: all cells in use.
        num_pieces: the stretches of used cells, each of which moves separately.
        """
        return num_passed > self.swap_from_tokens * (num_used + self.cells_per_run * num_pieces)

    def pays_to_offload(self, num_tokens: int, num_steps: int) -> bool:
        """Return whether idle KV should be offloaded for a request with this many prompt tokens and decode steps."""
        return self.idle_token_ns * num_tokens + self.idle_step_ns * num_steps >= self.spill_ns


UNMEASURED = Costs()
"""Costs with every rule off, for a tree whose plans no device computes."""


# ---- The time to compute prompt tokens on this machine, learnt from its steps. ------------------------------------------

MEMORY = 0.98  # weight of all earlier steps relative to a new one
OUTLIER = 4  # a step counts as at most this many times its expected time: the machine may have been paused


class Profile:
    """Learns T(cached, new), the seconds to compute `new` tokens after `cached` ones (RAGCache, section 5.1).

    RAGCache measures a grid at start and interpolates in it. Here a line is fitted to the steps that run anyway, since the
    time of a token is a fixed part and a part that grows with its depth. The line is as good, takes no time at start, and
    adapts to the machine.

    min_tokens: smaller steps are ignored, since they take about as long as a step of this size.
    """

    def __init__(self, min_tokens: int = 1) -> None:
        self._min_tokens = min_tokens
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # over tokens: weight, depth, depth squared, seconds, seconds times depth
        self._fixed, self._by_depth = 1.0, 0.0  # seconds for a token; seconds for a token and a position before it

    @property
    def is_learnt(self) -> bool:
        """Whether a step has been observed, so that times are in seconds."""
        return self._sums[0] > 0

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from the time that a plan took."""
        self.learn(plan.num_tokens, mean_depth(plan), seconds)

    def learn(self, tokens: int, depth: float, seconds: float) -> None:
        """Learn from the seconds that a number of tokens took.

        depth: the mean position of these tokens.
        """
        if tokens < self._min_tokens:
            return
        if self.is_learnt:
            seconds = min(seconds, OUTLIER * tokens * (self._fixed + self._by_depth * depth))
        each = seconds / tokens
        new = (1.0, depth, depth * depth, each, each * depth)
        self._sums = tuple(MEMORY * old + tokens * value for old, value in zip(self._sums, new, strict=True))
        self._fit()

    def seconds(self, cached: int, new: int) -> float:
        """Return T(cached, new). Before the first observed step each token counts as 1, not in seconds."""
        return new * (self._fixed + self._by_depth * (cached + new / 2))

    def cost(self, cached: int, new: int) -> float:
        """Return the time of each of `new` tokens after `cached` ones, divided by the mean time of all tokens so far.

        The division makes costs comparable over time: before and after the first step, and while the machine is slower.
        """
        mean = self._sums[3] / self._sums[0] if self.is_learnt else 1.0
        return self.seconds(cached, new) / new / mean

    def tokens_within(self, seconds: float, cached: int) -> int:
        """Return the most tokens after `cached` ones that take at most `seconds`; 0 before the first step."""
        if not self.is_learnt:
            return 0
        first, growth = self._fixed + self._by_depth * cached, self._by_depth / 2  # n tokens take n * first + n * n * growth
        return math.floor(2 * seconds / (first + math.sqrt(first * first + 4 * growth * seconds)))

    def _fit(self) -> None:
        """Fit a line by least squares: flat until depths differ, and never falling."""
        weight, depth, squares, seconds, products = self._sums
        spread = weight * squares - depth * depth
        slope = (weight * products - depth * seconds) / spread if spread > 1e-9 * weight * squares else 0.0
        fixed = (seconds - slope * depth) / weight
        if slope < 0 or fixed <= 0:
            slope, fixed = 0.0, seconds / weight
        self._fixed, self._by_depth = fixed, slope


def mean_depth(plan: Plan) -> float:
    """Return the mean position of the tokens of a plan, which must have some."""
    return sum(len(span.tokens) * (span.start + span.stop) / 2 for span in plan.spans) / plan.num_tokens


# ---- Budget -------------------------------------------------------------------------------------------------------------
# The prefill budget of a step: as many prompt tokens as running streams can wait for, in whole chunks.

AIM = 0.9  # share of the longest stall that a step aims at: steps take up to a tenth longer than their profile


class PrefillBudget:
    """Limits the prompt tokens of a step while other requests decode.

    size: most prompt tokens.
    max_stall: most seconds that the prompt tokens may take.

    The smaller limit holds, but a step may always compute one chunk, since part of a chunk takes about as long.

    The time of a token grows with the cells in use of all requests, because attention passes over all of them.
    """

    def __init__(self, size: int, max_stall: float, costs: Costs, profile: Profile) -> None:
        self.size, self.max_stall, self.costs = size, max_stall, costs
        self._profile = profile
        self._by_cells = Profile(costs.chunk)  # with the number of cells in use as the depth
        self._slowdown = 1.0  # time of the last step, divided by the expected time

    def observe(self, plan: Plan, seconds: float, cells: int) -> None:
        """Learn from the time that a plan took, and let the profile learn.

        Plans with drafts or without a whole chunk are ignored. If a step took longer than expected, because the machine has
        other work, the next steps become smaller at once.

        cells: cells in use on the device, without the plan's new tokens.
        """
        tokens = plan.num_tokens
        if tokens < self.costs.chunk or plan.has_drafts:
            return
        if self._by_cells.is_learnt:
            self._slowdown = max(1.0, seconds / self._by_cells.seconds(cells, tokens))
        self._by_cells.learn(tokens, cells + tokens / 2, seconds)
        self._profile.observe(plan, seconds)

    def limit(self, most: int, cells: Callable[[int], int]) -> int:
        """Return how many prompt tokens a step may compute now.

        most: the tokens that the step has room for.
        cells: returns how many cells are in use while a step computes a given number of tokens. Fewer may be in use in a
            large step, because such a step swaps out the cells of other requests.
        """
        most = min(most, self.size)
        if self.max_stall == math.inf or not most:
            return most
        within = self._within(cells(most))
        if (in_use := cells(within)) > cells(most):
            within = self._within(in_use)  # a step this small does not swap
        return min(most, max(self.costs.chunk, within))

    def _within(self, cells: int) -> int:
        return self._by_cells.tokens_within(AIM * self.max_stall / self._slowdown, cells)


def chunk_size(left: int, most: int, costs: Costs) -> int:
    """Return how many of the `left` tokens to compute now, at most `most`: whole chunks, which leave no tiny remainder.

    Attention takes as long for part of a chunk as for a whole one. If `most` allows it, neither this part of the tokens nor
    the last part has fewer than `recompute_last`.
    """
    if left <= most:
        return left
    chunk, recompute_last = costs.chunk, costs.recompute_last
    size = most // chunk * chunk or most
    if left - size < chunk < size:
        size -= chunk
    return left - recompute_last if left - size < recompute_last <= left - recompute_last else size
