"""What the scheduler needs from drafts and from lower tiers: for each, a protocol, and a class that does nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from .cells import Cells
from .device import DeviceCells
from .job import Job
from .plan import Plan, Span
from .scope import Scope
from .slot import Slot


class Proposer(Protocol):
    """Proposes drafts: guesses at the next tokens of streams, which a step checks. Drafts never change an answer.

    longest: the most tokens of a draft.
    model_seconds: the seconds that a draft model took while the last step was planned.
    """

    longest: float
    model_seconds: float

    def propose(self, jobs: Sequence[Job], running: Sequence[Job], cells: Cells) -> Sequence[np.ndarray]:
        """Return a draft (int32, may be empty) for each of `jobs`, all of which decode. Return () if no draft pays.

        running: all running requests.
        """
        ...

    def settle(self, checked: list[tuple[Job, Span]], device: DeviceCells) -> None:
        """Free the cells of rejected tokens, and clear `checked`.

        checked: those spans of the last step that ran which have drafts.
        """
        ...

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from the time that a step took."""
        ...

    def use_idle_time(self, slots: Iterable[tuple[Slot, int]]) -> bool:
        """Spend a moment on preparing drafts for the next turns of idle slots. Return False if nothing is left to do.

        slots: each slot with the number of cached tokens of its history.
        """
        ...

    def forget(self, scope: Scope) -> None:
        """Free the draft model's KV of a scope."""
        ...


class NoDrafts:
    """Proposes no drafts."""

    longest = model_seconds = 0.0

    def propose(self, jobs: Sequence[Job], running: Sequence[Job], cells: Cells) -> Sequence[np.ndarray]:
        return ()

    def settle(self, checked: list[tuple[Job, Span]], device: DeviceCells) -> None: ...

    def observe(self, plan: Plan, seconds: float) -> None: ...

    def use_idle_time(self, slots: Iterable[tuple[Slot, int]]) -> bool:
        return False

    def forget(self, scope: Scope) -> None: ...


class Fetcher(Protocol):
    """Fetches KV from lower tiers into host memory.

    Fetched KV may lie after a hole: tokens of the prompt whose KV was not fetched. Prefill computes these tokens first.
    """

    def has_to_wait(self, job: Job) -> bool:
        """Return whether a request that is about to be admitted must wait for a fetch.

        If the request needs a fetch that has not begun, the fetch begins now.
        """
        ...

    def is_fetching(self, job: Job) -> bool:
        """Return whether a request waits for a fetch."""
        ...

    def begins(self, job: Job) -> None:
        """End a request's wait for a fetch, since the request leaves the queue and starts."""
        ...

    def ends(self, job: Job) -> None:
        """Forget the fetched records of a request that has ended."""
        ...

    def next_pause(self, job: Job) -> int:
        """Return the position where a running request must pause to take over fetched KV; 0: it need not pause."""
        ...

    def take_over(self, job: Job) -> bool:
        """Move to host memory the records that a running request has reached.

        Return whether the request has reached any record.
        """
        ...


class NoFetches:
    """The fetcher of a server without lower tiers."""

    def has_to_wait(self, job: Job) -> bool:
        return False

    def is_fetching(self, job: Job) -> bool:
        return False

    def begins(self, job: Job) -> None: ...

    def ends(self, job: Job) -> None: ...

    def next_pause(self, job: Job) -> int:
        return 0

    def take_over(self, job: Job) -> bool:
        return False
