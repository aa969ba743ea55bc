"""Separate reading: each document is read (computed) after the prompt's prefix alone.

After the reading, the document's KV is moved to its place in the prompt.

A request with separately read documents runs in stages. In each stage but the last, its prompt is the prefix and one
document, so the KV of this document is as exact as that of any other prompt:

    stage 1    | prefix | document 2 |
    stage 2    | prefix | document 3 |
    last       | prefix | document 1 | document 2 | document 3 | question |

In this example, document 1 was cached before. At the end of stages 1 and 2, the request keeps a copy of the document's KV,
gives up its slot, and returns to the head of the queue. In the last stage, the KV of documents 2 and 3 is moved to their
places.

Documents are read one after the other, never together, because the bits of a token's KV depend on its cell.

Each use of a document raises the worth of the KV that was read after the prefix alone. The KV that was moved to a place in a
prompt is worth little: it can be made again at once from the KV that was read. To make such a prompt's KV again, only the
tokens between and after the documents would have to be computed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import takewhile
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from .host import PromptTree
from .job import Job, StrategyState
from .plan import HostCopy, Restore, Save, Span
from .prefix_tree import PrefixTree
from .radix import Node, Section, path
from .request import Layout, PlacedDocument, Request, Segment
from .reuse import Source, ids_of
from .scope import Scope
from .strategy import PlainKV

# ---- Prompts with separately read documents. ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class MovedDocument:
    """A separately read document at positions [start, stop) of a prompt.

    id, key: as in `PlacedDocument`.
    prefix (int32): the prompt's tokens before its first document. All moved documents of a prompt share this array.
    tokens (int32): the document's own tokens.
    """

    id: str
    key: str
    start: int
    stop: int
    _: KW_ONLY
    prefix: np.ndarray
    tokens: np.ndarray

    @property
    def num_prefix(self) -> int:
        """The number of the prompt's tokens before its first document."""
        return len(self.prefix)

    @property
    def text(self) -> np.ndarray:
        """The tokens (int32) of the text in which the document is read: the prefix, then the document."""
        return np.concatenate((self.prefix, self.tokens))

    @property
    def distance(self) -> int:
        """How many positions the document's KV moves: from where the document is read to its place in the prompt."""
        return self.start - self.num_prefix

    @property
    def moves_from(self) -> int:
        """The first position of the prompt whose KV comes from the document's text.

        The position is 0 if the document is read in its place: the KV of the document's text then includes the prompt's
        prefix.
        """
        return self.start if self.distance else 0

    @property
    def needed_from(self) -> int:
        """The first position of the document's text whose KV is needed."""
        return self.moves_from - self.distance

    def runs(self, tree: PromptTree, scope: Scope) -> Iterator[tuple[Node, int, int]]:
        """Yield the runs of a tree that have parts of the document, each with the positions of its part in `text`."""
        match = tree.match(scope, self.text)
        for node in reversed(path(match.node)):
            start, stop = max(node.start, self.needed_from), min(node.end, match.length)
            if start < stop:
                yield node, start, stop

    def cached_runs(self, tree: PromptTree, scope: Scope) -> list[tuple[Node, int, int]]:
        """Return the `runs` if all KV of the document is on the device or in host memory, else an empty list."""
        at, runs = self.needed_from, list(self.runs(tree, scope))
        for node, start, stop in runs:
            if start != at or (node.copy is None and node.start + node.ready < stop):
                return []
            at = stop
        return runs if at == self.num_prefix + len(self.tokens) else []

    def is_cached(self, tree: PromptTree, scope: Scope) -> bool:
        """Return whether all KV of the document is on the device or in host memory."""
        return bool(self.cached_runs(tree, scope))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SeparateLayout(Layout):
    """The layout of a prompt with separately read documents, or of a stage that reads one of them.

    In the layout of the whole prompt, the tokens of separately read documents are marked (`mark`).

    moved: the separately read documents; empty in a stage.
    reads: None if this is not a stage. In a stage, the number of the document that the stage reads, and the layout of the
        whole prompt. The document is in the `moved` of that layout.
    """

    moved: tuple[MovedDocument, ...] = ()
    reads: tuple[int, SeparateLayout] | None = None

    @property
    def in_pieces(self) -> bool:
        return bool(self.moved)

    @property
    def is_stage(self) -> bool:
        return self.reads is not None

    @property
    def texts(self) -> list[np.ndarray]:
        """The texts of the moved documents, then the prompt (int32 tokens)."""
        return [*(document.text for document in self.moved), self.tokens]

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """The documents' places; empty if documents are moved, since other prompts cannot reuse them at these places."""
        return [] if self.moved else [(document.key, document.start, document.stop) for document in self.documents]

    def ids_of(self, tokens: np.ndarray) -> np.ndarray:
        return ids_of(tokens) if self.moved else tokens

    def moved_at(self, position: int) -> int | None:
        """Return the index in `moved` of the document whose KV is moved to `position`; None if no KV is moved there."""
        at = bisect_right(self.moved, position, key=attrgetter("moves_from")) - 1
        return at if at >= 0 and position < self.moved[at].stop else None

    def num_placed(self, tree: PromptTree, scope: Scope, reached: int) -> int:
        later = (document for document in self.moved if document.stop > reached)
        return sum(one.stop - max(one.moves_from, reached) for one in later if one.is_cached(tree, scope))

    def sections(self, num_tokens: int) -> list[Section]:
        """Return the sections between the moved documents."""
        starts, stops = [0, *(one.stop for one in self.moved)], [*(one.moves_from for one in self.moved), num_tokens]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop] or [(0, num_tokens)]


