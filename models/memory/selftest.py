"""Whether the runs of a context can be moved, found out at load by computing one token at several positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..model import Model
from ..state import Layout
from .rotation import Rope, Rotation, is_same, measure, why_unmovable

STEPS = 15  # of the ladder, whatever the number of cells: the angles must not depend on it
ComputeAlone = Callable[[int, Sequence[int]], list[np.ndarray]]
"""Computes a token at each of some positions, where it sees no other token; returns the runs (uint8)."""


def find_rotation(model: Model, layout: Layout | None, num_cells: int, compute: ComputeAlone) -> Rotation | str:
    """Return the rotation of a context's runs, or why they cannot be moved. num_cells: positions are below.

    A token that sees no other has the same values at all positions, and keys that differ by the rotation alone. The angles
    are measured with one token, and hold for another one at positions in between.
    """
    rope = Rope.of(model)
    if reason := why_unmovable(layout, rope):
        return reason
    assert layout is not None and layout.attention is not None and rope is not None
    ladder = [0, *(1 << step for step in range(STEPS))]
    attention = layout.attention
    runs = dict(zip(ladder, compute(model.num_vocab // 2, ladder), strict=True))
    rotation = measure(attention, rope, runs)
    between = [num_cells * share // 16 for share in (1, 3, 7, 15)]
    original, *computed = compute(model.num_vocab // 3, [0, *between])
    for distance, run in zip(between, computed, strict=True):
        if not is_same(attention, rotation.moved(original, distance), run, distance):
            return f"keys at position {distance} are no rotation of those at 0"
    return rotation
