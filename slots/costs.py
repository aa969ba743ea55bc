"""The costs of work on one device, in the units that the tuning rules compare.

`models/costs.py` makes the one value of a server from measured constants. Every tuning rule reads it; no rule has a number
of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NEVER = math.inf  # a threshold that is never reached: its rule is off


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of one model on one device. Thresholds may be NEVER.

    chunk: prompt tokens that attention computes together; a smaller batch takes about as long.
    background_step: prompt tokens of a background step: the work that is lost when a new request aborts it.
    background_ns: time that a background step may take where none can be aborted: a new request waits for its end.
    rest: the fewest tokens of a prompt to compute together, so that their bits do not depend on the cache.
    min_shared: uncached tokens that two requests must share before the second waits for the first to compute them.
    restore_share: time to restore KV from host memory, as a share of computing it.
    apart_from_cells: from this many cells in use on, decode and prefill are cheaper in steps of their own.
    swap_from_tokens: from this many tokens on, a step is faster if all cells in use, of which it sees none, are swapped out.
    cells_per_run: cells that take as long to move as one more run does.
    spill_ns: an idle cell that is swapped out for a request: it comes back when it is used again.
    idle_token_ns, idle_step_ns: an idle cell that stays: for each token of a prompt, for each decode step.
    tile: query tokens of one tile of the attention kernel; 1 where it has no tiles.
    token_ns: a token more in a batch of whole tiles.
    cell_ns, tile_cell_ns: a cell that a token sees; a cell that a tile of tokens sees.
    pass_ns, row_ns: a batch of its own, which reads all weights; a token more in it with its row of logits. 0: unknown.
    """

    chunk: int
    background_step: int
    background_ns: float
    rest: int
    min_shared: int
    restore_share: float
    apart_from_cells: float
    swap_from_tokens: float
    cells_per_run: int
    spill_ns: float
    idle_token_ns: float
    idle_step_ns: float
    tile: int
    token_ns: float
    cell_ns: float
    tile_cell_ns: float
    pass_ns: float
    row_ns: float

    def step_ns(self, rows: int, depth: int) -> float:
        """Return the time of a step of `rows` rows with logits that see `depth` cells each."""
        attention = self.cell_ns * rows * depth
        if rows < self.tile:
            attention = min(attention, self.tile_cell_ns * depth + self.token_ns * (self.tile - rows))
        return self.pass_ns + rows * self.row_ns + attention

    def pays_to_pad(self, size: int, seen: int, together: int) -> bool:
        """Return whether a batch of `size` tokens takes longer than a whole tile.

        seen: cells that its tokens see, in sum. together: different cells among them.
        """
        if size >= self.tile:
            return False
        return self.cell_ns * seen > self.tile_cell_ns * together + self.token_ns * (self.tile - size)

    def pays_to_swap(self, num_tokens: int, num_unseen: int, num_used: int, num_runs: int) -> bool:
        """Return whether a step is faster if the cells that it does not see are swapped out for its time.

        num_unseen: those cells. num_used, num_runs: all cells in use, and the runs that stand in them.
        """
        return num_unseen * num_tokens > self.swap_from_tokens * (num_used + self.cells_per_run * num_runs)

    def pays_to_spill(self, num_tokens: int, num_steps: int) -> bool:
        """Return whether idle KV should leave the device for a request of so many prompt tokens and decode steps."""
        return self.idle_token_ns * num_tokens + self.idle_step_ns * num_steps >= self.spill_ns


UNMEASURED = Costs(
    chunk=1,
    background_step=1,
    background_ns=0.0,
    rest=1,
    min_shared=1,
    restore_share=0.0,
    apart_from_cells=NEVER,
    swap_from_tokens=NEVER,
    cells_per_run=0,
    spill_ns=0.0,
    idle_token_ns=0.0,
    idle_step_ns=0.0,
    tile=1,
    token_ns=0.0,
    cell_ns=0.0,
    tile_cell_ns=0.0,
    pass_ns=0.0,
    row_ns=0.0,
)
"""No device: every rule is off. For a tree whose plans are not computed."""
