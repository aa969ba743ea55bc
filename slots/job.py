"""`Job` is a request from its submission to its end. `Strategy` is the protocol of ways in which jobs reuse KV."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np

from .plan import Span
from .radix import NO_TOKENS, Sequence, common_prefix
from .request import NO_LAYOUT, Layout, Request
from .reuse import Reuse


class Phase(Enum):
    """What a request does now: it waits, runs, or is done.

    FETCHING: it waits for records of a lower tier.
    READING: it runs, and computes a document that its prompt needs.
    FOLLOWING: it has a slot, and waits until another request has computed its next tokens.
    """

    WAITING = "waiting"
    FETCHING = "fetching"
    READING = "reading"
    PREFILL = "prefill"
    FOLLOWING = "following"
    DECODE = "decode"
    DONE = "done"


Turn = tuple[bool, int, int]
"""The place of a prompt among the prompts that run together: see `Job.turn`."""

_COMPUTES = {Phase.READING, Phase.PREFILL, Phase.DECODE}
NEXT_PHASES = {
    Phase.WAITING: {Phase.FETCHING, *_COMPUTES, Phase.DONE},
    Phase.FETCHING: {Phase.WAITING, *_COMPUTES, Phase.DONE},  # a job that has to run alone waits for no tier
    Phase.READING: {Phase.FOLLOWING, Phase.WAITING, Phase.DONE},
    Phase.PREFILL: {Phase.FOLLOWING, Phase.DECODE, Phase.WAITING, Phase.DONE},
    Phase.FOLLOWING: {*_COMPUTES, Phase.WAITING, Phase.DONE},
    Phase.DECODE: {Phase.PREFILL, Phase.WAITING, Phase.DONE},  # to prefill: a grammar forces further tokens
    Phase.DONE: set[Phase](),
}


@dataclass(slots=True, eq=False)
class StrategyState:
    """The state that a strategy keeps for one job. A strategy that needs more fields uses a subclass.

    pause: see `Strategy.pause_at`.
    """

    pause: int = 0

    @property
    def has_started(self) -> bool:
        """Whether the job has started: it then keeps its own copies of KV."""
        return False

    def suits(self, layout: Layout) -> bool:
        """Return whether a layout can still be used. The cache may have evicted some of its KV since the layout was made."""
        return True

    def forget_unmade(self) -> None:
        """Forget copies that were planned and can no longer be made, because the device has lost all KV."""

    def start_over(self) -> None:
        """Reset the state, since the job starts again. Finished copies stay."""
        self.forget_unmade()


class Strategy(Protocol):
    """A way in which jobs reuse KV. One object serves all jobs whose requests it `takes`. The usual one is `PlainKV`."""

    def takes(self, request: Request, whole: Layout) -> bool:
        """Return whether the strategy serves a request.

        whole: the layout of the request's whole prompt.
        """
        ...

    def stage(self, job: Job, whole: Layout) -> Layout:
        """Return the layout to compute next: a document that must be computed before the prompt, or the whole prompt."""
        ...

    def has_room(self, job: Job, others: Iterable[Job]) -> bool:
        """Return whether there is room for the KV that the strategy keeps outside the cells for a job.

        others: the other jobs, running or waiting.
        """
        ...

    def begin(self, job: Job, waiting: Iterable[Job]) -> None:
        """Give the job a sequence with all cached KV of its prompt, and set `job.computed`."""
        ...

    def catch_up(self, job: Job, num_cells: int) -> None:
        """Take over KV that other jobs have computed since this job's last span.

        num_cells: how many cells the step needs for the spans that it already has.
        """
        ...

    def bring_back(self, job: Job, num_cells: int) -> None:
        """Restore for the job the KV that has come into host memory since the job's last span.

        num_cells: as for `catch_up`.
        """
        ...

    def pause_at(self, job: Job, at: int) -> None:
        """Let the job's prefill pause at position `at`, because fetched KV begins there; 0: do not pause."""
        ...

    def next_stop(self, job: Job) -> int:
        """Return the position that the job's next span must not pass.

        If the job can compute nothing now, the result is its current position.
        """
        ...

    def sharable(self, leader: Job, upto: int) -> int:
        """Return how many of the first `upto` tokens other jobs can take over after `leader` has computed them."""
        ...

    def reached(self, job: Job, span: Span) -> bool:
        """Handle a computed span. Return whether the span ends a stage: the job then returns to the queue."""
        ...

    def release(self, job: Job) -> None:
        """End the job's use of its sequence. The KV stays in the cache."""
        ...


