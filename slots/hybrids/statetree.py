"""A tree of runs and recurrent states in host memory, within one budget of bytes.

    runs       |-- instructions --|-- document --|-- question and answer --|      each run behind the run before it
    states                        S              S                         S
                                                 |-- another question --|
                                                                        S

Every leaf has a state, or it is of no use. The state that saves the least time a byte leaves first, with the runs that only
it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..archive import Record
from ..costs import Costs
from ..eviction import Candidates, EvictionPolicy
from ..node import Blob, Node, Sizes
from ..profile import Profile
from ..radix import Match, PromptTree, descendants, path, scope_of
from ..scope import Scope

Cut = Callable[[np.ndarray, int, int], np.ndarray]
"""Returns the part of a run (uint8) at positions [start, stop)."""


class StateTree(PromptTree):
    """The tier protocol, with nodes for keys: a node is a run, and may have a state at its end.

    max_bytes: of all runs and states; 0: none is kept. costs: of this device. profile: the time that tokens take.
    policy: the order in which states leave. cut: takes a part out of a run.
    """

    def __init__(
        self, max_bytes: int, *, costs: Costs, profile: Profile, policy: EvictionPolicy | None = None, cut: Cut
    ) -> None:
        super().__init__(costs, self._has_room_for)
        self.max_bytes = max_bytes
        self.sizes = Sizes()
        self.num_bytes = 0
        self.num_runs = self.num_tokens = 0  # runs, and their tokens
        self.num_states = 0
        self.unused: dict[Node, None] = {}  # states within prompts that no second prompt has used, the oldest first
        self.aged: set[Node] = set()  # nodes whose states have left for that reason
        self.unsaved: list[Node] | None = None  # changed since the last `take_unsaved`; None: they are not written behind
        self._profile, self._cut = profile, cut
        self._policy = policy or EvictionPolicy()
        self.candidates = Candidates(lambda node: (node.host_priority, 0), self.may_leave)

    def __len__(self) -> int:
        return self.num_states

    def size_of(self, num_tokens: int) -> int:
        """Return the bytes of a state behind `num_tokens` tokens."""
        return self.sizes.state + num_tokens * self.sizes.state_token

    def reusable(self, scope: Scope, tokens: np.ndarray) -> int:
        node = self.longest(scope, tokens)
        return node.end if node is not None else 0

    def may_continue(self, node: Node) -> bool:
        return node.state is not None

    def continued(self, origin: Node, match: Match) -> int:
        stop = origin.end + match.length
        ends = (node.end for node in path(match.node) if node.state is not None and origin.end < node.end <= stop)
        return max(ends, default=origin.end) - origin.end

    def _has_room_for(self, num_tokens: int) -> bool:
        size = self.size_of(num_tokens) + num_tokens * self.sizes.run_token
        return self.num_bytes + size <= self.max_bytes

    def has_room(self, record: Record) -> bool:
        """Return whether a record fits with nothing leaving for it."""
        missing = len(record.tokens) - self._length(record.scope, record.tokens)
        state = self.size_of(len(record.tokens)) if record.state is not None else 0
        return self.num_bytes + missing * self.sizes.run_token + state <= self.max_bytes

    def of(self, scope: Scope) -> list[Node]:
        """Return the nodes of a scope with a state at their end."""
        return [node for node in descendants(self.roots[scope]) if node.state] if scope in self.roots else []

    def get(self, node: Node) -> Record | None:
        """Return a run with the state at its end as a record; None if it is gone or has not been made."""
        if node.blob is None or node.blob.data is None or (node.state and node.state.data is None):
            return None
        tokens = np.concatenate([one.tokens for one in path(node)][::-1])
        whole = (node.blob.start, node.blob.stop) == (node.start, node.end)
        documents = ((key, origin.end) for origin, key in node.document_of)
        return Record(
            scope_of(node),
            tokens,
            node.start,
            node.blob.data if whole else self._cut(node.blob.data, node.start, node.end),
            documents=tuple((key, at) for key, at in documents if at <= node.start),
            frequency=node.frequency,
            token_cost=node.token_cost,
            state=node.state.data if node.state else None,
        )

    def along(self, scope: Scope | None, tokens: np.ndarray, known: Node | None = None) -> Iterator[Node]:
        """Return the nodes with states that these tokens begin with, the longest one first.

        known: a node on their path; the search begins there.
        """
        match = self.match_from(known, tokens[known.end :]) if known is not None else self.match(scope, tokens)
        stop = match.length + (known.end if known is not None else 0)
        return (node for node in path(match.node) if node.state is not None and node.end <= stop)

    def longest(self, scope: Scope | None, tokens: np.ndarray, known: Node | None = None) -> Node | None:
        """Return the node with the deepest state that these tokens begin with."""
        return next(self.along(scope, tokens, known), None)

    def put(self, record: Record, source: str = "disk") -> bool:
        """Keep a record that comes from elsewhere if the runs before it are kept and it fits. Return whether it is kept now.

        Of a run that is partly kept, the rest is taken.
        """
        start, stop = self._length(record.scope, record.tokens), len(record.tokens)
        if (
            start < record.start
            or not self.has_room(record)
            or not all(0 <= at <= record.start for _, at in record.documents)
        ):
            return False
        stops = sorted({start, *(at for _, at in record.documents)})
        ends = self.insert(self.root(record.scope), record.tokens, stops)
        node = ends[stop]
        if node.blob is None:
            data = record.data if start == record.start else self._cut(record.data, start, stop)
            self.keep_run(node, Blob(start, stop, data, source=source, is_written=source == "disk"))
        if record.state is not None and node.state is None:
            self.keep_state(node, Blob(0, stop, record.state))
            node.frequency = record.frequency
        for key, at in record.documents:
            ends[at].place(key, node)
        self.price(node)
        return True

    def take_unsaved(self) -> list[Node]:
        """Return the nodes that changed since the last call; the first call begins to note them."""
        taken, self.unsaved = self.unsaved or [], []
        return taken

    def drop(self, scope: Scope) -> int:
        """Forget a scope. Return how many tokens its runs had."""
        before = self.num_tokens
        for node in list(descendants(self.roots[scope]))[::-1] if scope in self.roots else []:
            self.forget(node)
        return before - self.num_tokens

    def discard(self, scope: Scope | None, tokens: np.ndarray) -> int:
        """Forget the states along a prompt, unless a longer one stands on them. Return how many tokens that were."""
        before = self.num_tokens
        for node in list(self.along(scope, tokens)):
            if not node.children:
                self.forget(node)
        return before - self.num_tokens

    def void(self) -> None:
        """Forget what was decided and never performed, with all that stands on it: a record may have come in behind it."""
        nodes = [node for root in self.roots.values() for node in descendants(root)]  # parents first
        lost: set[Node | None] = set()
        for node in nodes:
            if node.parent in lost or node.blob is None or node.blob.data is None:
                lost.add(node)
        for node in reversed(nodes):
            if node in lost or (node.state is not None and node.state.data is None):
                self.forget(node)

    def forget(self, node: Node) -> None:
        """Drop the state at the end of a node, and the runs that no other state needs."""
        if node.state is not None:
            node.state = None
            self.unused.pop(node, None)
            self.num_states -= 1
            self.num_bytes -= self.size_of(node.end)
        while node.parent and node.blob and not node.children and node.state is None:
            parent = node.parent
            node.blob.users -= 1
            self.num_bytes -= 0 if node.blob.users else len(node.blob) * self.sizes.run_token
            self.num_runs -= 1
            self.num_tokens -= len(node.tokens)
            self.pinned.discard(node)
            self.aged.discard(node)
            node.blob = None  # as of a node that was forgotten before
            self._unlink(node)
            node = parent
        self.candidates.offer(node)

    def price(self, node: Node) -> None:
        """Set the priority of a state that is used or new: the time that it saves, a byte that leaves with it."""
        if not self.may_leave(node):
            return  # a run that states stand on leaves with them
        above = node.parent
        while above is not None and above.parent is not None and above.state is None:
            above = above.parent
        begin, size = above.end if above is not None else 0, self.size_of(node.end)
        size += 0 if node.children else (node.end - begin) * self.sizes.run_token
        length = node.end - begin
        node.token_cost = self._profile.cost(begin, length) * length / max(size, 1)
        node.last_use, node.host_priority = self._clock, self._policy.priority(node)
        self.candidates.offer(node)

    def may_leave(self, node: Node) -> bool:
        """Return whether something would be freed: a state, or a run that no state needs."""
        return node.blob is not None and (node.state is not None or not node.children)

    def _length(self, scope: Scope, tokens: np.ndarray) -> int:
        """Return how many leading tokens are in kept runs."""
        return self.match(scope, tokens).length

    def keep_run(self, node: Node, blob: Blob) -> None:
        """Give a node its run."""
        node.blob = blob
        self.num_runs += 1
        self.num_tokens += len(node.tokens)
        self.num_bytes += len(blob) * self.sizes.run_token
        self._note(node)

    def keep_state(self, node: Node, blob: Blob) -> None:
        """Give a node a state at its end."""
        node.state = blob
        self.aged.discard(node)
        self.num_states += 1
        self.num_bytes += self.size_of(node.end)
        self._note(node)

    def _note(self, node: Node) -> None:
        if self.unsaved is not None and node not in self.unsaved[-1:]:
            self.unsaved.append(node)

    def make_room(self, node: Node) -> None:
        """Let states leave until the budget holds. `node` is new, or used now, and stays."""
        self._clock += 1
        node.host_priority = np.inf
        while self.num_bytes > self.max_bytes and (least := self.candidates.pop()):
            self._policy.on_evict(least.host_priority)
            self.forget(least)
        if self.num_bytes > self.max_bytes:  # a copy that was cut in two is freed with its last part only
            self.forget(node)
        else:
            self.price(node)

    def _split(self, lower: Node, at: int) -> Node:
        upper = super()._split(lower, at)
        if lower.blob is not None:
            upper.blob = lower.blob
            upper.blob.users += 1
            self.num_runs += 1
            if self.unsaved is not None and lower in self.unsaved:
                self.unsaved.append(upper)
        return upper
