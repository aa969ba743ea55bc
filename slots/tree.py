"""The prefix tree: one radix tree over tokens that is the index of everything that has KV, and the ledger of its cells.

A slot is an execution lane, not a cache: what was computed stays here, held by parked sequences, until cells run out and
the least recently used leaf leaves. Sources: SGLang's radix attention; RAGCache, section 5.1 (knowledge tree); llama_cpp_ex
ADR 007 (a slot's history outlives its request).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from .node import Node, Sequence
from .plan import Drop, Operation, Share, Trim

NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt is known: `length` tokens are in the tree, of which the first `ready` have KV.

    `node` is where the match ends; `ready_node` where its computed part ends; `evictable` counts the ready tokens of the
    match that nothing pins, so they would no longer be reclaimable once claimed.
    """

    node: Node
    length: int
    ready_node: Node
    ready: int
    evictable: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A running request's place: its sequence, the tokens it need not compute, and whose they were (own, fork, none)."""

    sequence: Sequence
    cached: int
    source: str


class OutOfSequences(RuntimeError):
    """Every sequence id is in use by a running request: a programmer's error (more lanes than the tree was made for)."""


class PrefixTree:
    """Asks are `match` and the counters; acts are `claim`, `advance`, `catch_up`, `release`, `evict`, `forget`.

    Acts decide memory operations; the scheduler takes them with `take_operations()` into the next plan, where they run
    before anything is computed. num_cells: KV cells in the pool. num_sequences: sequence ids, at least 2 * lanes + 1.
    """

    def __init__(self, num_cells: int, num_sequences: int = 256) -> None:
        self.num_cells = num_cells
        self.num_ready = 0  # cells in use: every ready token is in exactly one
        self.num_pending = 0  # claimed and not computed yet: cells that are promised
        self.num_pinned = 0  # ready cells that running requests need
        self.num_evicted = 0  # tokens that left, ever
        self.roots: dict[Hashable, Node] = {}
        self.parked: dict[Node, Sequence] = {}  # by tip; at most one a node
        self._free_ids = list(range(num_sequences))[::-1]
        self._operations: list[Operation] = []
        self._clock = 0

    # ---- ask -------------------------------------------------------------------------------------------------------

    def match(self, scope: Hashable, tokens: np.ndarray) -> Match:
        """The longest known prefix of `tokens` (int32) in `scope`, to the token, inside a run too. Changes nothing."""
        root = self.roots.get(scope) or Node(NO_TOKENS, 0, None)
        return self.match_from(root, tokens)

    def match_from(self, origin: Node, tokens: np.ndarray) -> Match:
        """Like `match`, for tokens that follow the end of `origin`; lengths count from there."""
        node = ready_node = origin
        length = ready = evictable = 0
        while length < len(tokens):
            child = node.children.get(int(tokens[length]))
            if child is None:
                break
            node = child
            common = common_prefix(child.tokens, tokens[length:])
            if usable := min(common, child.ready):
                ready, ready_node = length + usable, child
                evictable += 0 if child.pins else usable
            length += common
            if common < len(child.tokens):
                break
        return Match(node, length, ready_node, ready, evictable)

    @property
    def num_reclaimable(self) -> int:
        """Cells that eviction could free now."""
        return self.num_ready - self.num_pinned

    # ---- act -------------------------------------------------------------------------------------------------------

    def claim(
        self, scope: Hashable, tokens: np.ndarray, stops: Seq[int] = (), documents: Seq[tuple[str, int, int]] = ()
    ) -> Claim:
        """Put a prompt's whole path into the tree, pinned, and give it a sequence that holds what is already computed.

        stops: positions where nodes must end (segment boundaries), ascending. documents: (key, start, stop) of each one.
        The last token is never taken from the cache: without computing it there are no logits. A parked sequence whose
        whole history is a prefix of the prompt is continued in place; any other match is forked, its donor untouched.
        """
        self._clock += 1
        match = self.match(scope, tokens)
        cached = min(match.ready, len(tokens) - 1)
        own = self._continued(match, cached)
        root = self.roots.setdefault(scope, Node(NO_TOKENS, 0, None))
        ends = self._insert(root, tokens, sorted({*stops, *(at for _, *span in documents for at in span)}))
        for key, start, stop in documents:
            origin, end = ends[start], ends[stop]
            origin.documents[key] = end
            end.document_of.add((origin, key))
        tip = ends[len(tokens)]
        for node in path(tip):
            self._pin(node)
        if own is not None:
            del self.parked[own.tip]
            own.tip, own.active = tip, True
            return Claim(own, cached, "own")
        sequence = Sequence(self._take_id(), tip)
        if cached:
            self._share(sequence, cached)
        return Claim(sequence, cached, "fork" if cached else "none")

    def catch_up(self, sequence: Sequence) -> int:
        """Share what others have computed on this sequence's path since; how many tokens that was."""
        node = next((node for node in path(sequence.tip) if node.ready), None)
        upto = min(node.start + node.ready, sequence.tip.end - 1) if node else 0
        gained = upto - sequence.length
        if gained > 0:
            self._share(sequence, upto)
        return max(gained, 0)

    def advance(self, sequence: Sequence, stop: int) -> None:
        """`sequence` has computed its path up to position `stop`.

        Where somebody else has the same tokens already, its own cells are given back and theirs shared: a token's KV
        stands in one cell only.
        """
        for node in path(sequence.tip):
            if node.end <= sequence.length:
                break
            fresh = min(stop, node.end) - node.start
            if fresh <= 0:
                continue
            computed_from = max(sequence.length - node.start, 0)
            twice = min(node.ready, fresh)
            if twice > computed_from:
                holder, start, end = node.longest_holder(), node.start + computed_from, node.start + twice
                self._operations += [Trim(sequence.id, start, end), Share(holder.id, sequence.id, start, end)]
            self._count_ready(node, max(fresh - node.ready, 0))
            node.sequences.add(sequence)
        sequence.length = stop

    def release(self, sequence: Sequence, tail: np.ndarray = NO_TOKENS) -> None:
        """A request is done with `sequence`, which stays parked. tail: the generated tokens that have KV (int32)."""
        self._clock += 1
        for node in path(sequence.tip):
            self._unpin(node)
        if len(tail):
            sequence.tip = self._descend(sequence.tip, tail)
            self.advance(sequence, sequence.tip.end)
        self._prune(sequence)
        sequence.active = False
        self._drop_covered(sequence.tip)
        self._park(sequence)

    def evict(self) -> bool:
        """Free the least recently used leaf; False when running requests need everything that is left."""
        leaves = (node for node in self.parked if not node.children and not node.pins)
        leaf = min(leaves, key=lambda node: node.last_use, default=None)
        if leaf is None:
            return False
        self.num_evicted += leaf.ready
        self._remove(leaf)
        return True

    def forget(self, scope: Hashable) -> None:
        """Drop a scope and all it holds. None of its requests may be running."""
        root = self.roots.pop(scope, None)
        if root is None:
            return
        nodes = list(descendants(root))
        for sequence in {sequence for node in nodes for sequence in node.sequences}:
            del self.parked[sequence.tip]
            self._drop(sequence)
        for node in nodes:
            self._count_ready(node, -node.ready)
            self.num_pending -= len(node.tokens)

    def take_operations(self) -> tuple[Operation, ...]:
        """The memory operations decided since the last call, in the order they must run."""
        operations, self._operations = tuple(self._operations), []
        return operations

    # ---- sequences -------------------------------------------------------------------------------------------------

    def _continued(self, match: Match, cached: int) -> Sequence | None:
        """The parked sequence whose whole history the prompt continues, if there is one."""
        own = self.parked.get(match.ready_node)
        return own if own and own.length == match.ready == cached else None

    def _take_id(self) -> int:
        while not self._free_ids:
            if not self.evict():
                raise OutOfSequences("no sequence id is free and nothing can be evicted")
        return self._free_ids.pop()

    def _share(self, sequence: Sequence, upto: int) -> None:
        """Let `sequence` hold its path up to `upto`, from whoever holds it."""
        nodes = [node for node in path(sequence.tip) if sequence.length < node.end and node.start < upto]
        donor = nodes[0].longest_holder()
        self._operations.append(Share(donor.id, sequence.id, sequence.length, upto))
        for node in nodes:
            node.sequences.add(sequence)
        sequence.length = upto

    def _covered(self, sequence: Sequence) -> bool:
        """Whether another sequence holds everything that this one does."""
        return any(other.length >= sequence.length for other in sequence.tip.sequences if other is not sequence)

    def _park(self, sequence: Sequence) -> None:
        """Keep a sequence that nobody runs, unless others hold all that it does."""
        if sequence.length == 0 or self._covered(sequence):
            self._drop(sequence)
        else:
            self.parked[sequence.tip] = sequence

    def _drop_covered(self, tip: Node) -> None:
        """Give back the ids of parked sequences on this path that longer ones have made redundant."""
        for node in path(tip):
            parked = self.parked.get(node)
            if parked and self._covered(parked):
                del self.parked[node]
                self._drop(parked)

    def _drop(self, sequence: Sequence) -> None:
        for node in path(sequence.tip):
            node.sequences.discard(sequence)
        self._operations.append(Drop(sequence.id))
        self._free_ids.append(sequence.id)

    # ---- nodes -----------------------------------------------------------------------------------------------------

    def _insert(self, root: Node, tokens: np.ndarray, stops: Seq[int]) -> dict[int, Node]:
        """Make nodes end at every stop and at the end of `tokens`; the node that ends at each position."""
        ends = {0: root}
        node, start = root, 0
        for stop in [*(stop for stop in stops if 0 < stop < len(tokens)), len(tokens)]:
            node = self._descend(node, tokens[start:stop])
            ends[stop], start = node, stop
        return ends

    def _descend(self, node: Node, tokens: np.ndarray) -> Node:
        """The node that ends exactly where `tokens` end below `node`, splitting and adding as needed."""
        start = 0
        while start < len(tokens):
            child = node.children.get(int(tokens[start]))
            if child is None:
                child = Node(np.array(tokens[start:], np.int32), node.end, node)
                node.children[int(tokens[start])] = child
                self.num_pending += len(child.tokens)
            common = common_prefix(child.tokens, tokens[start:])
            node = self._split(child, common) if common < len(child.tokens) else child
            start += common
            node.last_use = self._clock
        return node

    def _split(self, lower: Node, at: int) -> Node:
        """Cut a run in two. The lower part stays the same object: whoever refers to where a run ends stays right."""
        assert lower.parent is not None
        upper = Node(lower.tokens[:at], lower.start, lower.parent, {int(lower.tokens[at]): lower})
        upper.ready, upper.pins, upper.last_use = min(lower.ready, at), lower.pins, lower.last_use
        upper.sequences = set(lower.sequences)
        upper.parent.children[int(upper.tokens[0])] = upper  # type: ignore[union-attr]
        lower.tokens, lower.start, lower.parent = lower.tokens[at:], lower.start + at, upper
        lower.ready -= upper.ready
        lower.sequences = {sequence for sequence in lower.sequences if sequence.length > lower.start}
        # A parked sequence that ends in the upper part has its tip there now; active tips are always at a run's end.
        parked = self.parked.get(lower)
        if parked and parked.length <= upper.end:
            del self.parked[lower]
            parked.tip = upper
            self.parked[upper] = parked
        return upper

    def _pin(self, node: Node) -> None:
        node.last_use = self._clock
        self.num_pinned += 0 if node.pins else node.ready
        node.pins += 1

    def _unpin(self, node: Node) -> None:
        node.last_use = self._clock
        node.pins -= 1
        self.num_pinned -= 0 if node.pins else node.ready

    def _count_ready(self, node: Node, change: int) -> None:
        """`change` tokens of the run became ready (or, negative, stopped being so)."""
        node.ready += change
        self.num_ready += change
        self.num_pending -= change
        self.num_pinned += change if node.pins else 0

    def _prune(self, sequence: Sequence) -> None:
        """Take away what nobody has computed and nobody will: the rest of a cancelled request's path."""
        while (node := sequence.tip).parent and not node.pins and not node.children and not node.complete:
            if node.ready:
                self.num_pending -= len(node.tokens) - node.ready
                node.tokens = node.tokens[: node.ready]
                self._unlink_document(node)
                break
            self.num_pending -= len(node.tokens)
            self._unlink(node)
            sequence.tip = node.parent
        while sequence.tip.parent and sequence.tip.start >= sequence.length:
            sequence.tip = sequence.tip.parent

    def _remove(self, leaf: Node) -> None:
        """Free a parked leaf; its sequence lives on at the parent if nobody else holds that."""
        sequence = self.parked.pop(leaf)
        parent = leaf.parent
        assert parent is not None and leaf.sequences == {sequence}
        self._count_ready(leaf, -leaf.ready)
        self.num_pending -= len(leaf.tokens)
        self._unlink(leaf)
        leaf.sequences.clear()
        sequence.tip = parent
        self._operations.append(Trim(sequence.id, leaf.start, sequence.length))
        sequence.length = leaf.start
        self._drop_covered(parent)
        self._park(sequence)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[int(node.tokens[0])]
        self._unlink_document(node)
        if parent.parent is None and not parent.children:
            self.roots = {scope: root for scope, root in self.roots.items() if root is not parent}

    def _unlink_document(self, node: Node) -> None:
        for origin, key in node.document_of:
            del origin.documents[key]
        node.document_of.clear()


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens two int32 arrays share."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    at = int(differs.argmax()) if size else 0
    return at if size and differs[at] else size


def path(node: Node) -> Iterator[Node]:
    """From `node` up to the child of the root. Safe while the yielded node itself is being changed."""
    while node.parent is not None:
        above = node.parent
        yield node
        node = above


def descendants(root: Node) -> Iterator[Node]:
    """Every node below `root`, parents first."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
