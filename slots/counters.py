"""The scheduler's totals since its start, for /metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from .prefix_tree import PrefixTree
from .request import Job
from .reuse import ON_DEVICE, ReusedSpan


@dataclass(slots=True)
class Counters:
    """Totals. tree: knows the time of a token. cached_tokens: prompt tokens not computed again, by origin."""

    tree: PrefixTree
    steps: int = 0
    spans: int = 0  # of all steps: one for each request that a step computes
    prefilled_tokens: int = 0
    idle_tokens: int = 0  # prompt tokens of background requests
    generated_tokens: int = 0
    forced_tokens: int = 0  # of these, the ones that a grammar left no choice about: they were not sampled
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of these, the ones that were the sampler's choice
    preemptions: int = 0
    restarts: int = 0  # of requests, behind a step that failed
    cached_tokens: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def prompt_tokens(self) -> int:
        """Computed tokens of all prompts."""
        return self.prefilled_tokens + self.idle_tokens

    def count_step(self, num_spans: int) -> None:
        self.steps += 1
        self.spans += num_spans

    def count_forced(self) -> None:
        """Count a generated token that was not sampled."""
        self.generated_tokens += 1
        self.forced_tokens += 1

    def count_draft(self, num_tokens: int) -> None:
        """Count a draft that was checked."""
        self.drafts += 1
        self.drafted_tokens += num_tokens

    def count_accepted(self) -> None:
        """Count a generated token that was chosen behind a drafted one, in the same step."""
        self.generated_tokens += 1
        self.accepted_tokens += 1

    def count_cached(self, job: Job, source: str, start: int, tokens: int) -> None:
        """Count prompt tokens from position `start` on that a request need not compute.

        Only at its first admission, and only if it has a client.
        """
        if job.reuse.num_preempted or job.request.background:
            return
        if tokens:
            job.reuse.spans.append(ReusedSpan(start, start + tokens, source, self._seconds(start, tokens, source)))
        self.cached_tokens[source] = self.cached_tokens.get(source, 0) + tokens

    def _seconds(self, start: int, tokens: int, source: str) -> float:
        """Return the time that reuse saves: that of computing the tokens, less that of bringing them back."""
        if not self.tree.profile.is_learnt:
            return 0.0
        share = 1.0 if source in ON_DEVICE else 1 - self.tree.costs.restore_share
        return share * self.tree.profile.seconds(start, tokens)
