"""How much of a model goes where, and the search for the most that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isinf


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The quantities that memory may limit.

    gpu_layers: with the output as one of them; gpu_experts: of these layers, those whose experts may be on a GPU. Both are
    counted from the last layer, and mean nothing without a GPU.
    """

    cells: int
    lanes: int
    gpu_layers: int = 0
    gpu_experts: int = 0


@dataclass(frozen=True, slots=True)
class Concession:
    """A quantity that may be lowered. name: a field of Placement. step: between its values, counted from the least."""

    name: str
    least: int
    step: int = 1


Excess = Callable[[Placement], float]
"""Bytes that a placement takes beyond what it may, on the device that lacks most; at most 0: it fits."""


def search(wanted: Placement, concessions: Sequence[Concession], excess: Excess) -> Placement | None:
    """Return the placement nearest to the wanted one that fits; None: not even the least does.

    Quantities are lowered in the order of the concessions, each wholly, until all fits. Then they are raised again in the
    opposite order, each as far as it fits.
    """
    found, lowered = wanted, []
    for concession in concessions:
        if excess(found) <= 0:
            break
        found = replace(found, **{concession.name: min(concession.least, getattr(wanted, concession.name))})
        lowered.append(concession)
    if excess(found) > 0:
        return None
    for concession in reversed(lowered):
        found = _raised(found, concession, getattr(wanted, concession.name), excess)
    return found


def _raised(found: Placement, concession: Concession, most: int, excess: Excess) -> Placement:
    """Return a placement that fits with one quantity raised as far as it still fits.

    Memory grows evenly with most quantities, so the first tries lie on a line: each may load a model anew. Tries that bring
    little are followed by a halving.
    """

    def at(step: int) -> Placement:
        return replace(found, **{concession.name: min(concession.least + step * concession.step, most)})

    low, high = 0, max(-(-(most - concession.least) // concession.step), 0)
    if (over := excess(at(high))) <= 0:
        return at(high)
    halves = False
    while high - low > 1:
        room, width = -excess(at(low)), high - low
        share = 0.5 if halves or isinf(over) else room / (room + over)
        tried = min(max(low + int(width * share), low + 1), high - 1)
        if (beyond := excess(at(tried))) <= 0:
            low = tried
        else:
            high, over = tried, beyond
        halves = high - low > width // 2
    return at(low)
