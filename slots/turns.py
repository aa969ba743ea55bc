"""Which requests start or compute in the next step, if not all can: adapter sets take turns, and some prompts start late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from .cells import Cells
from .costs import PrefillBudget
from .counters import Counters
from .job import Job, Phase, Turn


def in_turn(running: Sequence[Job], last: str, *, decoding: bool) -> list[Job]:
    """Return the running requests that may share the next step: all of one set of LoRA adapters.

    A context computes with one set at a time. The turn goes to the set after `last`, the set of the last step.

    decoding: True: return the requests that decode; False: the requests with a prompt to compute.
    """
    sets = list(dict.fromkeys([job.request.scope.adapters for job in running]))
    turn = sets[(sets.index(last) + 1) % len(sets)] if last in sets else next(iter(sets), "")
    return [job for job in running if (job.phase is Phase.DECODE) is decoding and job.request.scope.adapters == turn]


class LateStarts:
    """Prompts that start only once the running prompts before them are computed, although a slot is idle.

    An earlier start would bring no earlier first token. It would fix the order of a prompt's documents before the KV of the
    running prompts can be reused, and attention would pass over the prompt's cells in the meantime. A late prompt waits only
    for running prompts that have the same set of adapters and are computed first. A prompt that can share a step with the
    last tokens of these prompts starts at once.
    """

    def __init__(self, budget: PrefillBudget, cells: Cells, counters: Counters, batch_size: int) -> None:
        self._budget, self._cells, self._counters, self._batch_size = budget, cells, counters, batch_size
        self._jobs: set[Job] = set()  # requests that keep their layout until they start

    def __contains__(self, job: Job) -> bool:
        """Return whether a waiting request starts later. A background request starts after all late starts."""
        return job in self._jobs or (bool(self._jobs) and not job.request.kind.is_client)

    def update(self, running: Collection[Job]) -> None:
        """Forget the requests that may start now."""
        if self._jobs:
            ends = self._ends(running)
            self._jobs = {job for job in self._jobs if job.phase is Phase.WAITING and _is_late(job, ends)}

    def add(self, job: Job, running: Collection[Job]) -> bool:
        """Return whether a waiting request, which is laid out, starts later. If it does, remember it."""
        if not job.request.kind.is_client or job.has_started or job.is_suspect:
            return False
        ends, is_new = self._ends(running), not job.due
        if job.request.scope.adapters not in ends:
            return False
        job.due = job.due or self._counters.prompt_tokens + self._cells.num_missing(job)
        if not _is_late(job, ends):
            return False
        job.starts_late |= is_new
        self._jobs.add(job)
        return True

    def count(self, job: Job) -> None:
        """Count a request that starts, if it starts later than it could have."""
        self._counters.late_starts += job.starts_late
        job.starts_late = False

    def startable(self, lacking: Mapping[Job, int], running: Collection[Job]) -> set[Job]:
        """Return which of these waiting requests would not start later.

        lacking: the tokens that each request would compute.
        """
        ends, now = self._ends(running) if lacking else {}, self._counters.prompt_tokens
        return {job for job, size in lacking.items() if not _is_late(job, ends, now + size)}

    def _ends(self, running: Collection[Job]) -> dict[str, Turn]:
        """Return, by adapters, the first turn at which prompts start later. Without an entry, prompts start at once.

        The running prompts up to that turn need no other prompt to make a step efficient. While streams decode, prompts are
        computed in parts, and a step should be full. Otherwise a step should be large enough to swap out the other cells.
        """
        prompts = [one for one in running if one.request.kind.is_client and one.phase is not Phase.DECODE]
        if not prompts:
            return {}
        most, costs = self._batch_size, self._budget.costs
        if any(one.answering for one in running):
            alone = self._budget.limit(most, partial(self._cells.swap.passed_over, prompts))
        else:
            alone = min(most - min(costs.chunk, most // 2), costs.swap_from_tokens) + 1
        ends, lacking = dict[str, Turn](), Counter[str]()
        for one in sorted(prompts, key=lambda one: one.turn):
            lacking[adapters := one.request.scope.adapters] += one.num_lacking
            if lacking[adapters] >= alone:
                ends.setdefault(adapters, one.turn)
        return ends


def _is_late(job: Job, ends: Mapping[str, Turn], due: int = 0) -> bool:
    """Return whether a prompt starts later.

    due: the due count of a request that has none yet.
    """
    end = ends.get(job.request.scope.adapters)
    return end is not None and (True, -job.request.priority, job.due or due) >= end
