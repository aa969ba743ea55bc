"""The host tier: KV that has left the device and waits in host memory, run by run of the prefix tree.

A run is saved once (RAGCache, section 5.1, swap-out-only-once): it keeps its copy when it is restored, so its next eviction
costs nothing. When the budget is spent, the copy with the lowest priority and no copy behind it leaves.
"""

from __future__ import annotations

from ..eviction import Candidates, EvictionPolicy
from ..node import Blob, Node


class HostTier:
    """The ledger of the copies and their budget. max_tokens: 0 means that nothing is copied."""

    def __init__(self, max_tokens: int = 0, policy: EvictionPolicy | None = None) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0  # tokens that all blobs hold
        self.num_saved = 0  # tokens saved, ever
        self.num_restored = 0  # tokens restored, ever
        self.nodes: set[Node] = set()
        self.unsaved: list[Node] | None = None  # saved since the last `take_unsaved`; None: they are not written behind
        self._policy = policy or EvictionPolicy()
        self.candidates = Candidates(lambda node: (node.host_priority, 0), self.may_leave)

    def clear(self) -> None:
        """Forget all copies."""
        self.nodes, self.num_tokens = set(), 0
        self.candidates.clear()
        self.unsaved = None if self.unsaved is None else []

    def has_room(self, num_tokens: int) -> bool:
        """Return whether `num_tokens` more tokens fit with no copy leaving for them."""
        return self.num_tokens + num_tokens <= self.max_tokens

    def save(self, node: Node) -> Blob:
        """Return a new, empty blob for a node's run. The caller has made room for it."""
        self.num_saved += len(node.tokens)
        if self.unsaved is not None:
            self.unsaved.append(node)
        return self.keep(node, Blob(node.start, node.end))

    def keep(self, node: Node, blob: Blob) -> Blob:
        """Give a node a copy of its own."""
        node.blob = blob
        self.nodes.add(node)
        self.num_tokens += len(blob)
        self.touch(node)
        return blob

    def touch(self, node: Node) -> None:
        """Set the priority of a run that is used, pinned or unpinned now, or that comes to this tier."""
        node.host_priority = self._policy.priority(node)
        self.offer(node)

    def offer(self, node: Node) -> None:
        """Consider a copy that may leave from now on: it is not needed any more, or the copy behind it has left."""
        if node.blob is not None:
            self.candidates.offer(node)

    def split(self, upper: Node, lower: Node) -> None:
        """Let both parts of a run that was cut use its blob."""
        if lower.blob is not None:
            upper.blob = lower.blob
            upper.blob.users += 1
            self.nodes.add(upper)
            self.offer(upper)
            if self.unsaved is not None and lower in self.unsaved:
                self.unsaved.append(upper)

    def drop(self, node: Node) -> None:
        """Forget a node's copy, if it has one."""
        if node.blob is None:
            return
        node.blob.users -= 1
        self.num_tokens -= 0 if node.blob.users else len(node.blob)
        node.blob = None
        self.nodes.discard(node)
        if node.parent is not None:
            self.offer(node.parent)

    def least(self) -> Node | None:
        """Choose the copy that leaves next: of all copies that may leave, the one with the lowest priority."""
        least = self.candidates.pop()
        if least is not None:
            self._policy.on_evict(least.host_priority)
        return least

    def may_leave(self, node: Node) -> bool:
        """Return whether a run has a copy with no copy behind it, and no running request is about to restore it."""
        claimed = node.in_use and not node.ready
        return node in self.nodes and not claimed and all(child.blob is None for child in node.children.values())
