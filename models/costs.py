"""The measured constants, each with its device. No other module contains one (tests/models/test_costs.py).

The times are of the bench model (114 M weights) on 2 CPU cores. Only their ratios count: another CPU is faster or slower in
all of them. `slotcache bench residency` measures moves and idle cells again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..slots.costs import NEVER, Costs

if TYPE_CHECKING:
    from .model import Model

MIN_ROWS = 8  # from this many tokens on, every CPU kernel rounds a token as it would in a larger batch
TILE = 64  # query tokens: GGML_FA_TILE_Q, below which the CPU's flash attention takes token by token, cell by cell
CELL = 0.83  # ns: a token, a cell it sees and a number of the heads' width in all layers, token by token
TILE_CELL = 3.5  # ns: the same for a whole tile of tokens, and a cell that any of them sees
WEIGHT = 0.0126  # ns: a token more in a batch, and a weight of the layers
PASS = 0.1  # ns: a batch of its own, and a weight: all of them are read once more

CPU = Costs(
    chunk=64,
    background_step=64,
    rest=1,
    min_shared=32,  # half a chunk: chosen, not timed
    restore_share=0.01,  # 0.4 ms against 170 ms for 200 tokens
    apart_from_cells=NEVER,
    swap_from_tokens=50,  # a token passes over an unseen cell in 45 to 100 ns; moving it away and back takes 2.4 us
    cells_per_run=50,
    tile=1,
    token_ns=0.0,
    cell_ns=0.0,
    tile_cell_ns=0.0,
)
"""A CPU with flash attention, before the model is known: tiles are added by `cpu_costs`."""

GPU = replace(CPU, swap_from_tokens=NEVER)
"""No GPU was timed. Swapping is off, since the way to host memory is long. Padding and steps apart are off, since they serve
the tiles of the CPU's flash attention. The other values are the CPU's and stand in until a GPU is timed."""


def costs_of(model: Model, *, flash_attention: str, kernel_size: int, on_gpu: bool) -> Costs:
    """Return the costs of a model here. flash_attention: on, off or auto. kernel_size: tokens of a kernel."""
    if on_gpu:
        return replace(GPU, rest=MIN_ROWS) if flash_attention == "off" else GPU
    return cpu_costs(model, flash_attention, kernel_size)


def cpu_costs(model: Model, flash_attention: str, kernel_size: int) -> Costs:
    """Return the costs of a CPU.

    Rest: measured on real weights without flash attention, a single token is rounded differently; with K-quants up to
    seven are, by 1 at logits of 20. With flash attention (and on a GPU) no number of tokens makes reuse exact, and one
    token is enough for its logits.

    Tiles: at 1,024 cells 63 tokens take 550 ms, 64 tokens 91 ms. A tile attends over the cells of all requests in it: at
    4,100 cells, 3 tokens of 3 requests with 256 of a fourth's prompt take 344 ms, and apart 28 and 221 ms.
    """
    if flash_attention == "off":
        return replace(CPU, rest=MIN_ROWS)
    width = model.attention_width
    if kernel_size < TILE:
        return CPU
    return replace(
        CPU,
        tile=TILE,
        token_ns=WEIGHT * model.num_layer_parameters,
        cell_ns=CELL * width,
        tile_cell_ns=TILE_CELL * width,
        apart_from_cells=PASS * model.num_parameters / (TILE_CELL * width) if width else NEVER,
    )
