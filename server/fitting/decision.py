"""What was chosen, and why, as lines for the log and `doctor` and as values for `/props`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from ...models.memory.breakdown import Use
from ...models.memory.placement import Placement
from .limits import MIB, Limit, mib


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A placement with the use of each device. error: llama.cpp's, where it could not count."""

    placement: Placement
    uses: tuple[Use, ...]
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The wanted placement and the chosen one. margin: bytes that stay free on each device. notes: what else to know.

    num_layers: with the output as one of them; 0: no GPU is there. has_experts: some of the layers are mixtures.
    """

    wanted: Counted
    chosen: Counted
    limits: dict[str, Limit]
    margin: int
    num_layers: int
    has_experts: bool
    notes: Sequence[str] = ()

    def lines(self) -> Iterator[str]:
        """Yield the account: limits, the wanted placement with what it lacks, the chosen one, the use of each device."""
        for name, limit in self.limits.items():
            yield f"memory of {name}: at most {mib(limit.most(self.margin))} ({limit.why(self.margin)})"
        if self.chosen.placement != self.wanted.placement:
            lacks = self.wanted.error or ", ".join(self.lacking(self.wanted.uses))
            yield f"wanted: {self.described(self.wanted.placement)}: {lacks}"
            yield f"fitted: {self.described(self.chosen.placement)}"
        else:
            yield f"fits as it is: {self.described(self.chosen.placement)}"
        yield from map(described_use, self.chosen.uses)
        yield from self.notes

    def lacking(self, uses: Sequence[Use]) -> Iterator[str]:
        """Yield a text for each device that lacks memory."""
        for use in uses:
            if use.device in self.limits and (excess := self.limits[use.device].excess(use, self.margin)) > 0:
                yield f"{use.device} lacks {ceil(excess / MIB):,} MiB"

    def described(self, placement: Placement) -> str:
        """Describe a placement in words."""
        parts = [f"{placement.cells:,} cells (-c)", f"{placement.lanes} lanes (-np)"]
        if self.num_layers:
            parts.append(f"{placement.gpu_layers} of {self.num_layers} layers on the GPU (-ngl)")
            if self.has_experts and placement.gpu_experts < self.num_layers - 1:
                on_host = self.num_layers - 1 - placement.gpu_experts
                parts.append(f"the experts of {on_host} of them in host memory (-ncmoe)")
        return ", ".join(parts)

    def shown(self) -> dict[str, object]:
        """Return the account for `/props`."""
        return {
            "devices": [
                {
                    "name": use.device,
                    "weights": use.weights,
                    "kv": use.kv,
                    "compute": use.compute,
                    "most": int(self.limits[use.device].most(self.margin)) if self._is_limited(use.device) else None,
                }
                for use in self.chosen.uses
            ],
            "decision": list(self.lines()),
        }

    def _is_limited(self, device: str) -> bool:
        return device in self.limits and self.limits[device].most(self.margin) != float("inf")


def described_use(use: Use) -> str:
    """Describe the use of a device in one line."""
    return f"{use.device}: {mib(use.total)}: weights {mib(use.weights)}, KV {mib(use.kv)}, compute buffer {mib(use.compute)}"