def separate(layout: Layout) -> SeparateLayout:
    """Check that a layout is a `SeparateLayout`, and return it."""
    assert isinstance(layout, SeparateLayout)
    return layout


def moved_in(layout: Layout) -> tuple[MovedDocument, ...]:
    """Return the documents of a prompt that are read separately and moved to their places."""
    return layout.moved if isinstance(layout, SeparateLayout) else ()


# ---- The documents that a job has read, and their reuse. ----------------------------------------------------------------


class KvPart(NamedTuple):
    """A part of a document's KV, which `copy` has at positions [start, stop) of the text in which the document was read."""

    copy: HostCopy
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class ReadDocuments(StrategyState):
    """The documents that a request has read, or has found in the cache. Documents are numbered as in `moved`.

    pieces: the KV of each document that was read or found, by the document's number. The request keeps this KV even if the
        cache evicts its own copy.
    num_prefix, tokens: how many tokens of the prefix, and of each document, the request has computed in its stages.
    reached: the position up to which reused tokens were counted.
    looked: the number of the document at which the last search for an unread document stopped. When that search stopped, all
        documents before this one were read or cached.
    """

    pieces: dict[int, tuple[KvPart, ...]] = field(default_factory=dict[int, tuple[KvPart, ...]])
    num_prefix: int = 0
    tokens: dict[int, int] = field(default_factory=dict[int, int])
    reached: int = 0
    looked: int = 0

    @property
    def has_started(self) -> bool:
        return bool(self.pieces)

    def suits(self, layout: Layout) -> bool:
        """Return whether a layout can still be used: the job must have its own copy of each document.

        The cache's copies may have been evicted by now.
        """
        return len(self.pieces) >= len(moved_in(layout))

    def count(self, document: int, num_prefix: int, start: int, stop: int) -> None:
        """Count tokens that were computed at positions [start, stop) of the text in which a document is read."""
        in_front = max(min(stop, num_prefix) - start, 0)
        self.num_prefix += in_front
        self.tokens[document] = self.tokens.get(document, 0) + stop - start - in_front

    def forget_unmade(self) -> None:
        made = {at: pieces for at, pieces in self.pieces.items() if all(piece.copy.data is not None for piece in pieces)}
        self.pieces = made

    def start_over(self) -> None:
        self.reached = 0
        self.forget_unmade()


def read_by(job: Job) -> ReadDocuments:
    """Return the documents that a job has read or found."""
    if not isinstance(job.strategy_state, ReadDocuments):
        job.strategy_state = ReadDocuments()
    return job.strategy_state


Run = tuple[Node, int, int]
"""A run of the tree, and the positions [start, stop) of its part of a document in the document's text."""