@dataclass(slots=True, eq=False)
class Job:
    """A request from its submission to its end: it waits, runs, is preempted and resumes. The scheduler owns it.

    The first `num_tokens` of `tokens` are known: the prompt, and then the generated tokens, which were sampled or forced by
    a grammar. The first `computed` tokens have KV. `num_tokens` and `computed` decide whether the job prefills or decodes:
    see `computes`.
    """

    request: Request
    phase: Phase = Phase.WAITING
    strategy: Strategy = field(init=False)  # set once the job is laid out
    strategy_state: StrategyState = field(default_factory=StrategyState)
    layout: Layout = NO_LAYOUT
    tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    num_prompt: int = 0
    num_tokens: int = 0
    computed: int = 0
    started_at: int = 0  # `computed` at its admission
    # Once the server has computed this many prompt tokens, no later prompt goes before this one; 0: not known yet.
    due: int = 0
    starts_late: bool = False  # see `LateStarts`; false once it has started
    recompute_last: int = 1  # how many last tokens are computed even if they are cached (see `Costs`)
    claimed: int = 0  # tokens whose path is in the tree; later computed tokens are private
    sequence: Sequence | None = None
    slot: int = -1
    reuse: Reuse = field(default_factory=Reuse)
    num_failures: int = 0  # steps that failed while it ran
    failed_at: int = 0  # `num_generated` when the last such step failed

    def enter(self, phase: Phase) -> None:
        """Enter a phase. Raises AssertionError if `phase` cannot follow the current phase."""
        if phase is not self.phase:
            assert phase in NEXT_PHASES[self.phase], f"request {self.request.id}: {self.phase.value}, then {phase.value}"
            self.phase = phase

    def go_on(self) -> None:
        """Enter the phase of the job's next span."""
        self.enter(self.computes)

    def lay_out(self, layout: Layout) -> None:
        """Take over the layout of the next stage, and make room in `tokens` for all tokens to generate."""
        self.layout = layout
        self.num_prompt = self.num_tokens = len(layout.tokens)
        self.tokens = np.empty(self.num_prompt + self.request.limit, np.int32)
        self.tokens[: self.num_prompt] = layout.tokens

    def ids(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens at positions [start, stop) as the model knows them."""
        return self.layout.ids_of(self.tokens[start:stop])

    def scored(self, start: int, stop: int) -> np.ndarray | None:
        """Return the prompt's tokens at positions [start + 1, stop + 1); None if the request needs no logprobs of them."""
        last = min(stop + 1, self.num_prompt)
        return self.ids(start + 1, last) if self.request.scores_prompt and start + 1 < last else None

    def step_back(self) -> Job:
        """Drop the layout, because the job has read a document and must be laid out again. Return the job."""
        self.layout, self.computed, self.due = NO_LAYOUT, 0, 0
        return self

    def start_over(self) -> None:
        """Start again, because a step failed before the job had a generated token.

        The count of how often the job was overtaken stays.
        """
        self.step_back()
        self.claimed, self.sequence = 0, None
        self.reuse = Reuse(num_overtaken=self.reuse.num_overtaken)
        self.strategy_state.start_over()

    def fall_back(self) -> None:
        """Forget the KV on the device after a failed step. The generated tokens stay, and the job can go on after them."""
        self.computed = self.claimed = 0
        self.reuse.num_preempted += 1
        self.strategy_state.forget_unmade()

    @property
    def num_generated(self) -> int:
        """How many tokens the answer has so far."""
        return self.num_tokens - self.num_prompt

    @property
    def is_suspect(self) -> bool:
        """Whether the job may have made a step fail. A suspect job runs alone until its next token is generated."""
        return self.num_failures > 0 and self.num_generated == self.failed_at

    @property
    def has_started(self) -> bool:
        """Whether the job has been paused, or has read a document, since it was submitted."""
        return self.reuse.num_preempted > 0 or self.strategy_state.has_started

    @property
    def keeps_layout(self) -> bool:
        """Whether the job has a layout that is still valid."""
        return self.layout is not NO_LAYOUT and self.strategy_state.suits(self.layout)

    @property
    def is_reading(self) -> bool:
        """Whether the job reads a document for its prompt, and samples nothing."""
        return self.layout.is_stage

    def append(self, token: int) -> None:
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1

    def force(self, token: int) -> None:
        """Append a token that a grammar forces. If the grammar forces several tokens, they are computed in one span."""
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        if self.phase is Phase.DECODE:
            self.enter(Phase.PREFILL)

    def accept(self, token: int) -> None:
        """Append the token that was sampled after an accepted drafted token.

        The drafted token already has KV, so the job's `computed` grows by one.
        """
        self.append(token)
        self.computed += 1
        if self.request.draft is not None:
            self.request.draft.num_accepted += 1

    def waits_for(self, leader: Job, min_shared: int) -> bool:
        """Return whether this job should wait, because `leader` is about to compute the same next tokens.

        After the position where this job started, the two jobs must share at least `min_shared` tokens. Only tokens whose
        path is in the tree are compared. Generated tokens are private, even if two requests generate the same ones.
        """
        if not leader.request.shares_with(self.request) or leader.computed != self.computed:
            return False
        shared = common_prefix(leader.tokens[: leader.claimed], self.tokens[: self.claimed])
        shared = self.strategy.sharable(leader, min(shared, self.num_tokens - self.recompute_last))
        return shared > self.computed and shared - self.started_at >= min_shared

    @property
    def computes(self) -> Phase:
        """The phase of the job's next span: READING in a stage, DECODE for one generated token, otherwise PREFILL.

        Several generated tokens that a grammar forced are computed in PREFILL, too.
        """
        if self.is_reading:
            return Phase.READING
        is_decode = self.num_tokens > self.num_prompt and self.computed == self.num_tokens - 1
        return Phase.DECODE if is_decode else Phase.PREFILL

    @property
    def answering(self) -> bool:
        """Whether the whole prompt is computed, so that only tokens of the answer are left to compute."""
        return self.computed >= self.num_prompt

    @property
    def turn(self) -> Turn:
        """The sort key of the prompt among the prompts of a step. The prompt with the smallest key is computed first."""
        return not self.answering, -self.request.priority, self.due

    @property
    def num_lacking(self) -> int:
        """How many known tokens are left to compute."""
        return sum(max(stop - max(start, self.computed), 0) for start, stop in self.layout.sections(self.num_tokens))

    @property
    def num_private(self) -> int:
        """How many cells hold generated tokens, which are not in the tree yet."""
        return max(self.computed - self.claimed, 0)
