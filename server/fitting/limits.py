"""The memory that the served model may take on each device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ...models.hardware.device import devices
from ...models.hardware.memory import free_memory
from ...models.memory.breakdown import HOST, Use
from ..settings import Settings

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limit:
    """Of one device, in bytes. free: infinite where the device does not tell it. cap: --device-memory; 0: none.

    counts_weights: False for host memory behind a GPU: weights there are mapped from the file, and the system may drop and
    read them again.
    """

    free: float
    cap: int
    counts_weights: bool

    def most(self, margin: int) -> float:
        """Return the bytes that may be taken. margin: those that stay free where the cap does not hold."""
        return min(max(self.free - margin, 0), self.cap or math.inf)

    def excess(self, use: Use, margin: int) -> float:
        """Return the bytes by which a use is too large; at most 0 if it fits."""
        return use.total - (0 if self.counts_weights else use.weights) - self.most(margin)

    def why(self, margin: int) -> str:
        """Say where the most comes from."""
        if self.cap and self.most(margin) == self.cap:
            return "--device-memory"
        return "memory unknown" if math.isinf(self.free) else f"{mib(self.free)} free, {mib(margin)} stay so"


def limits(settings: Settings) -> dict[str, Limit]:
    """Return the limit of each GPU and of host memory, by ggml's name.

    --device-memory holds for GPUs, or for host memory where there is none.
    """
    gpus = [device for device in devices() if device.is_gpu]
    cap, others = settings.device_memory * MIB, beside(settings)
    found = {gpu.name: Limit((gpu.free - others) if gpu.total else math.inf, cap, True) for gpu in gpus}
    return found | {HOST: Limit(free_memory() - others, 0 if gpus else cap, not gpus)}


def beside(settings: Settings) -> int:
    """Return the bytes of the files that are loaded beside the served model: each of them needs about its size."""
    files = [settings.embedding_model, settings.rerank_model, *settings.lora.split(",")]
    files += [entry.rpartition(":")[0] for entry in settings.lora_scaled.split(",")]
    paths = [Path(file).expanduser() for file in files if file]
    return sum(path.stat().st_size for path in paths if path.is_file())


def mib(size: float) -> str:
    return f"{size / MIB:,.0f} MiB"
