"""KV from host memory to a request's sequence: copies that follow its own KV, and documents moved to their places."""

from __future__ import annotations

from ..cells import Cells
from ..counters import Counters
from ..plan import Restore
from ..request import Request
from ..tree import PrefixTree


def fetch(tree: PrefixTree, cells: Cells, counters: Counters, request: Request, *, spans: int = 0) -> None:
    """Bring back all KV that follows the request's own, while cells are free for it.

    spans: cells that the step needs for its own tokens, as far as it is planned.
    """
    assert request.sequence is not None
    while True:
        if (needed := tree.copies.restorable(request.sequence)) and cells.reserve(spans + needed):
            for source, tokens in tree.copies.restore(request.sequence):
                counters.count_cached(request, source, tokens)
        if not place(tree, cells, counters, request, spans=spans):
            return


def place(tree: PrefixTree, cells: Cells, counters: Counters, request: Request, *, spans: int = 0) -> bool:
    """Move the documents that follow the request's KV to their places. False: none follows, or no cells are free for it.

    All that follow each other at once: each change of the path walks all of it.
    """
    sequence, layout = request.sequence, request.layout
    assert sequence is not None and layout is not None
    start = reached = sequence.length
    while (at := layout.moved_at(reached)) is not None and cells.reserve(spans + layout.moved[at].stop - start):
        document = layout.moved[at]
        distance = document.distance
        for piece in request.readings.pieces[at]:
            first, last = max(piece.start + distance, reached), piece.stop + distance
            if first < last:
                tree.ledger.perform(Restore(piece.blob, sequence.id, first, last, distance=distance))
        counters.count_moved(request, at, reached)
        reached = document.stop
    if reached > start:
        tree.ledger.advance(sequence, reached)
    return reached > start
