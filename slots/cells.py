"""The cells of the pool: free, promised to those that run, to be had from idle KV, or lent to a step for its time."""

from __future__ import annotations

from collections.abc import Collection

from .request import Prompt, Request
from .scope import Scope
from .swap import Moves, resident, set_aside
from .tree import PrefixTree


class Room:
    """Says whether a prompt fits, and makes room for it.

    running: who runs, as the scheduler keeps it. idle_cells: most cells that may hold what nobody who runs needs.
    """

    def __init__(self, tree: PrefixTree, running: Collection[Request], idle_cells: int) -> None:
        self._tree, self._running, self._idle_cells, self._costs = tree, running, idle_cells, tree.costs
        self.num_set_aside = 0  # tokens of others whose KV left the device for a step, ever
        self._in_front: list[int] = []  # requests that got the first cells in the last such step

    @property
    def num_used(self) -> int:
        """Cells in use: everything in the tree, and what is being generated."""
        return self._tree.ledger.num_ready + sum(request.num_tail for request in self._running)

    @property
    def num_free(self) -> int:
        return self._tree.ledger.num_cells - self.num_used

    def fits(self, request: Request) -> bool:
        """Whether a prompt fits beside what is running and has been promised. Alone, every accepted prompt fits."""
        if not self._running:
            return True
        tree = self._tree
        match = tree.match(request.scope, request.tokens[: request.num_tokens])
        reclaimable = tree.ledger.num_reclaimable - match.evictable
        promised = (
            tree.ledger.num_pending + len(self._running) + tree.rest - 1
        )  # it computes what is cached of its rest twice
        return request.num_tokens - match.covered + promised < self.num_free + reclaimable

    def forecast(self, prompt: Prompt, scope: Scope) -> tuple[int, bool]:
        """How many tokens a background request would compute, and whether the cells for it are free."""
        tokens = prompt.arrange(self._tree, scope).tokens
        match = self._tree.match(scope, tokens)
        return len(tokens) - match.length, len(tokens) - match.ready <= self.num_free

    def reserve(self, num_cells: int) -> bool:
        """Make room for so many more tokens by evicting what nobody is using."""
        missing = num_cells - self.num_free
        return missing <= 0 or self._tree.evict(missing) >= missing

    def spill_idle(self) -> None:
        """Move idle KV to host memory until no more of it than is allowed slows the others."""
        excess = self._tree.ledger.num_reclaimable - self._idle_cells
        if self._tree.host.max_tokens and excess > 0:
            self._tree.evict(excess)

    def operations(self, num_tokens: int, computing: list[Request]) -> tuple[Moves, Moves]:
        """What is carried out before a step of so many tokens, and behind it: what the tree has decided, and the moves of
        `set_aside` where they cost less than they save. computing: whom the step is for."""
        moves, afterwards = self._set_aside(num_tokens, computing)
        return (
            self._tree.ledger.take_operations() + moves,
            afterwards,
        )  # in this order: copies for the host tier are among them

    def _set_aside(self, num_tokens: int, computing: list[Request]) -> tuple[Moves, Moves]:
        tree, costs = self._tree, self._costs
        background = all(request.background for request in computing)  # it must be possible to end it early
        if background or num_tokens <= costs.swap_from_tokens or (used := self.num_used) > tree.host.max_tokens:
            return (), ()
        runs, needed = list(resident(tree, self._running)), {request.sequence for request in computing}
        foreign = sum(node.ready for node in runs if node.sequences.isdisjoint(needed))
        foreign += sum(request.num_tail for request in self._running if request.sequence not in needed)
        if not costs.pays_to_swap(num_tokens, foreign, used, len(runs)):
            return (), ()
        self.num_set_aside += foreign
        before, self._in_front = self._in_front, [request.id for request in computing]
        return set_aside(tree, runs, self._running, computing, in_place=self._in_front == before)