class SeparateDocuments(PlainKV):
    """Moves documents to their places. Stages, and tokens between documents, reuse KV of the tree as usual."""

    def takes(self, request: Request, whole: Layout) -> bool:
        return bool(moved_in(whole))

    def stage(self, job: Job, whole: Layout) -> Layout:
        whole, readings = separate(whole), read_by(job)
        count = len(whole.moved)
        first = readings.looked
        # The search goes on where the last one stopped, so that all stages together look at each document once.
        # Then it looks at the earlier documents, which may have been evicted since.
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

    def release(self, job: Job) -> None:
        sequence = job.sequence
        assert sequence is not None
        super().release(job)
        self._price_path(job, sequence.last_node)

    def catch_up(self, job: Job, num_cells: int) -> None:
        super().catch_up(job, num_cells)
        assert job.sequence is not None
        if self._place(job, num_cells):
            self._restore(job, num_cells)
            job.computed = job.sequence.length

    def next_stop(self, job: Job) -> int:
        layout = separate(job.layout)
        if layout.moved_at(job.computed) is not None:
            return job.computed  # no cells are free for the document that is to be moved here
        starts = (document.moves_from for document in layout.moved)
        return next((start for start in starts if start > job.computed), job.num_tokens)

    def reached(self, job: Job, span: Span) -> bool:
        """Handle a computed span of a document: count its tokens.

        Return whether the whole document is now read, which ends the stage.

        The request keeps a copy of the document's KV, so that the cache may evict it.
        """
        if not job.is_reading:
            return False
        at, whole = _reads(job)
        document = whole.moved[at]
        readings = read_by(job)
        readings.count(at, document.num_prefix, span.start, span.stop)
        if job.computed < job.num_tokens:
            return False
        runs = list(document.runs(self._tree, job.request.scope))
        readings.pieces[at] = tuple(_copied(self._tree, run) for run in runs)
        return True

    def _keep_moved(self, job: Job) -> None:
        """Keep copies of the documents that a request has found in the cache, and count the request's use of them.

        The copies are made at the start of the request's first stage, because reading documents may evict others from the
        cache.
        """
        readings, scope = read_by(job), job.request.scope
        if job.is_reading and readings.tokens:
            return  # the request's first stage has done this
        pieces = readings.pieces
        whole = _reads(job)[1] if job.is_reading else separate(job.layout)
        found = ((at, one.cached_runs(self._tree, scope)) for at, one in enumerate(whole.moved) if at not in pieces)
        missing = {at: runs for at, runs in found if runs}
        self._count_use(job, whole, missing)
        # Present copies first: making another one may evict them from host memory.
        found = {at: [(run, _piece(run)) for run in runs] for at, runs in missing.items()}
        pieces |= {at: tuple(piece or _copied(self._tree, run) for run, piece in runs) for at, runs in found.items()}
        assert job.is_reading or len(pieces) == len(whole.moved)

    def _count_use(self, job: Job, whole: SeparateLayout, found: Mapping[int, list[Run]]) -> None:
        """Count a request's use of documents in the cache, without documents of an earlier turn. Compare `count_use`."""
        if not found:
            return
        match = self._tree.match(job.request.scope, whole.tokens)
        continued = match.length if match.length == match.node.end and not match.node.children else 0
        new = ((whole.moved[at], runs) for at, runs in found.items() if whole.moved[at].stop > continued)
        nodes = dict.fromkeys(node for one, runs in new for node, _, _ in runs if node.end > one.num_prefix)
        self._tree.use(nodes, counts_as_use=job.request.kind.counts_as_use, session=job.request.session)

    def _price_path(self, job: Job, last_node: Node) -> None:
        """Set the worth of the path after the prefix, by the share of the path's tokens that were computed and not moved.

        Reusing the path saves more time the larger this share is. The share of computed tokens is squared, which lowers the
        worth: the path serves only its own chat, while documents serve all chats.
        """
        if job.is_reading:
            return
        moved = moved_in(job.layout)
        nodes = path(last_node, begin := moved[0].start)
        if not nodes:
            return
        end = nodes[0].end
        num_moved = sum(max(min(one.stop, end) - one.start, 0) for one in moved)
        token_cost = self._tree.profile.cost(begin, end - begin) * (1 - num_moved / (end - begin)) ** 2
        for node in nodes:
            node.token_cost = token_cost
            self._tree.price(node)

    def _restore(self, job: Job, num_cells: int = 0) -> None:
        """From the job's own KV on, restore copies of runs, and move documents to their places, in the prompt's order."""
        while True:
            super()._restore(job, num_cells)
            if not self._place(job, num_cells):
                return

    def _place(self, job: Job, num_cells: int) -> bool:
        """Move the documents that directly follow the job's KV to their places, as far as cells can be freed.

        Return False if no document was moved. Adjacent documents are moved together, since each change of a path walks the
        whole path.
        """
        sequence, layout, device = job.sequence, separate(job.layout), self._tree.device
        assert sequence is not None
        start = reached = sequence.length
        num_cells -= start
        while (at := layout.moved_at(reached)) is not None and self._cells.reserve(num_cells + layout.moved[at].stop):
            document = layout.moved[at]
            distance = document.distance
            for piece in read_by(job).pieces[at]:
                first, last = max(piece.start + distance, reached), piece.stop + distance
                if first < last:
                    device.perform(Restore(piece.copy, sequence.id, first, last, distance=distance))
            self._count_moved(job, at, reached)
            reached = document.stop
        if reached > start:
            device.advance(sequence, reached)
        return reached > start

    def _count(self, job: Job, source: str, start: int, tokens: int) -> None:
        """Count reused tokens. Tokens of a stage do not count, nor do tokens that the request has computed in its stages."""
        if job.is_reading:
            return
        self._count_reused(job, source, start, start + tokens)

    def _count_moved(self, job: Job, at: int, start: int) -> None:
        """Count the reuse of document number `at`, whose KV was moved to the prompt from position `start` on."""
        stop = separate(job.layout).moved[at].stop
        if job.request.cache:  # otherwise the request has computed this KV itself
            self._count_reused(job, Source.MOVED, start, stop)
        read_by(job).reached = stop

    def _count_reused(self, job: Job, source: str, start: int, stop: int) -> None:
        """Count positions [start, stop) as reused, without tokens that the request has computed in its stages.

        The tokens computed in stages are the last tokens of the prefix, and the last tokens of each document that was read.
        """
        readings, moved = read_by(job), moved_in(job.layout)
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
    """Return how many tokens are in copies that only requests keep, and that are not part of host memory."""
    states = (one.strategy_state for one in jobs)
    read = (state.pieces.values() for state in states if isinstance(state, ReadDocuments))
    pieces = (piece for each in read for pieces in each for piece in pieces)
    return sum(len(copy) for copy in {piece.copy for piece in pieces if not piece.copy.users})


