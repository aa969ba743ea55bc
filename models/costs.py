"""The costs of a device: measured constants for CPUs, and times of this very machine for other devices.

No other module contains a measured constant (tests/models/test_costs.py). They are of the bench model (114 M weights) on 2
CPU cores. Only their ratios count: another CPU is faster or slower in all of them. `slotcache bench residency` measures
moves and idle cells again. Other devices differ too much for that: `hardware/timing.py` times each at its first start.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..slots.costs import NEVER, Costs
from .hardware.times import Times

if TYPE_CHECKING:
    from .model import Model

MIN_ROWS = 8  # from this many tokens on, every CPU kernel rounds a token as it would in a larger batch
TILE = 64  # query tokens: GGML_FA_TILE_Q, below which the CPU's flash attention takes token by token, cell by cell
CELL = 0.83  # ns: a token, a cell it sees and a number of the heads' width in all layers, token by token
TILE_CELL = 3.5  # ns: the same for a whole tile of tokens, and a cell that any of them sees
WEIGHT = 0.0126  # ns: a token more in a batch, and a weight of the layers
CLEARLY = 1.2  # times as long: more than the noise of a timing
PASS = 0.1  # ns: a batch of its own, and a weight: all of them are read once more

CPU = Costs(
    chunk=64,
    background_step=64,
    background_ns=0.0,  # a new request aborts the step
    rest=1,
    min_shared=32,  # half a chunk: chosen, not timed
    restore_share=0.01,  # 0.4 ms against 170 ms for 200 tokens
    apart_from_cells=NEVER,
    swap_from_tokens=50,  # a token passes over an unseen cell in 45 to 100 ns; moving it away and back takes 2.4 us
    cells_per_run=50,
    spill_ns=0.0,  # little beside the tokens that pass over the cell: idle KV always leaves
    idle_token_ns=0.0,
    idle_step_ns=0.0,
    tile=1,
    token_ns=0.0,
    cell_ns=0.0,
    tile_cell_ns=0.0,
    pass_ns=0.0,
    row_ns=0.0,
)
"""A CPU with flash attention, before the model is known: tiles are added by `cpu_costs`."""

OTHER = replace(CPU, swap_from_tokens=NEVER, background_ns=40e6)
"""A device that is not the CPU, before it is timed. Swapping is off, since the way to host memory may be long. Background
steps may take 40 ms, chosen: llama.cpp aborts batches on the CPU only, so that a new request waits for their ends."""


def costs_of(model: Model, *, flash_attention: str, kernel_size: int) -> Costs:
    """Return the costs of a model here, as far as they are known without timing.

    flash_attention: on, off or auto. kernel_size: tokens of a kernel.
    """
    if model.device is None:
        return cpu_costs(model, flash_attention, kernel_size)
    return replace(OTHER, rest=MIN_ROWS) if flash_attention == "off" else OTHER


def timed_costs(costs: Costs, times: Times) -> Costs:
    """Return the costs of a device that is not the CPU, from its times.

    A device has tiles if one token less than a chunk takes clearly longer than the chunk, as on the CPU. Then the cost of
    cells is told apart by the depth, and `apart_from_cells` is where a tile's cells take as long as one more batch. A row
    more counts as a token more of a large batch.
    A copy of idle KV was made in idle time: to spill it costs its way back.
    """
    token = max(times.double - times.chunk, 0.0) / times.chunk_tokens
    costs = replace(costs, pass_ns=1e9 * max(times.step - token, 0.0), row_ns=1e9 * token)
    if times.short_deep > CLEARLY * max(times.chunk_deep, times.chunk):
        per_tile_cell = max(times.chunk_deep - times.chunk, 0.0) / times.depth
        costs = replace(
            costs,
            tile=times.chunk_tokens,
            token_ns=1e9 * token,
            cell_ns=1e9 * max(times.short_deep - times.chunk, 0.0) / ((times.chunk_tokens - 1) * times.depth),
            tile_cell_ns=1e9 * per_tile_cell,
            apart_from_cells=times.step / per_tile_cell if per_tile_cell else NEVER,
        )
    if not times.idle:
        return costs
    move, restore = (times.save + times.restore) / times.depth, times.restore / times.depth
    few = max(times.save_few + times.restore_few - times.few * move, 0.0)
    unseen = max(times.chunk_idle - times.chunk, 0.0) / (times.chunk_tokens * times.idle)
    return replace(
        costs,
        restore_share=min(restore / (times.chunk_deep / times.chunk_tokens), 1.0),
        swap_from_tokens=move / unseen if unseen else NEVER,
        cells_per_run=round(few / move),
        spill_ns=1e9 * restore,
        idle_token_ns=1e9 * unseen,
        idle_step_ns=1e9 * max(times.step_idle - times.step, 0.0) / times.idle,
    )


def cpu_costs(model: Model, flash_attention: str, kernel_size: int) -> Costs:
    """Return the costs of a CPU.

    Rest: measured on real weights without flash attention, a single token is rounded differently; with K-quants up to
    seven are, by 1 at logits of 20. With flash attention (and on a GPU) no number of tokens makes reuse exact, and one
    token is enough for its logits.

    Tiles: at 1,024 cells 63 tokens take 550 ms, 64 tokens 91 ms. A tile attends over the cells of all requests in it: at
    4,100 cells, 3 tokens of 3 requests with 256 of a fourth's prompt take 344 ms, and apart 28 and 221 ms.
    """
    cpu = replace(CPU, pass_ns=PASS * model.num_parameters, row_ns=WEIGHT * model.num_parameters)
    if flash_attention == "off":
        return replace(cpu, rest=MIN_ROWS)
    width = model.attention_width
    if kernel_size < TILE:
        return cpu
    return replace(
        cpu,
        tile=TILE,
        token_ns=WEIGHT * model.num_layer_parameters,
        cell_ns=CELL * width,
        tile_cell_ns=TILE_CELL * width,
        apart_from_cells=PASS * model.num_parameters / (TILE_CELL * width) if width else NEVER,
    )
