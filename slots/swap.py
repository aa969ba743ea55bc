"""Swapping: while a prompt is computed, the KV of other requests is in host memory. It comes back behind the step.

Attention passes over all cells in use. On the CPU an unseen cell costs an eighth to a quarter of a seen one (the kernel goes
by tiles of cells, which may belong to several requests). Moving a cell away and back takes as long as passing over it for
some tens of tokens; a step computes hundreds.

To whom the cells belong, where a step computes for A while B and C run:

    before            | B | A and B | C | A | free ...
    during            | A and B | A | new tokens of A | free ...      B and C: in host memory
    after             | A and B | A | new tokens of A | B | C | ...
    next step for A   | A and B | A | new tokens of A | free ...      A is in place, so only B and C move

The first swap for A clears the pool: all KV is copied first, and then A's comes back into the first cells. A run stays on
the device if any sequence of A holds it, even if B's holds it too. Sequences, pins and counts do not change: for the tree
nothing has moved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from .node import Blob, Node
from .plan import Clear, Operation, Restore, Save, Share, Trim
from .radix import path
from .request import Request
from .tree import PrefixTree

Moves = tuple[Operation, ...]


def swap_out(
    tree: PrefixTree, runs: list[Node], running: Collection[Request], computing: Collection[Request], *, in_place: bool
) -> tuple[Moves, Moves]:
    """Return the operations of a swap before a step, behind the tree's own decisions, and after it.

    runs: those on the device. computing: the running requests that the step is for; their KV gets the first cells.
    in_place: it has them already. Runs that move are copied to the host tier if it has room, else only for the step.
    """
    copies: list[Operation] = []
    stays: list[Operation] = []  # KV of the computing requests, which comes back before the step
    leaves: list[Restore | Share] = []  # all other KV, which comes back after it
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
        sharers = (sequence for sequence in node.sequences if sequence is not holder)
        moves += [Share(holder.id, one.id, node.start, min(stop, one.length)) for one in sharers]
    for request in running:
        if request.num_tail and (sequence := request.sequence):  # the tree does not know of tails
            is_needed = sequence in needed
            if is_needed and in_place:
                continue
            blob = Blob(request.claimed, request.computed)
            copies.append(Save(sequence.id, blob))
            moves = stays if is_needed else leaves
            moves.append(Restore(blob, sequence.id, blob.start, blob.stop))
    if in_place:
        return (*copies, *map(_trim_of, leaves)), tuple(leaves)
    return (*copies, Clear(), *stays), tuple(leaves)


def _trim_of(move: Restore | Share) -> Trim:
    """Return the operation that frees the cells which `move` gives back."""
    return Trim(move.sequence if isinstance(move, Restore) else move.target, move.start, move.stop)


def runs_on_device(tree: PrefixTree, running: Collection[Request]) -> Iterator[Node]:
    """Yield each run with KV on the device, right behind its parent or a sibling's last descendant.

    They are found from the sequences, because most scopes have no run on the device.
    """
    sequences = (*tree.ledger.parked.values(), *(request.sequence for request in running if request.sequence))
    stack = list(_first_runs(sequence.tip for sequence in sequences))
    while stack:
        node = stack.pop()
        if node.ready:
            yield node
            stack.extend(node.children.values())


def _first_runs(tips: Iterable[Node]) -> Iterator[Node]:
    """Yield the runs with which the paths to these tips begin, each once."""
    seen: set[Node] = set()
    for tip in tips:
        for node in path(tip):
            if node in seen:
                break
            seen.add(node)
            if node.start == 0:
                yield node
