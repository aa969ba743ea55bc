"""Who holds what, and how many cells that takes: the sequences and the cells behind the prefix tree's runs."""

from __future__ import annotations

from .node import Node, Sequence
from .plan import Drop, Operation, Share
from .radix import RadixTree, descendants, path
from .tiers.host import HostTier


class Ledger(RadixTree):
    """Keeps runs, sequences and counts in step; what to claim and what to give up is its subclass's business.

    What it decides becomes memory operations, which the scheduler takes with `take_operations()` into the next plan.
    """

    def __init__(self, num_cells: int, num_sequences: int, host: HostTier | None) -> None:
        super().__init__()
        self.num_cells = num_cells
        self.num_ready = 0  # cells in use: every ready token is in exactly one
        self.num_pending = 0  # claimed and not computed yet: cells that are promised
        self.num_pinned = 0  # ready cells that running requests need
        self.host = host or HostTier()
        self.parked: dict[Node, Sequence] = {}  # by tip; at most one a node
        self._num_sequences = num_sequences
        self.held: set[Node] = set()  # runs that a client asked to keep
        self._free_ids = list(range(num_sequences))[::-1]
        self._operations: list[Operation] = []

    def clear(self) -> None:
        """Forget everything, even what is inconsistent: no cell, sequence or copy is in use then."""
        self.roots, self.parked, self.held, self._operations = {}, {}, set(), []
        self.num_ready = self.num_pending = self.num_pinned = 0
        self._free_ids = list(range(self._num_sequences))[::-1]
        self.host.clear()

    @property
    def num_reclaimable(self) -> int:
        """Cells that eviction could free now."""
        return self.num_ready - self.num_pinned

    def take_operations(self) -> tuple[Operation, ...]:
        """The memory operations decided since the last call, in the order they must run."""
        operations, self._operations = tuple(self._operations), []
        return operations

    def perform(self, operation: Operation) -> None:
        """Have an operation carried out behind those that were decided before."""
        self._operations.append(operation)

    # ---- sequences -------------------------------------------------------------------------------------------------

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

    # ---- runs ------------------------------------------------------------------------------------------------------

    def _split(self, lower: Node, at: int) -> Node:
        upper = super()._split(lower, at)
        self.host.split(upper, lower)
        if lower.held_until:
            self.held.add(upper)
        # A parked sequence that ends in the upper part has its tip there now; active tips are always at a run's end.
        parked = self.parked.get(lower)
        if parked and parked.length <= upper.end:
            del self.parked[lower]
            parked.tip = upper
            self.parked[upper] = parked
        return upper

    def _unlink(self, node: Node) -> None:
        super()._unlink(node)
        self.held.discard(node)

    def _pin(self, node: Node) -> None:
        node.last_use = self._clock
        if not node.pins:
            self.num_pinned += node.ready
            self.num_pending += len(node.tokens) - node.ready
        node.pins += 1

    def _unpin(self, node: Node) -> None:
        node.last_use = self._clock
        node.pins -= 1
        if not node.pins:
            self.num_pinned -= node.ready
            self.num_pending -= len(node.tokens) - node.ready
            self.host.offer(node)

    def _count_ready(self, node: Node, change: int) -> None:
        """`change` tokens of the run became ready (or, negative, stopped being so)."""
        node.ready += change
        self.num_ready += change
        if node.pins:
            self.num_pinned += change
            self.num_pending -= change
            self.host.offer(node)  # its request has its own cells now

    def _prune(self, sequence: Sequence) -> None:
        """Take away what nobody has computed and nobody will: the rest of a cancelled request's path."""
        while (node := sequence.tip).parent and not node.pins and not node.children and not node.complete:
            if node.ready:
                node.tokens = node.tokens[: node.ready]
                self._unlink_document(node)
                break
            if node.blob is not None:
                break
            self._unlink(node)
            sequence.tip = node.parent
        for node in path(sequence.tip):
            if 0 < node.ready < len(node.tokens) and not node.pins:
                # Restored but for its last token, in front of what is still in host memory: so is what is left of it.
                self._split(node, node.ready)
                break
        while sequence.tip.parent and sequence.tip.start >= sequence.length:
            sequence.tip = sequence.tip.parent

    def _unlink_all(self, node: Node) -> None:
        """Take a node out of the tree with whatever is only in host memory behind it."""
        for below in reversed(list(descendants(node))):
            self.host.drop(below)
            self._unlink(below)
        self.host.drop(node)
        self._unlink(node)
