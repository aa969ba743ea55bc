"""Setting aside: while a prompt is computed, only its own KV stays in the pool; the others' comes back behind the step.

A step's attention passes over all cells in use. On the CPU a foreign cell costs an eighth to a quarter of one that a token
sees (it goes by tiles of cells, which those of several requests may share). Moving a cell to host memory and back takes as
long as passing it over for some tens of tokens; a step computes hundreds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from .node import Blob, Node
from .plan import Clear, Operation, Restore, Save, Share, Trim
from .radix import path
from .request import Request
from .tree import PrefixTree

Moves = tuple[Operation, ...]


def set_aside(
    tree: PrefixTree, runs: list[Node], running: Collection[Request], computing: Collection[Request], in_place: bool
) -> tuple[Moves, Moves]:
    """The operations before a step, behind those that the tree has decided, and after it.

    Who holds what does not change, but runs that move and have no copy in the host tier get one, as far as it has room.
    runs: all that are `resident`. computing: whom of those that run the step is for; what they hold gets the first cells.
    in_place: it has them already.
    """
    copies: list[Operation] = []
    stays: list[Operation] = []
    leaves: list[Restore | Share] = []
    needed = {request.sequence for request in computing}
    private = {request.sequence for request in running if not request.cache}
    for node in runs:
        is_needed = not node.sequences.isdisjoint(needed)
        if is_needed and in_place:
            continue
        holder, stop = node.longest_holder(), node.start + node.ready
        blob = node.blob if node.sequences <= private else tree.copies.save_if_free(node)
        if blob is None:
            blob = Blob(node.start, stop)
            copies.append(Save(holder.id, blob))
        moves: list = stays if is_needed else leaves
        moves.append(Restore(blob, holder.id, node.start, stop))
        others = (sequence for sequence in node.sequences if sequence is not holder)
        moves += [Share(holder.id, one.id, node.start, min(stop, one.length)) for one in others]
    for request in running:
        if request.num_tail and (sequence := request.sequence):  # no business of the tree
            is_needed = sequence in needed
            if is_needed and in_place:
                continue
            blob = Blob(request.claimed, request.computed)
            copies.append(Save(sequence.id, blob))
            moves = stays if is_needed else leaves
            moves.append(Restore(blob, sequence.id, blob.start, blob.stop))
    if in_place:
        return (*copies, *map(_undone, leaves)), tuple(leaves)
    return (*copies, Clear(), *stays), tuple(leaves)


def _undone(move: Restore | Share) -> Trim:
    return Trim(move.sequence if isinstance(move, Restore) else move.target, move.start, move.stop)


def resident(tree: PrefixTree, running: Collection[Request]) -> Iterator[Node]:
    """Every run that is on the device, or a part of it; each right behind its parent or a sibling's last descendant.

    Found by those who hold it: most scopes have nothing on the device.
    """
    holders = (*tree.ledger.parked.values(), *(request.sequence for request in running if request.sequence))
    stack = list(_first(sequence.tip for sequence in holders))
    while stack:
        node = stack.pop()
        if node.ready:
            yield node
            stack.extend(node.children.values())


def _first(tips: Iterable[Node]) -> Iterator[Node]:
    """The runs that the paths to these tips begin with, each once."""
    seen: set[Node] = set()
    for tip in tips:
        for node in path(tip):
            if node in seen:
                break
            seen.add(node)
            if node.start == 0:
                yield node
