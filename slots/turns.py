"""Who starts and who computes in the next step, where not all requests together do: sets of adapters, streams, prompts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from .cells import Cells
from .costs import PrefillBudget
from .counters import Counters
from .job import Job, Phase


def in_turn(running: Sequence[Job], last: str, *, decoding: bool) -> list[Job]:
    """Return the running requests that may share the next step: those of one set of LoRA adapters.

    A context computes with one set at a time. Of several, the turn is that of the set after `last`, the last step's.
    decoding: those that decode; else those with a prompt to compute.
    """
    sets = list(dict.fromkeys([job.request.scope.adapters for job in running]))
    turn = sets[(sets.index(last) + 1) % len(sets)] if last in sets else next(iter(sets), "")
    return [job for job in running if (job.phase is Phase.DECODE) is decoding and job.request.scope.adapters == turn]


class LateStarts:
    """Prompts that start once those that run are computed, although a slot is idle.

    An earlier start brings their first token no earlier. It fixes the order of their documents before the KV of the running
    prompts can be reused, and attention passes over their cells meanwhile. A prompt that would be computed before a running
    one starts at once, and so does one whose tokens share a step with the last ones of those that run.
    """

    def __init__(self, budget: PrefillBudget, cells: Cells, counters: Counters, batch_size: int) -> None:
        self._budget, self._cells, self._counters, self._batch_size = budget, cells, counters, batch_size
        self._last: tuple[Job, list[int]] | None = None  # one that starts later, and the ids of those that waited then

    def is_known(self, waiting: Iterable[Job], running: Collection[Job]) -> bool:
        """Return whether the last one starts later still, and no other one has come since: none is laid out anew for it."""
        if self._last is None or self._last[1] != _ids(waiting) or not self._is_late(self._last[0], running):
            self._last = None
        return self._last is not None

    def includes(self, job: Job, waiting: Iterable[Job], running: Collection[Job]) -> bool:
        """Return whether a waiting request, whose prompt is laid out, starts later, and remember it."""
        if is_late := self._is_late(job, running):
            self._last = job, _ids(waiting)
        return is_late

    def _is_late(self, job: Job, running: Collection[Job]) -> bool:
        prompts = [one for one in running if one.request.kind.is_client and one.phase is not Phase.DECODE]
        if not prompts or not job.request.kind.is_client or job.has_begun or job.is_suspect:
            return False
        if any(job.request.priority > one.request.priority for one in prompts):
            return False
        streams = any(one.phase is Phase.DECODE for one in running)
        if sum(one.num_lacking for one in prompts) < self._alone(prompts, streams):
            return False
        if not job.due:
            job.due = self._counters.prompt_tokens + self._cells.num_missing(job)
            self._counters.late_starts += 1
        return job.due >= min(one.due for one in prompts)

    def _alone(self, prompts: list[Job], streams: bool) -> float:
        """Return from how many tokens on prompts have a step for themselves.

        Beside streams, which cut prompts into parts, a step is to be full. Else it is to see no other prompt's cells.
        """
        if streams:
            return self._budget.limit(self._batch_size, partial(self._cells.swap.passed_over, prompts))
        costs = self._budget.costs
        return min(self._batch_size - costs.chunk, costs.swap_from_tokens) + 1


def _ids(waiting: Iterable[Job]) -> list[int]:
    """Return the ids of the requests that wait for nothing but a slot."""
    return [job.request.id for job in waiting if job.phase is Phase.WAITING]
