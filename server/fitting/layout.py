"""`--repack auto`: the layout of weights that the CPU computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...models.hardware.cores import fast_cores
from ...models.hardware.device import devices
from ...models.hardware.repacking import is_faster_repacked
from ..settings import Settings


def with_layout(settings: Settings, path: Path, progress: Callable[[float], bool] | None = None) -> Settings:
    """Return the settings with the layout that is faster, where no promise of exact bits and no GPU is in the way.

    progress: as in `Model`.
    """
    if settings.repack != "auto":
        return settings
    may_change = settings.flash_attn != "off" and not any(device.is_gpu for device in devices())
    goes_on = (lambda: progress(0.0)) if progress else (lambda: True)
    is_faster = may_change and is_faster_repacked(path, settings.threads or fast_cores(), goes_on)
    return replace(settings, repack="on" if is_faster else "off")
