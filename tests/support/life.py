"""Tests tree and scheduler with random lives of requests, against a simple model of memory. `chatting` and `keeping` add
rules.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from slotcache.models.times import CPU
from slotcache.slots.check import check
from slotcache.slots.drafts import Drafts
from slotcache.slots.eviction import POLICIES, EvictionPolicy
from slotcache.slots.host import HostMemory
from slotcache.slots.job import Job, Phase
from slotcache.slots.lookup import Lookup
from slotcache.slots.plan import Clear
from slotcache.slots.prefix_tree import Pins, PrefixTree
from slotcache.slots.radix import CopySizes, path
from slotcache.slots.request import Kind, PlacedDocument, Request
from slotcache.slots.reuse import ids_of
from slotcache.slots.scheduler import TRIES, Scheduler
from slotcache.slots.scope import Scope
from slotcache.slots.snapshots import Snapshots

from support.asks import ASKS, CONTEXT, SCOPES
from support.fixed_prompt import Fixed
from support.memory import Memory, cut, next_token, seen
from support.reuse import reuse_with
from support.toy_drafter import ToyDrafter

OPENINGS = [[], [0, 1, 2, 3, 4] * 6]  # histories with which every life starts
SEEN: Counter[str] = Counter()  # counts over all lives: operations, ends of requests, and other events
EXPECTED = {
    *("Share", "Trim", "Drop", "Save", "Restore", "Clear", "Snap", "Load", "set aside"),
    *("own", "fork", "host", "snapshot", "finished", "cancelled waiting", "cancelled running", "paused", "resumed"),
    *("refused", "interrupted", "evict", "drop", "forget", "save ahead", "make room", "pin", "unpin", "expire"),
    *("recovered", "kept over a failure", "began again", "paused by a failure", "poison"),
    *("overtaken", "prefetch", "private", "its slot", "adapters in turn"),
    *("forced", "forced and paused", "right drafts", "wrong drafts", "ended within a draft"),
    *("late", "rested", "several answers", "shared among them", "pinned by marks", "slept", "retired"),
    *("waiting, then prefill", "waiting, then decode", "waiting, then reading", "waiting, then fetching"),
    *("fetching, then waiting", "reading, then waiting"),
    *("prefill, then decode", "prefill, then waiting", "prefill, then following"),
    *("following, then prefill", "following, then waiting"),
    *("decode, then prefill", "decode, then waiting"),
}
SESSIONS = ["", "a", "b"]
ACTS = ["save ahead", "make room", "evict", "forget", "drop"]  # acts that evict or copy KV


def greedy(prompt: list[int], limit: int, adapters: str) -> list[int]:
    tokens = list(prompt)
    for _ in range(limit):
        tokens.append(next_token(seen(tokens, adapters)))
    return tokens


class Life(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 4),
        extra=st.integers(0, 60),
        batch=st.integers(4, 40),
        budget=st.integers(1, 16),
        spare_ids=st.integers(1, 6),
        host=st.sampled_from([0, 20, 40, 60, 1000]),
        idle=st.sampled_from([0, 0, 10, 1000]),
        apart=st.sampled_from([0, 20, 1000]),
        aside=st.sampled_from([0, 0, 4, 1000]),
        policy=st.sampled_from(sorted(POLICIES)),
        window=st.sampled_from([0, 1, 32]),
        states=st.sampled_from([None, None, None, 60, 1000]),
        recompute_last=st.sampled_from([1, 1, 2, 8]),
        offload=st.sampled_from([0, 0, 10]),
        scattered=st.sampled_from([0, 0, 1, 4]),
        drafter=st.sampled_from([None, 0, 5, 10]),
        stall=st.sampled_from([math.inf, 0.03, 0.2]),
    )
    def start(
        self,
        slots,
        extra,
        batch,
        budget,
        spare_ids,
        host,
        idle,
        apart,
        aside,
        policy,
        window,
        states,
        recompute_last,
        offload,
        scattered,
        drafter,
        stall,
    ):
        """Start with an empty cache.

        states: for a hybrid model, the bytes for runs (nodes) and states: one byte per token, three per state.
        drafter: how many of ten tokens from the draft model are right.
        """
        self.drafter = None if drafter is None else ToyDrafter(drafter)
        self.can_cut = states is None
        self.policy, self.num_ids = policy, 2 * slots + spare_ids
        self.shape = {
            "num_slots": slots,
            "batch_size": max(batch, slots),
            "prefill_budget": budget,
            "idle_cells": idle,
            "window": window,
            "max_stall": stall,
        }
        self.costs = replace(
            CPU,
            apart_from_cells=apart,
            swap_from_tokens=aside,
            recompute_last=recompute_last,
            scattered_tokens=scattered,
            **offloading(offload),
        )
        self.recompute_last = recompute_last
        self.now = 0
        self.ids = itertools.count()
        self.open: list[Job] = []
        self.limits: dict[int, int] = {}  # the length of each request's answer
        self.forced: dict[int, int] = {}  # by request: forced tokens after each sampled token
        self.choices: set[int] = set()  # requests that share a private scope
        self.poison: dict[int, float] = {}  # requests that make each step fail, and the share of operations done before
        self.histories: list[list[int]] = list(OPENINGS)
        self.build(CONTEXT + extra, host, states)

    def build(self, cells, host, states):
        """Make a scheduler with an empty cache."""
        self.memory = Memory(cells, self.can_cut)
        lent = cells // 2 if self.can_cut else 0
        tier = HostMemory(host if self.can_cut else 0, EvictionPolicy(self.policy), cut=cut, lent=lent)
        self.tree = PrefixTree(cells, self.num_ids, tier, EvictionPolicy(self.policy), costs=self.costs)
        self.met_others: set[int] = set()  # requests that at some time ran beside other requests
        self.phases: dict[Job, Phase] = {}  # the last phase of each open or finished request
        of_states = HostMemory(states or 0, EvictionPolicy(self.policy), sizes=CopySizes(run_token=1, state=3), cut=cut)
        self.snapshots = Snapshots(self.tree, of_states, spacing=8, unused=2)
        drafts = Drafts(self.costs, max_rows=self.shape["batch_size"], drafter=self.drafter)
        if self.drafter:  # drafts are made whatever they cost
            drafts._pace.seconds = lambda streams, depth: 1.0
            drafts._may_cost = lambda steps, streams, depth: True
        self.scheduler = Scheduler(self.tree, drafts=drafts, **reuse_with(self.snapshots), **self.shape)
        self.scheduler.pins = Pins(self.scheduler.index, lambda: self.now)

    @rule(asks=st.lists(ASKS, min_size=1, max_size=3), steps=st.integers(0, 6))
    def submit(self, asks, steps):
        for ask in asks:
            self.submit_one(ask)
        self.step(steps)

    def submit_one(self, ask):
        history = self.history(ask.of)
        tokens = np.array([*history[: int(ask.share * len(history))], *ask.fresh][: CONTEXT - ask.limit], np.int32)
        at = sorted(stop for stop in ask.stops if stop <= len(tokens))
        documents = tuple(
            PlacedDocument(f"d{a}", str(tokens[a:b].tolist()), a, b) for a, b in itertools.pairwise(at) if a < b
        )
        marks = [(stop, float(ask.limit % 3)) for stop in at]
        return self.submit_prompt(Fixed(tokens, at, documents, marks), ask)

    def submit_prompt(self, prompt, ask):
        number = next(self.ids)
        kept = ask.scope if ask.cache and not self.can_cut else None  # the scope of its states
        cache = ask.cache and self.can_cut
        scope = ask.scope if cache else Scope.private(number, ask.scope.adapters)
        ahead = Kind.PREFETCH if ask.of == 1 else Kind.AHEAD
        request = Request(
            number,
            prompt,
            ask.limit,
            scope,
            cache=cache,
            priority=ask.priority,
            kind=ahead if ask.background else Kind.CLIENT,
            snapshot_scope=kept,
            draft=Lookup(asks_model=number % 4 < 3) if self.can_cut and number % 2 else None,
            wanted_slot=-1 if ask.background else min(ask.slot, self.shape["num_slots"]) - 1,
            session=SESSIONS[number % len(SESSIONS)],
        )
        self.limits[number], self.forced[number] = ask.limit, ask.forced
        job = self.scheduler.submit(request)
        self.open.append(job)
        self.phases[job] = Phase.WAITING
        self.waits(job)
        return job

    @rule(ask=ASKS, further=st.integers(1, 2), steps=st.integers(0, 6))
    def choose(self, ask, further, steps):
        """Ask for several answers to one prompt. If it is not cached, and KV can be cut, they share a private scope."""
        first = self.submit_one(replace(ask, background=False))
        for number in itertools.islice(self.ids, further):
            scope = first.request.scope if self.can_cut else Scope.private(number, ask.scope.adapters)
            self.limits[number], self.forced[number] = ask.limit, ask.forced
            self.choices |= {first.request.id, number} if self.can_cut else set()
            job = self.scheduler.submit(replace(first.request, id=number, scope=scope, draft=None))
            self.open.append(job)
            self.phases[job] = Phase.WAITING
            self.waits(job)
        SEEN["several answers"] += 1
        self.step(steps)

    @rule()
    @precondition(lambda self: not self.scheduler.running)
    def sleep(self):
        """Evict all KV from the device, as before its memory is freed."""
        self.tree.evict(self.tree.device.num_ready)
        self.carry_out(self.tree.device.take_operations())
        self.ran()
        assert not self.tree.device.num_ready and not self.memory.num_used
        SEEN["slept"] += 1

    def waits(self, job):
        """Note that a request has been submitted. A hook for other lives."""

    all_wait = False  # whether all requests wait for records of a lower tier

    def plan(self):
        return self.scheduler.plan()

    def before_step(self):
        """Prepare the next step. A hook for other lives."""

    def history(self, of):
        return self.histories[-min(of, len(self.histories))]

    @rule(of=st.integers(0, 60))
    @precondition(lambda self: self.open)
    def cancel(self, of):
        job = self.open[of % len(self.open)]  # draws must not depend on the cache, whose sets have no order
        SEEN["cancelled running" if job.sequence else "cancelled waiting"] += 1
        self.open.remove(job)
        self.scheduler.finish(job)

    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps):
            self.one_step()

    @rule(end=st.sampled_from(["refused", "refused", "interrupted", "at once", 0.0, 0.5, 1.0]))
    @precondition(lambda self: self.open)
    def fail(self, end):
        """End a plan before its spans: for lack of room, for a new request, or by an error after some operations."""
        if end == "at once":
            self.recover()
            return
        plan = self.plan()
        self.look_at_phases(plan)
        if isinstance(end, float):
            self.fail_in(plan, end)
            return
        self.carry_out(plan.operations + plan.afterwards)
        SEEN[end] += bool(plan.spans)
        if end == "refused" and plan.spans and not self.scheduler.refuse():
            self.recover()

    @rule(ask=ASKS, share=st.sampled_from([0.0, 0.5, 1.0]), beside=st.lists(ASKS, max_size=3), steps=st.integers(0, 4))
    def poisonous(self, ask, share, beside, steps):
        """Submit a request that makes each step fail, beside other requests."""
        for other in beside:
            self.submit_one(other)
        job = self.submit_one(replace(ask, background=False))
        self.poison[job.request.id] = share
        SEEN["poison"] += 1
        self.step(steps)

    def fail_in(self, plan, share):
        """Let a step fail after a share of its operations."""
        self.carry_out(plan.operations[: int(share * len(plan.operations))])
        self.recover()

    def recover(self):
        """Recover from a failed step. Requests without a token run again, others pause, and the causes of failures end. All
        finished copies stay.
        """
        SEEN["recovered"] += 1
        waiting, running = list(self.scheduler.waiting), list(self.scheduler.running)
        made = {index: texts_with_copies(index) for index in (self.tree, self.snapshots)}
        suspects = [one for one in running if one.is_suspect]
        assert not suspects or running == suspects[:1], "one that may be the cause runs beside others"
        late = {one for one in running if one.request.id % 5 == 0}  # these have not received their last token
        found = self.scheduler.recover(goes_on=lambda job: job not in late)
        failed, again, paused = found.failed, found.again, found.paused
        self.memory.apply(Clear())
        assert [*self.scheduler.waiting] == [*paused, *again, *waiting] and not self.scheduler.running
        assert {*failed, *again, *paused} == {*running} and len(failed) + len(again) + len(paused) == len(running)
        for job in running:
            has_started = job.num_generated > 0
            gives_up = job.num_failures >= TRIES or not job.request.kind.is_client or (has_started and job in late)
            assert job in (failed if gives_up else paused if has_started else again)
        for job in failed:
            self.open.remove(job)
            self.scheduler.finish(job)
        assert set(self.open) == {*waiting, *again, *paused}
        SEEN["paused by a failure"] += bool(paused)
        for index, texts in made.items():
            # Of copies that were planned but not made, the runs before states go too, because nothing depends on them.
            now = texts_with_copies(index)
            assert now == texts if index is self.tree and self.can_cut and not failed else now <= texts
            SEEN["kept over a failure"] += bool(now)
        SEEN["began again"] += bool(again)
        device = self.tree.device
        assert not device.num_ready and not device.num_pending and not device.idle
        assert not device.take_operations(), "they would be carried out in an empty memory"
        check(self.scheduler)
        self.ran()

    @rule(acts=st.lists(st.sampled_from(ACTS), min_size=1, max_size=3), scope=SCOPES)
    def let_go(self, acts, scope):
        for act in acts:
            SEEN[act] += self.let_go_by(act, scope)

    def let_go_by(self, act, scope):
        """Do one of the acts that evict or copy KV. Return whether it had an effect."""
        tree = self.tree
        before, pinned, saved = tree.device.num_ready, tree.device.num_in_use, tree.copies.num_saved
        if act == "evict":
            leaves = (node for node in tree.device.idle if tree.device.is_leaf(node))
            least = min(leaves, key=lambda node: node.priority, default=None)
            freed = tree.evict()
            assert (least is None) == (freed == 0) and not (least and least.ready)
            return freed > 0
        if act == "drop":
            dropped = tree.drop(scope) + self.snapshots.drop(scope)
            assert pinned <= tree.device.num_ready <= before and not self.snapshots.of(scope)
            return dropped > 0
        if act == "save ahead":
            if work := self.scheduler.plan_idle_work():
                self.carry_out(work.operations)
                self.ran()
            return tree.copies.num_saved > saved
        if act == "make room":
            has_room = self.scheduler.idle and self.scheduler.cells.make_room(Fixed(self.history(1)), scope)
            self.carry_out(tree.device.take_operations())
            self.ran()
            return has_room
        if any(job.request.scope == scope for job in self.scheduler.running):
            return False
        tree.forget(scope)
        return before > tree.device.num_ready

    @rule(acts=st.lists(st.sampled_from(["unpin", 3, "pin", 1]), max_size=3), of=st.integers(1, 3), scope=SCOPES)
    def pin(self, acts, of, scope):
        """Pin a prompt for two seconds. Then pin again, unpin, or let seconds pass."""
        pins, tokens = self.scheduler.pins, np.array(self.history(of), np.int32)
        for act in ["pin", *acts]:
            before = len(list(pins.runs()))
            if act == "pin":
                SEEN[act] += bool(pins.pin(scope, tokens, 2))
            elif act == "unpin":
                SEEN[act] += bool(pins.unpin(scope, tokens))
            else:
                self.now += act
                pins.expire()
                SEEN["expire"] += len(list(pins.runs())) < before
                assert all(node.pinned_until > self.now for node in pins.runs())

    @rule(of=st.integers(1, 4), session=st.sampled_from(SESSIONS), scope=SCOPES)
    def end_session(self, of, session, scope):
        tokens = np.array(self.history(of), np.int32)
        SEEN["retired"] += bool(self.scheduler.index.retire(scope, tokens, session))

    def carry_out(self, operations):
        for operation in operations:
            SEEN[type(operation).__name__] += 1
            self.memory.apply(operation)

    def one_step(self):
        self.before_step()
        plan = self.plan()
        check(self.scheduler)
        self.look_at_phases(plan)
        if shares := [self.poison[span.request] for span in plan.spans if span.request in self.poison]:
            self.fail_in(plan, shares[0])
            return
        assert plan.num_tokens <= self.scheduler.batch_size and plan.num_spare >= 0
        assert plan.spans or not self.open or self.all_wait, "requests are open and nothing is computed"
        self.check_rest(plan)
        SEEN.update(type(operation).__name__ for operation in plan.operations)
        SEEN["prefetch"] += any(job.request.kind is Kind.PREFETCH for job in self.scheduler.running)
        SEEN["adapters in turn"] += len({job.request.scope.adapters for job in self.scheduler.running}) > 1
        SEEN["private"] += any(not job.request.keeps for job in self.scheduler.running)
        paused = [job.request.id for job in self.scheduler.waiting if job.reuse.num_preempted]
        SEEN["paused"] += bool(paused)
        SEEN["forced and paused"] += any(self.forced[id] for id in paused)
        SEEN["set aside"] += bool(plan.afterwards)
        SEEN["resumed"] += any(job.reuse.num_preempted for job in self.scheduler.running)
        SEEN["late"] += self.scheduler.counters.late_starts
        sampled = self.memory.run(plan)
        self.ran()
        if plan.spans:
            self.scheduler.budget.observe(plan, 0.01 + 0.001 * plan.num_tokens, self.scheduler.cells.swap.num_passed)
        for job, _ in self.scheduler.commit(plan, sampled):
            self.take_further(job)
            self.force(job)
            if job.num_tokens == job.num_prompt + self.limits[job.request.id]:
                self.end(job)
        check(self.scheduler)
        self.look_at_phases()
        for job in self.scheduler.running:
            assert job.sequence is not None
            known_cells = self.memory.cells.get(job.sequence.id, {})
            known = seen(job.tokens[: job.computed].tolist(), job.request.scope.adapters)
            assert job.computed == 0 or known_cells[job.computed - 1] == known

    def look_at_phases(self, plan=None):
        """Check that each request's phase agrees with the queue, its tokens and the next step. Nothing follows DONE."""
        spans = {span.request: span for span in plan.spans} if plan else {}
        for job, before in self.phases.items():
            now, span, answered = job.phase, spans.get(job.request.id), job.num_tokens - job.num_prompt
            if job not in self.open:
                expected = {Phase.DONE}
            elif job in self.scheduler.waiting:
                expected = {Phase.FETCHING if self.is_fetching(job) else Phase.WAITING}
            elif answered and job.computed == job.num_tokens - 1:
                expected = {Phase.DECODE}
            elif job.is_reading:
                expected = {Phase.READING} if span else {Phase.READING, Phase.FOLLOWING}
            else:
                expected = {Phase.PREFILL} if span else {Phase.PREFILL, Phase.FOLLOWING}
            assert now in expected, f"{before.value}, then {now.value}"
            if now is not before:
                assert before is not Phase.DONE
                assert now is not Phase.FOLLOWING or any(shares_next(job, one) for one in self.open if one is not job)
                SEEN[f"{before.value}, then {now.value}"] += 1
            self.phases[job] = now

    def is_fetching(self, job) -> bool:
        """Whether a request waits for a lower tier."""
        return False

    def take_further(self, job):
        """Append the tokens that a draft added. Now and then the answer ends within them, as by a stop string."""
        further = self.memory.take_further(job.request.id)
        SEEN["right drafts"] += bool(further)
        if draft := job.request.draft:
            SEEN["wrong drafts"] += draft.num_drafted > draft.num_accepted + len(further)
        for place, token in enumerate(further):
            if job.request.id % 3 == place == 1:
                SEEN["ended within a draft"] += 1
                self.limits[job.request.id] = job.num_tokens - job.num_prompt
                return
            job.accept(token)

    def force(self, job):
        """Append several tokens at once, as a grammar does. They are the tokens that would be sampled."""
        most = min(self.forced[job.request.id], job.num_prompt + self.limits[job.request.id] - job.num_tokens)
        for _ in range(most):
            job.force(next_token(seen(job.tokens[: job.num_tokens].tolist(), job.request.scope.adapters)))
        SEEN["forced"] += most > 1

    def check_rest(self, plan):
        """Check that a prompt computed alone has no pieces below `recompute_last` tokens, and leaves no such rest."""
        running, recompute_last = self.scheduler.running, self.recompute_last
        if len(running) > 1:
            self.met_others.update(job.request.id for job in running)
            return
        has_room = self.scheduler.batch_size >= 2 * recompute_last and (self.tree.host.max_bytes or not self.can_cut)
        for job, span in zip(running, plan.spans, strict=False):
            sections = job.layout.sections(job.num_tokens)
            begin, end = next(section for section in sections if section[0] <= span.start < section[1])
            left = end - span.stop + span.drafted  # a resumed request may have a draft after its last token
            if has_room and job.request.id not in self.met_others and span.start < job.claimed:
                assert len(span.tokens) >= min(recompute_last, end - begin), "a piece that is too small for its bits"
                assert left == 0 or left >= recompute_last, "a rest that is too small for its bits"

    def ran(self):
        """Note that a plan has been carried out. A hook for other lives."""

    def end(self, job):
        assert job.request.id not in self.poison, "one with which each step fails has an end"
        self.open.remove(job)
        pinned = len(self.scheduler.index.pinned)
        self.scheduler.finish(job)
        SEEN["pinned by marks"] += len(self.scheduler.index.pinned) > pinned
        result = job.tokens[: job.num_tokens].tolist()
        expected = greedy(job.layout.tokens.tolist(), self.limits[job.request.id], job.request.scope.adapters)
        assert result == expected, "reuse changed a result"
        assert job.request.wanted_slot in (-1, job.slot), "another slot than the one it waited for"
        assert not job.request.kind.is_client or self.scheduler.slots[job.slot].last == job.request.id
        ends = [0, *(at for span in job.reuse.spans for at in (span.start, span.stop)), job.num_prompt]
        assert ends == sorted(ends), "tokens that count as reused twice, or that are none of the prompt's"
        if job.request.id in self.choices:
            SEEN["shared among them"] += job.reuse.cached > 0
        elif not job.request.keeps:
            assert job.reuse.cached == 0 and job.reuse.source == "none"
        self.histories.append(ids_of(np.array(result, np.int32)).tolist())
        SEEN.update(["finished", job.reuse.source, *["overtaken"] * bool(job.reuse.num_overtaken)])
        SEEN["its slot"] += job.request.wanted_slot >= 0

    @invariant()
    def consistent(self):
        if hasattr(self, "scheduler"):
            check(self.scheduler)
            self.look_at_phases()

    @rule()
    @precondition(lambda self: self.scheduler.idle)
    def rest(self):
        """Do all idle work. It ends: each idle run is copied at most twice, however little room the tiers have."""
        self.before_step()
        nodes = {node for sequence in self.tree.device.idle.values() for node in path(sequence.last_node)}
        for _ in range(2 * len(nodes) + 2):
            work = self.scheduler.plan_idle_work()
            if work is not None:
                self.carry_out(work.operations)
            self.ran()
            check(self.scheduler)
            if work is None:
                break
        else:
            raise AssertionError("idle work does not end")
        SEEN["rested"] += bool(nodes)

    def teardown(self):
        if hasattr(self, "scheduler"):
            self.finish()
            self.rest()
            self.close()

    def finish(self):
        """Step until no request is open."""
        for _ in range(2000):
            if not self.open:
                return
            self.one_step()
        raise AssertionError("a request never ended")

    def close(self):
        """Forget everything. No cell, id or copy may remain."""
        while self.tree.evict():
            check(self.scheduler)
        self.memory.run(self.plan())
        tree, device = self.tree, self.tree.device
        for scope in list(tree.roots):
            tree.forget(scope)
        for scope in list(self.snapshots.roots):
            self.snapshots.drop(scope)
        self.carry_out(device.take_operations())
        for host in (tree.host, self.snapshots.host):
            assert host.num_bytes == host.num_tokens == host.num_states == 0 and not host.nodes
        assert device.num_ready == device.num_pending == device.num_in_use == 0 and not tree.roots and not device.idle
        assert self.memory.num_used == 0 and not any(self.memory.cells.values()), "cells have leaked"
        assert sorted(device.free_ids) == list(range(self.num_ids)), "sequence ids have leaked"
        assert not any(root.children for root in self.snapshots.roots.values())
        assert not any(slot.job for slot in self.scheduler.slots) and self.scheduler.idle


def shares_next(job, other):
    """Whether two requests have the same tokens, including the next token that the first request computes."""
    upto, mine, theirs = job.computed + 1, job.request.index_scope, other.request.index_scope
    return mine == theirs and np.array_equal(job.tokens[:upto], other.tokens[:upto])


def texts_with_copies(index):
    """Return the scope and tokens of each prefix whose KV has a finished copy."""
    found, stack = set(), [(root.scope, (), child) for root in index.roots.values() for child in root.children.values()]
    while stack:
        scope, before, node = stack.pop()
        if node.copy is not None and node.copy.data is not None:
            text = (*before, *node.tokens.tolist())
            found.add((scope, text))
            stack += [(scope, text, child) for child in node.children.values()]
    return found


def offloading(num_tokens):
    """Return costs with which idle KV is offloaded for requests of this many tokens and steps."""
    return {"spill_ns": num_tokens, "idle_token_ns": 1.0, "idle_step_ns": 1.0}
