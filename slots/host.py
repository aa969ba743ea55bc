"""The host tier: KV that has left the device and waits in host memory, run by run of the prefix tree.

Saved once (RAGCache, section 5.3, swap-out-only-once): a run keeps its copy when it is restored, so it can leave the device
again for nothing. When the budget is spent the least recently used leaf goes.
"""

from __future__ import annotations

from .node import Blob, Node


class HostTier:
    """Which runs have a copy, and the ledger of the budget. max_tokens 0: there is no host tier."""

    def __init__(self, max_tokens: int = 0) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0  # tokens that all blobs hold
        self.num_saved = 0  # tokens saved, ever
        self.num_restored = 0  # tokens restored, ever
        self.nodes: set[Node] = set()

    def keep(self, node: Node) -> Blob:
        """A new, empty blob for a node's run; whoever asks has made room."""
        node.blob = Blob(node.start, node.end)
        self.nodes.add(node)
        self.num_tokens += len(node.blob)
        self.num_saved += len(node.blob)
        return node.blob

    def split(self, upper: Node, lower: Node) -> None:
        """A run was cut in two: both parts use its blob."""
        if lower.blob is not None:
            upper.blob = lower.blob
            upper.blob.users += 1
            self.nodes.add(upper)

    def drop(self, node: Node) -> None:
        """Forget a node's copy, if it has one."""
        if node.blob is None:
            return
        node.blob.users -= 1
        self.num_tokens -= 0 if node.blob.users else len(node.blob)
        node.blob = None
        self.nodes.discard(node)

    def oldest_leaf(self) -> Node | None:
        """The least recently used copy that no other copy stands behind and no running request has claimed."""
        leaves = (
            node
            for node in self.nodes
            if not (node.pins and not node.ready) and all(child.blob is None for child in node.children.values())
        )
        return min(leaves, key=lambda node: node.last_use, default=None)
