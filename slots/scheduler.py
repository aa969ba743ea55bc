"""Decides what each step computes: decode first, prefill under a budget, admission when there is room.

A step is `plan()`, then the runner, then `commit()`. There is no prefill phase: a request's computed tokens chase its
known ones (vLLM's scheduler). When cells run out: evict a leaf, else preempt the youngest request, which resumes later
from whatever of it is still in the tree. The oldest running request always makes progress, so nothing starves.
"""

from __future__ import annotations

from .budget import PrefillBudget
from .cells import Room
from .counters import Counters
from .lanes import Lanes
from .pins import Pins
from .plan import Plan
from .queue import Queue
from .request import Request
from .snapshots import Snapshots
from .step import Step
from .tree import PrefixTree


class Scheduler:
    """Owns who waits and who runs. Not thread-safe: one thread calls it.

    batch_size: most tokens a step may compute. prefill_budget: most prompt tokens a step may compute while other
    requests are generating, at the speed of a short context. idle_cells: most cells that may hold what
    no running request needs, where there is a host tier to move it to: every step attends over the whole pool, so idle
    KV slows what runs. window: how many later requests may be admitted before one that waits. snapshots: for models that
    cannot be cut.
    """

    def __init__(
        self,
        tree: PrefixTree,
        *,
        num_lanes: int,
        batch_size: int = 512,
        prefill_budget: int = 512,
        idle_cells: int = 0,
        window: int = 32,
        snapshots: Snapshots | None = None,
    ) -> None:
        self.tree = tree
        self.lanes = Lanes(num_lanes)
        self.batch_size = batch_size
        self.budget = PrefillBudget(prefill_budget, tree.costs)
        self.waiting = Queue(tree, window)
        self.pins = Pins(tree)
        self.snapshots = Snapshots(tree, 0) if snapshots is None else snapshots
        self.running: list[Request] = []  # in order of admission
        self.room = Room(tree, self.running, idle_cells)
        self.counters = Counters()
        self.step = Step(tree, self.room, self.snapshots, self.counters)  # of the last plan

    # ---- requests come and go --------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.add(request)

    def finish(self, request: Request) -> None:
        """End a request in whatever state it is: its KV stays in the tree, or goes if it is not to be cached."""
        if request.sequence is None:
            self.waiting.discard(request)
        else:
            self._leave(request)
        if not request.cache:
            self.tree.forget(request.scope)
        self.waiting.unblock()

    def take_rejected(self) -> list[tuple[Request, Exception]]:
        """The requests that could not be admitted since the last call, and why; they are finished."""
        return self.waiting.take_rejected()

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    # ---- a step ----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The next step. Empty when nobody runs and nobody could be admitted."""
        self.pins.expire()
        started = self._admit()
        step = self.step = self._next_step()
        operations, afterwards = self.room.operations(step.num_tokens, step.requests)
        return Plan(
            operations,
            tuple(step.spans),
            afterwards,
            num_spare=self.room.num_free - step.num_tokens,
            background=step.background,
            admitted=tuple(request.id for request in started if request.sequence is not None),  # not preempted since
        )

    def plan_idle_work(self) -> Plan | None:
        """A small step for when there is nothing to compute: what was decided, and one idle run copied to host memory.

        None: all is done.
        """
        self.tree.copies.save_ahead()
        operations = self.tree.ledger.take_operations()
        return Plan(operations) if operations else None

    def commit(self, plan: Plan, sampled: list[int]) -> list[tuple[Request, int]]:
        """Take over what a plan computed. sampled: one token for each span that asked for logits, in order.

        Returns the new token of each request that got one; whoever calls decides whether that request is finished.
        """
        self.counters.steps += 1
        return self.step.commit(plan, sampled)

    def observe(self, plan: Plan, seconds: float) -> None:
        """A plan took so long."""
        self.budget.observe(plan, seconds)
        self.tree.profile.observe(plan, seconds)

    def refuse(self) -> bool:
        """The runner had no room for the plan's batch: free something. False if nothing can be."""
        if not self.tree.evict():
            if len(self.running) < 2:
                return False
            self._preempt()
        return True

    def abandon(self) -> list[Request]:
        """The runner failed: forget everything that has KV, since nobody knows any more. Returns who was running.

        The runner's memory must be cleared as well; operations that were decided and not run are void.
        """
        failed = list(self.running)
        for request in failed:
            self.lanes.leave(request)
            request.sequence = None
        self.running.clear()
        self.tree.clear()
        self.snapshots.void()
        self.waiting.unblock()
        return failed

    def _next_step(self) -> Step:
        """Decode first, then prefill with the tokens that are left; in turns where both in one step cost more."""
        apart = self.room.num_used >= self.tree.costs.apart_from_cells
        if apart and self.step.is_decode_turn and any(request.decoding for request in self.running):
            step = Step(self.tree, self.room, self.snapshots, self.counters)
            step.prefill([request for request in self.running if not request.decoding], self.budget.room(self.batch_size))
            if step.spans:
                return step
        while True:
            step = Step(self.tree, self.room, self.snapshots, self.counters)
            while not self.room.reserve(len(decoding := [request for request in self.running if request.decoding])):
                self._preempt()
            step.decode(decoding)
            step.is_decode_turn = apart and bool(step.spans)
            if not step.is_decode_turn:
                left = self.batch_size - step.num_tokens
                behind = [request for request in self.running if not request.decoding]
                step.prefill(behind, self.budget.room(left) if step.spans else left)
            if step.spans or not self.running:
                return step
            self._preempt()  # everybody wants cells and has none: the youngest gives up its own

    # ---- admission and memory --------------------------------------------------------------------------------------

    def _admit(self) -> list[Request]:
        """Start waiting requests while there are idle lanes and the pool has room for their prompts; return them."""
        started: list[Request] = []
        while self.lanes.any_idle and (request := self.waiting.next()):
            if not self.room.fits(request):
                self.waiting.block()
                break
            self.waiting.take(request)
            try:
                self._start(request)
            except Exception as error:  # it neither waits nor runs, and the tree is not to be trusted
                request.sequence = None
                self.waiting.reject(request, error)
                raise
            started.append(request)
        return started

    def _start(self, request: Request) -> None:
        """Have a request run that has left the queue. Only the last lines count it among those that run."""
        claim = request.claim(self.tree)
        request.sequence, request.claimed, request.rest = claim.sequence, request.num_tokens, self.tree.rest
        self.counters.count_cached(request, claim.source, claim.cached)
        if not request.guess:
            self.room.spill_idle()
        if (needed := self.tree.copies.restorable(claim.sequence)) and self.room.reserve(needed):
            for source, tokens in self.tree.copies.restore(claim.sequence).items():
                self.counters.count_cached(request, source, tokens)
        if request.snapshot_scope is not None and self.room.reserve(request.num_tokens):
            self.counters.count_cached(request, "snapshot", self.snapshots.load(request))
        request.computed = request.started_at = claim.sequence.length
        request.stops = self.snapshots.stops(request) if request.snapshot_scope is not None else ()
        self.lanes.take(request, claim.sequence.id)
        self.running.append(request)

    def _preempt(self) -> None:
        """Stop the youngest request of the lowest priority and put it first in the queue: its stream only pauses.

        It stays there until a running request ends; admitted any earlier it would fit exactly, and be preempted again.
        """
        victim = min(reversed(self.running), key=lambda request: request.priority)
        self._leave(victim)
        if not victim.cache:
            self.tree.forget(victim.scope)
        victim.num_preempted += 1
        victim.computed = 0
        self.waiting.resume(victim, blocks=bool(self.running))
        self.counters.preemptions += 1

    def _leave(self, request: Request) -> None:
        """Take a request off its lane; everything of it that has KV stays in the tree."""
        assert request.sequence is not None
        if request.snapshot_scope is not None:
            self.snapshots.take(request)
        self.tree.release(request.sequence, request.tokens[request.claimed : max(request.computed, request.claimed)])
        self.running.remove(request)
        self.lanes.leave(request)
        request.sequence = None
