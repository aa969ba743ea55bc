"""Decides what each step computes: decode first, prefill under a budget, admission when there is room.

A step is `plan()`, then the runner, then `commit()`. There is no prefill phase: a request's computed tokens chase its
known ones (vLLM's scheduler). When cells run out: evict a leaf, else preempt the youngest request, which resumes later
from whatever of it is still in the tree. The oldest running request always makes progress, so nothing starves.
"""

from __future__ import annotations

from .budget import PrefillBudget, chunk_size
from .cells import Room
from .counters import Counters
from .lanes import Lanes
from .pins import Pins
from .plan import Plan, Span
from .queue import Queue, Rejected
from .request import Prompt, Request
from .scope import Scope
from .snapshots import Snapshots, next_stop
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
        self._turn_of_prefill = False  # the last step generated only
        self._head_is_stuck = False  # the first in the queue did not fit, and nothing has been freed since
        self._in_flight: list[Request] = []  # of the last plan, in span order
        self._rejected: list[tuple[Request, Exception]] = []

    # ---- requests come and go --------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request."""
        if all(request.priority > other.priority for other in self.waiting):
            self._head_is_stuck = False  # it is the head now
        self.waiting.add(request)

    def finish(self, request: Request) -> None:
        """End a request in whatever state it is: its KV stays in the tree, or goes if it is not to be cached."""
        if request.sequence is None:
            self.waiting.discard(request)
        else:
            self._leave(request)
        if not request.cache:
            self.tree.forget(request.scope)
        self._head_is_stuck = False

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    # ---- a step ----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The next step. Empty when nobody runs and nobody could be admitted."""
        self.pins.expire()
        started = self._admit()
        while True:
            spans = self._spans()
            if spans or not self.running:
                break
            self._preempt(self._victim)  # everybody wants cells and has none: the youngest gives up its own
        num_tokens = sum(len(span.tokens) for span in spans)
        background = all(request.background for request in self._in_flight)
        operations, afterwards = self.room.operations(num_tokens, self._in_flight)
        admitted = tuple(request.id for request in started if request.sequence is not None)  # not preempted since
        num_spare = self.room.num_free - num_tokens
        return Plan(operations, tuple(spans), afterwards, num_spare, background, admitted=admitted)

    def ahead(self, prompt: Prompt, scope: Scope) -> tuple[int, bool]:
        """How many tokens a background request would compute, and whether the cells for it are free."""
        tokens = prompt.arrange(self.tree, scope).tokens
        match = self.tree.match(scope, tokens)
        return len(tokens) - match.length, len(tokens) - match.ready <= self.room.num_free

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
        tokens = iter(sampled)
        progress = []
        for request, span in zip(self._in_flight, plan.spans, strict=True):
            request.computed = span.stop
            if request.sequence is not None and request.sequence.length < request.claimed:
                self.tree.ledger.advance(request.sequence, min(span.stop, request.claimed))
                if request.background:
                    self.counters.idle_tokens += len(span.tokens)
                else:
                    self.counters.prefilled_tokens += len(span.tokens)
            if request.computed in request.stops:
                self.snapshots.take(request)
            if span.logits:
                token = next(tokens)
                request.append(token)
                self.counters.generated_tokens += not request.background
                progress.append((request, token))
        self.counters.steps += 1
        return progress

    def observe(self, plan: Plan, seconds: float) -> None:
        """A plan took so long."""
        self.budget.observe(plan, seconds)
        self.tree.profile.observe(plan, seconds)

    def refuse(self) -> bool:
        """The runner had no room for the plan's batch: free something. False if nothing can be."""
        if not self.tree.evict():
            if len(self.running) < 2:
                return False
            self._preempt(self._victim)
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
        self._in_flight, self._head_is_stuck = [], False
        return failed

    # ---- spans -----------------------------------------------------------------------------------------------------

    def _spans(self) -> list[Span]:
        """The spans of one batch. Where generating and prefill go apart, whichever was not in the last one."""
        apart = self.room.num_used >= self.tree.costs.apart_from_cells
        if apart and self._turn_of_prefill and any(request.decoding for request in self.running):
            self._turn_of_prefill, self._in_flight = False, []
            if spans := self._prefill_spans(self.batch_size, protect=True):
                return spans
        spans = self._decode_spans()
        self._turn_of_prefill = apart and bool(spans)
        if not self._turn_of_prefill:
            spans += self._prefill_spans(self.batch_size - len(spans), protect=bool(spans))
        return spans

    def _decode_spans(self) -> list[Span]:
        while not self.room.reserve(sum(request.decoding for request in self.running)):
            self._preempt(self._victim)
        self._in_flight = [request for request in self.running if request.decoding]
        return [self._span(request, 1) for request in self._in_flight]

    def _prefill_spans(self, budget: int, protect: bool) -> list[Span]:
        """Spans for requests that are behind, in order of admission. protect: others are generating, keep the budget."""
        left = self.budget.room(budget) if protect else budget
        spans: list[Span] = []
        leaders: list[Request] = []
        for request in [request for request in self.running if not request.decoding]:
            self._catch_up(request)
            if any(request.waits_for(leader, self.tree.costs.min_shared) for leader in leaders):
                continue
            leaders.append(request)
            most = min(left, self.tree.costs.background_step) if request.background else left
            ahead = (next_stop(request.stops, request.computed) or request.num_tokens) - request.computed
            size = chunk_size(ahead, most, self.tree.costs)
            planned = len(self._in_flight) + sum(len(span.tokens) for span in spans)
            if size <= 0:
                continue
            if not self.room.reserve(planned + size):
                size = self.room.num_free - planned
                if size <= 0:
                    continue
            spans.append(self._span(request, size))
            self._in_flight.append(request)
            left -= size
        return spans

    def _span(self, request: Request, size: int) -> Span:
        assert request.sequence is not None
        stop = request.computed + size
        tokens = request.tokens[request.computed : stop]
        return Span(request.id, request.sequence.id, request.computed, tokens, logits=stop == request.num_tokens)

    def _catch_up(self, request: Request) -> None:
        assert request.sequence is not None
        if gained := self.tree.ledger.catch_up(request.sequence):
            request.computed += gained
            self._count_cached(request, "fork", gained)

    # ---- admission and memory --------------------------------------------------------------------------------------

    def _admit(self) -> list[Request]:
        """Start waiting requests while there are idle lanes and the pool has room for their prompts; return them."""
        started: list[Request] = []
        while self.waiting and not self._head_is_stuck and self.lanes.any_idle:
            try:
                request = self.waiting.next()
            except Rejected as rejection:
                self._rejected.append((rejection.request, rejection.cause))
                continue
            if not self.room.fits(request):
                self._head_is_stuck = True
                break
            self.waiting.take(request)
            try:
                self._start(request)
            except Exception as error:  # it neither waits nor runs, and the tree is not to be trusted
                request.sequence = None
                self._rejected.append((request, error))
                raise
            started.append(request)
        return started

    def take_rejected(self) -> list[tuple[Request, Exception]]:
        """The requests that could not be admitted since the last call, and why; they are finished."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def _start(self, request: Request) -> None:
        """Have a request run that has left the queue. Only the last lines count it among those that run."""
        claim = request.claim(self.tree)
        request.sequence, request.claimed, request.rest = claim.sequence, request.num_tokens, self.tree.rest
        self._count_cached(request, claim.source, claim.cached)
        if not request.guess:
            self.room.spill_idle()
        if (needed := self.tree.copies.restorable(claim.sequence)) and self.room.reserve(needed):
            for source, tokens in self.tree.copies.restore(claim.sequence).items():
                self._count_cached(request, source, tokens)
        if request.snapshot_scope is not None and self.room.reserve(request.num_tokens):
            self._count_cached(request, "snapshot", self.snapshots.load(request))
        request.computed = request.started_at = claim.sequence.length
        request.stops = self.snapshots.stops(request) if request.snapshot_scope is not None else ()
        self.lanes.take(request, claim.sequence.id)
        self.running.append(request)

    def _count_cached(self, request: Request, source: str, tokens: int) -> None:
        if request.num_preempted or request.background:
            return  # its prompt has been counted, or nobody asked for it
        request.cached += tokens
        request.sources[source] = request.sources.get(source, 0) + tokens
        self.counters.cached_tokens[source] = self.counters.cached_tokens.get(source, 0) + tokens

    @property
    def _victim(self) -> Request:
        """Who is paused when cells run out: the youngest of the lowest priority."""
        return min(reversed(self.running), key=lambda request: request.priority)

    def _preempt(self, request: Request) -> None:
        """Stop a request for now and put it first in the queue: its stream only pauses.

        It stays there until a running request ends; admitted any earlier it would fit exactly, and be preempted again.
        """
        self._leave(request)
        if not request.cache:
            self.tree.forget(request.scope)
        request.num_preempted += 1
        request.computed = 0
        self.waiting.resume(request)
        self._head_is_stuck = bool(self.running)
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
