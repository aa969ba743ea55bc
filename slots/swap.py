"""Swap: while a step computes a prompt, the KV of other requests is in host memory.

The KV of those requests comes back after the step.

Attention passes over all cells in use. On the CPU, a cell that no token of the step sees takes an eighth to a quarter of the
time of a cell that is seen, because the kernel works on tiles of cells, which may belong to several requests. Moving a cell
out and back takes as long as passing over it for some tens of tokens, and a step computes hundreds of tokens.

The owners of the cells, when a step computes for A while B and C run:

    before            | B | A and B | C | A | free ...
    during            | A and B | A | new tokens of A | free ...
    after             | A and B | A | new tokens of A | B | C | ...
    next step for A   | A and B | A | new tokens of A | free ...

During a step for A, KV that A does not need is in host memory. Runs that A shares with B are on the device. The first swap
for A empties the pool: all KV is copied to host memory, and then A's KV is copied back into the first cells. In A's next
step, A's KV is in place already, so only the KV of B and C moves. Sequences, pins and counts do not change: for the tree
nothing has moved.

llama.cpp also passes over free cells, up to the highest cell in use. If KV before A's cells was evicted, a swap moves A's KV
to the first cells, even if no other KV has to be moved out.

llama.cpp does not report the highest cell in use, so each run has an upper bound for its cells, `cells_end`. llama.cpp fills
the lowest free cells first. So the bound for new KV is the number of cells in use with this KV, or the highest cell that was
in use before, whichever is higher. Once a run is evicted, its bound no longer counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from .job import Job
from .plan import Clear, HostCopy, Operation, Restore, Save, Share, Trim
from .prefix_tree import PrefixTree
from .radix import Node, path

USUAL_ANSWER = 200  # tokens: requests allow for more than their answers take
Moves = tuple[Operation, ...]


class Swap:
    """Decides which KV is in host memory during a step.

    running: the scheduler's list of running requests.
    """

    def __init__(self, tree: PrefixTree, running: Collection[Job]) -> None:
        self._tree, self._running = tree, running
        self.num_passed = 0  # cells that the last step passes over, without its own
        self.num_swapped = 0  # tokens whose KV was swapped out, ever
        self._in_front: list[int] = []  # requests to which the last swap gave the first cells

    @property
    def num_used(self) -> int:
        """The number of cells in use: cells of the tree's runs, and cells of private tokens."""
        return self._tree.device.num_ready + sum(job.num_private for job in self._running)

    def forget_order(self) -> None:
        """Forget which requests have the first cells, because no cell is in use any more."""
        self._in_front = []

    def bound_cells(self, job: Job) -> None:
        """Recompute the upper bound of the cells in use, before a request's copies are restored into the first free cells.

        No bound covers private tokens. While any request has private tokens, the upper bound is not lowered.
        """
        device = self._tree.device
        if device.cells_end > self.num_used and not any(one.num_private for one in self._running):
            runs = runs_on_device(self._tree, [*self._running, job])
            device.cells_end = max((node.cells_end for node in runs), default=0)

    def take_operations(self, num_tokens: int, computing: list[Job]) -> tuple[Moves, Moves]:
        """Return the operations to carry out before a step, and those to carry out after it.

        The step computes `num_tokens` tokens of the requests in `computing`. The operations before the step are the tree's
        pending ones. If a swap saves time, the operations of the swap are added.
        """
        device, used = self._tree.device, self.num_used
        device.cells_end = max(device.cells_end, used) if used else 0
        moves, afterwards = self._swap(num_tokens, computing)
        # Taken last: deciding on a swap adds copies for the host tier to the tree's operations.
        return self._tree.device.take_operations() + moves, afterwards

    def passed_over(self, computing: list[Job], num_tokens: int) -> int:
        """Return how many cells attention passes over in a step: all up to the highest one in use, or fewer with a swap."""
        _, spared = self._to_swap(num_tokens, computing)
        return max(self._tree.device.cells_end, self.num_used) - spared

    def _swap(self, num_tokens: int, computing: list[Job]) -> tuple[Moves, Moves]:
        unseen, spared = self._to_swap(num_tokens, computing)
        device = self._tree.device
        self.num_passed = device.cells_end - spared
        if not spared:
            return (), ()
        self.num_swapped += unseen
        before, self._in_front = self._in_front, [job.request.id for job in computing]
        used, needed = self.num_used, {job.sequence for job in computing}
        # Only a move to the first cells spares free cells, and private tokens stand after the cells of other requests.
        in_place = self._in_front == before and spared == unseen and not any(job.num_private for job in computing)
        if not in_place:
            device.cells_end = used
        for node in (runs := list(runs_on_device(self._tree, self._running))):
            if node.sequences.isdisjoint(needed):
                node.cells_end = used + num_tokens  # the run comes back after the computing requests
            elif not in_place:
                node.cells_end = used - unseen
        return swap_out(self._tree, runs, self._running, computing, in_place=in_place)

    def _to_swap(self, num_tokens: int, computing: list[Job]) -> tuple[int, int]:
        """Return how many of the cells in use a step does not see, and how many cells attention can skip thanks to a swap.

        With a swap, attention skips the unseen cells, and the free cells below the highest one in use. If a swap would not
        make the step faster, the second number is 0. Later steps skip the free cells, too, so the decision also counts the
        steps of the answer.
        """
        tree, costs, used = self._tree, self._tree.costs, self.num_used
        free = max(tree.device.cells_end - used, 0)
        limits = [job.request.limit for job in computing if job.num_tokens == job.num_prompt] if free else []
        num_steps = min(max(limits, default=0), USUAL_ANSWER)
        if num_tokens + num_steps <= costs.swap_from_tokens or not tree.host.could_lend(used):
            return 0, 0
        if not any(job.request.kind.is_client for job in computing):
            return 0, 0  # a new request may abort the step; then it must not wait for moves
        sequences = {job.sequence for job in computing if job.sequence}
        needed = {node for one in sequences for node in path(one.last_node) if one in node.sequences}
        unseen = tree.device.num_ready - sum(node.ready for node in needed)
        unseen += sum(job.num_private for job in self._running if job.sequence not in sequences)
        pieces = tree.device.num_runs  # of cells, each of which is moved by itself
        if costs.scattered_tokens:
            pieces += tree.device.stretches.total
        passed = unseen * num_tokens + free * (num_tokens + num_steps)
        return unseen, unseen + free if costs.pays_to_swap(passed, used, pieces) else 0


