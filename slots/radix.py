"""The radix tree of token runs: match, split, insert, cut.

As in SGLang's radix attention, a child is found by its first token, and then compared token by token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from .plan import HostCopy
from .reuse import Source
from .scope import Scope

N = TypeVar("N", bound="Run[Any]")


@dataclass(slots=True, eq=False)
class Run(Generic[N]):
    """A run of tokens (int32) at positions [start, end) of every path through it. Base class of the runs of all trees.

    documents: the last run of each document that starts where this run ends, by the document's key.
    scope: the scope of a root; None for all other runs.
    ready, in_use: as in `Node`; always 0 in trees without KV.
    """

    tokens: np.ndarray
    start: int
    parent: N | None = field(repr=False)
    children: dict[int, N] = field(default_factory=dict[int, Any], repr=False)
    documents: dict[str, N] = field(default_factory=dict[str, Any], repr=False)
    scope: ClassVar[Scope | None] = None
    ready = in_use = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


# ---- Node ---------------------------------------------------------------------------------------------------------------
# The parts of the prefix tree: a node is a run of tokens, a sequence a llama.cpp sequence id, a copy its saved KV.

Section = tuple[int, int]
"""Positions [start, stop) of a prompt that are computed. The KV between two sections comes from moved documents."""


@dataclass(slots=True, eq=False)
class Node(Run["Node"]):
    """A run of tokens at positions [start, end) of every path through it: a document, a message or a part of one.

        tokens   |---------- run ----------|
        KV       |---- ready ----|.pending.|
                 start                    end
        copy     |-------------------------|
        state                              |

    ready: the number of tokens with KV on the device, each in exactly one cell. If a running request has claimed the run,
        that request will compute the run's other tokens, which are pending.
    copy: the copy of the whole run in host memory, if there is one.
    state: the recurrent state after the run, if the model has such states (see `StateTree`).
    sequences: the sequences with KV of this run.
    in_use: how many running requests have this run on their paths. A run in use is not evicted.
    cells_end: an upper bound: all cells of the run are below this one (see `slots/swap.py`).
    record: the key of the run's record in a lower tier.
    document_of: the inverse of `documents`: for each document that ends with this run, the run before the document, and the
        document's key.
    session: the session, if requests of only one session have computed or used the run; empty: several sessions, or
        requests without a session; None: no request yet.
    """

    ready: int = 0
    cells_end: int = 0
    sequences: set[Sequence] = field(default_factory=set["Sequence"], repr=False)
    in_use: int = 0
    last_use: int = 0
    frequency: int = 0  # requests that used it
    token_cost: float = 0.0  # to compute it (`Profile.cost`), the mean over the requests that missed it
    num_misses: int = 0  # requests that missed it
    priority: float = 0.0  # on the device: the lowest is evicted first
    host_priority: float = 0.0  # in host memory
    pinned_until: float = 0.0  # the time at which a client's pin ends; 0: not pinned
    copy: HostCopy | None = field(default=None, repr=False)
    state: HostCopy | None = field(default=None, repr=False)
    record: str = ""
    session: str | None = None
    document_of: set[tuple[Node, str]] = field(default_factory=set[tuple["Node", str]], repr=False)

    @property
    def is_cached(self) -> bool:
        """Whether the run's KV is on the device or in host memory."""
        return self.ready > 0 or self.copy is not None

    @property
    def complete(self) -> bool:
        return self.ready == len(self.tokens)

    def note_miss(self, token_cost: float) -> None:
        """Count a request that has to compute the run, at a cost of `token_cost` for each token (RAGCache, formula 4)."""
        self.num_misses += 1
        self.token_cost += (token_cost - self.token_cost) / self.num_misses

    def note_session(self, session: str) -> None:
        """Update the run's session for a request that computes or uses the run; empty: the request has no session."""
        if self.session != session:
            self.session = session if self.session is None else ""

    def place(self, key: str, end: Node) -> None:
        """Enter document `key`, which starts after this run and ends with the run `end`.

        If the document had another end before, that end is replaced.
        """
        if key in self.documents:
            self.documents[key].document_of.discard((self, key))
        self.documents[key] = end
        end.document_of.add((self, key))

    def part_with(self, upper: Node) -> None:
        """Give `upper`, which was cut off the start of this run, its part of this run's KV, and the same worth."""
        at = len(upper.tokens)
        upper.ready, upper.in_use, upper.last_use = min(self.ready, at), self.in_use, self.last_use
        upper.frequency, upper.token_cost, upper.num_misses = self.frequency, self.token_cost, self.num_misses
        upper.priority, upper.host_priority = self.priority, self.host_priority
        upper.pinned_until, upper.session = self.pinned_until, self.session
        upper.sequences = set(self.sequences)
        self.ready -= upper.ready
        upper.cells_end = self.cells_end - self.ready  # later tokens stand in higher cells
        self.sequences = {sequence for sequence in self.sequences if sequence.length > self.start}

    def longest_sequence(self) -> Sequence:
        """Return the sequence that holds the most of this run, so that other sequences can share its cells."""
        return max(self.sequences, key=lambda sequence: sequence.length)


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence id of llama.cpp, with KV at positions [0, length) of the path that ends in `last_node`.

    An active sequence belongs to a running request. An active sequence's path is the whole path that the request has
    claimed, with tokens that are not computed yet. An idle sequence is kept after its request has ended, so that later
    requests can continue or fork it.
    """

    id: int
    last_node: Node
    length: int = 0
    active: bool = True
    sections: tuple[Section, ...] = ()  # of its request's prompt
    idle_since: int = 0  # a count, not a time; of equal leaves, the one that is idle longest is evicted

    def most_cached(self, upto: int, recompute_last: int) -> int:
        """Return how many tokens of the path need not be computed if the first `upto` tokens are cached."""
        return most_cached(self.sections, upto, recompute_last)


def most_cached(sections: Seq[Section], upto: int, recompute_last: int) -> int:
    """Return how many tokens of a prompt need not be computed if its first `upto` tokens are cached.

    If a section is only partly cached, at least its last `recompute_last` tokens are computed together; a shorter section is
    computed as a whole. These tokens are computed together because the bits of KV depend on the number of tokens in a batch.
    The prompt's last token is always computed.

    sections: the positions that are computed; the last section ends with the prompt.
    """
    upto = min(upto, sections[-1][1] - 1)
    at = bisect_right(sections, upto, key=itemgetter(0)) - 1
    start, stop = sections[at] if at >= 0 else (0, 0)
    return max(min(upto, stop - recompute_last), start) if upto < stop else max(upto, 0)


@dataclass(frozen=True, slots=True)
class Claim:
    """The result of a claim: the request's sequence, the number of cached tokens, and the origin of these tokens."""

    sequence: Sequence
    cached: int
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySizes:
    """The sizes of copies, in bytes.

    run_token: the size of one token in the copy of a run.
    state: the size of one recurrent state, without `state_token`.
    state_token: what each token before a state adds to its size, if states contain the KV of attention. If states contain
        this KV, copies of runs are empty.
    """

    run_token: int = 0
    state: int = 0
    state_token: int = 0


