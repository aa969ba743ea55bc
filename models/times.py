"""The times of computing and copying tokens, measured or assumed, and the costs that follow from them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..slots.costs import NEVER, Costs
from .hardware import Device
from .model_files import cache_folder, keep

if TYPE_CHECKING:
    from .model import Model


_unkept: dict[Path, Times] = {}  # this process's times, if the cache directory cannot be written
NUMBERS = {"int": int, "float": float}
LARGEST = 1 << 16  # bytes of a file with times


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Measured times in seconds, and the numbers of tokens and cells for which they were measured. 0 means unknown.

    step, chunk, double: the times to compute one token, `chunk_tokens` tokens, and twice as many, in an empty pool.
    step_rows: the time to compute a batch of `rows` tokens with logits for each token, as for a draft.
    short_deep, chunk_deep: the times to compute one token less than a chunk, and a whole chunk, after `depth` tokens.
    step_idle, chunk_idle: the times `step` and `chunk`, measured while the pool has `idle` cells of other prompts.
    save, restore: the times to copy a run of `depth` tokens to host memory, and back.
    save_few, restore_few: the times to copy a run of `few` tokens to host memory, and back.
    save_scattered: the time to save `scattered` tokens whose cells are not adjacent.
    cuts: how many starts have run out of time without timing everything.
    """

    chunk_tokens: int
    step: float
    chunk: float = 0.0
    double: float = 0.0
    rows: int = 0
    step_rows: float = 0.0
    depth: int = 0
    short_deep: float = 0.0
    chunk_deep: float = 0.0
    few: int = 0
    save: float = 0.0
    restore: float = 0.0
    save_few: float = 0.0
    restore_few: float = 0.0
    scattered: int = 0
    save_scattered: float = 0.0
    idle: int = 0
    step_idle: float = 0.0
    chunk_idle: float = 0.0
    cuts: int = 0


@dataclass(frozen=True, slots=True)
class Subject:
    """Everything that times depend on: the device, the build of llama.cpp, the shape of the model, and the settings."""

    device: list[object]
    engine: list[object]
    model: list[object]
    settings: list[object]


def kept_times(subject: Subject) -> Times | None:
    """Return the stored times of a subject; None if there are none, or if they cannot be read."""
    place = _place(subject)
    return _read(place)[1] or _unkept.get(place)


def keep_times(subject: Subject, times: Times) -> None:
    """Store times in the user's cache directory. Without a cache directory, the times last as long as this process."""
    place = _place(subject)
    try:
        keep(place, json.dumps(asdict(subject) | {"times": asdict(times)}, indent=1))
    except OSError:
        _unkept[place] = times


def times_on(device: Device) -> Iterator[tuple[str, Times]]:
    """Yield the description of each model that was timed on a device, and the times."""
    for path in sorted(_folder().glob("*.json")):
        found, times = _read(path)
        if times is not None and found.get("device") == identify(device):
            yield str(found["model"][0]), times


def identify(device: Device) -> list[object]:
    return [device.name, device.description, device.total]


def summarize(times: Times) -> str:
    """Return the times in one line."""
    line = f"a token {1e3 * times.step:.2f} ms" if times.step else "nothing, since a token takes too long"
    if times.chunk:
        line += f", {times.chunk_tokens} tokens {1e3 * times.chunk:.2f} ms"
    if times.save:
        line += f", {times.depth} tokens to host memory {1e3 * times.save:.2f} ms and back {1e3 * times.restore:.2f} ms"
    if times.scattered:
        line += f", {times.scattered} scattered ones to host memory {1e3 * times.save_scattered:.2f} ms"
    if times.idle:
        line += f", {1e9 * max(times.step_idle - times.step, 0.0) / times.idle:.0f} ns a step for an idle cell"
    return line


