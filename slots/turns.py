"""Which requests are in the next step: sets of LoRA adapters take turns, and some prompts start late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from .cells import Cells
from .costs import PrefillBudget
from .counters import Counters
from .job import Job, Phase, Turn


def in_turn(running: Sequence[Job], last: str, *, decoding: bool) -> list[Job]:
    """Return the running requests that may share the next step. All returned requests have the same set of LoRA adapters.

    A llama.cpp context computes with one set at a time, so the sets take turns. The next set is the one after `last`, the
    set of the last step.

    decoding: if True, return the requests that decode; if False, the requests with a prompt to compute.
    """
    sets = list(dict.fromkeys([job.request.scope.adapters for job in running]))
    turn = sets[(sets.index(last) + 1) % len(sets)] if last in sets else next(iter(sets), "")
    return [job for job in running if (job.phase is Phase.DECODE) is decoding and job.request.scope.adapters == turn]


class LateStarts:
    """Late prompts: prompts that start only after certain running prompts are computed, although a slot is idle.

    If a late prompt started at once, its first token would not come earlier. But the documents of the late prompt would be
    ordered before the KV of the running prompts can be reused, and attention would pass over the late prompt's cells in the
    meantime. A late prompt waits only for running prompts that have the same set of adapters and are computed before it. A
    prompt is not late if it can share a step with the last tokens of the running prompts before it.
    """

    def __init__(self, budget: PrefillBudget, cells: Cells, counters: Counters, batch_size: int) -> None:
        self._budget, self._cells, self._counters, self._batch_size = budget, cells, counters, batch_size
        self._jobs: set[Job] = set()  # requests that keep their layout until they start

    def __contains__(self, job: Job) -> bool:
        """Return whether a waiting request must not start yet.

        While there are late prompts, a background request must not start either.
        """
        return job in self._jobs or (bool(self._jobs) and not job.request.kind.is_client)

    def update(self, running: Collection[Job]) -> None:
        """Forget the late prompts that may start now."""
        if self._jobs:
            ends = self._ends(running)
            self._jobs = {job for job in self._jobs if job.phase is Phase.WAITING and _is_late(job, ends)}

    def add(self, job: Job, running: Collection[Job]) -> bool:
        """Return whether the prompt of a waiting request is late, and remember a late one. The prompt must be laid out."""
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
        """Count a request that starts now, if its prompt was late."""
        self._counters.late_starts += job.starts_late
        job.starts_late = False

    def startable(self, lacking: Mapping[Job, int], running: Collection[Job]) -> set[Job]:
        """Return the requests in `lacking` whose prompts would not be late.

        lacking: for each waiting request, how many tokens it would compute.
        """
        ends, now = self._ends(running) if lacking else {}, self._counters.prompt_tokens
        return {job for job, size in lacking.items() if not _is_late(job, ends, now + size)}

    def _ends(self, running: Collection[Job]) -> dict[str, Turn]:
        """Return for each set of adapters the first turn (`Job.turn`) at which a prompt is late.

        If a set has no entry, none of its prompts is late. The running prompts up to the turn in the result have enough
        tokens for an efficient step. If streams decode, an efficient step is as full as the prefill budget allows. If no
        stream decodes, an efficient step is less than a chunk short of a full batch, or large enough to swap out the cells
        of other requests.
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
    """Return whether a prompt is late.

    due: the value to use for `Job.due`, if that is not known yet.
    """
    end = ends.get(job.request.scope.adapters)
    return end is not None and (True, -job.request.priority, job.due or due) >= end
