"""Answers decoded in this process, with drafts or without: the scheduler and the runner of a server, and no HTTP."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from ...models.context import Context
from ...models.runner import Runner
from ...models.sampling import Sampler
from ...models.sampling_params import GREEDY
from ...slots.drafter import Drafter
from ...slots.drafts import Drafts
from ...slots.host import HostMemory
from ...slots.job import Job, Phase
from ...slots.lookup import Lookup
from ...slots.prefix_tree import PrefixTree
from ...slots.radix import PrefixIndex
from ...slots.request import Layout, Prompt, Request
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

    def arrange(self, tree: PrefixIndex, scope: Scope, waiting: Collection[Prompt] = ()) -> Layout:
        """Return them as they are."""
        return Layout(self.tokens)


class Chooser(Sampler):
    """Chooses the best token."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.context.model, GREEDY)

    def choose(self, logits: np.ndarray, context: Any, index: int) -> int:
        return int(logits.argmax())


@dataclass(slots=True)
class Answer:
    """Its tokens, and the seconds of each step behind the first token."""

    job: Job
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Streams:
    """A pool with a scheduler."""

    def __init__(self, context: Context, runner: Runner, *, max_stall: float = 0.2, drafter: Drafter | None = None) -> None:
        tree = PrefixTree(context.num_cells, context.scratch, HostMemory(), costs=context.costs)
        rows, ends = min(context.max_rows, context.batch), context.model.ends
        drafts = Drafts(context.costs, max_rows=rows, max_stall=max_stall, ends=ends, drafter=drafter)
        self.scheduler = Scheduler(tree, num_slots=SLOTS, batch_size=context.batch, max_stall=max_stall, drafts=drafts)
        self._runner, self._is_end, self._number = runner, context.model.is_end, 0
        runner.clear()

    def clear(self) -> None:
        """Empty the pool. What was learnt of drafts stays."""
        self.scheduler.recover(keep=False)
        self._runner.clear()

    def answer(self, prompts: Sequence[np.ndarray], limit: int, source: Source) -> list[Answer]:
        """Answer some prompts side by side, with at most `limit` tokens each."""
        samplers: dict[int, Sampler] = {}
        answers: dict[int, Answer] = {}
        for prompt in prompts:
            self._number += 1
            request = Request(self._number, Tokens(prompt, len(prompt)), limit, Scope.shared("bench"), draft=source())
            samplers[request.id] = Chooser(self._runner)
            answers[request.id] = Answer(self.scheduler.submit(request))
        while not self.scheduler.idle:
            self._step(samplers, answers)
        for sampler in samplers.values():
            sampler.close()
        return list(answers.values())

    def _step(self, samplers: dict[int, Sampler], answers: dict[int, Answer]) -> None:
        decoding = [job.request.id for job in self.scheduler.running if job.phase is Phase.DECODE]
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
            if is_over or self._is_end(answer.tokens[-1]):
                self.scheduler.finish(job)
        seconds = perf_counter() - began
        for id in decoding:
            answers[id].seconds.append(seconds)
