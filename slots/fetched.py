"""Records that are fetched from a lower tier for a request.

The request waits until the records are read, but not longer than `Fetches` allows. Records after a hole are kept aside: the
request takes over each of them when its prefill reaches the record.
"""

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

PATIENCE = 0.07  # share of the time to compute fetched tokens that a request waits while nothing arrives: see `Fetches`


class FetchedRecord(NamedTuple):
    """A record from a lower tier, with the tier's name and the record's key."""

    tier: str
    key: str
    record: Record


@dataclass(slots=True, eq=False)
class Fetch:
    """The records that are read from a lower tier for a waiting request.

    tier: the tier's name.
    texts (int32): as in `Layout.texts`.
    gained: how many tokens the request need not compute because of the fetch.
    seconds: the time to compute the `gained` tokens.
    num_bytes: the size of all records.
    keys: the keys and sizes of the records that are not in host memory yet, prefixes first.
    arrived: by key, the records that have been read but not yet taken over, because the first record of `keys` has not been
        read; None: the tier no longer has the record.
    reserved: the copies that must stay in host memory for the request, each with a node that uses the copy.
    wanted_at: the time from which the request could have been admitted without the fetch; 0: it could not have been admitted
        yet.
    """

    job: Job
    tier: str
    texts: list[np.ndarray]
    gained: int
    seconds: float
    num_bytes: int
    keys: deque[tuple[str, int]] = field(default_factory=deque[tuple[str, int]])
    arrived: dict[str, Record | None] = field(default_factory=dict[str, "Record | None"])
    reserved: dict[HostCopy, Node] = field(default_factory=dict[HostCopy, Node])
    num_adopted: int = 0  # bytes
    began: float = 0.0
    wanted_at: float = 0.0
    is_over: bool = False

    def patience_left(self, now: float) -> float:
        """Return how many more seconds the request waits for the fetch: see `Fetches`."""
        if not self.wanted_at:
            return self.seconds
        return self.seconds * (PATIENCE + self.num_adopted / self.num_bytes) - (now - self.wanted_at)


# ---- Records after a hole: the request first computes the missing tokens before them. -----------------------------------


class Holes:
    """Fetched records that wait until their request has computed the missing tokens before them.

    The prefill of such a request pauses where its next record begins, to take over the record. Between two pauses, the
    prefill computes at least `recompute_last` tokens.
    """

    def __init__(self) -> None:
        self._records: dict[Job, deque[FetchedRecord]] = {}

    def add(self, job: Job, fetched: FetchedRecord) -> None:
        """Keep a record until the prefill of its request reaches it."""
        self._records.setdefault(job, deque()).append(fetched)

    def forget(self, job: Job) -> None:
        """Forget all records of a request, which no longer needs them."""
        self._records.pop(job, None)

    def next_pause(self, job: Job) -> int:
        """Return the position where a request's prefill pauses for its next record; 0: it need not pause."""
        while records := self._records.get(job):
            record = records[0].record
            at = max(record.start, job.computed + job.recompute_last) if record.start > job.computed else job.computed
            last = min(common_prefix(record.tokens, job.tokens[: job.num_tokens]), job.num_tokens - job.recompute_last)
            if last > at:
                return at
            records.popleft()
        return 0

    def take_over(self, job: Job, host: HostMemory) -> bool:
        """Move to host memory the records that a request's prefill has reached.

        Return whether the prefill has reached any record.
        """
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
        """Forget the records that their tiers no longer have. Return the bytes of the remaining records.

        tiers: the keys of the records of each tier, by the tier's name.
        """
        kept = {job: deque(one for one in records if one.key in tiers[one.tier]) for job, records in self._records.items()}
        self._records = {job: records for job, records in kept.items() if records}
        return sum(one.record.num_bytes for records in self._records.values() for one in records)
