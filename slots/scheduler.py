"""Plans each step and commits its results.

A step is `plan()`, then the runner, then `commit()`. Prefill is no phase of its own: a request's computed tokens chase its
known ones (vLLM's scheduler). When cells run out: evict a leaf, else preempt the youngest request, which resumes later
from its KV that is still in the tree. No later prompt of its priority passes one that is due, and the oldest request is
preempted last, so none starves beside others of its priority.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat

import numpy as np

from .cells import Cells
from .costs import PrefillBudget, chunk_size
from .counters import Counters
from .drafts import Drafts
from .host import HostMemory, PromptTree
from .plan import Plan, Restore, Span
from .prefix_tree import Pins, PrefixTree
from .queue import Queue
from .radix import NO_TOKENS, Node, descendants, path
from .request import Request
from .separate import keep_moved, note_read
from .slot import Lanes
from .snapshots import Snapshots, next_stop
from .source import Source
from .state_tree import StateTree


def fetch(tree: PrefixTree, cells: Cells, counters: Counters, request: Request, *, spans: int = 0) -> None:
    """Bring back all KV that follows the request's own, while cells are free for it.

    spans: cells that the step needs for its own tokens, as far as it is planned.
    """
    assert request.sequence is not None
    while True:
        if (needed := tree.copies.restorable(request.sequence)) and cells.reserve(spans + needed):
            for source, tokens in tree.copies.restore(request.sequence):
                counters.count_cached(request, source, tokens)
        if not place(tree, cells, counters, request, spans=spans):
            return


def place(tree: PrefixTree, cells: Cells, counters: Counters, request: Request, *, spans: int = 0) -> bool:
    """Move the documents that follow the request's KV to their places. False: none follows, or no cells are free for it.

    All that follow each other at once: each change of the path walks all of it.
    """
    sequence, layout = request.sequence, request.layout
    assert sequence is not None and layout is not None
    start = reached = sequence.length
    while (at := layout.moved_at(reached)) is not None and cells.reserve(spans + layout.moved[at].stop - start):
        document = layout.moved[at]
        distance = document.distance
        for piece in request.readings.pieces[at]:
            first, last = max(piece.start + distance, reached), piece.stop + distance
            if first < last:
                tree.ledger.perform(Restore(piece.blob, sequence.id, first, last, distance=distance))
        counters.count_moved(request, at, reached)
        reached = document.stop
    if reached > start:
        tree.ledger.advance(sequence, reached)
    return reached > start


# ---- One step while it is planned: spans under a budget of tokens and of cells. -----------------------------------------


class StepBuilder:
    """Requests and their spans, in the same order. It lives from one `plan()` to the next: `commit()` reads it.

    is_decode_turn: decode took a step of its own, since both together cost more; the next step is for prompts, if any wait.
    """

    def __init__(self, tree: PrefixTree, cells: Cells, snapshots: Snapshots, counters: Counters) -> None:
        self._tree, self._cells, self._snapshots, self._counters = tree, cells, snapshots, counters
        self.requests: list[Request] = []
        self.spans: list[Span] = []
        self.checked: list[tuple[Request, Span]] = []  # those with drafts, once they are computed
        self.num_tokens = 0
        self.is_decode_turn = False
        self._num_cells = 0  # cells of the spans, and of one token behind each prompt
        self._leaders: list[Request] = []  # requests that this step prefills, or would with more tokens or cells

    @property
    def adapters(self) -> str:
        """The LoRA adapters of its requests, which all have the same."""
        return self.requests[0].scope.adapters if self.requests else ""

    @property
    def background(self) -> bool:
        """Whether no client waits for its results."""
        return all(request.background for request in self.requests)

    @property
    def have_read(self) -> list[Request]:
        """Return the requests that have read a document for their prompt to its end."""
        return [one for one in self.requests if one.is_reading and one.computed == one.num_tokens]

    def decode(self, requests: Iterable[Request], drafts: Sequence[np.ndarray] = ()) -> None:
        """Add the last token of each request, and its draft. Their cells are free. drafts: of each request, or none."""
        for request, draft in zip(requests, drafts or repeat(NO_TOKENS), strict=False):
            self._add(request, 1, draft)

    def prefill(self, requests: Iterable[Request], num_tokens: int) -> None:
        """Add as much of the prompts as `num_tokens` and the cells allow, in the order in which they are due.

        A prompt is due when as many prompt tokens have been computed since its admission as it lacked then: a short one
        passes a long one, and none that comes later passes one that is due (fair queueing, Demers et al. 1989).
        Tokens that a grammar forced on an answer go before all prompts: a stream waits for them.
        """
        for request in sorted(requests, key=lambda request: (not request.answering, -request.priority, request.due)):
            self._catch_up(request)
            if self._follows_a_leader(request):
                continue
            self._leaders.append(request)
            if size := self._size(request, num_tokens):
                self._add(request, size)
                self._num_cells += 1
                num_tokens -= size

    def commit(self, plan: Plan, sampled: Iterable[int]) -> list[tuple[Request, int]]:
        """Take over the results: see `Scheduler.commit`."""
        self._counters.count_step(len(plan.spans))
        tokens = iter(sampled)
        progress = []
        for request, span in zip(self.requests, plan.spans, strict=True):
            request.computed = span.stop - span.drafted
            if span.drafted and request.draft is not None:
                request.draft.num_drafted += span.drafted
                self._counters.count_draft(span.drafted)
                self.checked.append((request, span))
            if request.sequence is not None and request.sequence.length < request.claimed:
                self._tree.ledger.advance(request.sequence, min(span.stop, request.claimed))
                if request.background:
                    self._counters.idle_tokens += len(span.tokens)
                else:
                    self._counters.prefilled_tokens += len(span.tokens)
            if request.is_reading:
                note_read(self._tree, request, span)
            if request.snapshot_scope is not None and request.computed in request.stops:
                self._snapshots.take(request)
            if span.logits:
                token = next(tokens)
                request.append(token)
                self._counters.generated_tokens += not request.background
                progress.append((request, token))
        return progress

    def _catch_up(self, request: Request) -> None:
        """Share KV of this request's prompt that other requests have computed since its last span."""
        assert request.sequence is not None
        if request.snapshot_scope is not None:
            has_room = self._cells.reserve(self._num_cells + request.num_tokens - request.computed)
            source, gained = self._snapshots.load(request) if has_room else (Source.NONE, 0)
        else:
            source, gained = Source.FORK, self._tree.ledger.catch_up(request.sequence)
        if gained:
            self._counters.count_cached(request, source, gained)
            request.computed += gained
        if place(self._tree, self._cells, self._counters, request, spans=self._num_cells):
            fetch(self._tree, self._cells, self._counters, request, spans=self._num_cells)
            request.computed = request.sequence.length

    def _follows_a_leader(self, request: Request) -> bool:
        """Return whether this step computes the next tokens of this request for another one."""
        return any(request.waits_for(leader, self._tree.costs.min_shared) for leader in self._leaders)

    def _size(self, request: Request, num_tokens: int) -> int:
        """Return how many tokens of a prompt to compute: at most `num_tokens`, up to its next snapshot, if cells allow."""
        costs = self._tree.costs
        most = min(num_tokens, self._background_size(request.computed)) if request.background else num_tokens
        assert request.layout is not None
        if request.layout.moved_at(request.computed) is not None:
            return 0  # no cells are free for the document that is to be moved here
        stop = next_stop(request.stops, request.computed) or request.num_tokens
        size = chunk_size(stop - request.computed, most, costs)
        if size > 0 and not self._cells.reserve(self._num_cells + size):
            size = self._cells.num_free - self._num_cells
        return max(size, 0)

    def _background_size(self, cached: int) -> int:
        """Return the most tokens of a background step: more where they are done before a new request waits long."""
        costs = self._tree.costs
        return max(costs.background_step, self._tree.profile.tokens_within(costs.background_ns / 1e9, cached))

    def _add(self, request: Request, size: int, draft: np.ndarray = NO_TOKENS) -> None:
        assert request.sequence is not None
        start, stop = request.computed, request.computed + size
        tokens, is_last = request.ids(start, stop), stop == request.num_tokens and not request.is_reading
        if len(draft):
            tokens, size = np.concatenate((tokens, draft)), size + len(draft)
        self.spans.append(Span(request.id, request.sequence.id, start, tokens, logits=is_last, drafted=len(draft)))
        self.requests.append(request)
        self.num_tokens += size
        self._num_cells += size


