"""Documents are read one after the other, each behind the prompt's prefix alone, then moved to their places.

A request with documents that are read separately runs in stages. In each stage but the last it is a prompt of its own, the
prefix and one document, exact KV like that of any other request:

    stage 1    | prefix | document 2 |                          computed and copied; then the request leaves its slot
    stage 2    | prefix | document 3 |                          and goes on at the head of the queue
    last       | prefix | document 1 | 2 | 3 | question |       1 was cached; 2 and 3 are moved to their places

One after the other, since the bits of a token's KV depend on its cell.

Documents are worth what their uses make them, wherever these move them to. What stands at the places is worth little: it is
made again from the documents at once, and only what is between them and behind has to be computed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import takewhile
from operator import attrgetter

from .plan import HostCopy, Restore, Save, Span
from .prefix_tree import PrefixTree
from .radix import Node, path
from .request import Job, KvPart, Layout, PlacedDocument, Segment
from .reuse import Source
from .strategy import PlainKV

Run = tuple[Node, int, int]
"""A run of the tree, and the positions of a document's text that stand in it."""


class SeparateDocuments(PlainKV):
    """Brings documents to their places. Between them, and in stages, KV is reused as in any prompt."""

    def stage(self, job: Job, whole: Layout) -> Layout:
        readings, count = job.readings, len(whole.moved)
        first = readings.looked
        # On from the last one, so that all stages together look once at each. Then at the others, which may have left since.
        for at in (*range(first, count), *range(first)):
            readings.looked = at
            if at not in readings.pieces and not whole.moved[at].is_cached(self._tree, job.request.scope):
                return _stage(whole, at)
        return whole

    def has_room(self, job: Job, others: Iterable[Job]) -> bool:
        return num_kept(others) <= self._tree.device.num_cells

    def begin(self, job: Job, waiting: Iterable[Job]) -> None:
        self._keep_moved(job)
        super().begin(job, waiting)
        assert job.sequence is not None
        self._price_path(job, job.sequence.last_node)

    def leave(self, job: Job) -> None:
        sequence = job.sequence
        assert sequence is not None
        super().leave(job)
        self._price_path(job, sequence.last_node)

    def catch_up(self, job: Job, num_cells: int) -> None:
        super().catch_up(job, num_cells)
        assert job.sequence is not None
        if self._place(job, num_cells):
            self._fetch(job, num_cells)
            job.computed = job.sequence.length

    def next_stop(self, job: Job) -> int:
        if job.layout.moved_at(job.computed) is not None:
            return job.computed  # no cells are free for the document that is to be moved here
        starts = (document.moves_from for document in job.layout.moved)
        return next((start for start in starts if start > job.computed), job.num_tokens)

    def reached(self, job: Job, span: Span) -> bool:
        """Take over a computed span of a document; keep a copy once it is read, whatever leaves the cache from now on."""
        if job.layout.reads is None:
            return False
        at, whole = job.layout.reads
        document = whole.moved[at]
        job.readings.count(at, document.num_prefix, span.start, span.stop)
        if job.computed < job.num_tokens:
            return False
        runs = list(document.runs(self._tree, job.request.scope))
        job.readings.pieces[at] = tuple(_copied(self._tree, run) for run in runs)
        return True

    def _keep_moved(self, job: Job) -> None:
        """Keep copies of the documents that a request is to move and need not read, and count their use.

        From its first stage on: the documents that it reads may push them out of the cache.
        """
        pieces, scope, reads = job.readings.pieces, job.request.scope, job.layout.reads
        if reads is not None and job.readings.tokens:
            return  # they were looked for in its first stage
        whole = job.layout if reads is None else reads[1]
        found = ((at, one.cached_runs(self._tree, scope)) for at, one in enumerate(whole.moved) if at not in pieces)
        missing = {at: runs for at, runs in found if runs}
        self._count_use(job, whole, missing)
        # All copies that there are first: to make another one may push them out of host memory.
        found = {at: [(run, _piece(run)) for run in runs] for at, runs in missing.items()}
        pieces |= {at: tuple(piece or _copied(self._tree, run) for run, piece in runs) for at, runs in found.items()}
        assert reads is not None or len(pieces) == len(whole.moved)

    def _count_use(self, job: Job, whole: Layout, found: Mapping[int, list[Run]]) -> None:
        """Count a request's use of documents that it has found, but not of those of an earlier turn, as in `count_use`."""
        if not found:
            return
        match = self._tree.match(job.request.scope, whole.tokens)
        continued = match.length if match.length == match.node.end and not match.node.children else 0
        new = ((whole.moved[at], runs) for at, runs in found.items() if whole.moved[at].stop > continued)
        nodes = dict.fromkeys(node for one, runs in new for node, _, _ in runs if node.end > one.num_prefix)
        self._tree.use(nodes, counts_as_use=job.request.kind.counts_as_use, session=job.request.session)

    def _price_path(self, job: Job, last_node: Node) -> None:
        """Let what stands behind the prefix be worth the more, the more of it was computed and not moved.

        The time that its reuse saves grows with that share. Squared: it serves its own chat alone, and documents serve all.
        """
        if job.is_reading:
            return
        moved = job.layout.moved
        nodes = path(last_node, begin := moved[0].start)
        if not nodes:
            return
        end = nodes[0].end
        num_moved = sum(max(min(one.stop, end) - one.start, 0) for one in moved)
        token_cost = self._tree.profile.cost(begin, end - begin) * (1 - num_moved / (end - begin)) ** 2
        for node in nodes:
            node.token_cost = token_cost
            self._tree.price(node)

    def _fetch(self, job: Job, num_cells: int = 0) -> None:
        """Bring back all KV that follows the job's own, copies and documents in turn."""
        while True:
            super()._fetch(job, num_cells)
            if not self._place(job, num_cells):
                return

    def _place(self, job: Job, num_cells: int) -> bool:
        """Move the documents that follow the job's KV to their places. False: none follows, or no cells are free for it.

        All that follow each other at once: each change of the path walks all of it.
        """
        sequence, layout, device = job.sequence, job.layout, self._tree.device
        assert sequence is not None
        start = reached = sequence.length
        num_cells -= start
        while (at := layout.moved_at(reached)) is not None and self._cells.reserve(num_cells + layout.moved[at].stop):
            document = layout.moved[at]
            distance = document.distance
            for piece in job.readings.pieces[at]:
                first, last = max(piece.start + distance, reached), piece.stop + distance
                if first < last:
                    device.perform(Restore(piece.copy, sequence.id, first, last, distance=distance))
            self._count_moved(job, at, reached)
            reached = document.stop
        if reached > start:
            device.advance(sequence, reached)
        return reached > start

    def _count(self, job: Job, source: str, start: int, tokens: int) -> None:
        """KV that the request computed itself for a document does not count, nor any for the reading of one."""
        if job.is_reading:
            return
        self._count_reused(job, source, start, start + tokens)

    def _count_moved(self, job: Job, at: int, start: int) -> None:
        """Count a document, by its place among the moved ones, that came to its place from position `start` on."""
        stop = job.layout.moved[at].stop
        if job.request.cache:  # else it is from another document of the request, that begins alike
            self._count_reused(job, Source.MOVED, start, stop)
        job.readings.reached = stop

    def _count_reused(self, job: Job, source: str, start: int, stop: int) -> None:
        """Count positions [start, stop), but for the tokens that the request computed to read its documents: the last ones
        of each, and of the prefix.
        """
        readings, moved = job.readings, job.layout.moved
        start, readings.reached = max(start, readings.reached), max(stop, readings.reached)
        first = bisect_right(moved, start, key=attrgetter("stop"))
        here = takewhile(lambda at: moved[at].start < stop, range(first, len(moved)))
        read = ((moved[at].stop, readings.tokens[at]) for at in here if at in readings.tokens)
        for end, num_own in ((moved[0].num_prefix, readings.num_prefix), *read):
            if start < end:
                if (upto := min(stop, end - num_own)) > start:
                    self._counters.count_cached(job, source, start, upto - start)
                start = end
        if start < stop:
            self._counters.count_cached(job, source, start, stop - start)


