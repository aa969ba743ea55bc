"""How a request comes by KV that it need not compute; the usual way, runs of the prefix tree."""

from __future__ import annotations

from collections.abc import Iterable

from .cells import Cells
from .counters import Counters
from .plan import Span
from .prefix_tree import PrefixTree
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
        self._count(job, claim.source, claim.cached)
        if not job.request.is_prefetch:
            self._cells.offload_idle(job)
        self._fetch(job)
        job.computed = job.started_at = claim.sequence.length

    def catch_up(self, job: Job, num_cells: int) -> None:
        assert job.sequence is not None
        if gained := self._tree.device.catch_up(job.sequence):
            self._count(job, Source.FORK, gained)
            job.computed += gained

    def next_stop(self, job: Job) -> int:
        return job.num_tokens

    def sharable(self, leader: Job, upto: int) -> int:
        return upto

    def reached(self, job: Job, span: Span) -> bool:
        return False

    def leave(self, job: Job) -> None:
        assert job.sequence is not None
        self._tree.release(job.sequence, job.tokens[job.claimed : max(job.computed, job.claimed)])

    def _fetch(self, job: Job, num_cells: int = 0) -> None:
        """Bring back the copies that follow the job's KV, if cells are free for them beside `num_cells` of the step."""
        assert job.sequence is not None
        copies = self._tree.copies
        if (needed := copies.restorable(job.sequence)) and self._cells.reserve(num_cells + needed):
            for source, tokens in copies.restore(job.sequence):
                self._count(job, source, tokens)

    def _count(self, job: Job, source: str, tokens: int) -> None:
        """Count tokens that need not be computed, behind those that have KV."""
        self._counters.count_cached(job, source, max(job.reuse.cached, job.computed), tokens)