def _piece(run: Run) -> KvPart | None:
    node, start, stop = run
    return None if node.copy is None else KvPart(node.copy, start, stop)


def _copied(tree: PrefixTree, run: Run) -> KvPart:
    """Return the part of a document that a run has, with the run's copy. If the run has no copy, the next plan makes one."""
    node, start, stop = run
    return KvPart(_copy(tree, node), start, stop)


def _copy(tree: PrefixTree, node: Node) -> HostCopy:
    if node.copy is None and not (node.complete and tree.copies.save(node, node.longest_sequence())):
        copy = HostCopy(node.start, node.start + node.ready, users=0)
        tree.device.perform(Save(node.longest_sequence().id, copy))
        return copy
    assert node.copy is not None
    return node.copy


def _reads(job: Job) -> tuple[int, SeparateLayout]:
    """Return the number of the document that a job reads in its stage, and the layout of the whole prompt."""
    reads = separate(job.layout).reads
    assert reads is not None
    return reads


def _stage(whole: SeparateLayout, at: int) -> SeparateLayout:
    """Return the layout of the stage that reads document number `at`: the prefix, then the document."""
    document = whole.moved[at]
    num_prefix, text = document.num_prefix, document.text
    segments = tuple(segment for segment in whole.segments if segment.stop <= num_prefix)
    return SeparateLayout(
        tokens=text,
        stops=(num_prefix,),
        documents=(PlacedDocument(document.id, document.key, num_prefix, len(text)),),
        segments=(*segments, Segment(len(text), f"document {document.id}")),
        reads=(at, whole),
        opening=num_prefix,
    )
