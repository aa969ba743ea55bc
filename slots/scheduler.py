"""Plans each step: decode first, then prefill under a budget. Requests are admitted as cells allow.

A step is `plan()`, then the runner, then `commit()`. Prefill is no phase of its own: a request's computed tokens chase its
known ones (vLLM's scheduler). When cells run out: evict a leaf, else preempt the youngest request, which resumes later
from its KV that is still in the tree. No later prompt passes one that is due, and the oldest request is preempted last, so
none starves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import partial

from .budget import PrefillBudget
from .cells import Cells
from .counters import Counters
from .drafts.drafts import Drafts
from .hybrids.snapshots import Snapshots
from .lanes import Lanes
from .pins import Pins
from .plan import Plan
from .queue import Queue
from .radix import PromptTree
from .request import Request
from .separate.placing import fetch
from .separate.reading import keep_moved
from .step import Step, in_turn
from .tree import PrefixTree


class Scheduler:
    """Owns the waiting and the running requests. Not thread-safe: only the engine's thread calls it.

    batch_size: most tokens of a step. prefill_budget, max_stall: see `PrefillBudget`. idle_cells: see `Cells`. window: see
    `Queue`. snapshots: for models whose memory cannot be cut. drafts: for requests that want them.
    """

    def __init__(
        self,
        tree: PrefixTree,
        *,
        num_lanes: int,
        batch_size: int = 512,
        prefill_budget: int = 512,
        max_stall: float = math.inf,
        idle_cells: int = 0,
        window: int = 32,
        snapshots: Snapshots | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        self.tree, self.lanes, self.batch_size = tree, Lanes(num_lanes), batch_size
        self.budget = PrefillBudget(prefill_budget, max_stall, tree.costs, tree.profile)
        self.snapshots = Snapshots(tree, 0) if snapshots is None else snapshots
        self.index: PromptTree = self.snapshots if self.snapshots.max_bytes else tree  # what prompts are compared with
        self.waiting = Queue(self.index, window, self.lanes.may_take)
        self.drafts = drafts or Drafts(tree.costs)
        self.running: list[Request] = []  # in order of admission
        self.cells = Cells(tree, self.index, self.running, idle_cells)
        self.pins, self.counters = Pins(self.index), Counters(tree)
        self.step = Step(tree, self.cells, self.snapshots, self.counters)  # of the last plan

    # ---- requests come and go --------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.add(request)

    def finish(self, request: Request) -> None:
        """End a waiting or running request. Its KV stays in the tree, unless it is not to be cached."""
        self.waiting.discard(request) if request.sequence is None else self._leave(request)
        forget_uncached(self.tree, request, itertools.chain(self.running, self.waiting))
        self.waiting.unblock()

    def take_rejected(self) -> list[tuple[Request, Exception]]:
        """Return the requests that could not be admitted since the last call, and why; they are finished."""
        return self.waiting.take_rejected()

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    # ---- a step ----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return the next step. It is empty if no request runs and none could be admitted."""
        self.drafts.settle(self.step.checked, self.tree.ledger)
        self.pins.expire()
        started = self._admit()
        step = self.step = self._next_step()
        operations, afterwards = self.cells.take_operations(step.num_tokens, step.requests)
        return Plan(
            operations,
            tuple(step.spans),
            afterwards,
            num_spare=self.cells.num_free - step.num_tokens,
            background=step.background,
            adapters=step.adapters,
            admitted=tuple(request.id for request in started if request.sequence is not None),  # not preempted since
        )

    def plan_idle_work(self) -> Plan | None:
        """Return a step without spans: the tree's decisions, and one idle run's copy to host memory. None: all is done."""
        self.tree.copies.save_ahead()
        operations = self.tree.ledger.take_operations()
        return Plan(operations) if operations else None

    def commit(self, plan: Plan, sampled: list[int]) -> list[tuple[Request, int]]:
        """Take over the results of a plan. sampled: one token for each span that asked for logits, in order.

        Returns the requests with a new token, and the token; the caller decides whether a request is finished.
        """
        progress = self.step.commit(plan, sampled)
        for request in self.step.have_read:
            self._leave(request)
            self.waiting.resume(request.step_back(), blocks=False)
        return progress

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from the time that a plan took."""
        self.budget.observe(plan, seconds, self.cells.num_passed)
        self.drafts.observe(plan, seconds)

    def refuse(self) -> bool:
        """Free cells, since the runner had none for the plan's batch. Returns False if no cell can be freed."""
        if not self.tree.evict():
            if len(self.running) < 2:
                return False
            self._preempt()
        return True

    def abandon(self) -> list[Request]:
        """Forget all KV, because the runner failed and its cells may hold anything. Returns the requests that ran.

        The caller clears the runner's memory as well. Operations that were decided and not carried out are void.
        """
        failed = list(self.running)
        for request in failed:
            self.lanes.leave(request)
            request.sequence = None
        self.running.clear()
        self.tree.clear()
        self.snapshots.void()
        self.waiting.restart()
        return failed

    def _next_step(self) -> Step:
        """Return a step: decode first, then prefill with the remaining tokens; in turns where both together cost more.

        The requests of one set of adapters share a step, the sets take turns.
        """
        last, apart = self.step.adapters, self.cells.num_used >= self.tree.costs.apart_from_cells
        streams = any(one.decoding for one in self.running) or len({one.answering for one in self.running}) > 1
        if apart and self.step.is_decode_turn and streams:
            step = Step(self.tree, self.cells, self.snapshots, self.counters)
            same = [request for request in self.running if request.scope.adapters == last and not request.decoding]
            step.prefill(same, self.budget.limit(self.batch_size, partial(self.cells.passed_over, same)))
            if step.spans:
                return step
        while True:
            step = Step(self.tree, self.cells, self.snapshots, self.counters)
            while not self.cells.reserve(len(decoding := in_turn(self.running, last, decoding=True))):
                self._preempt()
            step.decode(decoding, self.drafts.propose(decoding, self.running, self.cells))
            step.is_decode_turn = apart and bool(step.spans)
            if not step.is_decode_turn and (prompts := in_turn(self.running, last, decoding=False)):
                left, cells = self.batch_size - step.num_tokens, partial(self.cells.passed_over, [*decoding, *prompts])
                step.prefill(prompts, self.budget.limit(left, cells) if streams else left)
            if step.spans or not self.running:
                return step
            self._preempt()  # all requests lack cells: the youngest gives up its own

    # ---- admission and memory --------------------------------------------------------------------------------------

    def _admit(self) -> list[Request]:
        """Start waiting requests while a lane is idle and their prompts fit; return them."""
        started: list[Request] = []
        while self.lanes.any_idle and (request := self.waiting.next()):
            if not self.cells.fits(request, self.waiting):
                self.waiting.block()
                break
            self.waiting.take(request)
            try:
                self._start(request)
            except Exception as error:  # it neither waits nor runs, and the tree may be inconsistent
                request.sequence = None
                self.waiting.reject(request, error)
                raise
            started.append(request)
        return started

    def _start(self, request: Request) -> None:
        """Run a request that has left the queue: claim its path, bring back its KV, give it a lane."""
        keep_moved(self.tree, request)
        claim = request.claim(self.tree)
        request.sequence, request.claimed, request.rest = claim.sequence, request.num_tokens, self.tree.rest
        self.counters.count_cached(request, claim.source, claim.cached)
        if not request.guess:
            self.cells.spill_idle(request)
        fetch(self.tree, self.cells, self.counters, request)
        if request.snapshot_scope is not None and self.cells.reserve(request.num_tokens):
            self.counters.count_cached(request, "snapshot", self.snapshots.load(request))
        request.computed = request.started_at = claim.sequence.length
        has_states = request.snapshot_scope is not None
        request.stops = self.snapshots.stops(request, self.waiting) if has_states else request.pauses
        request.due = self.counters.prompt_tokens + request.num_lacking
        self.lanes.take(request, claim.sequence.id)
        self.running.append(request)

    def _preempt(self) -> None:
        """Stop the youngest request of the lowest priority and put it first in the queue: its stream only pauses.

        It stays there until a running request ends; admitted any earlier it would fit exactly, and be preempted again.
        """
        victim = min(reversed(self.running), key=lambda request: request.priority)
        self._leave(victim)
        forget_uncached(self.tree, victim, self.running)
        victim.num_preempted += 1
        victim.computed = 0
        self.waiting.resume(victim, blocks=bool(self.running))
        self.counters.preemptions += 1

    def _leave(self, request: Request) -> None:
        """Take a request off its lane; its KV stays in the tree, parked."""
        assert request.sequence is not None
        if request.snapshot_scope is not None:
            self.snapshots.take(request)
        self.tree.release(request.sequence, request.tokens[request.claimed : max(request.computed, request.claimed)])
        self.running.remove(request)
        self.lanes.leave(request)
        request.sequence = None


def forget_uncached(tree: PrefixTree, request: Request, rest: Iterable[Request]) -> None:
    """Forget the KV of a request that is not to be cached, unless the `rest` has another answer to the same prompt."""
    if not request.cache and all(other.scope != request.scope for other in rest):
        tree.forget(request.scope)
