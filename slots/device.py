"""The cells of the device: sequences, the cells that they hold, and the memory operations that are due."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .eviction import Candidates, EvictionPolicy
from .plan import Drop, Operation, Share, Trim
from .radix import Node, Sequence, path


class Stretches:
    """Estimates how many separate stretches of cells hold the KV of a run, or of a sequence's private tokens.

    An answer that is computed in steps with other requests takes many stretches, since its tokens are not in adjacent cells.
    A run without a count is in one piece, or is not on the device.
    """

    def __init__(self) -> None:
        self._counts: dict[Node | Sequence, int] = {}
        self.total = 0  # of all owners

    def of(self, owner: Node | Sequence) -> int:
        """Return the number of stretches of a run, or of a sequence's private tokens; 0: the KV is in one piece."""
        return self._counts.get(owner, 0)

    @property
    def owners(self) -> Iterable[Node | Sequence]:
        """The runs and the sequences that have a count."""
        return self._counts.keys()

    def add(self, sequence: Sequence) -> None:
        """Count one more stretch for a sequence that has computed a token in a step with other sequences."""
        self._counts[sequence] = self._counts.get(sequence, 0) + 1
        self.total += 1

    def join(self, owner: Node | Sequence) -> int:
        """Drop an owner's count of stretches, and return this count.

        The owner's KV was restored in one piece, or is no longer on the device.
        """
        count = self._counts.pop(owner, 0)
        self.total -= count
        return count

    def split(self, upper: Node, lower: Node) -> None:
        """After a run was cut in two, divide its count between the parts."""
        if count := self._counts.get(lower):
            self._counts[upper] = count * len(upper.tokens) // (len(upper.tokens) + len(lower.tokens))
            self._counts[lower] = count - self._counts[upper]

    def settle(self, sequence: Sequence, nodes: Iterable[Node]) -> None:
        """Move the count of a sequence's private tokens to `nodes`, the runs made of these tokens.

        The count is dropped if no new run is made of these tokens.
        """
        if count := self.join(sequence):
            found = {node: min(count, len(node.tokens)) for node in nodes if not node.ready}
            self._counts |= found
            self.total += sum(found.values())

    def clear(self) -> None:
        self._counts.clear()
        self.total = 0


