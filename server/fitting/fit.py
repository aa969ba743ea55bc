"""`--fit`: the most of the wanted context, lanes and layers that fits in the memory that is free."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ...models.errors import ModelError, NotCounted
from ...models.memory.breakdown import HOST
from ...models.memory.placement import Concession, Placement, search
from ..settings import Settings
from .context import num_cells
from .decision import Counted, Decision
from .limits import MIB, limits, mib
from .measure import Measure

logger = logging.getLogger("slotcache")
CELLS = 256  # llama.cpp pads the pool to a multiple of it
SHARES = (1, 0.5, 0.25, 0.125, 0)  # of --fit-target that stay free, where no more can
READ_AGAIN = "the weights are larger than the free memory: the system reads them again and again, which is slow"
DEFAULTS = Settings()


def fit(settings: Settings, path: Path) -> tuple[Settings, Decision | None]:
    """Return the settings with which the model fits, and the decision; None for an encoder, or where nothing is told.

    What a flag gives stays as it is given. With --fit off nothing changes. Raises ModelError where the model does not fit.
    """
    measure = Measure(settings, path)
    try:
        if not measure.model.can_chat:
            return settings, None
        fitting = Fitting(settings, measure)
        decision = fitting.decide()
        return fitting.placed(decision.chosen.placement), decision
    except NotCounted as error:
        logger.warning("%s", error)
        return settings, None
    finally:
        measure.close()


class Fitting:
    """The search for one model on this machine."""

    def __init__(self, settings: Settings, measure: Measure) -> None:
        self.settings, self.measure, model = settings, measure, measure.model
        self.name, self.num_layers, self.has_experts = model.path.name, model.num_layers, model.num_expert_layers > 0
        on_gpu = self.num_layers + 1 if settings.gpu_layers < 0 else min(settings.gpu_layers, self.num_layers + 1)
        self.wanted = Placement(
            cells=num_cells(settings, model),
            lanes=settings.parallel,
            gpu_layers=on_gpu,
            gpu_experts=max(self.num_layers - settings.n_cpu_moe, 0),
        )
        self.count(self.wanted)  # a device's own needs, such as CUDA's, are no longer free from here on
        self.limits = limits(settings)
        self.has_gpu = len(self.limits) > 1

    def decide(self) -> Decision:
        """Choose a placement. Raises ModelError: none fits."""
        for margin, counts_weights, note in self._rungs():
            self.limits[HOST] = replace(self.limits[HOST], counts_weights=counts_weights)
            may = list(self._concessions()) if self.settings.fit else []
            chosen = search(self.wanted, may, lambda placement, margin=margin: self.excess(placement, margin))
            if chosen is not None:
                return self._decision(chosen, margin, note)
        raise ModelError(self._complaint())

    def _rungs(self) -> Iterator[tuple[int, bool, str]]:
        """Yield what must hold: a margin, whether weights in host memory count; and a note on what no longer holds."""
        target = self.settings.fit_target * MIB if self.settings.fit else 0
        for share in SHARES if target else (0,):
            note = f"of --fit-target only {mib(target * share)} stay free" if target and share < 1 else ""
            yield int(target * share), not self.has_gpu, note
        host = self.limits[HOST]
        if not self.has_gpu and not host.cap:
            for share in (0.5, 0):
                yield int(max(host.free, 0) * share), False, READ_AGAIN

    def _concessions(self) -> Iterator[Concession]:
        """Yield what may be lowered, the least painful first: all that no flag gives."""
        given, unset = self.settings, DEFAULTS
        is_given = {
            "cells": given.ctx_size != unset.ctx_size,
            "lanes": given.parallel != unset.parallel,
            "gpu_experts": bool(given.n_cpu_moe or given.cpu_moe or given.override_tensor),
            "gpu_layers": given.gpu_layers != unset.gpu_layers,
        }
        return (concession for concession in self._possible(given.fit_ctx) if not is_given[concession.name])

    def _possible(self, least_cells: int) -> Iterator[Concession]:
        """Yield all that could be lowered on this machine."""
        yield Concession("cells", least_cells, CELLS)
        yield Concession("lanes", 1)
        if self.has_gpu and self.has_experts:
            yield Concession("gpu_experts", 0)
        if self.has_gpu:
            yield Concession("gpu_layers", 0)

    def placed(self, placement: Placement) -> Settings:
        """Return the settings for a placement. Flags that it does not change stay as they are."""
        changed: dict[str, int] = {"ctx_size": placement.cells, "parallel": placement.lanes}
        if placement.gpu_layers != self.wanted.gpu_layers:
            changed["gpu_layers"] = placement.gpu_layers
        if placement.gpu_experts != self.wanted.gpu_experts:
            changed["n_cpu_moe"] = self.num_layers - placement.gpu_experts
        return replace(self.settings, **changed)

    def excess(self, placement: Placement, margin: int) -> float:
        """Return the bytes that the device which lacks most lacks; at most 0: all fits."""
        counted = self.count(placement)
        known = [self.limits[use.device].excess(use, margin) for use in counted.uses if use.device in self.limits]
        return math.inf if counted.error else max(known, default=0)

    def count(self, placement: Placement) -> Counted:
        try:
            return Counted(placement=placement, uses=self.measure(self.placed(placement)))
        except NotCounted:
            raise
        except ModelError as error:
            return Counted(placement=placement, uses=(), error=str(error))

    def _decision(self, chosen: Placement, margin: int, note: str) -> Decision:
        return Decision(
            wanted=self.count(self.wanted),
            chosen=self.count(chosen),
            limits=self.limits,
            margin=margin,
            num_layers=self.num_layers + 1 if self.has_gpu else 0,
            has_experts=self.has_experts,
            notes=[note] if note else [],
        )

    def _complaint(self) -> str:
        """Say in one line what is missing, and which flags would help."""
        wanted = self._decision(self.wanted, 0, "")
        would = self._any_that_fits()
        if wanted.wanted.error and would is None:
            return wanted.wanted.error
        lacks = wanted.wanted.error or ", ".join(
            f"{text} of {mib(use.total)} (weights {mib(use.weights)}, KV {mib(use.kv)}, compute buffer {mib(use.compute)})"
            for use in wanted.wanted.uses
            for text in wanted.lacking([use])
        )
        return f"{self.name} does not fit with {wanted.described(self.wanted)}: {lacks}; {self._advice(would)}"

    def _any_that_fits(self) -> Placement | None:
        """Search without regard to flags, down to --fit-ctx and then below it."""
        for cells in (self.settings.fit_ctx, CELLS):
            if found := search(self.wanted, list(self._possible(cells)), lambda placement: self.excess(placement, 0)):
                return found
        return None

    def _advice(self, would: Placement | None) -> str:
        if would is None:
            remedies = "it takes a smaller file, more memory, or a higher --device-memory"
            return f"{CELLS} cells and a lane do not fit either: {remedies}"
        flags = {
            "-c": (would.cells, self.wanted.cells),
            "-np": (would.lanes, self.wanted.lanes),
            "-ngl": (would.gpu_layers, self.wanted.gpu_layers),
            "-ncmoe": (self.num_layers - would.gpu_experts, self.num_layers - self.wanted.gpu_experts),
        }
        changed = " ".join(f"{flag} {new}" for flag, (new, old) in flags.items() if new != old)
        can_choose = not self.settings.fit and would.cells >= min(self.settings.fit_ctx, self.wanted.cells)
        return f"it fits with {changed}" + (", or --fit chooses" if can_choose else "")
