"""A hypothesis state machine: tree and scheduler against a simple model of memory, over random lives of requests."""

import itertools

import numpy as np
import pytest
from fixed_prompt import Fixed
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slotcache.slots.check import check
from slotcache.slots.host import HostTier
from slotcache.slots.replacement import POLICIES, Replacement
from slotcache.slots.request import PlacedDocument, Request
from slotcache.slots.scheduler import Scheduler
from slotcache.slots.tree import PrefixTree

from .memory import Memory, next_token

CONTEXT = 48


def greedy(prompt: list[int], limit: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(limit):
        tokens.append(next_token(tuple(tokens)))
    return tokens


class Lives(RuleBasedStateMachine):
    @initialize(
        lanes=st.integers(1, 4),
        extra=st.integers(0, 60),
        batch=st.integers(4, 40),
        budget=st.integers(1, 16),
        spare_ids=st.integers(1, 6),
        host=st.sampled_from([0, 0, 20, 60, 1000]),
        idle=st.sampled_from([0, 0, 10, 1000]),
        apart=st.sampled_from([0, 20, 1000]),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def start(self, lanes, extra, batch, budget, spare_ids, host, idle, apart, policy):
        self.memory = Memory(CONTEXT + extra)
        tree = PrefixTree(CONTEXT + extra, 2 * lanes + spare_ids, HostTier(host, Replacement(policy)), Replacement(policy))
        self.scheduler = Scheduler(tree, lanes, max(batch, lanes), budget, idle, apart)
        self.ids = itertools.count()
        self.open: list[Request] = []
        self.histories: list[list[int]] = [[]]
        self.done = 0

    @rule(
        data=st.data(),
        fresh=st.lists(st.integers(0, 4), min_size=1, max_size=12),
        limit=st.integers(1, 10),
        scope=st.sampled_from(["", "", "", "x"]),
        cache=st.sampled_from([True, True, True, False]),
        priority=st.sampled_from([0, 0, 1]),
        background=st.sampled_from([False, False, True]),
    )
    def submit(self, data, fresh, limit, scope, cache, priority, background):
        history = data.draw(st.sampled_from(self.histories[-8:]))
        cut = data.draw(st.integers(0, len(history)))
        tokens = np.array([*history[:cut], *fresh][: CONTEXT - limit], np.int32)
        at = sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=4)))
        documents = tuple(
            PlacedDocument(f"d{a}", str(tokens[a:b].tolist()), a, b) for a, b in itertools.pairwise(at) if a < b
        )
        number = next(self.ids)
        scope = scope if cache else ("private", number)
        request = Request(number, Fixed(tokens, at, documents), limit, scope, cache, priority, background)
        self.scheduler.submit(request)
        self.open.append(request)

    @rule(data=st.data())
    @precondition(lambda self: self.open)
    def cancel(self, data):
        request = data.draw(st.sampled_from(self.open))
        self.open.remove(request)
        self.scheduler.finish(request)

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.one_step()

    @rule()
    @precondition(lambda self: self.open)
    def refuse(self):
        plan = self.scheduler.plan()
        for operation in plan.operations:
            self.memory.apply(operation)
        if plan.spans:
            self.scheduler.refuse()

    @rule(scope=st.sampled_from(["", "x"]))
    def drop(self, scope):
        before = self.scheduler.tree.num_ready
        pinned = self.scheduler.tree.num_pinned
        self.scheduler.tree.drop(scope)
        assert pinned <= self.scheduler.tree.num_ready <= before

    @rule()
    def use_idle_time(self):
        if work := self.scheduler.plan_idle_work():
            self.memory.run(work)

    def one_step(self):
        plan = self.scheduler.plan()
        check(self.scheduler)
        assert plan.num_tokens <= self.scheduler.batch_size
        assert plan.spans or not self.open, "requests are open and nothing is computed"
        sampled = self.memory.run(plan)
        for request, _ in self.scheduler.commit(plan, sampled):
            if request.num_tokens == request.num_prompt + request.limit:
                self.end(request)
        check(self.scheduler)
        for request in self.scheduler.running:
            held = self.memory.cells.get(request.sequence.id, {})
            assert request.computed == 0 or held[request.computed - 1] == tuple(request.tokens[: request.computed].tolist())

    def end(self, request):
        self.open.remove(request)
        self.scheduler.finish(request)
        result = request.tokens[: request.num_tokens].tolist()
        assert result == greedy(request.layout.tokens.tolist(), request.limit), "reuse changed a result"
        if not request.cache:
            assert request.cached == 0 and request.source == "none"
        self.histories.append(result)
        self.done += 1

    @invariant()
    def consistent(self):
        if hasattr(self, "scheduler"):
            check(self.scheduler)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2000):
            if not self.open:
                break
            self.one_step()
        assert not self.open, "a request never ended"
        while self.scheduler.tree.evict():
            check(self.scheduler)
        self.memory.run(self.scheduler.plan())
        tree = self.scheduler.tree
        for scope in list(tree.roots):
            tree.forget(scope)
        assert tree.host.num_tokens == 0 and not tree.host.nodes
        assert tree.num_ready == tree.num_pending == tree.num_pinned == 0 and not tree.roots and not tree.parked
        assert self.memory.num_used == 0 and not any(self.memory.cells.values())
        assert len(tree._free_ids) == len(set(tree._free_ids))


TestLives = pytest.mark.timeout(600)(Lives.TestCase)
TestLives.settings = settings(
    max_examples=1000, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
