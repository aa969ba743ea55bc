"""The operations that bring a path's KV back from host memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

from ..node import Blob, Node, Sequence
from ..plan import Restore
from ..radix import path


def restores(sequence: Sequence, rest: int) -> list[tuple[Restore, list[Node]]]:
    """Return an operation for each blob that follows the sequence's KV on its path, with the runs that the blob covers.

    The path's last `rest` tokens are left out and computed: the last one gives the logits.
    """
    runs: list[tuple[Node, Blob]] = []
    reached = sequence.length
    for node in reversed(list(itertools.takewhile(lambda node: node.end > sequence.length, path(sequence.tip)))):
        if node.ready or node.blob is None or node.start != reached:
            break
        runs.append((node, node.blob))
        reached = node.end
    last = sequence.most_cached(reached, rest)
    found: list[tuple[Restore, list[Node]]] = []
    for node, blob in runs:
        start, stop = node.start, min(node.end, last)
        if start >= stop:
            break
        if found and found[-1][0].blob is blob:
            restore, nodes = found.pop()
            found.append((replace(restore, stop=stop), [*nodes, node]))
        else:
            found.append((Restore(blob, sequence.id, start, stop), [node]))
    return found


def restores_to(tip: Node, sequence: int, begin: int) -> list[Restore]:
    """Return an operation for each blob of the path to `tip`, from position `begin` on. All of its runs have one."""
    found: list[Restore] = []
    behind = itertools.takewhile(lambda node: node.end > begin, path(tip))
    for node in reversed(list(behind)):
        assert node.blob is not None
        start = found.pop().start if found and found[-1].blob is node.blob else max(node.start, begin)
        found.append(Restore(node.blob, sequence, start, node.end))
    return found