NO_TOKENS = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Root(Node):
    """The empty prefix of all prompts of one scope."""

    scope: Scope = field(kw_only=True)  # pyright: ignore[reportIncompatibleVariableOverride]

    @classmethod
    def of(cls, scope: Scope) -> Root:
        return cls(NO_TOKENS, 0, None, scope=scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match(Generic[N]):
    """The prefix of a prompt that is in the tree: `length` tokens, of which the first `ready` have KV on the device.

    The match ends in `node`, and its part with KV ends in `ready_node`. `covered` counts the matched tokens that need no
    further cells: their cells are filled, or promised to a running request. `evictable` counts the matched tokens whose
    cells could be evicted now, but not after the prompt is claimed. `exact_end` is the node that ends exactly where the
    prompt ends; None if not all tokens match, or if the prompt ends inside a run.
    """

    node: N
    length: int
    ready_node: N
    ready: int
    covered: int
    evictable: int
    exact_end: N | None


class PrefixIndex(Protocol):
    """Tells an ordering policy how much of a prompt would be reused. The cache and the indexes of lower tiers implement it.

    recompute_last: how many tokens at the end of a prompt are computed even if they are cached.
    """

    recompute_last: int

    @property
    def roots(self) -> Mapping[Scope, Run[Any]]: ...

    def match_from(self, origin: Any, tokens: np.ndarray) -> Match[Any]:
        """Return the match of tokens after the end of `origin`. The match's lengths count from the end of `origin`."""
        ...

    def continued(self, origin: Any, match: Match[Any]) -> int:
        """Return how many of the tokens that `match` found after `origin` need not be computed."""
        ...

    def may_continue(self, node: Any) -> bool:
        """Return whether a prompt can continue from the end of a run."""
        ...

    def saved_share(self, node: Any) -> float:
        """Return which share of the time to compute a run is saved by reusing the run."""
        ...

    def seconds(self, cached: int, new: int) -> float:
        """Estimate the time to compute `new` tokens after `cached` ones."""
        ...


class RadixTree(Generic[N]):
    """Finds, adds and splits runs. Subclasses define what a run stands for: KV, states or files.

    run: makes a run from its tokens, its start position and its parent.
    root: makes the root of a scope.
    """

    def __init__(self, run: Callable[[np.ndarray, int, N | None], N], root: Callable[[Scope], N]) -> None:
        self._run, self._root = run, root
        self.roots: dict[Scope, N] = {}

    def match(self, scope: Scope | None, tokens: np.ndarray) -> Match[N]:
        """Return the longest prefix of `tokens` (int32) that the tree has in `scope`. The prefix may end inside a run."""
        root = (self.roots.get(scope) if scope is not None else None) or self._run(NO_TOKENS, 0, None)
        return self.match_from(root, tokens)

    def match_from(self, origin: N, tokens: np.ndarray) -> Match[N]:
        """Return the match of tokens after the end of `origin`. The match's lengths count from the end of `origin`."""
        node = ready_node = origin
        length = ready = covered = evictable = 0
        while length < len(tokens):
            child = node.children.get(int(tokens[length]))
            if child is None:
                break
            node = child
            common = common_prefix(child.tokens, tokens[length:])
            if usable := min(common, child.ready):
                ready, ready_node = length + usable, child
                evictable += 0 if child.in_use else usable
            covered += common if child.in_use else usable
            length += common
            if common < len(child.tokens):
                break
        ends = length == len(tokens) and node.end == origin.end + length
        return Match(
            node=node,
            length=length,
            ready_node=ready_node,
            ready=ready,
            covered=covered,
            evictable=evictable,
            exact_end=node if ends else None,
        )

    def root(self, scope: Scope) -> N:
        """Return the root of a scope. If there is none, make it."""
        if scope not in self.roots:
            self.roots[scope] = self._root(scope)
        return self.roots[scope]

    def insert(self, root: N, tokens: np.ndarray, stops: Seq[int]) -> dict[int, N]:
        """Add tokens below `root`, so that a node ends at each position of `stops` and at the end of `tokens`.

        Return a mapping from each of these positions to the node that ends there.
        """
        ends = {0: root}
        node, start = root, 0
        for stop in [*(stop for stop in stops if 0 < stop < len(tokens)), len(tokens)]:
            node = self._descend(node, tokens[start:stop])
            ends[stop], start = node, stop
        return ends

    def _descend(self, node: N, tokens: np.ndarray) -> N:
        """Return the node whose path from `node` is exactly `tokens`. Split and add runs as needed."""
        start = 0
        while start < len(tokens):
            child = node.children.get(int(tokens[start]))
            if child is None:
                child = self._grow(node, tokens[start:])
            common = common_prefix(child.tokens, tokens[start:])
            node = self._split(child, common) if common < len(child.tokens) else child
            start += common
        return node

    def _grow(self, node: N, tokens: np.ndarray) -> N:
        """Add a run with these tokens below `node`, which has no child that starts with the first of them."""
        child = node.children[int(tokens[0])] = self._run(np.array(tokens, np.int32), node.end, node)
        return child

    def _split(self, lower: N, at: int) -> N:
        """Cut a run in two, and return the new upper part. The object `lower` becomes the lower part."""
        parent = lower.parent
        assert parent is not None
        upper = self._run(lower.tokens[:at], lower.start, parent)
        upper.children[int(lower.tokens[at])] = lower
        parent.children[int(upper.tokens[0])] = upper
        lower.tokens, lower.start, lower.parent = lower.tokens[at:], lower.start + at, upper
        return upper

    def _unlink(self, node: N) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[int(node.tokens[0])]
        if parent.scope is not None and not parent.children:
            del self.roots[parent.scope]


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many leading tokens two int32 arrays share."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    at = int(differs.argmax()) if size else 0
    return at if size and differs[at] else size


def path(node: N, begin: int = 0) -> list[N]:
    """Return the nodes from `node` up to the child of the root. Nodes that end at or before `begin` are left out."""
    nodes: list[N] = []
    while node.parent is not None and node.end > begin:
        nodes.append(node)
        node = node.parent
    return nodes


def upward(node: N) -> Iterator[N]:
    """Yield the nodes from `node` up to the child of the root. The caller may change or unlink the yielded node."""
    while node.parent is not None:
        above = node.parent
        yield node
        node = above


def scope_of(node: Run[Any]) -> Scope:
    """Return the scope that a node belongs to."""
    while node.parent is not None:
        node = node.parent
    assert node.scope is not None
    return node.scope


def descendants(root: N) -> Iterator[N]:
    """Yield every node below `root`, parents first."""
    stack: list[N] = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