def in_turn(running: Sequence[Request], last: str, *, decoding: bool) -> list[Request]:
    """Return the running requests that may share the next step: those of one set of LoRA adapters.

    A context computes with one set at a time. Of several, the turn is that of the set after `last`, the last step's.
    decoding: those that decode; else those with a prompt to compute.
    """
    sets = list(dict.fromkeys([request.scope.adapters for request in running]))
    turn = sets[(sets.index(last) + 1) % len(sets)] if last in sets else next(iter(sets), "")
    return [request for request in running if request.decoding is decoding and request.scope.adapters == turn]


logger = logging.getLogger("slotcache.scheduler")
TRIES = 3  # steps that may fail with a request until it counts as the cause: the first beside others, the rest alone


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
        self.snapshots = Snapshots(tree, HostMemory()) if snapshots is None else snapshots
        self.index: PromptTree = self.snapshots if self.snapshots.host.max_bytes else tree  # what prompts are compared with
        self.waiting = Queue(self.index, window, self.lanes.may_take)
        self.drafts = drafts or Drafts(tree.costs)
        self.running: list[Request] = []  # in order of admission
        self.cells = Cells(tree, self.index, self.running, idle_cells)
        self.pins, self.counters = Pins(self.index), Counters(tree)
        self.step = StepBuilder(tree, self.cells, self.snapshots, self.counters)  # of the last plan

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

    def recover(self, keep: bool = True) -> tuple[list[Request], list[Request]]:
        """Begin again with an empty device, because a step failed and its cells may hold anything.

        Returns the requests that cannot go on, and those that run again from their start: they have no token yet, and wait
        at the head of the queue. The caller clears the runner's memory as well. Operations that were decided and not carried
        out are void. keep: the copies in host memory stay, as far as they were made.
        """
        failed: list[Request] = []
        again: list[Request] = []
        for request in self.running:
            self.lanes.leave(request)
            request.sequence = None
            request.num_failures += 1
            has_begun = request.num_tokens > request.num_prompt or request.background
            (failed if has_begun or request.num_failures >= TRIES else again).append(request)
        self.running.clear()
        for request in again:
            request.start_over()
        self._void(keep)
        self.cells.forget_order()
        self.step = StepBuilder(self.tree, self.cells, self.snapshots, self.counters)
        self.waiting.restart(again)
        self.counters.restarts += len(again)
        return failed, again

    def _void(self, keep: bool) -> None:
        """Forget the KV on the device; that in host memory stays, if it is to be kept and can be."""
        try:
            if keep:
                self.tree.void()
                self.snapshots.void()
                return
        except Exception:
            logger.exception("the copies in host memory cannot be told apart, and are dropped")
        self.tree.clear()
        self.snapshots.clear()

    def _next_step(self) -> StepBuilder:
        """Return a step: decode first, then prefill with the remaining tokens; in turns where both together cost more.

        The requests of one set of adapters share a step, the sets take turns.
        """
        last, apart = self.step.adapters, self.cells.num_used >= self.tree.costs.apart_from_cells
        streams = any(one.decoding for one in self.running) or len({one.answering for one in self.running}) > 1
        if apart and self.step.is_decode_turn and streams:
            step = StepBuilder(self.tree, self.cells, self.snapshots, self.counters)
            same = [request for request in self.running if request.scope.adapters == last and not request.decoding]
            step.prefill(same, self.budget.limit(self.batch_size, partial(self.cells.passed_over, same)))
            if step.spans:
                return step
        while True:
            step = StepBuilder(self.tree, self.cells, self.snapshots, self.counters)
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
        """Start waiting requests while a lane is idle and their prompts fit; return them.

        One that may make steps fail runs alone, so that it takes no other one with it. The others pause until its first
        token, and what can be copied is.
        """
        started: list[Request] = []
        if any(request.is_suspect for request in self.running):
            return started
        if self.waiting.suspect is not None:
            while self.running:
                self._preempt()
            while self.tree.copies.save_ahead():
                pass
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
            if request.is_suspect:
                break
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
            self.counters.count_cached(request, *self.snapshots.load(request))
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


