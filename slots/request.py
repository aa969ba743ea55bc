"""A request as the scheduler sees it: tokens that are known, and how many of them have been computed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .node import Sequence
from .radix import common_prefix
from .scope import Scope
from .tree import Claim, PrefixTree


@dataclass(frozen=True, slots=True)
class PlacedDocument:
    """A document where it stands in a prompt: positions [start, stop)."""

    id: str
    key: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A prompt whose documents have their order.

    tokens: int32. stops: ascending positions where nodes of the tree shall end. segments: (stop, what it is in words)
    of everything the prompt consists of, for the reason of a miss. repeated: ids of documents that an earlier turn holds,
    so that they stand here once.
    """

    tokens: np.ndarray
    stops: tuple[int, ...] = ()
    documents: tuple[PlacedDocument, ...] = ()
    segments: tuple[tuple[int, str], ...] = ()
    repeated: tuple[str, ...] = ()

    def segment_at(self, position: int) -> str:
        """What stands at `position`, in words."""
        return next((label for stop, label in self.segments if position < stop), "the prompt")


class Prompt(Protocol):
    """A prompt whose documents may still be an unordered set; `num_tokens` bounds its length before it is laid out."""

    num_tokens: int

    def arrange(self, tree: PrefixTree, scope: Scope, waiting: Collection[Prompt] = ()) -> Layout:
        """Fix the order of the documents by what the tree holds now. waiting: prompts of this scope that come next."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """One request from submission to its end. priority: those of a higher one go first.

    background: computes something ahead while there is nothing else to do, in small steps. guess: and that for nobody in
    particular, so that nothing counts as used by it. follows: the request whose next turn a background one computes.

    `tokens[:num_tokens]` are known: the prompt, then what was sampled. `computed` of them have KV; it chases
    `num_tokens`, and there is no other phase. limit: the most tokens it may generate.
    """

    id: int
    prompt: Prompt
    limit: int
    scope: Scope
    cache: bool = True
    priority: int = 0
    background: bool = False
    guess: bool = False
    follows: int | None = None
    snapshot_scope: Scope | None = None  # where its states are kept, if its model cannot be cut and may keep them

    layout: Layout | None = None
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    num_prompt: int = 0
    num_tokens: int = 0
    computed: int = 0
    started_at: int = 0  # what was computed already when it was admitted
    rest: int = 1  # its last tokens, which it computes itself whatever is cached (see `PrefixTree`)
    stops: tuple[int, ...] = ()  # where its prefill pauses for a snapshot
    claimed: int = 0  # tokens whose path is in the tree; what is computed beyond is the private tail

    sequence: Sequence | None = None
    lane: int = -1
    cached: int = 0  # prompt tokens it did not have to compute, at its first admission and by catching up
    sources: dict[str, int] = field(default_factory=dict)  # those tokens by where they came from: own, fork, host, snapshot
    num_preempted: int = 0
    num_overtaken: int = 0  # requests that came after it and were admitted before it

    def lay_out(self, layout: Layout) -> None:
        """Take the final prompt, with room for everything that may be generated."""
        self.layout = layout
        self.num_prompt = self.num_tokens = len(layout.tokens)
        self.tokens = np.empty(self.num_prompt + self.limit, np.int32)
        self.tokens[: self.num_prompt] = layout.tokens

    def claim(self, tree: PrefixTree) -> Claim:
        """Put its prompt into the tree, with nodes that end where something ends that it consists of."""
        assert self.layout is not None
        stops = [*self.layout.stops, self.num_tokens]
        documents = [(document.key, document.start, document.stop) for document in self.layout.documents]
        return tree.claim(self.scope, self.tokens[: self.num_tokens], stops, documents, guess=self.guess)

    def append(self, token: int) -> None:
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1

    def waits_for(self, leader: Request, min_shared: int) -> bool:
        """Whether `leader` is about to compute what this one needs next, `min_shared` tokens or more since it started."""
        if leader.scope != self.scope or leader.computed != self.computed:
            return False
        shared = common_prefix(leader.tokens[: leader.num_tokens], self.tokens[: self.num_tokens])
        shared = min(shared, self.num_tokens - self.rest)
        return shared > self.computed and shared - self.started_at >= min_shared

    @property
    def source(self) -> str:
        """Where most of its cached tokens came from: own, fork, host or none."""
        most = max(self.sources, key=lambda source: self.sources[source], default="none")
        return most if self.sources.get(most) else "none"

    @property
    def decoding(self) -> bool:
        """Whether its next step is a single token that was just sampled."""
        return self.num_tokens > self.num_prompt and self.computed == self.num_tokens - 1

    @property
    def num_tail(self) -> int:
        """Cells it holds outside the tree: generated tokens."""
        return max(self.computed - self.claimed, 0)
