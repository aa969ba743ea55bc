"""The scheduler's totals since its start, for /metrics."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from .job import Job
from .prefix_tree import PrefixTree
from .reuse import ON_DEVICE, ReusedSpan

HELP, NAME = "help", "name"  # in the metadata of a field


def total(help: str, name: str = "") -> int:
    """Declare a total for /metrics.

    help: its description there.
    name: its name there, if that is not the field's name.
    """
    return field(default=0, metadata={HELP: help, NAME: name})


@dataclass(slots=True)
class Counters:
    """The scheduler's totals.

    tree: the tree whose profile knows the time to compute tokens.
    cached_tokens: the number of reused prompt tokens, by origin (`Source`).
    """

    tree: PrefixTree
    steps: int = total("Steps of the engine, each a batch of tokens")
    spans: int = total("Requests computed in steps, each counted once per step")
    late_starts: int = total("Requests that waited for the running prompts although a slot was idle")
    restarts: int = total("Times a request started again because a step failed before its first token", "restarted_requests")
    prefilled_tokens: int = total("Prompt tokens computed for requests", "prompt_tokens")
    idle_tokens: int = total(
        "Prompt tokens computed in idle time, for a next turn or for a client that has disconnected", "idle_prompt_tokens"
    )
    generated_tokens: int = total("Tokens generated in answers")
    forced_tokens: int = total("Generated tokens that were not sampled, because a grammar determined them")
    drafts: int = total("Drafts of next tokens that a step checked")
    drafted_tokens: int = total("Drafted tokens that a step checked")
    accepted_tokens: int = total("Drafted tokens that the sampler chose")
    retired_tokens: int = total(
        "Tokens marked for early eviction because the only session or sub-agent using them has ended"
    )
    preemptions: int = total(
        "Requests paused because cells ran out or a step failed, and background prompts paused for a request"
    )
    cached_tokens: dict[str, int] = field(default_factory=dict[str, int])

    def shown(self) -> dict[str, tuple[str, int]]:
        """Return the help text and the value of each total, by the total's name in /metrics."""
        declared = [one for one in fields(self) if HELP in one.metadata]
        return {one.metadata[NAME] or one.name: (one.metadata[HELP], getattr(self, one.name)) for one in declared}

    @property
    def prompt_tokens(self) -> int:
        """The number of computed prompt tokens, of all requests."""
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
        """Count an accepted drafted token, which adds one token to the answer."""
        self.generated_tokens += 1
        self.accepted_tokens += 1

    def count_cached(self, job: Job, source: str, start: int, tokens: int) -> None:
        """Count `tokens` prompt tokens from position `start` on as reused.

        source: the origin of these tokens.

        Nothing is counted if the request was preempted before, or if no client waits for it.
        """
        if job.reuse.num_preempted or not job.request.kind.is_client:
            return
        if tokens:
            job.reuse.spans.append(ReusedSpan(start, start + tokens, source, self._seconds(start, tokens, source)))
        self.cached_tokens[source] = self.cached_tokens.get(source, 0) + tokens

    def _seconds(self, start: int, tokens: int, source: str) -> float:
        """Return the seconds that reuse saves: the time to compute the tokens, minus the time to restore them."""
        if not self.tree.profile.is_learnt:
            return 0.0
        share = 1.0 if source in ON_DEVICE else 1 - self.tree.costs.restore_share
        return share * self.tree.profile.seconds(start, tokens)