# ---- Check --------------------------------------------------------------------------------------------------------------
# The invariants of the cache, in code: tests call this after every step, and `--check` does when the server is idle.


def check_tree(tree: PrefixTree) -> None:
    """Raise AssertionError where the tree, its sequences and its ledger disagree."""
    ledger = tree.ledger
    nodes = [node for root in tree.roots.values() for node in descendants(root)]
    sequences = {sequence for node in nodes for sequence in node.sequences} | set(ledger.parked.values())
    assert ledger.num_ready == sum(node.ready for node in nodes)
    assert ledger.num_pending == sum(len(node.tokens) - node.ready for node in nodes if node.in_use)
    assert ledger.num_in_use == sum(node.ready for node in nodes if node.in_use)
    assert 0 <= ledger.num_ready <= ledger.num_cells
    for node in nodes:
        assert len(node.tokens) > 0
        assert node.parent is not None and node.parent.children[int(node.tokens[0])] is node
        assert node.parent.end == node.start
        held = [min(sequence.length, node.end) - node.start for sequence in node.sequences]
        assert node.ready == max(held, default=0) and min(held, default=1) > 0
        assert node.in_use or node.complete or (node.blob and not node.ready), "a run that nobody will compute"
        assert node.ready == 0 or node.parent.complete
        for key, end in node.documents.items():
            assert (node, key) in end.document_of and node in path(end)
        for origin, key in node.document_of:
            assert origin.documents[key] is node
    check_host(tree, nodes)
    ids = [sequence.id for sequence in sequences]
    assert len(ids) == len(set(ids)) and not set(ids) & set(ledger._free_ids)
    assert ledger.leaves.nodes == {node for node in ledger.parked if ledger.is_leaf(node)}
    for tip, sequence in ledger.parked.items():
        assert sequence.tip is tip and not sequence.active and tip.start < sequence.length <= tip.end
    for sequence in sequences:
        held = {node for node in path(sequence.tip) if node.start < sequence.length}
        assert held == {node for node in nodes if sequence in node.sequences}


