"""What is fetched for one request: the fetch that it waits for, and records that it takes over from behind a hole."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .host import HostMemory
from .job import Job
from .plan import HostCopy
from .radix import Node, common_prefix
from .record import Record

PATIENCE = 0.07  # of the time to compute what is fetched, that a request waits at most while nothing arrives: 0.1 in all


class FetchedRecord(NamedTuple):
    """A record from a lower tier, by the tier's name and its key."""

    tier: str
    key: str
    record: Record


@dataclass(slots=True, eq=False)
class Fetch:
    """What is read from a lower tier for a request that waits, by the name of the tier. It begins when it is read.

    texts (int32): the prompt, and what its documents are read in. gained: the tokens that it spares. seconds: to compute
    these. num_bytes: of the records. keys: of the records that are not adopted yet, beginnings first, with their sizes.
    arrived: records ahead of the first of these; None: one that is gone. held: the copies that stay for it, each with a
    node that it is of. wanted_at: when the request could have been admitted without it; 0: not yet.
    """

    job: Job
    tier: str
    texts: list[np.ndarray]
    gained: int
    seconds: float
    num_bytes: int
    keys: deque[tuple[str, int]] = field(default_factory=deque[tuple[str, int]])
    arrived: dict[str, Record | None] = field(default_factory=dict[str, "Record | None"])
    held: dict[HostCopy, Node] = field(default_factory=dict[HostCopy, Node])
    num_adopted: int = 0  # bytes
    began: float = 0.0
    wanted_at: float = 0.0
    is_over: bool = False

    def patience_left(self, now: float) -> float:
        """Return the seconds that it may still go on as it is: see `Fetches`."""
        if not self.wanted_at:
            return self.seconds
        return self.seconds * (PATIENCE + self.num_adopted / self.num_bytes) - (now - self.wanted_at)


# ---- Behind a hole: what lacks in front of these records is computed, and then they are taken over. ---------------------


class Holes:
    """Records that requests keep until they have computed what lacks in front of them, beginnings first.

    A prefill pauses where such a record begins, or behind the fewest tokens to compute together.
    """

    def __init__(self) -> None:
        self._records: dict[Job, deque[FetchedRecord]] = {}

    def add(self, job: Job, fetched: FetchedRecord) -> None:
        """Keep a record for a request."""
        self._records.setdefault(job, deque()).append(fetched)

    def forget(self, job: Job) -> None:
        """A request needs none any more."""
        self._records.pop(job, None)

    def next_pause(self, job: Job) -> int:
        """Return where a prefill pauses for its next record, as far as it has computed now; 0: for none."""
        while records := self._records.get(job):
            record = records[0].record
            at = max(record.start, job.computed + job.recompute_last) if record.start > job.computed else job.computed
            last = min(common_prefix(record.tokens, job.tokens[: job.num_tokens]), job.num_tokens - job.recompute_last)
            if last > at:
                return at
            records.popleft()
        return 0

    def take_over(self, job: Job, host: HostMemory) -> bool:
        """Put the records that a prefill has come to into host memory. Return whether there are any."""
        records = self._records.get(job)
        if not records or job.computed < job.strategy_state.pause:
            return False
        reached = job.computed
        while records and records[0].record.start <= reached:
            tier, _, record = records.popleft()
            host.overdraw(record)
            if host.put(record, tier, is_claimed=True):
                reached, job.reuse.has_hole = max(reached, len(record.tokens)), True
        return True

    def forget_dropped(self, tiers: Mapping[str, Container[str]]) -> int:
        """Forget records that their tiers have dropped meanwhile. Return the bytes of the others."""
        kept = {job: deque(one for one in records if one.key in tiers[one.tier]) for job, records in self._records.items()}
        self._records = {job: records for job, records in kept.items() if records}
        return sum(one.record.num_bytes for records in self._records.values() for one in records)
