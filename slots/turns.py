"""Who computes in the next step, where not all requests together do: turns of adapters, and of streams and prompts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from .cells import Cells
from .costs import PrefillBudget
from .job import Job, Phase


def in_turn(running: Sequence[Job], last: str, *, decoding: bool) -> list[Job]:
    """Return the running requests that may share the next step: those of one set of LoRA adapters.

    A context computes with one set at a time. Of several, the turn is that of the set after `last`, the last step's.
    decoding: those that decode; else those with a prompt to compute.
    """
    sets = list(dict.fromkeys([job.request.scope.adapters for job in running]))
    turn = sets[(sets.index(last) + 1) % len(sets)] if last in sets else next(iter(sets), "")
    return [job for job in running if (job.phase is Phase.DECODE) is decoding and job.request.scope.adapters == turn]


class ShortWaits:
    """Prompts that wait for streams which all end soon, where both together cost more: so they need no parts.

    With parts, the shortest prompt would wait for as many steps of these streams. Others may come meanwhile, so a prompt
    waits for the longest stall in all.
    """

    def __init__(self, budget: PrefillBudget, cells: Cells, batch_size: int) -> None:
        self._budget, self._cells, self._batch_size = budget, cells, batch_size
        self._seconds: dict[Job, float] = {}  # that each prompt has waited so far

    def begins(self, running: Collection[Job]) -> bool:
        """Return whether the prompts among these requests wait for one more step, and note it."""
        budget = self._budget
        prompts = [job for job in running if job.request.kind.is_client and job.phase is not Phase.DECODE]
        streams = [job for job in running if job.phase is Phase.DECODE]
        if not (streams and prompts) or any(job.answering for job in prompts):
            return False
        if len({job.request.scope.adapters for job in running}) > 1:
            return False  # sets take turns: another one's prompts would be computed meanwhile
        left = max(job.num_prompt + job.request.limit - job.num_tokens for job in streams)
        seconds = max(self._seconds.get(job, 0.0) for job in prompts) + left * budget.decode
        if not 0 < seconds <= budget.max_stall < math.inf:
            return False
        part = budget.limit(self._batch_size, partial(self._cells.swap.passed_over, prompts))
        if min(job.num_lacking for job in prompts) <= part * max(left - 1, 1):
            return False
        self._note(prompts, budget.decode)
        return True

    def _note(self, prompts: Iterable[Job], seconds: float) -> None:
        self._seconds = {job: waited for job, waited in self._seconds.items() if job.phase is not Phase.DONE}
        for job in prompts:
            self._seconds[job] = self._seconds.get(job, 0.0) + seconds
            job.enter(Phase.HELD)