def _read(path: Path) -> tuple[dict, Times | None]:
    """Return the content of a file, and its times. The times are None if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        if not path.is_file():  # a pipe would wait for a writer
            return {}, None
        with path.open("rb") as file:
            found = json.loads(file.read(LARGEST))
        subject = Subject(**{field.name: list(found[field.name]) for field in fields(Subject)})
        str(subject.model[0])
        kept = {field.name: 0 for field in fields(Times)} | found["times"]
        numbers = {field.name: NUMBERS[str(field.type)](kept[field.name]) for field in fields(Times)}
        if numbers["chunk_tokens"] and all(math.isfinite(number) and number >= 0 for number in numbers.values()):
            return found, Times(**numbers)
    return {}, None


def _folder() -> Path:
    return cache_folder() / "times"


def _place(subject: Subject) -> Path:
    name = hashlib.blake2b(json.dumps(asdict(subject)).encode(), digest_size=16).hexdigest()
    return _folder() / f"{name}.json"


# ---- Costs --------------------------------------------------------------------------------------------------------------
# The costs of a CPU follow from measured constants, except for tiles. The costs of other devices follow from times that are
# measured on this machine.
#
# No other module contains a measured constant (tests/models/test_costs.py). The constants were measured with the bench
# model (114 M weights) on 2 CPU cores. Only their ratios count, since another CPU is faster or slower in all of them. The
# exception is attention: its token by token kernel is six times as fast on some CPUs, so `models/learning.py` has it timed
# at a model's first start. Moves and idle cells were measured by the bench `residency` of a14b74a. Other devices differ too
# much, so all their work is timed.

MIN_ROWS = 8  # with so many tokens or more, every CPU kernel rounds a token as in any larger batch
MIN_ROWS_OF_DEVICE = 9  # likewise for CUDA (MMVQ_MAX_BATCH_SIZE) and Vulkan (mul_mat_vec_max_cols)
MIN_ROWS_OF_BOTH = 32  # with so many tokens or more, a card also computes with the CPU's weights (op_offload)
TILE = 64  # query tokens (GGML_FA_TILE_Q): with fewer, the CPU's flash attention computes token by token, cell by cell
CELL = 0.83  # ns per token, for each cell that the token sees and each number of the heads' width in all layers
TILE_CELL = 3.5  # ns per tile of tokens, likewise for each cell that any of its tokens sees
WEIGHT = 0.0126  # ns per further token in a batch, for each weight of the layers
FAR = 10  # a ratio of times that attention and idle cells cannot cause
CLEARLY = 1.2  # a ratio of times above the noise of a timing
NOISE = 0.05  # the noise of a timing, as a share of a chunk's time
PASS = 0.1  # ns per further batch, for each weight, since a batch reads all weights

CPU = Costs(
    chunk=64,
    background_step=64,
    background_ns=0.0,  # a new request aborts the step
    min_shared=32,  # half a chunk; chosen, not measured
    restore_share=0.01,  # restoring 200 tokens takes 0.4 ms, computing them 170 ms
    swap_from_tokens=50,  # a token skips an unseen cell in 45 to 100 ns; moving the cell away and back takes 2.4 us
    cells_per_run=50,
    spill_ns=0.0,  # idle KV is always offloaded, since skipping its cells costs far more
)
"""The costs of a CPU before the model is known. `cpu_costs` adds the times that depend on the model, and the tiles."""

OTHER = replace(CPU, swap_from_tokens=NEVER, spill_ns=NEVER, background_ns=40e6)
"""The costs of a device other than the CPU, before it is timed.

