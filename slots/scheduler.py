"""The scheduler, which plans each step and commits its results.

For each step, the engine calls `plan()`, runs the plan, and calls `commit()`. Prefill is not a separate kind of step (as in
vLLM): each step computes some tokens of each request that are known but have no KV. Whether the request prefills or decodes
follows from the numbers of its known and its computed tokens.

If cells run out, a leaf is evicted. If there is no leaf, the youngest request of the lowest priority is preempted. The
preempted request resumes later from the KV that the tree still has. Requests of the same priority do not starve each other:
no later prompt passes a prompt that is due, and the oldest request is preempted last.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import numpy as np

from .cells import Cells, cut
from .costs import PrefillBudget, chunk_size
from .counters import Counters
from .host import PromptTree
from .job import Job, Phase, Strategy
from .plan import Plan, Span
from .prefix_tree import Pins, PrefixTree
from .queue import WINDOW, Queue
from .radix import NO_TOKENS
from .request import Layout, Request
from .seams import Fetcher, NoDrafts, NoFetches, Proposer
from .slot import SIMILARITY, Slots
from .strategy import PlainKV
from .turns import LateStarts, in_turn

# ---- One step while it is planned: spans under a budget of tokens and of cells. -----------------------------------------


BACKGROUND_CHUNKS = 2  # of a step with a client's request; three would lengthen the gaps of its stream by a sixth


class StepBuilder:
    """Collects the requests of a step, and the span of each.

    The scheduler keeps the builder until the next `plan()`, because `commit()` needs it.

    is_decode_turn: whether this step only decodes, because decode and prefill take less time in separate steps. The step
        after a decode turn is for prompts, if there are any to compute.
    most_scored: for how many prompt tokens the step may compute logprobs. Each of these prompt tokens takes a row of logits.
    has_client: whether any client's request is running, even if it is not in this step.
    """

    def __init__(
        self,
        tree: PrefixTree,
        cells: Cells,
        counters: Counters,
        fetcher: Fetcher,
        *,
        most_scored: int = 0,
        has_client: bool = False,
    ) -> None:
        self._tree, self._cells, self._counters, self._fetcher = tree, cells, counters, fetcher
        self._most_scored, self._has_client = most_scored, has_client
        self.jobs: list[Job] = []
        self.spans: list[Span] = []
        self.checked: list[tuple[Job, Span]] = []  # computed spans with drafts
        self.staged: list[Job] = []  # requests that have finished a stage, but not their prompt
        self.num_tokens = 0
        self.is_decode_turn = False
        self._num_cells = 0  # cells of the spans, and of one token after each prompt
        self._leaders: list[Job] = []  # requests that this step prefills, or would prefill with more tokens or cells

    @property
    def adapters(self) -> str:
        """The LoRA adapters of the step. All requests of a step have the same adapters."""
        return self.jobs[0].request.scope.adapters if self.jobs else ""

    def decode(self, jobs: Iterable[Job], drafts: Sequence[np.ndarray] = ()) -> None:
        """Add the last token and the draft of each request. Enough cells must be free.

        drafts: a draft for each request; empty: no drafts.
        """
        for job, draft in zip(jobs, drafts or repeat(NO_TOKENS), strict=False):
            self._add(job, 1, draft)

    def prefill(self, jobs: Iterable[Job], num_tokens: int) -> None:
        """Add at most `num_tokens` tokens of prompts, as far as cells allow, in the order in which the prompts are due.

        Each prompt becomes due at some time: if it lacks n tokens when it is admitted, it is due once the server has
        computed n more prompt tokens. A short prompt can thus pass a long one, but no later prompt passes a prompt that is
        due (fair queueing, Demers et al. 1989). Tokens that a grammar forced on an answer are added before all prompts,
        because a stream waits for them.
        """
        for job in sorted(jobs, key=lambda job: job.turn):
            if not job.request.kind.is_client and self._leaders and self._leaders[0].request.kind.is_client:
                return  # a background prompt must not delay a client's prompt
            self._catch_up(job)
            if self._follows_a_leader(job):
                job.enter(Phase.FOLLOWING)
                continue
            job.go_on()
            self._leaders.append(job)
            if size := self._size(job, num_tokens):
                self._add(job, size)
                self._num_cells += 1
                num_tokens -= size

    def commit(self, plan: Plan, sampled: Iterable[int]) -> list[tuple[Job, int]]:
        """Take over the results: see `Scheduler.commit`."""
        self._counters.count_step(len(plan.spans))
        tokens = iter(sampled)
        progress: list[tuple[Job, int]] = []
        is_alone = len(plan.spans) == 1
        for job, span in zip(self.jobs, plan.spans, strict=True):
            job.computed, is_client = span.stop - span.drafted, job.request.kind.is_client
            if not is_alone and span.start >= job.claimed and job.sequence is not None:
                self._tree.device.stretches.add(job.sequence)
            if span.drafted and job.request.draft is not None:
                job.request.draft.num_drafted += span.drafted
                self._counters.count_draft(span.drafted)
                self.checked.append((job, span))
            if job.sequence is not None and job.sequence.length < job.claimed:
                self._tree.device.advance(job.sequence, min(span.stop, job.claimed))
                if is_client:
                    self._counters.prefilled_tokens += len(span.tokens)
                else:
                    self._counters.idle_tokens += len(span.tokens)
            if job.strategy.reached(job, span):
                self.staged.append(job)
            if span.logits:
                token = next(tokens)
                job.append(token)
                self._counters.generated_tokens += is_client
                progress.append((job, token))
            if job.phase is not Phase.DECODE:
                job.go_on()
        return progress

    def _catch_up(self, job: Job) -> None:
        """Let a request take over KV that other requests have computed since its last span, and fetched KV."""
        before, strategy, fetcher = job.computed, job.strategy, self._fetcher
        strategy.catch_up(job, self._num_cells)
        if job.computed > before:
            strategy.pause_at(job, fetcher.next_pause(job))
        if fetcher.take_over(job):
            strategy.bring_back(job, self._num_cells)
            strategy.pause_at(job, fetcher.next_pause(job))

    def _follows_a_leader(self, job: Job) -> bool:
        """Return whether another request of this step computes a request's next tokens, so that the request waits."""
        return any(job.waits_for(leader, self._tree.costs.min_shared) for leader in self._leaders)

    def _size(self, job: Job, num_tokens: int) -> int:
        """Return how many tokens of a request to compute in this step.

        The result is at most `num_tokens`, and the span does not pass the request's next stop (`Strategy.next_stop`). If too
        few cells can be freed, the result is the number of free cells.
        """
        costs = self._tree.costs
        most = num_tokens if job.request.kind.is_client else min(num_tokens, self._background_size(job.computed))
        if job.request.scores_prompt and not job.answering:
            most = min(most, self._most_scored)
        size = chunk_size(job.strategy.next_stop(job) - job.computed, most, costs)
        if size > 0 and not self._cells.reserve(self._num_cells + size):
            size = self._cells.num_free - self._num_cells
        return max(size, 0)

    def _background_size(self, cached: int) -> int:
        """Return the most tokens that a background request may compute in this step.

        While a client's request runs, all background requests of a step together compute at most BACKGROUND_CHUNKS chunks,
        because a longer step would delay the client's next token.
        """
        costs = self._tree.costs
        if self._has_client:
            ahead = (span for job, span in zip(self.jobs, self.spans, strict=True) if not job.request.kind.is_client)
            return BACKGROUND_CHUNKS * costs.chunk - sum(len(span.tokens) for span in ahead)
        return costs.background_tokens(self._tree.profile, cached)

    def _add(self, job: Job, size: int, draft: np.ndarray = NO_TOKENS) -> None:
        assert job.sequence is not None
        start, stop = job.computed, job.computed + size
        tokens, is_last = job.ids(start, stop), stop == job.num_tokens and not job.is_reading
        if len(draft):
            tokens, size = np.concatenate((tokens, draft)), size + len(draft)
        scored = job.scored(start, stop)
        span = Span(job.request.id, job.sequence.id, start, tokens, logits=is_last, drafted=len(draft), scored=scored)
        self.spans.append(span)
        self.jobs.append(job)
        self._most_scored -= span.num_scored
        self.num_tokens += size
        self._num_cells += size


