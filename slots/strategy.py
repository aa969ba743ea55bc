"""How a request comes by KV that it need not compute; the usual way, runs of the prefix tree."""

from __future__ import annotations

from collections.abc import Iterable

from .cells import Cells
from .counters import Counters
from .host import HostMemory
from .plan import Span
from .prefix_tree import PrefixTree
from .radix import common_prefix
from .request import Job, Layout
from .reuse import Source


class PlainKV:
    """Claims what the tree has of a prompt, brings back what host memory has, and shares what others compute meanwhile.

    The other strategies differ from it in some steps: `FromSnapshots`, `SeparateDocuments`.
    """

    def __init__(self, tree: PrefixTree, cells: Cells, counters: Counters) -> None:
        self._tree, self._cells, self._counters = tree, cells, counters

    def stage(self, job: Job, whole: Layout) -> Layout:
        return whole

    def has_room(self, job: Job, others: Iterable[Job]) -> bool:
        return True

    def begin(self, job: Job, waiting: Iterable[Job]) -> None:
        claim = job.claim(self._tree)
        job.sequence, job.claimed, job.recompute_last = claim.sequence, job.num_tokens, self._tree.recompute_last
        self._count(job, claim.source, 0, claim.cached)
        if job.request.kind.counts_as_use:
            self._cells.offload_idle(job)
        self._fetch(job)
        job.computed = job.started_at = claim.sequence.length
        self._look_behind(job)

    def catch_up(self, job: Job, num_cells: int) -> None:
        assert job.sequence is not None
        if gained := self._tree.device.catch_up(job.sequence):
            self._count(job, Source.FORK, job.computed, gained)
            job.computed += gained
            self._look_behind(job)
        if self._adopt(job, self._tree.host):
            self._fetch(job, num_cells)
            job.computed = job.sequence.length
            self._look_behind(job)

    def next_stop(self, job: Job) -> int:
        return job.resumes_at if job.resumes_at > job.computed else job.num_tokens

    def sharable(self, leader: Job, upto: int) -> int:
        return upto

    def reached(self, job: Job, span: Span) -> bool:
        return False

    def leave(self, job: Job) -> None:
        assert job.sequence is not None
        private = job.tokens[job.claimed : max(job.computed, job.claimed)]
        self._tree.release(job.sequence, private, job.num_scattered, job.request.session)
        job.num_scattered = 0

    def _fetch(self, job: Job, num_cells: int = 0) -> None:
        """Bring back the copies that follow the job's KV, if cells are free for them beside `num_cells` of the step."""
        assert job.sequence is not None
        copies = self._tree.copies
        if (needed := copies.restorable(job.sequence)) and self._cells.reserve(num_cells + needed):
            at = job.sequence.length
            for source, tokens in copies.restore(job.sequence):
                self._count(job, source, at, tokens)
                at += tokens

    def _count(self, job: Job, source: str, start: int, tokens: int) -> None:
        """Count tokens from position `start` on that need not be computed."""
        self._counters.count_cached(job, source, start, tokens)

    # ---- behind a hole: computed up to where records begin that were fetched from there ---------------------------------

    def _look_behind(self, job: Job) -> None:
        """Set where the prefill pauses next: where such a record begins, or behind the fewest tokens to compute together."""
        while job.behind:
            record = job.behind[0].record
            at = max(record.start, job.computed + job.recompute_last) if record.start > job.computed else job.computed
            last = min(common_prefix(record.tokens, job.tokens[: job.num_tokens]), job.num_tokens - job.recompute_last)
            if last > at:
                job.resumes_at = at
                return
            job.behind.popleft()
        job.resumes_at = 0

    def _adopt(self, job: Job, host: HostMemory) -> bool:
        """Take over the records that the prefill has come to. Return whether there are any."""
        if not job.behind or job.computed < job.resumes_at:
            return False
        reached = job.computed
        while job.behind and job.behind[0].record.start <= reached:
            tier, _, record = job.behind.popleft()
            host.overdraw(record)
            if host.put(record, tier, is_claimed=True):
                reached, job.reuse.has_hole = max(reached, len(record.tokens)), True
        return True
