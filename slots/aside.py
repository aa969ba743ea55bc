"""Setting aside: while a prompt is computed, only its own KV stays in the pool; the others' comes back behind the step.

A step's attention passes over all cells in use. On the CPU a foreign cell costs an eighth to a quarter of one that a token
sees (it goes by tiles of cells, which those of several requests may share). Moving a cell to host memory and back takes as
long as passing it over for some tens of tokens; a step computes hundreds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from .node import Blob, Node, Sequence
from .plan import Clear, Operation, Restore, Save, Share
from .tree import PrefixTree

Moves = tuple[Operation, ...]


def set_aside(tree: PrefixTree, held: Mapping[Sequence, int], needed: Collection[Sequence | None]) -> tuple[Moves, Moves]:
    """The operations before a step, behind those that the tree has decided, and after it.

    The tree stays as it is, since who holds what does not change.

    held: up to where each running request holds cells; those behind its path are no business of the tree. needed: the
    sequences that the step computes; what they hold has the first cells, path by path, one after another.
    """
    copies: list[Operation] = []
    stays: list[Operation] = []
    leaves: list[Operation] = []
    for node in _paths(tree):
        if node.ready:
            holder, stop = node.longest_holder(), node.start + node.ready
            blob = tree.save_if_free(node)
            if blob is None:
                blob = Blob(node.start, stop)
                copies.append(Save(holder.id, blob))
            moves = leaves if node.sequences.isdisjoint(needed) else stays
            moves.append(Restore(blob, holder.id, node.start, stop))
            others = (sequence for sequence in node.sequences if sequence is not holder)
            moves += [Share(holder.id, one.id, node.start, min(stop, one.length)) for one in others]
        for sequence, stop in held.items():
            if sequence.tip is node and stop > node.end:
                blob = Blob(node.end, stop)
                copies.append(Save(sequence.id, blob))
                moves = stays if sequence in needed else leaves
                moves.append(Restore(blob, sequence.id, node.end, stop))
    return (*copies, Clear(), *stays), tuple(leaves)


def _paths(tree: PrefixTree) -> Iterator[Node]:
    """Every node, each right behind its parent or a sibling's last descendant."""
    stack = list(tree.roots.values())
    while stack:
        node = stack.pop()
        if node.parent is not None:
            yield node
        stack.extend(node.children.values())
