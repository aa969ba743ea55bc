"""Runs a scheduler over a real context without a server, to compare logits."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
from slotcache.models.context import Context, ContextSettings
from slotcache.models.lora import Adapters
from slotcache.models.model import Model
from slotcache.models.runner import Runner
from slotcache.models.sampling import Sampler
from slotcache.models.sampling_params import Sampling
from slotcache.slots.check import check
from slotcache.slots.host import HostMemory
from slotcache.slots.job import Job
from slotcache.slots.prefix_tree import PrefixTree
from slotcache.slots.request import Kind, Request
from slotcache.slots.scheduler import Scheduler
from slotcache.slots.scope import Scope
from slotcache.slots.snapshots import Snapshots

from support.fixed_prompt import Fixed
from support.scopes import COMMON

from .on_device import idle_leaves
from .reuse import reuse_with


@dataclass
class Answer:
    """A finished request, with its answer and the logits of each token of the answer."""

    job: Job
    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)


class Lab:
    def __init__(
        self,
        model: Model,
        num_cells=2048,
        slots=4,
        batch=256,
        budget=64,
        sequences=64,
        flash="off",
        host=0,
        apart=math.inf,
        aside=math.inf,
        kernel=None,
        adapters: Adapters | None = None,
        states=0,
        spacing=64,
    ):
        """kernel: tokens that a kernel computes; None for the whole batch. states: bytes for snapshots."""
        self.adapters = adapters or Adapters(model)
        settings = ContextSettings(
            num_cells=num_cells,
            batch=batch,
            micro_batch=kernel or batch,
            flash_attention=flash,
            threads=1,
            num_sequences=sequences,
        )
        self.context = Context(model, settings)
        idle_leaves(self.context)
        costs = replace(self.context.costs, apart_from_cells=apart, swap_from_tokens=aside)
        self.runner = Runner(self.context, self.adapters)
        of_runs, of_states = (HostMemory(size, cut=self.runner.states.cut) for size in (host, states))
        tree = PrefixTree(num_cells, self.context.scratch, of_runs, costs=costs)
        self.snapshots = Snapshots(tree, of_states, spacing=spacing)
        if states:
            sizes = self.runner.measure_states()
            assert sizes is not None
            of_states.sizes = sizes
        reuse = reuse_with(self.snapshots)
        self.scheduler = Scheduler(tree, num_slots=slots, batch_size=batch, prefill_budget=budget, **reuse)
        self.sampler = Sampler(model, Sampling(temperature=0))
        self.samplers: dict[int, Sampler] = {}
        self.answers: dict[int, Answer] = {}
        self.number = 0

    def submit(
        self, tokens, limit=4, stops=(), cache=True, scope=COMMON, snapshots: Scope | None = None, background=False
    ) -> Answer:
        self.number += 1
        scope = scope if cache else Scope.private(self.number)
        prompt = Fixed(tokens, stops)
        request = Request(
            self.number,
            prompt,
            limit,
            scope,
            cache,
            snapshot_scope=snapshots,
            kind=Kind.AHEAD if background else Kind.CLIENT,
        )
        return self.enter(request)

    def enter(self, request: Request) -> Answer:
        self.samplers[request.id] = self.sampler
        self.answers[request.id] = Answer(self.scheduler.submit(request))
        return self.answers[request.id]

    def step(self) -> None:
        plan = self.scheduler.plan()
        sampled = self.runner.run(plan, self.samplers)
        rows = self.runner.logits(len(sampled)).copy() if sampled else []
        for (job, token), row in zip(self.scheduler.commit(plan, sampled), rows, strict=True):
            answer = self.answers[job.request.id]
            answer.tokens.append(token)
            answer.logits.append(row)
            if job.num_tokens == job.num_prompt + job.request.limit:
                self.scheduler.finish(job)
        check(self.scheduler)

    def finish(self) -> None:
        for _ in range(10_000):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError("requests never ended")

    def run(self, tokens, **options) -> Answer:
        """Submit one request, and run until all open requests have ended."""
        answer = self.submit(tokens, **options)
        self.finish()
        return answer

    def close(self) -> None:
        self.context.close()
