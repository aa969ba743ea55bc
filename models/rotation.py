"""Moves the keys of cached tokens to other positions, and tests whether that is exact.

Rotary embeddings (Su et al. 2021, RoFormer) turn pairs of a key's numbers by angles that grow with the position. Rotary
embeddings do not turn V. A run is therefore moved by turning its keys by the angles of the distance. The angles of one
position are measured in the model itself, from the keys of one token at positions 0, 1, 2, 4, 8, ... The key at each further
position determines the angles twice as exactly. The measured angles include everything that affects the rotation: base,
scale, factors in a tensor, and YaRN. Layers may have different angles, or no rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from . import llama
from .kv_state import BLOCK, CELL, COUNT_AT, HEADER, Attention, StateLayout
from .model import Model

NORM, NEOX = llama.LLAMA_ROPE_TYPE_NORM, llama.LLAMA_ROPE_TYPE_NEOX
NUMBERS = {0: np.dtype(np.float32), 1: np.dtype(np.float16)}  # by ggml's type
TOLERANCE = 4e-3  # as a share of the largest number of a layer, since f16 is rounded twice
TOLERANCE_STEP = 2e-6  # further tolerance per position of distance, since llama.cpp computes angles as float32


@dataclass(frozen=True, slots=True)
class Rope:
    """How a key's numbers are paired.

    head: the size of a head, in numbers.
    turned: how many numbers of a head are rotated, starting with the first.
    neighbours: adjacent numbers are a pair. If `neighbours` is false, each number in the first half of the rotated numbers
    is paired with the number at the same place in the second half.
    """

    head: int
    turned: int
    neighbours: bool

    @classmethod
    def of(cls, model: Model) -> Rope | None:
        """Return how a model's keys are paired; None if its positions are of another kind."""
        kind, head, turned = model.rope
        if kind not in (NORM, NEOX) or not 0 < turned <= head or turned % 2:
            return None
        return cls(head, turned, neighbours=kind == NORM)

    def pairs(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return views of the first and the second numbers of all pairs, each (cells, heads, pairs).

        keys: (cells, width).
        """
        turned = keys.reshape(len(keys), -1, self.head)[:, :, : self.turned]
        if self.neighbours:
            return turned[:, :, 0::2], turned[:, :, 1::2]
        return turned[:, :, : self.turned // 2], turned[:, :, self.turned // 2 :]


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """Moves the runs of one context.

    angles: the angles of one position in radians, (layers, pairs), float64.
    """

    attention: Attention
    rope: Rope
    angles: np.ndarray

    def moved(self, run: np.ndarray, distance: int) -> np.ndarray:
        """Return a run (uint8) moved up by `distance` positions. Each move rounds the keys, so do not move a run twice."""
        run = run.copy()
        positions = self.positions(run)
        positions += np.int32(distance)
        for (kind, keys), angles in zip(self.tensors(run), self.angles, strict=False):
            self._turn(keys.view(NUMBERS[kind]).reshape(len(positions), -1), angles * distance)
        return run

    def positions(self, run: np.ndarray) -> np.ndarray:
        """Return a view (int32) of the positions of a run's cells, in the order of the run."""
        return run[HEADER : HEADER + CELL * _num_cells(run)].view(np.int32)[:: CELL // 4]

    def tensors(self, run: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield ggml's type and a view of the bytes of each tensor of a run, keys first."""
        return _blocks(self.attention, run)

    def _turn(self, keys: np.ndarray, angles: np.ndarray) -> None:
        """Turn the keys (cells, width) of a layer in place."""
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        numbers = keys.astype(np.float32)  # in one copy, since strided access takes twice as long
        first, second = self.rope.pairs(numbers)
        first[...], second[...] = first * cos - second * sin, first * sin + second * cos
        keys[...] = numbers


def why_unmovable(layout: StateLayout | None, rope: Rope | None) -> str:
    """Return why runs of this layout cannot be moved; empty if no reason is known."""
    if layout is None or not layout.attention or layout.recurrent is not None:
        return "its KV cannot be cut by positions"
    if layout.attention[1:]:
        return "a sliding window passes its KV"
    if rope is None:
        return "its positions are not rotary ones in one dimension"
    attention = layout.attention[0]
    blocks = attention.blocks
    keys = [(int.from_bytes(head[:4], "little"), size) for head, size in blocks[: len(blocks) // 2]]
    if attention.cell != CELL or any(kind not in NUMBERS for kind, _ in keys):
        return "its keys are neither f16 nor f32"
    if any(size % (rope.head * NUMBERS[kind].itemsize) for kind, size in keys):
        return "its keys are not whole heads"
    return ""


def measure(attention: Attention, rope: Rope, runs: Mapping[int, np.ndarray]) -> Rotation:
    """Measure the rotation.

    runs: a mapping from the positions 0, 1, 2, 4, ... to runs of one token. The token is always the same, and was computed
        alone at that position.
    """
    num_layers = len(attention.blocks) // 2
    angles = np.zeros((num_layers, rope.turned // 2))
    ladder = {at: [_complex(rope, *block) for block in _blocks(attention, runs[at])][:num_layers] for at in sorted(runs)}
    first = ladder.pop(0)
    for position, layers in ladder.items():
        for layer, keys in enumerate(layers):
            turned = (np.conj(first[layer]) * keys).sum(axis=(0, 1))
            angles[layer] += np.angle(turned * np.exp(-1j * position * angles[layer])) / position
    return Rotation(attention, rope, angles)


def is_same(attention: Attention, moved: np.ndarray, computed: np.ndarray, distance: int) -> bool:
    """Return whether a moved run equals, within rounding, the run that was computed at the new positions."""
    bound = TOLERANCE + TOLERANCE_STEP * distance
    for (kind, ours), (_, theirs) in zip(_blocks(attention, moved), _blocks(attention, computed), strict=True):
        if kind in NUMBERS:
            a, b = (block.view(NUMBERS[kind]).astype(np.float32) for block in (ours, theirs))
            if not np.abs(a - b).max() <= bound * np.abs(b).max():
                return False
    return True


def _complex(rope: Rope, kind: int, block: np.ndarray) -> np.ndarray:
    """Return the pairs of one token's keys as complex numbers, (1, heads, pairs)."""
    if kind not in NUMBERS:
        return np.empty(0)  # values of another type are not compared
    first, second = rope.pairs(block.view(NUMBERS[kind])[None])
    return first.astype(np.float64) + 1j * second.astype(np.float64)


def _blocks(attention: Attention, run: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the tensors of a run, keys first: ggml's type, and a view of the bytes."""
    count = _num_cells(run)
    at = HEADER + CELL * count + len(attention.lead)
    for head, size in attention.blocks:
        at += BLOCK
        yield int.from_bytes(head[:4], "little"), run[at : at + count * size]
        at += count * size


def _num_cells(run: np.ndarray) -> int:
    return int(run[:HEADER].view(np.int32)[COUNT_AT])


# ---- Selftest -----------------------------------------------------------------------------------------------------------
# Tests, at load, whether the runs of a context can be moved: computes one token at several positions.

STEPS = 15  # steps of the ladder of positions; fixed, since the angles must not depend on the number of cells
ComputeAlone = Callable[[int, Sequence[int]], list[np.ndarray]]
"""Computes a token at each of several positions, where it sees no other token. Returns the runs (uint8)."""


def find_rotation(model: Model, layout: StateLayout | None, num_cells: int, compute: ComputeAlone) -> Rotation | str:
    """Return the rotation of a context's runs, or the reason why they cannot be moved.

    A token that sees no other token has the same values at all positions, and its keys differ only by the rotation. The
    angles are measured with one token, and checked with another token at positions in between.

    num_cells: the number of cells in the pool; all positions are below it.
    """
    rope = Rope.of(model)
    if reason := why_unmovable(layout, rope):
        return reason
    assert layout is not None and rope is not None
    ladder = [0, *(1 << step for step in range(STEPS))]
    attention = layout.attention[0]
    runs = dict(zip(ladder, compute(model.num_vocab // 2, ladder), strict=True))
    rotation = measure(attention, rope, runs)
    between = [num_cells * share // 16 for share in (1, 3, 7, 15)]
    original, *computed = compute(model.num_vocab // 3, [0, *between])
    for distance, run in zip(between, computed, strict=True):
        if not is_same(attention, rotation.moved(original, distance), run, distance):
            return f"keys at position {distance} are no rotation of those at 0"
    return rotation
