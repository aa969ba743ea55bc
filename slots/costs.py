"""The time to compute and to restore tokens, and the prefill budget of a step.

`models/times.py` makes the `Costs` of a model from measured constants. Every tuning rule takes its numbers from a `Costs`.
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

    chunk: how many prompt tokens attention computes together. A batch smaller than a chunk takes about as long as a chunk.
    background_step: how many prompt tokens a background step has. If a new request aborts the step, the computed tokens are
        lost.
    background_ns: the longest time of a background step if the device cannot abort steps; 0: it can.
    recompute_last: how many tokens at the end of a prompt are always computed, in one batch, even if they are cached. A
        batch of fewer tokens than `recompute_last` rounds differently, so the bits of an answer would depend on what is
        cached.
    min_shared: how many uncached tokens two requests must share, so that the second waits until the first has computed them.
    restore_share: the time to restore KV from host memory, divided by the time to compute it.
    apart_from_cells: if at least this many cells are in use, decode and prefill take less time in separate steps.
    swap_from_tokens: a step that sees no cell in use saves time by swapping out the cells in use, if the step has more
        tokens than this.
    cells_per_run: the fixed part of the time to move a run, as the number of cells that move in the same time.
    scattered_tokens: the extra time to save each separate stretch of cells, as the number of tokens that are computed in the
        same time; 0: no extra time.
    spill_ns: the time to move an idle cell to host memory, plus the time to move it back when it is used again.
    idle_token_ns, idle_step_ns: the time that an idle cell on the device adds to each prompt token, and to each decode step.
    tile: the number of query tokens in one tile of the attention kernel; 1: the kernel has no tiles.
    token_ns: the time that one more token adds to a batch of whole tiles.
    cell_ns, tile_cell_ns: the attention time for each cell that one token sees, and for each cell that a whole tile sees.
    pass_ns, row_ns: the time to read all weights once, and the time that one more token with its row of logits adds to a
        batch; 0: unknown.
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
        """Return the costs of a smaller model, which has this share of the weights and of the layers."""
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
        """Return how many prompt tokens a background step computes after `cached` tokens, while no other request runs.

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
        """Return whether a batch of `size` tokens takes longer than a batch that is padded to a whole tile.

        seen: for each token the number of cells that it sees, added up over all tokens.
        together: the number of cells that at least one token sees.
        """
        if size >= self.tile:
            return False
        return self.cell_ns * seen > self.tile_cell_ns * together + self.token_ns * (self.tile - size)

    def pays_to_swap(self, num_passed: int, num_used: int, num_pieces: int) -> bool:
        """Return whether a swap saves more time than it takes.

        A swap saves the time in which attention passes over cells that no token sees.

        num_passed: the cells that attention would pass over for nothing, counted once for each token.
        num_used: the number of cells in use, all of which a swap may move.
        num_pieces: the number of stretches of these cells; each stretch is moved separately.
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

    RAGCache measures a grid of times at its start and interpolates between them. This class fits a line to the steps that
    run anyway: the time of a token has a fixed part, and a part that grows with the token's position. The line predicts as
    well as a grid, takes no time at the start, and adapts to the machine.

    min_tokens: steps with fewer tokens are ignored, since they take about as long as a step with `min_tokens` tokens.
    """

    def __init__(self, min_tokens: int = 1) -> None:
        self._min_tokens = min_tokens
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # over tokens: weight, depth, depth squared, seconds, seconds times depth
        self._fixed, self._by_depth = 1.0, 0.0  # seconds for a token; seconds for a token and a position before it

    @property
    def is_learnt(self) -> bool:
        """Whether a step has been observed. Before the first observed step, times are not in seconds."""
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
        """Return T(cached, new) in seconds. Before the first observed step, the result is the number of new tokens."""
        return new * (self._fixed + self._by_depth * (cached + new / 2))

    def cost(self, cached: int, new: int) -> float:
        """Return the time per token of `new` tokens after `cached` ones, divided by the mean time per token so far.

        Because of this division, a cost from before the first step, or from when the machine was slower, can be
        compared with later costs.
        """
        mean = self._sums[3] / self._sums[0] if self.is_learnt else 1.0
        return self.seconds(cached, new) / new / mean

    def tokens_within(self, seconds: float, cached: int) -> int:
        """Return how many tokens after `cached` ones can be computed within `seconds`; 0 before the first step."""
        if not self.is_learnt:
            return 0
        first, growth = self._fixed + self._by_depth * cached, self._by_depth / 2  # n tokens take n * first + n * n * growth
        return math.floor(2 * seconds / (first + math.sqrt(first * first + 4 * growth * seconds)))

    def _fit(self) -> None:
        """Fit a line by least squares.

        The line's slope is 0 until steps of different depths were observed, and never negative.
        """
        weight, depth, squares, seconds, products = self._sums
        spread = weight * squares - depth * depth
        slope = (weight * products - depth * seconds) / spread if spread > 1e-9 * weight * squares else 0.0
        fixed = (seconds - slope * depth) / weight
        if slope < 0 or fixed <= 0:
            slope, fixed = 0.0, seconds / weight
        self._fixed, self._by_depth = fixed, slope


def mean_depth(plan: Plan) -> float:
    """Return the mean position of the tokens of a plan. The plan must have at least one token."""
    return sum(len(span.tokens) * (span.start + span.stop) / 2 for span in plan.spans) / plan.num_tokens


# ---- Budget -------------------------------------------------------------------------------------------------------------
# The prefill budget of a step: as many prompt tokens as running streams can wait for, in whole chunks.

AIM = 0.9  # share of the longest stall that a step aims at: steps take up to a tenth longer than their profile


class PrefillBudget:
    """Limits the prompt tokens of a step while other requests decode.

    size: the most prompt tokens.
    max_stall: the most seconds that the prompt tokens may take.

    Both limits hold, except that a step may always compute one whole chunk, since part of a chunk takes about as long.

    The time of a prompt token grows with the number of cells in use: attention passes over the cells of all requests.
    """

    def __init__(self, size: int, max_stall: float, costs: Costs, profile: Profile) -> None:
        self.size, self.max_stall, self.costs = size, max_stall, costs
        self._profile = profile
        self._by_cells = Profile(costs.chunk)  # with the number of cells in use as the depth
        self._slowdown = 1.0  # time of the last step, divided by the expected time

    def observe(self, plan: Plan, seconds: float, cells: int) -> None:
        """Learn from the time that a plan took. The tree's profile learns from this time, too.

        Plans with drafts, and plans with fewer tokens than a chunk, are ignored. If a step took longer than expected because
        the machine has other work, the next steps become smaller at once.

        cells: the number of cells in use on the device, without the cells of the plan's new tokens.
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

        most: the number of tokens that the step has room for.
        cells: takes the number of tokens of a step, and returns how many cells are in use during that step. A larger step
            may have fewer cells in use, because it swaps out the cells of other requests.
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
    """Return how many of the `left` tokens to compute in the next step, at most `most`.

    The result is a number of whole chunks if `most` allows it, because attention takes as long for part of a chunk as for a
    whole one. The result leaves no tiny remainder for the last step: if possible, both this step and the last one compute at
    least `recompute_last` tokens.
    """
    if left <= most:
        return left
    chunk, recompute_last = costs.chunk, costs.recompute_last
    size = most // chunk * chunk or most
    if left - size < chunk < size:
        size -= chunk
    return left - recompute_last if left - size < recompute_last <= left - recompute_last else size
