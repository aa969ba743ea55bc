"""Host memory as a tier of records: runs of the prefix tree on their way to lower tiers and files, and back.

A record stands for itself: it has all tokens from the first one on, so it is taken back only where its tokens match.
"""

from __future__ import annotations

import numpy as np

from .plan import HostCopy
from .prefix_tree import PrefixTree
from .radix import Node, path, scope_of
from .reuse import Source
from .scope import Scope
from .tier import Cut, Record


class Archive:
    """Reads records out of a tree's host tier and puts them back. The tier protocol, with nodes for keys."""

    def __init__(self, tree: PrefixTree, cut: Cut) -> None:
        self._tree, self._cut = tree, cut

    def has_room(self, record: Record) -> bool:
        """Return whether the uncached part of a record fits with no other copy leaving for it."""
        return self._tree.host.has_room(len(record.tokens) - self.length(record.scope, record.tokens))

    def get(self, node: Node) -> Record | None:
        """Return a run as a record; None if its copy in host memory has not been made."""
        return self.part(node, node.blob, node.end) if node.blob is not None else None

    def drop(self, scope: Scope) -> int:
        """Forget the KV of a scope that no running request needs. Return how many tokens that were."""
        return self._tree.drop(scope)

    def take_unsaved(self) -> list[Node]:
        """Return the runs that were copied to host memory since the last call; the first call begins to note them."""
        taken, self._tree.host.unsaved = self._tree.host.unsaved or {}, {}
        return list(taken)

    def part(self, node: Node, blob: HostCopy, stop: int) -> Record | None:
        """Return a run up to position `stop` as a record, from a copy that reaches it; None if the copy is not made yet."""
        if blob.data is None:
            return None
        whole = (blob.start, blob.stop) == (node.start, stop)
        data = blob.data if whole else self._cut(blob.data, node.start, stop)
        tokens = np.concatenate([one.tokens for one in path(node)][::-1])[:stop]
        documents = ((key, origin.end) for origin, key in node.document_of if stop == node.end)
        within = tuple((key, at) for key, at in documents if at <= node.start)
        return Record(
            scope_of(node),
            tokens,
            node.start,
            data,
            documents=within,
            frequency=node.frequency,
            token_cost=node.token_cost,
        )

    def put(self, record: Record, source: str = Source.HOST) -> bool:
        """Put a record into host memory if the runs before it are cached and it fits. Return whether it is cached now.

        Of a record that is partly cached, the uncached rest is taken. source: the lower tier that it comes from;
        a record from elsewhere is new to the lower tiers.
        """
        tree, stop = self._tree, len(record.tokens)
        start = self.length(record.scope, record.tokens)
        if start == stop:
            return True
        is_claimed = tree.match(record.scope, record.tokens).length > start  # a running request computes it
        if start < record.start or is_claimed or not tree.host.has_room(stop - start):
            return False
        if not all(0 <= at <= record.start for _, at in record.documents):
            return False
        ends = tree.insert(tree.root(record.scope), record.tokens, sorted({start, *(at for _, at in record.documents)}))
        node = ends[stop]
        node.frequency, node.token_cost, node.num_misses = record.frequency, record.token_cost, 1
        data = record.data if start == record.start else self._cut(record.data, start, stop)
        tree.host.keep(node, HostCopy(start, stop, data, source=source, is_written=source != Source.HOST))
        for key, at in record.documents:
            ends[at].place(key, node)
        tree.price(node)
        return True

    def cached(self, scope: Scope | None, tokens: np.ndarray) -> list[tuple[Node, int]]:
        """Return the runs with KV that a prompt begins with, first to last, each with the position where its KV ends."""
        match, runs = self._tree.match(scope, tokens), []
        for node in reversed(list(path(match.node))):
            known = min(node.end, match.length)
            stop = known if node.blob is not None else min(known, node.start + node.ready)
            if stop > node.start:
                runs.append((node, stop))
            if stop < node.end:
                break
        return runs

    def length(self, scope: Scope | None, tokens: np.ndarray) -> int:
        """Return how many leading tokens of a prompt have KV on the device or in host memory."""
        runs = self.cached(scope, tokens)
        return runs[-1][1] if runs else 0
