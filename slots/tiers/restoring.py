"""What would bring a path's KV back from host memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

from ..node import Node, Sequence
from ..plan import Restore
from ..radix import path


def restores(sequence: Sequence, rest: int) -> list[tuple[Restore, list[Node]]]:
    """One operation for each blob that follows on what the sequence holds of its path, with the runs that it covers.

    Up to the path's last `rest` tokens, which are computed: without the last one there are no logits.
    """
    found: list[tuple[Restore, list[Node]]] = []
    last = sequence.tip.end - rest
    behind = itertools.takewhile(lambda node: node.end > sequence.length, path(sequence.tip))
    for node in reversed(list(behind)):
        start = found[-1][0].stop if found else sequence.length
        if node.ready or node.blob is None or node.start != start or start >= last:
            break
        stop = min(node.end, last)
        if found and found[-1][0].blob is node.blob:
            restore, nodes = found.pop()
            found.append((replace(restore, stop=stop), [*nodes, node]))
        else:
            found.append((Restore(node.blob, sequence.id, start, stop), [node]))
    return found
