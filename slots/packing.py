"""Packing: everything on the device, moved into cells one after another, path by path.

While requests come and go beside each other, a prompt's KV is scattered over the cells that others have left. The CPU's
attention works through tiles of cells and skips those that hold nothing for it: scattered, the same KV takes half as many
tiles again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .node import Blob, Node, Sequence
from .plan import Clear, Operation, Restore, Save, Share
from .tree import PrefixTree


def pack(tree: PrefixTree, tails: Mapping[Sequence, int]) -> tuple[Operation, ...]:
    """The operations: save, clear, restore. The tree stays as it is, since who holds what does not change.

    tails: up to where each running request holds cells; those behind its path in the tree are no business of the tree.
    """
    saves: list[Operation] = []
    restores: list[Operation] = []
    for node in _paths(tree):
        if node.ready:
            holder, stop = node.longest_holder(), node.start + node.ready
            blob = node.blob
            if blob is None:
                blob = Blob(node.start, stop)
                saves.append(Save(holder.id, blob))
            restores.append(Restore(blob, holder.id, node.start, stop))
            others = (sequence for sequence in node.sequences if sequence is not holder)
            restores += [Share(holder.id, one.id, node.start, min(stop, one.length)) for one in others]
        for sequence, stop in tails.items():
            if sequence.tip is node and stop > node.end:
                blob = Blob(node.end, stop)
                saves.append(Save(sequence.id, blob))
                restores.append(Restore(blob, sequence.id, node.end, stop))
    return (*saves, Clear(), *restores)


def _paths(tree: PrefixTree) -> Iterator[Node]:
    """Every node, each right behind its parent or a sibling's last descendant."""
    stack = list(tree.roots.values())
    while stack:
        node = stack.pop()
        if node.parent is not None:
            yield node
        stack.extend(node.children.values())
