"""What the scheduler has done since it started, for /metrics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Totals. cached_tokens: prompt tokens not computed again, by where they came from (own, fork, host)."""

    steps: int = 0
    prefilled_tokens: int = 0
    idle_tokens: int = 0  # prompt tokens computed for requests in the background
    generated_tokens: int = 0
    preemptions: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)