def check_host(tree: PromptTree, nodes: list[Node]) -> None:
    """Raise AssertionError where a tree's copies, their budget and its pins disagree."""
    host, states = tree.host, [node for node in nodes if node.state is not None]
    blobs = {node.blob for node in nodes if node.blob is not None}
    assert host.num_tokens == sum(map(len, blobs)) and host.num_states == len(states)
    size = host.num_tokens * host.sizes.run_token + sum(host.size_of(node.end) for node in states)
    assert host.num_bytes == size <= host.max_bytes
    for node in nodes:
        assert node.blob is None or (node.blob.start <= node.start and node.end <= node.blob.stop)
        assert node.state is None or (node.state.start, node.state.stop) == (0, node.end)
    assert all(blob.users == sum(node.blob is blob for node in nodes) for blob in blobs)
    assert host.candidates.nodes == {node for node in nodes if host.may_leave(node)}
    assert tree.pinned == {node for node in nodes if node.pinned_until}


def check_states(tree: StateTree) -> None:
    """Raise AssertionError where runs and states disagree."""
    nodes = [node for root in tree.roots.values() for node in descendants(root)]
    for node in nodes:
        assert node.parent is not None and node.parent.end == node.start and node.blob is not None
    assert all(node.state is not None and node.frequency < 2 for node in tree.unused)
    assert all(node.state is None for node in tree.aged) and tree.aged <= set(nodes)
    check_host(tree, nodes)


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError where requests, lanes, sequences and cells disagree."""
    tree, ledger = scheduler.tree, scheduler.tree.ledger
    check_tree(tree)
    check_states(scheduler.snapshots)
    assert scheduler.cells.num_used <= ledger.num_cells
    assert [lane.request for lane in scheduler.lanes if lane.request] == sorted(
        scheduler.running, key=lambda request: request.lane
    )
    pins: dict[object, int] = {}
    for request in scheduler.running:
        sequence = request.sequence
        assert sequence is not None and sequence.active and sequence.tip.end == request.claimed
        assert sequence.length == min(request.computed, request.claimed)
        assert request.computed < request.num_tokens <= len(request.tokens)
        for node in path(sequence.tip):
            pins[node] = pins.get(node, 0) + 1
    for root in tree.roots.values():
        for node in descendants(root):
            assert node.in_use == pins.get(node, 0)
    assert all(request.sequence is None for request in scheduler.waiting)
    active = len(scheduler.running)
    held = {sequence for root in tree.roots.values() for node in descendants(root) for sequence in node.sequences}
    assert len(ledger._free_ids) + len(held | {r.sequence for r in scheduler.running}) >= active + len(ledger.parked)
