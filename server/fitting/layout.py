"""`--repack auto`: the layout of weights that the CPU computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...models.hardware.cores import fast_cores
from ...models.hardware.device import devices
from ...models.hardware.repacking import is_faster_repacked
from ..settings import Settings


def with_layout(settings: Settings, path: Path) -> Settings:
    """Return the settings with the layout that is faster, where no promise of exact bits and no GPU is in the way."""
    if settings.repack != "auto":
        return settings
    may_change = settings.flash_attn != "off" and not any(device.is_gpu for device in devices())
    is_faster = may_change and is_faster_repacked(path, settings.threads or fast_cores())
    return replace(settings, repack="on" if is_faster else "off")
