"""The usual strategy: a request reuses KV from the runs of the prefix tree."""

from __future__ import annotations

from collections.abc import Iterable

from .cells import Cells
from .counters import Counters
from .job import Job
from .plan import Span
from .prefix_tree import PrefixTree
from .radix import Claim
from .request import Layout, Request
from .reuse import Source


class PlainKV:
    """Claims a prompt's KV in the tree, restores copies, and shares KV that other requests compute in the meantime.

    Other strategies override some of these methods.
    """

    def __init__(self, tree: PrefixTree, cells: Cells, counters: Counters) -> None:
        self._tree, self._cells, self._counters = tree, cells, counters

    def takes(self, request: Request, whole: Layout) -> bool:
        return True

    def stage(self, job: Job, whole: Layout) -> Layout:
        return whole

    def has_room(self, job: Job, others: Iterable[Job]) -> bool:
        return True

    def begin(self, job: Job, waiting: Iterable[Job]) -> None:
        claim = self._claim(job)
        job.sequence, job.claimed, job.recompute_last = claim.sequence, job.num_tokens, self._tree.recompute_last
        self._count(job, claim.source, 0, claim.cached)
        if job.request.kind.counts_as_use:
            self._cells.offload_idle(job)
        self._restore(job)
        job.computed = job.started_at = claim.sequence.length

    def catch_up(self, job: Job, num_cells: int) -> None:
        assert job.sequence is not None
        if gained := self._tree.device.catch_up(job.sequence):
            self._count(job, Source.FORK, job.computed, gained)
            job.computed += gained

    def bring_back(self, job: Job, num_cells: int) -> None:
        assert job.sequence is not None
        self._restore(job, num_cells)
        job.computed = job.sequence.length

    def pause_at(self, job: Job, at: int) -> None:
        job.strategy_state.pause = at

    def next_stop(self, job: Job) -> int:
        pause = job.strategy_state.pause
        return pause if pause > job.computed else job.num_tokens

    def sharable(self, leader: Job, upto: int) -> int:
        return upto

    def reached(self, job: Job, span: Span) -> bool:
        return False

    def release(self, job: Job) -> None:
        assert job.sequence is not None
        private = job.tokens[job.claimed : max(job.computed, job.claimed)]
        self._tree.release(job.sequence, private, session=job.request.session)

    def _claim(self, job: Job) -> Claim:
        """Put a job's prompt into the tree, with nodes that end where its segments end."""
        request, layout = job.request, job.layout
        return self._tree.claim(
            request.scope,
            job.tokens[: job.num_tokens],
            [*layout.stops, job.num_tokens],
            layout.places,
            counts_as_use=request.kind.counts_as_use,
            sections=layout.sections(job.num_tokens),
            session=request.session,
        )

    def _restore(self, job: Job, num_cells: int = 0) -> None:
        """Restore the copies that follow the job's KV, if cells for them can be freed besides the step's `num_cells`."""
        assert job.sequence is not None
        copies = self._tree.copies
        if (needed := copies.restorable(job.sequence)) and self._cells.reserve(num_cells + needed):
            at = job.sequence.length
            for source, tokens in copies.restore(job.sequence):
                self._count(job, source, at, tokens)
                at += tokens

    def _count(self, job: Job, source: str, start: int, tokens: int) -> None:
        """Count `tokens` tokens from position `start` on as reused."""
        self._counters.count_cached(job, source, start, tokens)
