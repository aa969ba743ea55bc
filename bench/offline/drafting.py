"""Answers decoded in this process, with drafts or without: the scheduler and the runner of a server, and no HTTP."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

import numpy as np

from ...models.context import Context
from ...models.runner import Runner
from ...models.sampling import Sampler
from ...models.sampling_params import GREEDY
from ...slots.drafter import Drafter
from ...slots.drafts import ROWS, Drafts, Guess
from ...slots.host import HostMemory, PromptTree
from ...slots.lookup import Draft, Lookup
from ...slots.prefix_tree import PrefixTree
from ...slots.request import Job, Layout, Prompt, Request
from ...slots.scheduler import Scheduler
from ...slots.scope import Scope

SLOTS = 4
Source = Callable[[], Lookup | None]
"""Makes the source of a request's drafts."""


@dataclass(slots=True, eq=False)
class Tokens:
    """A prompt of certain tokens (int32)."""

    tokens: np.ndarray
    num_tokens: int
    documents: frozenset[str] = frozenset()
    beginning: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.beginning = self.tokens

    def arrange(self, tree: PromptTree, scope: Scope, waiting: Collection[Prompt] = ()) -> Layout:
        """Return them as they are."""
        return Layout(self.tokens)


class Chooser(Sampler):
    """Chooses the best token, and notes how far the second one is behind. forced: tokens to choose instead, in order."""

    def __init__(self, runner: Runner, forced: np.ndarray | None = None) -> None:
        super().__init__(runner.context.model, GREEDY)
        self.margins: list[float] = []
        self._forced = None if forced is None else iter(forced.tolist())

    def choose(self, logits: np.ndarray, context: Any, index: int) -> int:
        if self._forced is not None:
            return next(self._forced)
        second, first = np.partition(logits, -2)[-2:]
        self.margins.append(float(first - second))
        return int(logits.argmax())


class Always(Lookup):
    """A source that always drafts as many tokens as it may. is_right: as well as it can; else always wrong."""

    __slots__ = ("_is_right",)

    def __init__(self, is_right: bool) -> None:
        super().__init__()
        self._is_right = is_right

    def draft(self, tokens: np.ndarray, num_prompt: int, most: int) -> Draft | None:
        found = super().draft(tokens, num_prompt, most) if self._is_right else None
        return found or (Draft(np.zeros(most, np.int32), 0) if most > 0 else None)


class Fixed(Drafts):
    """Drafts of one length, whatever they cost."""

    length = 7

    def _length(
        self, jobs: Sequence[Job], found: Sequence[Guess | None], candidates: Sequence[int] = ROWS
    ) -> tuple[int, float]:
        return self.length, inf


@dataclass(slots=True)
class Answer:
    """Its tokens, the margin of each, and the seconds of each step behind the first token."""

    job: Job
    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens a second behind the first token."""
        return (len(self.tokens) - 1) / sum(self.seconds)

    @property
    def share_drafted(self) -> float:
        """The share of tokens that were drafted and right."""
        draft = self.job.request.draft
        return draft.num_accepted / len(self.tokens) if draft else 0.0


class Streams:
    """A pool with a scheduler. fixed: each step of a request with a source has drafts of the same length."""

    def __init__(
        self,
        context: Context,
        runner: Runner,
        *,
        fixed: bool = False,
        max_stall: float = 0.2,
        drafter: Drafter | None = None,
    ) -> None:
        tree = PrefixTree(context.num_cells, context.scratch, HostMemory(), costs=context.costs)
        rows, ends = min(context.max_rows, context.batch), context.model.ends
        ends = () if fixed else ends
        kind = Fixed if fixed else Drafts
        drafts = kind(context.costs, max_rows=rows, max_stall=max_stall, ends=ends, drafter=drafter)
        self.scheduler = Scheduler(tree, num_slots=SLOTS, batch_size=context.batch, max_stall=max_stall, drafts=drafts)
        self._runner, self._is_end, self._number = runner, context.model.is_end, 0
        runner.clear()

    def clear(self) -> None:
        """Empty the pool. What was learnt of drafts stays."""
        self.scheduler.recover(keep=False)
        self._runner.clear()

    def answer(
        self, prompts: Sequence[np.ndarray], limit: int, source: Source, forced: Sequence[np.ndarray] = ()
    ) -> list[Answer]:
        """Answer some prompts side by side, with at most `limit` tokens each. forced: the tokens of each answer."""
        samplers: dict[int, Sampler] = {}
        answers: dict[int, Answer] = {}
        for place, prompt in enumerate(prompts):
            self._number += 1
            most = len(forced[place]) if forced else limit
            request = Request(self._number, Tokens(prompt, len(prompt)), most, Scope.shared("bench"), draft=source())
            samplers[request.id] = Chooser(self._runner, forced[place] if forced else None)
            answers[request.id] = Answer(self.scheduler.submit(request))
        while not self.scheduler.idle:
            self._step(samplers, answers)
        for id, answer in answers.items():
            sampler = samplers[id]
            assert isinstance(sampler, Chooser)
            answer.margins = sampler.margins
            sampler.close()
        return list(answers.values())

    def _step(self, samplers: dict[int, Sampler], answers: dict[int, Answer]) -> None:
        decoding = [job.request.id for job in self.scheduler.running if job.decoding]
        began = perf_counter()
        plan = self.scheduler.plan()
        planned = perf_counter()
        sampled = self._runner.run(plan, samplers)
        self.scheduler.observe(plan, perf_counter() - planned)
        for job, token in self.scheduler.commit(plan, sampled):
            answer = answers[job.request.id]
            answer.tokens.append(token)
            for further, _ in samplers[job.request.id].take_further():
                job.accept(further)
                answer.tokens.append(further)
            is_over = job.num_tokens == job.num_prompt + job.request.limit
            if is_over or (self._is_end(answer.tokens[-1]) and job.request.limit != len(answer.tokens)):
                self.scheduler.finish(job)
        seconds = perf_counter() - began
        for id in decoding:
            answers[id].seconds.append(seconds)
