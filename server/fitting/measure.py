"""What settings take, counted by llama.cpp without taking it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...models.context import Context
from ...models.errors import ModelError
from ...models.memory.breakdown import HOST, Use, breakdown
from ...models.memory.overrides import EXPERTS, Override, experts_on_host, parse_overrides
from ...models.model import Model
from ..settings import Settings
from .context import context_settings

MOST_COUNTED = 1 << 20
"""Cells of a context that is counted. Each cell takes time and memory even so; the use of more cells lies on a line."""


def open_model(
    settings: Settings, path: Path, progress: Callable[[float], bool] | None = None, *, is_simulated: bool = False
) -> Model:
    """Load the served model. progress: as in `Model`. Raises ModelError."""
    every = (Override(EXPERTS, HOST),) if settings.cpu_moe else ()
    return Model(
        path,
        settings.gpu_layers,
        progress,
        repack=settings.repack == "on",
        may_rest=settings.sleep_after > 0 and not is_simulated,
        overrides=(*parse_overrides(settings.override_tensor), *every, *experts_on_host(settings.n_cpu_moe)),
        is_simulated=is_simulated,
    )


class Measure:
    """Simulated models, of which the last one stays open: each of its contexts is counted in milliseconds."""

    def __init__(self, settings: Settings, path: Path) -> None:
        self._path, self._settings = path, settings
        self._known: dict[Settings, tuple[Use, ...] | ModelError] = {}
        self.model = open_model(settings, path, is_simulated=True)

    def close(self) -> None:
        self.model.close()

    def __call__(self, settings: Settings) -> tuple[Use, ...]:
        """Return the use of each device. Raises ModelError where llama.cpp cannot make the context, for any reason."""
        if settings.ctx_size <= MOST_COUNTED:
            return self._counted(settings)
        half, most = (self._counted(replace(settings, ctx_size=cells)) for cells in (MOST_COUNTED // 2, MOST_COUNTED))
        steps = (settings.ctx_size - MOST_COUNTED) / (MOST_COUNTED // 2)
        return tuple(_further(one, other, steps) for one, other in zip(half, most, strict=True))

    def _counted(self, settings: Settings) -> tuple[Use, ...]:
        if settings not in self._known:
            try:
                self._known[settings] = self._count(settings)
            except ModelError as error:
                self._known[settings] = error
        found = self._known[settings]
        if isinstance(found, ModelError):
            raise found
        return found

    def _count(self, settings: Settings) -> tuple[Use, ...]:
        if (settings.gpu_layers, settings.n_cpu_moe) != (self._settings.gpu_layers, self._settings.n_cpu_moe):
            self.model.close()
            self.model, self._settings = open_model(settings, self._path, is_simulated=True), settings
        context = Context(self.model, context_settings(settings, self.model))
        try:
            return breakdown(context.handle)
        finally:
            context.close()


def _further(one: Use, other: Use, steps: float) -> Use:
    """Return the use of a context with more cells: from one use to the other is a step, and it is `steps` steps further."""
    kv, compute = (int(b + (b - a) * steps) for a, b in ((one.kv, other.kv), (one.compute, other.compute)))
    return replace(other, kv=kv, compute=compute)