def swap_out(
    tree: PrefixTree, runs: list[Node], running: Collection[Job], computing: Collection[Job], *, in_place: bool
) -> tuple[Moves, Moves]:
    """Return the operations of a swap: those before the step, and those after it.

    The operations before the step are to be carried out after the tree's pending ones. A copy of a run stays in host memory
    if there is room for it; otherwise it is kept only until the step ends.

    runs: the runs on the device.
    computing: the running requests that the step computes. The KV of the computing requests is moved to the first cells.
    in_place: whether the KV of the computing requests is in the first cells already.
    """
    copies: list[Operation] = []
    stays: list[Operation] = []  # KV of the computing requests, which comes back before the step
    moved: list[Restore | Share] = []  # all other KV, which comes back after it
    needed = {job.sequence for job in computing}
    private = {job.sequence for job in running if not job.request.cache}
    for node in runs:
        is_needed = not node.sequences.isdisjoint(needed)
        if is_needed and in_place:
            continue
        longest, stop = node.longest_sequence(), node.start + node.ready
        tree.device.stretches.join(node)
        copy = node.copy if node.sequences <= private else tree.copies.save_if_free(node)
        if copy is None:
            copy = HostCopy(node.start, stop)
            copies.append(Save(longest.id, copy))
        moves: list[Operation] | list[Restore | Share] = stays if is_needed else moved
        moves.append(Restore(copy, longest.id, node.start, stop))
        sharers = (sequence for sequence in node.sequences if sequence is not longest)
        moves += [Share(longest.id, one.id, node.start, min(stop, one.length)) for one in sharers]
    for job in running:
        if job.num_private and (sequence := job.sequence):  # the tree does not have private tokens
            is_needed = sequence in needed
            if is_needed and in_place:
                continue
            tree.device.stretches.join(sequence)
            copy = HostCopy(job.claimed, job.computed)
            copies.append(Save(sequence.id, copy))
            moves = stays if is_needed else moved
            moves.append(Restore(copy, sequence.id, copy.start, copy.stop))
    if in_place:
        return (*copies, *map(_trim_of, moved)), tuple(moved)
    return (*copies, Clear(), *stays), tuple(moved)


def _trim_of(move: Restore | Share) -> Trim:
    """Return the operation that frees the cells of some KV, which `move` brings back later."""
    return Trim(move.sequence if isinstance(move, Restore) else move.target, move.start, move.stop)


def runs_on_device(tree: PrefixTree, running: Collection[Job]) -> Iterator[Node]:
    """Yield each run with KV on the device, depth first, parents before their children.

    The runs are found from the sequences, because most scopes have no run on the device.
    """
    sequences = (*tree.device.idle.values(), *(job.sequence for job in running if job.sequence))
    stack = list(_first_runs(sequence.last_node for sequence in sequences))
    while stack:
        node = stack.pop()
        if node.ready:
            yield node
            stack.extend(node.children.values())


def _first_runs(last_nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield the first run of each path that ends in one of `last_nodes`. Each run is yielded once."""
    seen: set[Node] = set()
    for last_node in last_nodes:
        for node in path(last_node):
            if node in seen:
                break
            seen.add(node)
            if node.start == 0:
                yield node
