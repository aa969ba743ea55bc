"""How much of a model goes where, and the search for the most that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


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


def search(wanted: Placement, concessions: Sequence[Concession], fits: Callable[[Placement], bool]) -> Placement | None:
    """Return the placement nearest to the wanted one that fits; None: not even the least does.

    Quantities are lowered in the order of the concessions, each wholly, until all fits. Then they are raised again in the
    opposite order, each as far as it fits.
    """
    found, lowered = wanted, []
    for concession in concessions:
        if fits(found):
            break
        found = replace(found, **{concession.name: min(concession.least, getattr(wanted, concession.name))})
        lowered.append(concession)
    if not fits(found):
        return None
    for concession in reversed(lowered):
        found = _raised(found, concession, getattr(wanted, concession.name), fits)
    return found


def _raised(found: Placement, concession: Concession, most: int, fits: Callable[[Placement], bool]) -> Placement:
    """Return a placement that fits with one quantity raised as far as it still fits, by halving."""
    if fits(whole := replace(found, **{concession.name: most})):
        return whole
    low, high = 0, -(-(most - concession.least) // concession.step)  # steps: the first fits, the second does not
    while high - low > 1:
        middle = (low + high) // 2
        tried = replace(found, **{concession.name: concession.least + middle * concession.step})
        if fits(tried):
            low, found = middle, tried
        else:
            high = middle
    return found
