"""Snapshots: whole states of sequences, for models whose memory cannot be cut (recurrent and hybrid ones).

A state stands for exactly the tokens that led to it, so only a prompt that begins with all of them can use it. It is taken
where a later prompt may part from this one (the end of a segment, the end of an answer), kept in host memory within a budget
of bytes, and found by a radix tree over tokens. llama-server calls it a context checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from .archive import Record
from .node import Blob, Node
from .plan import Load, Snap
from .radix import RadixTree, path
from .request import Request
from .scope import Scope
from .tree import PrefixTree

SPACING = 256  # tokens between two snapshots of a prompt; fewer at its end
MOST = 6  # snapshots of one prompt


class Snapshots(RadixTree):
    """The tier protocol, with nodes for keys. max_bytes: of all snapshots; the least recently used leaves first.

    tree: has the ledger of the sequences. fixed_bytes, token_bytes: the size of a state, and of each token that led to it
    (the attention layers of a hybrid).
    """

    def __init__(self, tree: PrefixTree, max_bytes: int, spacing: int = SPACING) -> None:
        super().__init__()
        self.max_bytes = max_bytes
        self.fixed_bytes = self.token_bytes = 0
        self.num_bytes = 0
        self.num_taken = 0  # ever
        self.num_loaded = 0  # ever
        self.unsaved: list[Node] | None = None  # taken since the last `take_unsaved`; None: they are not written behind
        self._tree, self._spacing = tree, spacing
        self._kept: OrderedDict[Node, Scope] = OrderedDict()  # scopes of nodes with a snapshot at their end, oldest first

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nodes(self) -> set[Node]:
        """The nodes with a snapshot at their end."""
        return set(self._kept)

    def size_of(self, num_tokens: int) -> int:
        """Return the bytes of a snapshot behind `num_tokens` tokens."""
        return self.fixed_bytes + num_tokens * self.token_bytes

    def has_room(self, record: Record) -> bool:
        """Return whether a snapshot fits with no other one leaving for it."""
        return self.num_bytes + self.size_of(len(record.tokens)) <= self.max_bytes

    def of(self, scope: Scope) -> list[Node]:
        """Return the nodes of a scope with a snapshot at their end."""
        return [node for node, other in self._kept.items() if other == scope]

    def stops(self, request: Request) -> tuple[int, ...]:
        """Return the positions of snapshots to take while the rest of a prompt is computed.

        The last two ends of its segments (for the same question again, and for another one), and before them well apart.
        If the last question is too short for a piece of its own, only its beginning.
        """
        assert request.layout is not None
        chosen: list[int] = []
        for stop in reversed(request.layout.stops):
            behind = chosen[-1] if chosen else request.num_prompt
            least = self._spacing if len(chosen) > 1 else self._tree.rest
            if stop - request.computed < self._tree.rest or len(chosen) == MOST:
                break
            if behind - stop >= least:
                chosen.append(stop)
            elif len(chosen) == 1:
                chosen = [stop]
        return tuple(reversed(chosen))

    def load(self, request: Request) -> int:
        """Load the longest state that a request's tokens begin with into its sequence. Return how many tokens it spares."""
        assert request.sequence is not None
        node = self.longest(request.snapshot_scope, request.tokens[: max(request.num_tokens - self._tree.rest, 0)])
        if node is None:
            return 0
        assert node.blob is not None
        self._kept.move_to_end(node)
        self._tree.ledger.perform(Load(node.blob, request.sequence.id))
        self._tree.ledger.advance(request.sequence, node.end)
        self.num_loaded += 1
        return node.end

    def take(self, request: Request) -> None:
        """Keep the present state of a request's sequence, if the budget has room for it."""
        assert request.sequence is not None
        scope, tokens = request.snapshot_scope, request.tokens[: request.computed]
        if scope is None or not len(tokens) or self.size_of(len(tokens)) > self.max_bytes:
            return
        node = self._place(scope, tokens)
        if node.blob is None:
            node.blob = self._blob(len(tokens), None)
            self.num_taken += 1
            self._tree.ledger.perform(Snap(request.sequence.id, node.blob))
            if self.unsaved is not None:
                self.unsaved.append(node)

    def get(self, node: Node) -> Record | None:
        """Return the snapshot at the end of a node as a record; None if it is gone or has not been made."""
        if node.blob is None or node.blob.data is None:
            return None
        tokens = np.concatenate([one.tokens for one in path(node)][::-1])
        return Record(self._kept[node], tokens, 0, node.blob.data)

    def along(self, scope: Scope | None, tokens: np.ndarray) -> Iterator[Node]:
        """Return the nodes with snapshots that these tokens begin with, the longest one first."""
        match = self.match(scope, tokens)
        return (node for node in path(match.node) if node.blob is not None and node.end <= match.length)

    def longest(self, scope: Scope | None, tokens: np.ndarray) -> Node | None:
        return next(self.along(scope, tokens), None)

    def put(self, record: Record, source: str = "disk") -> bool:
        """Keep a snapshot that comes from elsewhere. Return False if it does not fit."""
        size = self.size_of(len(record.tokens))
        if size > self.max_bytes or len(record.data) != size:
            return False
        node = self._place(record.scope, record.tokens)
        node.blob = node.blob or self._blob(len(record.tokens), record.data)
        return True

    def take_unsaved(self) -> list[Node]:
        """Return the nodes of snapshots that were taken since the last call; the first call begins to note them."""
        taken, self.unsaved = self.unsaved or [], []
        return taken

    def drop(self, scope: Scope) -> int:
        """Forget a scope's snapshots. Return how many tokens the longest of each path stood for."""
        nodes = self.of(scope)
        dropped = sum(node.end for node in nodes if not node.children)
        for node in nodes:
            self.forget(node)
        return dropped

    def void(self) -> None:
        """Forget snapshots whose operations were decided and never performed."""
        for node in [node for node in self._kept if node.blob is None or node.blob.data is None]:
            self.forget(node)

    def _place(self, scope: Scope, tokens: np.ndarray) -> Node:
        """Return the node for a snapshot, as the one used last. Older snapshots leave for it."""
        found = self.longest(scope, tokens)
        if found is None or found.end < len(tokens):
            self._make_room(self.size_of(len(tokens)))
        node = self._descend(self.root(scope), tokens)
        self._kept[node] = scope
        self._kept.move_to_end(node)
        return node

    def _blob(self, num_tokens: int, data: np.ndarray | None) -> Blob:
        self.num_bytes += self.size_of(num_tokens)
        return Blob(0, num_tokens, data)

    def _make_room(self, size: int) -> None:
        while self._kept and self.num_bytes + size > self.max_bytes:
            self.forget(next(iter(self._kept)))

    def forget(self, node: Node) -> None:
        """Drop the snapshot at the end of a node."""
        del self._kept[node]
        node.blob = None
        self.num_bytes -= self.size_of(node.end)
        while node.parent and not node.children and node.blob is None:
            parent = node.parent
            self._unlink(node)
            node = parent


def next_stop(stops: Sequence[int], computed: int) -> int | None:
    """Return the first of these ascending stops behind position `computed`."""
    return next((stop for stop in stops if stop > computed), None)
