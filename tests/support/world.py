"""Runs a scheduler over a model of memory, step by step."""

import math
from collections.abc import Iterable
from dataclasses import replace

from slotcache.models.times import CPU
from slotcache.slots.check import check
from slotcache.slots.drafts import Drafts
from slotcache.slots.host import HostMemory
from slotcache.slots.lookup import Lookup
from slotcache.slots.plan import Plan
from slotcache.slots.prefix_tree import PrefixTree
from slotcache.slots.request import Request
from slotcache.slots.scheduler import Scheduler
from slotcache.slots.separate import SeparateDocuments

from support.fixed_prompt import Fixed
from support.memory import Memory, cut
from support.scopes import COMMON

END = 9  # a token that ends an answer, which the memory never chooses


class World:
    """A scheduler over a model of memory. Requests are numbered as they are submitted."""

    def __init__(
        self,
        cells=1000,
        slots=4,
        batch=128,
        budget=32,
        host=0,
        lent=0,
        idle=0,
        apart=math.inf,
        window=32,
        aside=math.inf,
        recompute_last=1,
        stall=math.inf,
        rows=0,
        drafter=None,
        similarity=0.1,
        **costs,
    ):
        """costs: more fields of the device's costs. drafter: a `ToyDrafter`, whose clock also times drafts."""
        self.memory = Memory(cells)
        device = replace(CPU, apart_from_cells=apart, swap_from_tokens=aside, recompute_last=recompute_last, **costs)
        tree = PrefixTree(cells, 2 * slots + 8, HostMemory(host, cut=cut, lent=lent), costs=device)
        timed = {"clock": drafter.clock} if drafter else {}
        self.scheduler = Scheduler(
            tree,
            num_slots=slots,
            similarity=similarity,
            batch_size=batch,
            prefill_budget=budget,
            max_stall=stall,
            idle_cells=idle,
            window=window,
            drafts=Drafts(device, max_rows=rows, max_stall=stall, ends=[END], drafter=drafter, **timed),
            max_rows=rows,
            strategies=[SeparateDocuments],
        )
        self.jobs = []
        self.plans = []

    def submit(self, tokens, limit=2, stops=(), priority=0, scope=COMMON, slot=-1, drafts: bool | str = False, **asked):
        """Submit a request.

        tokens: the tokens of the prompt, or a prompt object.
        drafts: whether the request has drafts; "model": also from the draft model.
        asked: more fields of the request.
        """
        prompt = Fixed(list(tokens), stops) if isinstance(tokens, Iterable) else tokens
        draft = Lookup(asks_model=drafts == "model") if drafts else None
        asked = {"priority": priority, "wanted_slot": slot, "draft": draft, **asked}
        job = self.scheduler.submit(Request(len(self.jobs), prompt, limit, scope, **asked))
        self.jobs.append(job)
        return job

    def step(self):
        plan = self.scheduler.plan()
        self.plans.append(plan)
        for job, _ in self.scheduler.commit(plan, self.memory.run(plan)):
            for token in self.memory.take_further(job.request.id):
                job.accept(token)
            if job.num_tokens == job.num_prompt + job.request.limit:
                self.scheduler.finish(job)
        check(self.scheduler)
        return plan

    def finish(self):
        while not self.scheduler.idle:
            self.step()

    def carry_out(self):
        """Carry out the pending operations of the tree."""
        self.memory.run(Plan(self.scheduler.tree.device.take_operations()))

    def run(self, tokens, **options):
        job = self.submit(tokens, **options)
        self.finish()
        return job
