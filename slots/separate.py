"""Documents are read one after the other, each behind the prompt's prefix alone, then moved to their places.

A request with documents that are read separately runs in stages. In each stage but the last it is a prompt of its own, the
front and one document, exact KV like that of any other request:

    stage 1    | front | document 2 |                          computed and copied; then the request leaves its lane
    stage 2    | front | document 3 |                          and goes on at the head of the queue
    last       | front | document 1 | 2 | 3 | question |       1 was cached; 2 and 3 are moved to their places

One after the other, since the bits of a token's KV depend on its cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .plan import HostCopy, Save, Span
from .prefix_tree import PrefixTree
from .radix import Node, PromptTree, path
from .request import Job, KvPart, Layout, MovedDocument, PlacedDocument
from .scope import Scope


def next_stage(tree: PromptTree, job: Job, whole: Layout) -> Layout:
    """Return the layout of a request's next stage. whole: that of its prompt."""
    readings, count = job.readings, len(whole.moved)
    first = readings.looked
    # On from the last one, so that all stages together look once at each. Then at the others, which may have left since.
    for at in (*range(first, count), *range(first)):
        readings.looked = at
        if at not in readings.pieces and not _is_cached(tree, job.request.scope, whole.moved[at]):
            return _stage(whole, at, whole.moved[at])
    return whole


def note_read(tree: PrefixTree, job: Job, span: Span) -> None:
    """Take over a computed span of a document; keep a copy once it is read, whatever leaves the cache from now on."""
    assert job.layout is not None and job.layout.reads is not None
    at, document = job.layout.reads
    job.readings.count(at, document.front, span.start, span.stop)
    if job.computed == job.num_tokens:
        job.readings.pieces[at] = _copies(tree, job.request.scope, document)


def keep_moved(tree: PrefixTree, job: Job) -> None:
    """Keep copies of the documents that a request is about to move and has not read itself."""
    assert job.layout is not None
    pieces, moved = job.readings.pieces, job.layout.moved
    missing = {at: list(_runs(tree, job.request.scope, document)) for at, document in enumerate(moved) if at not in pieces}
    # All copies that there are first: to make another one may push them out of host memory.
    found = {at: [(run, _piece(run)) for run in runs] for at, runs in missing.items()}
    pieces |= {at: tuple(piece or _copied(tree, run) for run, piece in runs) for at, runs in found.items()}


def num_placed(tree: PromptTree, scope: Scope, layout: Layout, reached: int) -> int:
    """Return how many tokens documents that are cached now bring to a prompt, behind its first `reached` ones."""
    behind = (document for document in layout.moved if document.stop > reached)
    return sum(one.stop - max(one.moves_from, reached) for one in behind if _is_cached(tree, scope, one))


def keeps_copies(job: Job) -> bool:
    """Return whether a request that is laid out keeps copies of documents."""
    return job.layout is not None and (job.is_reading or bool(job.layout.moved))


def num_kept(jobs: Iterable[Job]) -> int:
    """Return how many tokens requests keep copies of that are none of the host tier's, or none any more."""
    pieces = (piece for one in jobs for pieces in one.readings.pieces.values() for piece in pieces)
    return sum(len(blob) for blob in {piece.blob for piece in pieces if not piece.blob.users})


Run = tuple[Node, int, int]
"""A run of the tree, and the positions of a document's text that stand in it."""


def _is_cached(tree: PromptTree, scope: Scope, document: MovedDocument) -> bool:
    """Return whether all KV of a document is on the device or in host memory."""
    at = document.needed_from
    for node, start, stop in _runs(tree, scope, document):
        if start != at or (node.blob is None and node.start + node.ready < stop):
            return False
        at = stop
    return at == document.front + len(document.tokens)


def _runs(tree: PromptTree, scope: Scope, document: MovedDocument) -> Iterator[Run]:
    match = tree.match(scope, document.text)
    for node in reversed(list(path(match.node))):
        start, stop = max(node.start, document.needed_from), min(node.end, match.length)
        if start < stop:
            yield node, start, stop


def _piece(run: Run) -> KvPart | None:
    node, start, stop = run
    return None if node.blob is None else KvPart(node.blob, start, stop)


def _copies(tree: PrefixTree, scope: Scope, document: MovedDocument) -> tuple[KvPart, ...]:
    """Return copies of a document's KV, made by the next plan where the host tier has none."""
    return tuple(_copied(tree, run) for run in list(_runs(tree, scope, document)))


def _copied(tree: PrefixTree, run: Run) -> KvPart:
    node, start, stop = run
    return KvPart(_copy(tree, node), start, stop)


def _copy(tree: PrefixTree, node: Node) -> HostCopy:
    if node.blob is None and not (node.complete and tree.copies.save(node, node.longest_holder())):
        blob = HostCopy(node.start, node.start + node.ready, users=0)
        tree.ledger.perform(Save(node.longest_holder().id, blob))
        return blob
    assert node.blob is not None
    return node.blob


def _stage(whole: Layout, at: int, document: MovedDocument) -> Layout:
    """Return the layout of the front and one document."""
    front, text = document.front, document.text
    segments = tuple(segment for segment in whole.segments if segment[0] <= front)
    return Layout(
        text,
        stops=(front,),
        documents=(PlacedDocument(document.id, document.key, front, len(text)),),
        segments=(*segments, (len(text), f"document {document.id}")),
        reads=(at, document),
    )