def num_kept(jobs: Iterable[Job]) -> int:
    """Return how many tokens requests keep copies of that are none of the host tier's, or none any more."""
    pieces = (piece for one in jobs for pieces in one.readings.pieces.values() for piece in pieces)
    return sum(len(copy) for copy in {piece.copy for piece in pieces if not piece.copy.users})


def _piece(run: Run) -> KvPart | None:
    node, start, stop = run
    return None if node.copy is None else KvPart(node.copy, start, stop)


def _copied(tree: PrefixTree, run: Run) -> KvPart:
    """Return a copy of a document's KV in a run, made by the next plan where the host tier has none."""
    node, start, stop = run
    return KvPart(_copy(tree, node), start, stop)


def _copy(tree: PrefixTree, node: Node) -> HostCopy:
    if node.copy is None and not (node.complete and tree.copies.save(node, node.longest_holder())):
        copy = HostCopy(node.start, node.start + node.ready, users=0)
        tree.device.perform(Save(node.longest_holder().id, copy))
        return copy
    assert node.copy is not None
    return node.copy


def _stage(whole: Layout, at: int) -> Layout:
    """Return the layout of the prefix and one document."""
    document = whole.moved[at]
    num_prefix, text = document.num_prefix, document.text
    segments = tuple(segment for segment in whole.segments if segment.stop <= num_prefix)
    return Layout(
        text,
        stops=(num_prefix,),
        documents=(PlacedDocument(document.id, document.key, num_prefix, len(text)),),
        segments=(*segments, Segment(len(text), f"document {document.id}")),
        reads=(at, whole),
        opening=num_prefix,
    )
