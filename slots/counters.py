"""The scheduler's totals since its start, for /metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from .request import Request, Reused
from .tree import PrefixTree

FROM_HOST = ("host", "disk")  # sources whose KV is moved to the device: that takes time, too


@dataclass(slots=True)
class Counters:
    """Totals. tree: knows the time of a token. cached_tokens: prompt tokens not computed again, by origin (own, fork, host,
    disk, snapshot).
    """

    tree: PrefixTree
    steps: int = 0
    spans: int = 0  # of all steps: one for each request that a step computes
    prefilled_tokens: int = 0
    idle_tokens: int = 0  # prompt tokens of background requests
    generated_tokens: int = 0
    forced_tokens: int = 0  # of these, the ones that a grammar left no choice about: they were not sampled
    preemptions: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)

    def count_step(self, num_spans: int) -> None:
        self.steps += 1
        self.spans += num_spans

    def count_forced(self) -> None:
        """Count a generated token that was not sampled."""
        self.generated_tokens += 1
        self.forced_tokens += 1

    def count_cached(self, request: Request, source: str, tokens: int) -> None:
        """Count prompt tokens that a request need not compute, behind those that have KV.

        Only at its first admission, and only if it has a client.
        """
        if request.num_preempted or request.background:
            return
        start = max(request.cached, request.computed)
        if tokens:
            request.reused.append(Reused(start, start + tokens, source, self._seconds(start, tokens, source)))
        request.cached += tokens
        request.sources[source] = request.sources.get(source, 0) + tokens
        self.cached_tokens[source] = self.cached_tokens.get(source, 0) + tokens

    def _seconds(self, start: int, tokens: int, source: str) -> float:
        """Return the time that reuse saves: that of computing the tokens, less that of bringing them back."""
        if not self.tree.profile.is_learnt:
            return 0.0
        share = 1 - self.tree.costs.restore_share if source in FROM_HOST else 1.0
        return share * self.tree.profile.seconds(start, tokens)