Idle KV is not offloaded when a request starts, since copies to host memory may take long. Background steps may take 40 ms
(chosen, not measured). llama.cpp aborts batches only on the CPU, so on other devices a new request waits for the end of the
step."""


def costs_of(model: Model, *, flash_attention: str, kernel_size: int) -> Costs:
    """Return the costs of a model on its device before the device is timed.

    flash_attention: on, off or auto.
    kernel_size: the most tokens that a kernel computes at once.
    """
    costs = cpu_costs(model, flash_attention, kernel_size) if model.device is None else OTHER
    return replace(costs, recompute_last=min_rows(model)) if flash_attention == "off" else costs


def min_rows(model: Model) -> int:
    """Return the size of the smallest batch that rounds its tokens as all larger batches do.

    Without flash attention, smaller batches round their tokens differently.
    """
    if model.is_on_device:
        return MIN_ROWS_OF_DEVICE
    return MIN_ROWS_OF_BOTH if model.split.devices() else MIN_ROWS


def without_contradictions(times: Times) -> Times:
    """Return the times of a device, with 0 in place of times that contradict others.

    Such a time includes more than the work itself: for example, a kernel was compiled for another batch size, or another
    program used the device.
    """
    wrong: dict[str, float] = {}
    if times.double > 3 * times.chunk:
        wrong["double"] = 0.0
    if times.step_rows > 2 * times.rows * times.step:
        wrong |= dict.fromkeys(("rows", "step_rows"), 0)
    if times.chunk_deep > FAR * times.chunk or times.short_deep > FAR * max(times.chunk, times.chunk_tokens * times.step):
        wrong |= dict.fromkeys(("short_deep", "chunk_deep"), 0.0)
    if times.save_few > 2 * times.save > 0 or times.restore_few > 2 * times.restore > 0:
        wrong |= dict.fromkeys(("save", "restore", "save_few", "restore_few"), 0.0)
    if times.step_idle > FAR * times.step or times.chunk_idle > FAR * times.chunk:
        wrong |= dict.fromkeys(("idle", "step_idle", "chunk_idle"), 0)
    return replace(times, **wrong)


def timed_costs(costs: Costs, times: Times) -> Costs:
    """Return the costs of a device other than the CPU, from its times. If a time is unknown, its cost stays as it is.

    If a batch of one token less than a chunk takes clearly longer than the chunk, the device's attention computes tiles, as
    on the CPU. If attention computes tiles, the times after `depth` tokens give the costs of cells. `apart_from_cells`
    becomes the number of cells at which the attention of a tile takes as long as a batch of one token. Saving idle KV costs
    nothing, since it happens in idle time. `spill_ns` is therefore only the time to restore idle KV.
    """
    if not times.chunk:  # not timed: at worst a chunk takes as long as its tokens one by one
        return replace(costs, row_ns=1e9 * times.step, token_ns=1e9 * times.step)
    size = times.chunk_tokens
    token = max(times.double - times.chunk, 0.0) / size if times.double else times.chunk / size
    row = max(times.step_rows - times.step, 0.0) / (times.rows - 1) if times.rows > 1 else token
    costs = replace(costs, pass_ns=1e9 * max(times.step - row, 0.0), row_ns=1e9 * row, token_ns=1e9 * token)
    if times.depth and times.short_deep > CLEARLY * max(times.chunk_deep, times.chunk):
        per_tile_cell = max(times.chunk_deep - times.chunk, 0.0) / times.depth
        costs = replace(
            costs,
            tile=size,
            cell_ns=1e9 * max(times.short_deep - times.chunk, 0.0) / ((size - 1) * times.depth),
            tile_cell_ns=1e9 * per_tile_cell,
            apart_from_cells=times.step / per_tile_cell if per_tile_cell else NEVER,
        )
    computed = (times.chunk_deep or times.chunk) / size
    if times.scattered and times.few:
        scattered = max(times.save_scattered / times.scattered - times.save_few / times.few, 0.0)
        costs = replace(costs, scattered_tokens=scattered / computed)
    has_moves = times.depth and times.few and times.save and times.save_few
    return _with_moves(costs, times, computed) if has_moves else costs


def _with_moves(costs: Costs, times: Times, computed: float) -> Costs:
    """Set the costs of moves to host memory and back. If idle cells were timed, set their costs, too.

    computed: the seconds to compute a token.
    """
    move, restore = (times.save + times.restore) / times.depth, times.restore / times.depth
    few = max(times.save_few + times.restore_few - times.few * move, 0.0)
    costs = replace(costs, restore_share=min(restore / computed, 1.0), cells_per_run=round(few / move))
    if not times.idle:
        return costs
    unseen = max(times.chunk_idle - times.chunk, 0.0) / (times.chunk_tokens * times.idle)
    return replace(
        costs,
        swap_from_tokens=move / unseen if unseen else NEVER,
        spill_ns=1e9 * restore,
        idle_token_ns=1e9 * unseen,
        idle_step_ns=1e9 * max(times.step_idle - times.step, 0.0) / times.idle,
    )


def timed_tiles(costs: Costs, times: Times) -> Costs:
    """Return the costs of a CPU from measured times of its tiles. All other costs keep their ratio to `token_ns`.

    A slow model is timed with few tokens in the pool, where attention may take less time than the noise of a timing. If
    attention takes less time than the noise, its costs keep their assumed ratio to `token_ns`, but the noise is their upper
    limit.
    """
    token, noise = 1e9 * (times.double - times.chunk) / times.chunk_tokens, NOISE * times.chunk
    if token <= 0 or not times.depth or times.chunk_tokens != costs.tile:
        return costs
    scale = token / costs.token_ns
    of_tiles, alone = times.chunk_deep - times.chunk, times.short_deep - times.chunk
    tile_cell = 1e9 * max(of_tiles, noise) / times.depth
    cell = 1e9 * max(alone, noise) / ((times.chunk_tokens - 1) * times.depth)
    if of_tiles < noise:
        tile_cell = min(tile_cell, scale * costs.tile_cell_ns)
    if alone < noise:
        cell = min(cell, scale * costs.cell_ns)
    return replace(
        costs,
        token_ns=token,
        cell_ns=cell,
        tile_cell_ns=tile_cell,
        apart_from_cells=scale * costs.pass_ns / tile_cell if tile_cell else NEVER,
        pass_ns=scale * costs.pass_ns,
        row_ns=scale * costs.row_ns,
    )


def cpu_costs(model: Model, flash_attention: str, kernel_size: int) -> Costs:
    """Return the assumed costs of a model on a CPU, before the model is timed.

    Rounding was measured on real weights. Without flash attention, a single token is rounded differently from a token in a
    large batch. With K-quants, tokens in batches of up to seven are also rounded differently from tokens in a large batch:
    logits of about 20 then differ by 1. With flash attention, reuse is never exact, however many tokens are recomputed. With
    flash attention, only the last token is therefore recomputed, because its logits are needed.

    Whole tiles are fast: at 1,024 cells, the 64 tokens of a whole tile take 91 ms, but 63 tokens take 550 ms. A tile attends
    to the cells of all requests in it. At 4,100 cells, a step of 3 requests with one token each takes 28 ms, and a step of
    256 prompt tokens of a fourth request takes 221 ms. One step with all 259 tokens of these four requests takes 344 ms.
    """
    cpu = replace(CPU, pass_ns=PASS * model.num_parameters, row_ns=WEIGHT * model.num_parameters)
    width = model.attention_width
    if flash_attention == "off" or kernel_size < TILE:
        return cpu
    return replace(
        cpu,
        tile=TILE,
        token_ns=WEIGHT * model.num_layer_parameters,
        cell_ns=CELL * width,
        tile_cell_ns=TILE_CELL * width,
        apart_from_cells=PASS * model.num_parameters / (TILE_CELL * width) if width else NEVER,
    )
