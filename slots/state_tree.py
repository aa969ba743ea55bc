"""The tree of runs and recurrent states in host memory, for models whose state cannot be cut at a prefix.

    runs       |-- instructions --|-- document --|-- question and answer --|
    states                        S              S                         S
                                                 |-- another question --|
                                                                        S

In this example, two runs follow the document. S is a state at the end of a run. Every leaf has a state, since a run is
useless if there is no state at its end or after it. The state that saves the least time per byte is evicted before all other
states, together with the runs that no other state needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from .costs import Costs, Profile
from .host import HostMemory, PromptTree
from .radix import Match, Node, descendants, path, upward
from .scope import Scope

DEARER = 1.25  # a state is priced again at this many times its last price: the profile alone moves prices by less
PASSED = 1 / 8  # share of its worth that the state of an earlier turn keeps: only a change of the history uses it


class StateTree(PromptTree):
    """A tree whose nodes are runs with copies in host memory. A node may also have a state at its end."""

    def __init__(self, costs: Costs, host: HostMemory, profile: Profile) -> None:
        super().__init__(costs, host, profile)
        self.unused: dict[Node, None] = {}  # states inside prompts that no second prompt has used, the oldest first
        self.aged: set[Node] = set()  # nodes whose states were dropped from `unused`
        self.passed: set[Node] = set()  # states of a chat's turns that two later turns have passed

    def reusable(self, scope: Scope, tokens: np.ndarray) -> int:
        node = self.longest(scope, tokens)
        return node.end if node is not None else 0

    def may_continue(self, node: Node) -> bool:
        return node.state is not None

    def continued(self, origin: Node, match: Match[Node]) -> int:
        stop = origin.end + match.length
        ends = (node.end for node in path(match.node, origin.end) if node.state is not None and node.end <= stop)
        return max(ends, default=origin.end) - origin.end

    def of(self, scope: Scope) -> list[Node]:
        """Return the nodes of a scope that have a state at their end."""
        return [node for node in descendants(self.roots[scope]) if node.state] if scope in self.roots else []

    def along(self, scope: Scope | None, tokens: np.ndarray, known: Node | None = None) -> Iterator[Node]:
        """Return the nodes with states on the path of these tokens, deepest node first.

        known: a node that is known to be on the path, so that the search can begin there.
        """
        match = self.match_from(known, tokens[known.end :]) if known is not None else self.match(scope, tokens)
        stop = match.length + (known.end if known is not None else 0)
        return (node for node in upward(match.node) if node.state is not None and node.end <= stop)

    def longest(self, scope: Scope | None, tokens: np.ndarray, known: Node | None = None) -> Node | None:
        """Return the deepest node with a state on the path of these tokens. The arguments are as in `along`."""
        return next(self.along(scope, tokens, known), None)

    def usable_runs(self, scope: Scope | None, tokens: np.ndarray) -> list[tuple[Node, int]]:
        node = self.longest(scope, tokens)
        return [(run, run.end) for run in reversed(path(node))] if node is not None else []

    def check(self, nodes: list[Node]) -> None:
        for node in nodes:
            assert node.parent is not None and node.parent.end == node.start and node.copy is not None
        assert all(node.state is not None and node.frequency < 2 for node in (*self.unused, *self.passed))
        assert not self.passed & set(self.unused)
        assert all(node.state is None for node in self.aged) and self.aged <= set(nodes)

    def discard(self, nodes: Iterable[Node]) -> int:
        return sum(self.forget(node) for node in nodes if not node.children)

    def void(self) -> None:
        """Forget states and runs whose copies were never made, and all runs after such runs.

        A run after such a run may still have a copy, from a fetched record.
        """
        lost = set(self.without_copy())
        for node in [node for root in self.roots.values() for node in descendants(root)][::-1]:
            if node in lost or (node.state is not None and node.state.data is None):
                self.forget(node)
        self.host.recount()

    def clear(self) -> None:
        super().clear()
        self.unused, self.aged, self.passed = {}, set(), set()

    def forget(self, node: Node) -> int:
        """Drop a node's state, and the runs that no other state needs. Return the number of tokens of the dropped runs."""
        self.host.release_state(node)
        self.unused.pop(node, None)
        self.passed.discard(node)
        num_tokens = 0
        while node.parent and node.copy and not node.children and node.state is None:
            parent = node.parent
            num_tokens += len(node.tokens)
            self.aged.discard(node)
            self._remove(node)
            node = parent
        return num_tokens

    def lose(self, node: Node) -> int:
        """Forget the state of a node. Return the number of tokens of the runs that were forgotten with it.

        If the state saves much more time now than when it was last priced, it is not forgotten: it gets a new price, and the
        result is 0. A state saves more time once the state before it has been forgotten.
        """
        if node.state is not None and self._token_cost(node) > DEARER * node.token_cost:
            self.revalue(node)
            return 0
        return self.forget(node)

    def revalue(self, node: Node) -> None:
        """Set the priority of a state whose worth has changed, although it was not used."""
        self.host.revalue(node, self._token_cost(node))

    def price(self, node: Node, *, is_used: bool = True) -> None:
        """Set the priority of a state that is new or has just been used, by the time that it saves per byte."""
        self.aged.discard(node)
        if not self.host.may_evict(node):
            return  # a run that states need is evicted with them
        node.token_cost = self._token_cost(node)
        node.last_use = self._clock if is_used else 0
        self.host.touch(node)

    def _token_cost(self, node: Node) -> float:
        """Return how much more time a state saves than the state before it, per byte that its eviction would free."""
        above = node.parent
        while above is not None and above.parent is not None and above.state is None:
            above = above.parent
        begin, size = above.end if above is not None else 0, self.host.size_of(node.end)
        size += 0 if node.children else (node.end - begin) * self.host.sizes.run_token
        length = node.end - begin
        share = PASSED if node in self.passed else 1.0
        return share * self.profile.cost(begin, length) * length / max(size, 1)

    def make_room(self, node: Node) -> None:
        """Evict states until the budget has room for the state of `node`, which is new or has just been used.

        If the budget cannot get enough room, the state of `node` is forgotten.
        """
        self._clock += 1
        node.host_priority = np.inf
        if self.host.make_room(node):
            self.price(node)
        else:  # no room: a copy that two runs share is freed only with the second of them
            self.host.count_lost(node, self.forget(node))
