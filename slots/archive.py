"""Runs of the prefix tree as records that can be kept elsewhere, and their way back into the host tier.

A record stands for itself: it has all tokens from the first one on, so whoever brings it back need not believe anything.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from .node import Blob, Node
from .radix import NO_TOKENS, path
from .tree import PrefixTree

Cut = Callable[[np.ndarray, int, int], np.ndarray]
"""The part of a copy (uint8) at positions [start, stop)."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A run's KV. tokens: int32, the path's from position 0 to the run's end; data (uint8): the KV from `start` on.

    documents: (key, position where it begins) of the documents that end with the run. frequency, token_cost: what the
    run is worth, as in `Node`.
    """

    scope: Hashable
    tokens: np.ndarray
    start: int
    data: np.ndarray
    documents: tuple[tuple[str, int], ...] = ()
    frequency: int = 1
    token_cost: float = 0.0


class Archive:
    """Reads records out of a tree and puts them back."""

    def __init__(self, tree: PrefixTree, cut: Cut) -> None:
        self._tree, self._cut = tree, cut

    def record(self, node: Node) -> Record | None:
        """A run as a record; None where its copy in host memory has not been made."""
        blob = node.blob
        if blob is None or blob.data is None:
            return None
        whole = (blob.start, blob.stop) == (node.start, node.end)
        data = blob.data if whole else self._cut(blob.data, node.start, node.end)
        nodes = list(path(node))[::-1]
        documents = tuple((key, origin.end) for origin, key in node.document_of)
        tokens = np.concatenate([one.tokens for one in nodes])
        scope = self._scope_of(nodes[0])
        return Record(scope, tokens, node.start, data, documents, node.frequency, node.token_cost)

    def adopt(self, record: Record, source: str) -> bool:
        """Put a record into the host tier, if what comes before it is cached and there is room; whether it is there then."""
        tree, stop = self._tree, len(record.tokens)
        match = tree.match(record.scope, record.tokens)
        if match.length == stop:
            return True
        fits = tree.host.num_tokens + stop - record.start <= tree.host.max_tokens
        is_cached = all(node.complete or node.blob for node in path(match.node))
        if match.length != record.start or not fits or not is_cached:
            return False
        root = tree.roots.setdefault(record.scope, Node(NO_TOKENS, 0, None))
        ends = tree.insert(root, record.tokens, sorted({record.start, *(at for _, at in record.documents)}))
        node = ends[stop]
        node.frequency, node.token_cost, node.num_misses = record.frequency, record.token_cost, 1
        tree.host.keep(node, Blob(record.start, stop, record.data, source=source))
        for key, at in record.documents:
            ends[at].place(key, node)
        tree.price(node)
        return True

    def held(self, scope: Hashable, tokens: np.ndarray) -> list[Node]:
        """The runs of a prompt that are cached, the first one first."""
        match = self._tree.match(scope, tokens)
        return [node for node in list(path(match.node))[::-1] if node.end <= match.length and node.is_cached]

    def _scope_of(self, first: Node) -> Hashable:
        return next(scope for scope, root in self._tree.roots.items() if root is first.parent)