class DeviceCells:
    """The sequences and the cells that hold the runs of a prefix tree, and counts of the cells.

    Only the tree adds, splits and removes runs. Methods of this class add memory operations, which the scheduler puts into
    the next plan (`take_operations`).

    offer_copy: called with each run whose copy may now be evicted from host memory.
    recompute_last: how many tokens at the end of a prompt are computed even if they are cached.
    """

    def __init__(
        self,
        num_cells: int,
        num_sequences: int,
        offer_copy: Callable[[Node], None],
        *,
        policy: EvictionPolicy,
        recompute_last: int,
    ) -> None:
        self.num_cells = num_cells
        self.num_ready = 0  # cells with KV of a run: every ready token is in exactly one
        self.num_runs = 0  # runs with at least one such cell
        self.num_pending = 0  # claimed tokens that are not computed yet: promised cells
        self.num_in_use = 0  # ready cells that running requests need
        self.cells_end = 0  # all cells in use are below this one, if the lowest free cells are filled first
        self.idle: dict[Node, Sequence] = {}  # by last node; at most one per node
        self.leaves = Candidates(self._order, self.is_leaf)
        self.stretches = Stretches()
        self._num_sequences = num_sequences
        self.free_ids = list(range(num_sequences))[::-1]
        self._operations: list[Operation] = []
        self.num_idled = 0  # sequences that no request used any more, ever
        self._offer_copy, self._policy, self._recompute_last = offer_copy, policy, recompute_last

    def clear(self) -> None:
        """Forget everything, even in an inconsistent state. No cell or sequence is in use afterwards."""
        self.idle, self._operations = {}, []
        self.num_ready = self.num_runs = self.num_pending = self.num_in_use = self.cells_end = 0
        self.free_ids = list(range(self._num_sequences))[::-1]
        self.leaves.clear()
        self.stretches.clear()

    @property
    def num_reclaimable(self) -> int:
        """The number of cells that eviction could free now."""
        return self.num_ready - self.num_in_use

    @property
    def num_free_ids(self) -> int:
        """The number of free sequence ids."""
        return len(self.free_ids)

    def take_operations(self) -> tuple[Operation, ...]:
        """Return the memory operations decided since the last call, in the order in which they must run."""
        operations, self._operations = tuple(self._operations), []
        return operations

    def perform(self, operation: Operation) -> None:
        """Add an operation to the next plan, after the pending ones."""
        self._operations.append(operation)

    # ---- running sequences -----------------------------------------------------------------------------------------

    def begin(self, last_node: Node) -> Sequence:
        """Return a new sequence, still without KV, on the path to `last_node`. An id must be free."""
        return Sequence(self.free_ids.pop(), last_node)

    def resume(self, sequence: Sequence, last_node: Node) -> None:
        """Make an idle sequence active again. The sequence's path now ends in `last_node`, which extends the old path."""
        del self.idle[sequence.last_node]
        sequence.last_node, sequence.active = last_node, True

    def share(self, sequence: Sequence, upto: int) -> None:
        """Let `sequence` also hold the cells of its path up to position `upto`, which another sequence has filled."""
        nodes = [node for node in path(sequence.last_node, sequence.length) if node.start < upto]
        donor = nodes[0].longest_sequence()
        self._operations.append(Share(donor.id, sequence.id, sequence.length, upto))
        for node in nodes:
            node.sequences.add(sequence)
        sequence.length = upto

    def catch_up(self, sequence: Sequence) -> int:
        """Share KV that other sequences have computed on this sequence's path.

        Return how many tokens `sequence` has gained.
        """
        node = next((node for node in path(sequence.last_node, sequence.length) if node.ready), None)
        upto = sequence.most_cached(node.start + node.ready, self._recompute_last) if node else 0
        gained = upto - sequence.length
        if gained > 0:
            self.share(sequence, upto)
        return max(gained, 0)

    def advance(self, sequence: Sequence, stop: int) -> None:
        """Extend `sequence`, which has computed its path up to position `stop`.

        If another sequence already has the KV of some of these tokens, `sequence` frees its own cells of these tokens and
        shares those of the other sequence, so that each token's KV is in only one cell.
        """
        for node in path(sequence.last_node, sequence.length):
            if node.start >= stop:
                continue
            fresh = min(stop, node.end) - node.start
            computed_from = max(sequence.length - node.start, 0)
            twice = min(node.ready, fresh)
            if twice > computed_from:
                owner, start, end = node.longest_sequence(), node.start + computed_from, node.start + twice
                self._operations += [Trim(sequence.id, start, end), Share(owner.id, sequence.id, start, end)]
            self.count_ready(node, max(fresh - node.ready, 0))
            node.sequences.add(sequence)
        sequence.length = stop

    # ---- idle sequences --------------------------------------------------------------------------------------------

    def keep_idle(self, sequence: Sequence) -> None:
        """Keep a sequence as an idle sequence when its request ends, unless another sequence holds all of its KV.

        If another sequence also holds all KV of an idle sequence on the same path, drop the idle sequence.
        """
        sequence.active = False
        for node in path(sequence.last_node):
            idle = self.idle.get(node)
            if idle and _is_covered(idle):
                self.drop(idle)
        if sequence.length == 0 or _is_covered(sequence):
            self.drop(sequence)
        else:
            self._keep(sequence)

    # Whose cells are these? A running prompt with its answer, from position 0 on:
    #
    #     |----- shared prefix -----|-------- own --------|------ pending ------|--- private tokens ---|
    #     0      cached, or forked         computed               claimed           generated tokens
    #
    #                     holder                                     counted in               freed by
    #     shared prefix   the request's and other sequences          num_ready, num_in_use    evict, once no request uses it
    #     own             the request's sequence alone               num_ready, num_in_use    evict, once no request uses it
    #     pending         no sequence yet: promised cells            num_pending              _prune, if it is never computed
    #     private tokens  the request's sequence                     Job.num_private             release: it becomes a run
    #     idle runs       idle sequences                             num_ready                evict, leaves first
    #
    # A cell is counted once, however many sequences hold it, so eviction could free num_ready - num_in_use cells. A leaf is
    # a run that one idle sequence alone holds: trimming that sequence frees the leaf's cells. The leaf's parent may be the
    # next leaf.

    def take_leaf(self) -> Node | None:
        """Return the leaf to evict next: it has the lowest priority and, among equal leaves, has been idle longest."""
        leaf = self.leaves.pop()
        if leaf is not None:
            self._policy.on_evict(leaf.priority)
        return leaf

    def take_unused(self, is_kept: Callable[[Node], bool]) -> Node | None:
        """Return a leaf that no request has used and that another tier keeps: the one that has been idle longest.

        is_kept: returns whether another tier keeps a run.
        """
        unused = (leaf for leaf in self.idle if not leaf.frequency and is_kept(leaf))
        return next(filter(self.is_leaf, unused), None)

    def retreat(self, sequence: Sequence, leaf: Node) -> None:
        """Free the cells of a leaf.

        The leaf's idle sequence then ends at the leaf's parent, or is dropped if another sequence holds all of its KV.
        """
        assert leaf.parent is not None and leaf.sequences == {sequence}
        del self.idle[leaf]
        self.count_ready(leaf, -leaf.ready)
        leaf.sequences.clear()
        self._operations.append(Trim(sequence.id, leaf.start, sequence.length))
        sequence.last_node, sequence.length = leaf.parent, leaf.start
        self.keep_idle(sequence)

    def drop(self, sequence: Sequence) -> None:
        """End a sequence that no request uses. Cells that no other sequence holds become free."""
        if self.idle.get(sequence.last_node) is sequence:
            del self.idle[sequence.last_node]
        for node in path(sequence.last_node):
            node.sequences.discard(sequence)
            self._offer(node)
        self._operations.append(Drop(sequence.id))
        self.free_ids.append(sequence.id)

    def is_leaf(self, node: Node) -> bool:
        """Return whether the cells of a run can be freed: an idle sequence ends in it, and no other sequence holds it.

        A sequence that holds a later run of the path also holds this run, so a leaf has no later run on the device.
        """
        return node in self.idle and not node.in_use and len(node.sequences) == 1

    def _keep(self, sequence: Sequence) -> None:
        self.num_idled += 1
        sequence.idle_since = self.num_idled
        self.idle[sequence.last_node] = sequence
        self.leaves.offer(sequence.last_node)

    def _offer(self, node: Node) -> None:
        """Offer a run for eviction, if an idle sequence ends in it: it may now be a leaf, or have a new priority."""
        if node in self.idle:
            self.leaves.offer(node)

    def _order(self, node: Node) -> tuple[float, int]:
        return node.priority, self.idle[node].idle_since if node in self.idle else 0

    # ---- runs ------------------------------------------------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        """Update the counts after a run was cut in two.

        If the run's idle sequence has KV of the upper part only, it now ends in `upper`.
        """
        self.stretches.split(upper, lower)
        self.num_runs += lower.ready > 0
        idle = self.idle.get(lower)  # an active sequence always ends at a run's end
        if idle and idle.length <= upper.end:
            del self.idle[lower]
            idle.last_node = upper
            self._keep(idle)
        self._offer(lower)

    def touch(self, node: Node) -> None:
        """Set the priority of a run that has just been used, pinned or unpinned."""
        node.priority = self._policy.priority(node)
        self._offer(node)

    def begin_use(self, node: Node) -> None:
        """Count a running request that now has this run on its path."""
        if not node.in_use:
            self.num_in_use += node.ready
            self.num_pending += len(node.tokens) - node.ready
        node.in_use += 1

    def end_use(self, node: Node) -> None:
        """Undo `begin_use` for a request that no longer has this run on its path."""
        node.in_use -= 1
        if not node.in_use:
            self.num_in_use -= node.ready
            self.num_pending -= len(node.tokens) - node.ready
            self._offer_copy(node)
            self._offer(node)

    def count_ready(self, node: Node, change: int) -> None:
        """Change the number of a run's ready tokens by `change`, which may be negative."""
        before = node.ready
        node.ready += change
        self.num_ready += change
        self.num_runs += (node.ready > 0) - (before > 0)
        if change > 0:
            node.cells_end = self.cells_end = max(self.cells_end, self.num_ready)
        elif not node.ready:
            self.stretches.join(node)
        if node.in_use:
            self.num_in_use += change
            self.num_pending -= change
            self._offer_copy(node)  # the request no longer needs the copy: the KV is on the device


def _is_covered(sequence: Sequence) -> bool:
    """Return whether another sequence holds all KV that `sequence` holds."""
    return any(other.length >= sequence.length for other in sequence.last_node.sequences if other is not sequence)