logger = logging.getLogger("slotcache.scheduler")
MOST_LATE = 4  # waiting prompts that are laid out in one step although they start later
TRIES = 3  # failed steps after which a request counts as the cause; it runs alone in all but the first


@dataclass(frozen=True, slots=True)
class Recovery:
    """What happens after a failed step to the running requests, and to waiting requests with generated tokens.

    failed: requests that cannot go on.
    again: requests without generated tokens, which start again.
    paused: requests that go on after their generated tokens. The KV of the generated tokens is computed again, like a
        prompt's.
    """

    failed: list[Job]
    again: list[Job]
    paused: list[Job]

    def add(self, job: Job, goes_on: Callable[[Job], bool]) -> None:
        """Put a request that was running into one of the three lists.

        goes_on: as in `Scheduler.recover`.
        """
        is_hopeless = job.num_failures >= TRIES or not job.request.kind.is_client
        if not is_hopeless and not job.num_generated:
            job.start_over()
            self.again.append(job)
            return
        job.fall_back()
        if is_hopeless or not (job.keeps_layout and goes_on(job)):
            job.enter(Phase.DONE)
            self.failed.append(job)
        else:
            self.paused.append(job)


StrategyMaker = Callable[[PrefixTree, Cells, Counters], Strategy]


class Scheduler:
    """Owns the waiting and the running requests. Not thread-safe: only the engine's thread calls it.

    similarity: see `affine_slot`.
    batch_size: the most tokens of a step.
    prefill_budget, max_stall: the arguments `size` and `max_stall` of `PrefillBudget`.
    idle_cells: see `Cells`.
    window: see `Queue`.
    index: the tree that prompts are matched against; None: `tree` itself.
    strategies: functions that make the strategies to try before `PlainKV`.
    drafts: proposes drafts for requests that may have them; None: no drafts.
    max_rows: the most rows of logits of a step.
    """

    def __init__(
        self,
        tree: PrefixTree,
        *,
        num_slots: int,
        similarity: float = SIMILARITY,
        batch_size: int = 512,
        prefill_budget: int = 512,
        max_stall: float = math.inf,
        idle_cells: int = 0,
        window: int = WINDOW,
        index: PromptTree | None = None,
        strategies: Iterable[StrategyMaker] = (),
        drafts: Proposer | None = None,
        max_rows: int = 0,
    ) -> None:
        self.tree, self.slots, self.batch_size = tree, Slots(num_slots, similarity), batch_size
        self.budget = PrefillBudget(prefill_budget, max_stall, tree.costs, tree.profile)
        self.index = tree if index is None else index
        self.trees = (tree,) if index is None else (tree, index)
        self.waiting = Queue(self.index, window, self._may_start, self._strategy)
        self.drafts = drafts or NoDrafts()
        self.fetcher: Fetcher = NoFetches()
        self.running: list[Job] = []  # in order of admission
        self.admits = True  # whether waiting requests may start
        self.cells = Cells(tree, self.index, self.running, idle_cells)
        self.pins, self.counters = Pins(self.index), Counters(tree)
        self._most_scored = max_rows - num_slots  # one row is left for each slot
        self.step = self._new_step()  # the step of the last plan
        self._strategies = [make(tree, self.cells, self.counters) for make in (*strategies, PlainKV)]
        self._late = LateStarts(self.budget, self.cells, self.counters, batch_size)

    def fetch_with(self, fetcher: Fetcher) -> None:
        """From now on, let requests wait for the records of a fetcher."""
        self.fetcher = fetcher

    # ---- requests come and go --------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Job:
        """Queue a request."""
        self.waiting.add(job := Job(request))
        return job

    def finish(self, job: Job) -> None:
        """End a waiting or running request. The request's KV stays in the tree, unless the request asks not to be cached."""
        self.fetcher.ends(job)
        has_run = job.sequence is not None
        self._release(job) if has_run else self.waiting.discard(job)
        for stop, seconds in job.layout.breakpoints if has_run and job.request.keeps else ():
            if seconds:
                self.pins.pin(job.request.index_scope, job.tokens[: min(stop, job.computed)], seconds)
        job.enter(Phase.DONE)
        forget_uncached(self.tree, job, itertools.chain(self.running, self.waiting))
        if not job.request.keeps and all(other.request.scope != job.request.scope for other in self.running):
            self.drafts.forget(job.request.scope)
        self.waiting.unblock()

    def startable(self, lacking: Mapping[Job, int]) -> set[Job]:
        """Return the requests in `lacking` that could start now: with an idle slot, and with prompts that are not late.

        lacking: for each waiting request, how many tokens it would have to compute.
        """
        admits = self.admits and self.slots.any_idle
        may_take = {job: size for job, size in lacking.items() if admits and self.slots.may_take(job)}
        return self._late.startable(may_take, self.running)

    def take_rejected(self) -> list[tuple[Job, Exception]]:
        """Return the requests that were rejected since the last call, each with the cause.

        The returned requests are finished.
        """
        return self.waiting.take_rejected()

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    # ---- a step ----------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return the next step. The step is empty if no request runs and no waiting request could be admitted."""
        self.drafts.settle(self.step.checked, self.tree.device)
        self.pins.expire()
        started = self._admit()
        step = self.step = self._next_step()
        operations, afterwards = self.cells.swap.take_operations(step.num_tokens, step.jobs)
        return Plan(
            operations,
            tuple(step.spans),
            afterwards,
            num_spare=self.cells.num_free - step.num_tokens,
            background=not any(job.request.kind.is_client for job in step.jobs),
            adapters=step.adapters,
            admitted=tuple(job.request.id for job in started if job.sequence is not None),  # not preempted since
        )

    def plan_idle_work(self) -> Plan | None:
        """Return a step for idle time: pending memory operations, and the copy of an idle run; None if there are none."""
        self.tree.copies.save_ahead()
        operations = self.tree.device.take_operations()
        return Plan(operations) if operations else None

    def read_ahead(self) -> bool:
        """Let a draft model read a piece of an idle slot's history, so that drafts of the next turn cost less.

        Return False if nothing is left to read.
        """
        idle = (slot for slot in self.slots if slot.job is None and slot.scope is not None)
        return self.drafts.use_idle_time((slot, self.tree.num_cached(slot.scope, slot.history)) for slot in idle)

    def commit(self, plan: Plan, sampled: list[int]) -> list[tuple[Job, int]]:
        """Take over the results of a plan. Return the requests with a new token, and this token.

        The caller decides whether a request is finished.

        sampled: one token for each span with `logits`, in order.
        """
        progress = self.step.commit(plan, sampled)
        for job in self.step.staged:
            self._release(job)
            self.waiting.resume(job.step_back(), blocks=False)
        return progress

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from the time that a plan took."""
        self.budget.observe(plan, seconds, self.cells.swap.num_passed)
        self.drafts.observe(plan, seconds)

    def refuse(self) -> bool:
        """Make cells free, because the runner found too few for a step: evict KV, or else preempt a request.

        Return False if no KV can be evicted and no second request runs.
        """
        if not self.tree.evict():
            if len(self.running) < 2:
                return False
            self._preempt()
        return True

    def recover(self, keep: bool = True, goes_on: Callable[[Job], bool] = lambda job: True) -> Recovery:
        """Start again with an empty device, because a step failed and the cells may have any content.

        Requests that can go on are put first in the queue. Operations that were not carried out are dropped. The caller must
        also clear the runner's memory.

        keep: whether finished copies in host memory stay.
        goes_on: returns whether a request can go on after its generated tokens. A request cannot go on if its sampler has
            chosen a token that is not among its generated tokens.
        """
        recovery = Recovery([], [], [])
        for job in self.running:
            self.slots.release(job)
            job.sequence = None
            job.num_failures += 1
            job.failed_at = job.num_generated
            recovery.add(job, goes_on)
        self.running.clear()
        self._void(keep)
        self.cells.swap.forget_order()
        self.step = self._new_step()
        recovery.failed.extend(self.waiting.restart(recovery.again, recovery.paused))
        self.counters.restarts += len(recovery.again)
        self.counters.preemptions += len(recovery.paused)
        return recovery

    def _void(self, keep: bool) -> None:
        """Forget the KV on the device.

        keep: whether copies in host memory stay. If keeping the copies raises an error, they are dropped, too.
        """
        try:
            if keep:
                for tree in self.trees:
                    tree.void()
                return
        except Exception:
            logger.exception("the copies in host memory cannot be told apart, and are dropped")
        for tree in self.trees:
            tree.clear()

    def _new_step(self) -> StepBuilder:
        has_client = any(job.request.kind.is_client for job in self.running)
        parts = self.tree, self.cells, self.counters, self.fetcher
        return StepBuilder(*parts, most_scored=self._most_scored, has_client=has_client)

    def _next_step(self) -> StepBuilder:
        """Return the next step, with the next token of each stream that decodes, and prompt tokens up to a limit.

        If decode and prefill take less time in separate steps, such steps alternate. Only requests with the same set of LoRA
        adapters share a step. If running requests have several sets of adapters, the sets take turns.
        """
        last, in_turns = self.step.adapters, self.cells.num_used >= self.tree.costs.apart_from_cells
        # A stream decodes, or a grammar has forced tokens on its answer, which are computed in steps with prompts.
        has_stream = (
            any(one.phase is Phase.DECODE for one in self.running) or len({one.answering for one in self.running}) > 1
        )
        if in_turns and has_stream and self.step.is_decode_turn and (turn := self._prefill_turn(last)).spans:
            return turn
        while True:
            step = self._new_step()
            while not self.cells.reserve(len(decoding := in_turn(self.running, last, decoding=True))):
                self._preempt()
            step.decode(decoding, self.drafts.propose(decoding, self.running, self.cells))
            step.is_decode_turn = in_turns and bool(step.spans)
            if not step.is_decode_turn and (prompts := in_turn(self.running, last, decoding=False)):
                left, cells = self.batch_size - step.num_tokens, partial(self.cells.swap.passed_over, [*decoding, *prompts])
                step.prefill(prompts, self.budget.limit(left, cells) if has_stream else left)
            if step.spans or not self.running:
                return step
            self._preempt()  # all requests lack cells: the youngest gives up its cells

    def _prefill_turn(self, adapters: str) -> StepBuilder:
        """Return the step that follows a decode turn.

        This step computes only prompts with these LoRA adapters, and is empty if none can be computed.
        """
        step = self._new_step()
        prompts = [job for job in self.running if job.request.scope.adapters == adapters and job.phase is not Phase.DECODE]
        step.prefill(prompts, self.budget.limit(self.batch_size, partial(self.cells.swap.passed_over, prompts)))
        return step

    # ---- admission and memory --------------------------------------------------------------------------------------

    def _admit(self) -> list[Job]:
        """Start waiting requests while a slot is idle and their prompts fit. Return the requests that were started.

        A request that may make steps fail runs alone, so that no other request fails with it. Before such a request starts,
        all running requests are paused, and idle KV is copied to host memory.
        """
        started: list[Job] = []
        if any(job.is_suspect for job in self.running):
            return started
        if self.waiting.suspect is not None:
            while self.running:
                self._preempt()
            while self.tree.copies.save_ahead():
                pass
        self._late.update(self.running)
        num_late = 0
        while num_late < MOST_LATE and self._has_slot() and (job := self.waiting.next()):
            if self.fetcher.has_to_wait(job):
                continue  # the queue skips the request until the fetch ends
            if self._late.add(job, self.running):
                num_late += 1
                continue
            if not self.cells.fits(job, self.waiting):
                if self._give_way(job, slot=-1):
                    continue
                self.waiting.block()
                break
            self.waiting.take(job)
            try:
                self._start(job)
            except Exception as error:  # the request neither waits nor runs, and the tree may be inconsistent
                job.sequence = None
                self.waiting.reject(job, error)
                raise
            started.append(job)
            if job.is_suspect:
                break
        return started

    def _has_slot(self) -> bool:
        """Return whether a slot is idle. If need be, pause a background request for the waiting request of a client."""
        if not self.admits:
            return False
        for job in self.waiting if not all(one.request.kind.is_client for one in self.running) else ():
            if job.request.kind.is_client and job.phase is not Phase.FETCHING and job not in self._late:
                if self.slots.any_idle and self.slots.may_take(job):
                    break
                if self._give_way(job, slot=job.request.wanted_slot):
                    break
        return self.slots.any_idle

    def _give_way(self, job: Job, slot: int) -> bool:
        """Pause the youngest background request, so that a client's request can start.

        Return False if there is no such background request.

        slot: pause only a request in this slot; -1: in any slot.
        """
        found = [one for one in self.running if not one.request.kind.is_client and slot in (-1, one.slot)]
        if not job.request.kind.is_client or not found:
            return False
        self._pause(found[-1], blocks=False)
        return True

    def _may_start(self, job: Job) -> bool:
        """Return whether nothing but a lack of slots or cells keeps a request from starting.

        A request may not start while it has to wait for a fetch, for running prompts (`LateStarts`), or for a certain slot
        that is busy.
        """
        return job.phase is not Phase.FETCHING and job not in self._late and self.slots.may_take(job)

    def _strategy(self, request: Request, whole: Layout) -> Strategy:
        """Return the strategy by which a request reuses KV.

        whole: the layout of the request's whole prompt.
        """
        return next(one for one in self._strategies if one.takes(request, whole))

    def _start(self, job: Job) -> None:
        """Start a request that has left the queue: give it the cached KV of its prompt, and a slot."""
        job.strategy.begin(job, self.waiting)
        self.fetcher.begins(job)
        job.strategy.pause_at(job, self.fetcher.next_pause(job))
        assert job.sequence is not None
        job.due = job.due or self.counters.prompt_tokens + job.num_lacking
        self._late.count(job)
        self.slots.take(job, job.sequence.id)
        self.running.append(job)
        job.go_on()

    def _preempt(self) -> None:
        """Pause the youngest request of the lowest priority, and put it first in the queue.

        The stream of the paused request goes on later.

        The request stays in the queue until a running request ends. If the paused request were admitted earlier, its prompt
        would just fit, and it would soon be preempted again.
        """
        self._pause(min(reversed(self.running), key=lambda job: job.request.priority), blocks=True)

    def _pause(self, victim: Job, *, blocks: bool) -> None:
        """Pause a running request, and put it first in the queue.

        blocks: as in `Queue.resume`. If no other request runs, the queue is not blocked.
        """
        self._release(victim)
        forget_uncached(self.tree, victim, self.running)
        victim.reuse.num_preempted += 1
        victim.computed = 0
        self.waiting.resume(victim, blocks=blocks and bool(self.running))
        self.counters.preemptions += 1

    def _release(self, job: Job) -> None:
        """End a request's use of its slot and its sequence. The request's KV stays in the tree as idle KV."""
        for checked, span in self.step.checked:
            if checked is job:
                cut(job, span, self.tree.device)
        job.strategy.release(job)
        self.running.remove(job)
        self.slots.release(job)
        job.sequence = None


def forget_uncached(tree: PrefixTree, job: Job, others: Iterable[Job]) -> None:
    """Forget the KV of a request that asks not to be cached, unless one of `others` has the same scope."""
    if not job.request.cache and all(other.request.scope != job.request.scope for other in others):
        tree.forget(job.request.scope)
