"""A request, frozen; its prompt; and the layout, which gives the prompt's documents an order."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from .host import PromptTree
from .radix import NO_TOKENS, PrefixIndex, Section
from .scope import Scope


@dataclass(frozen=True, slots=True)
class PlacedDocument:
    """A document in a prompt, at positions [start, stop).

    rank: its retrieval rank, from 1.
    moved: whether its place among the documents differs from its place in the request.
    """

    id: str
    key: str
    start: int
    stop: int
    rank: int = 1
    moved: bool = False


class Segment(NamedTuple):
    """A part of a prompt, up to position `stop`.

    label: the origin of the part, in words.
    verb: the verb after the label.
    """

    stop: int
    label: str
    verb: str = "is"

    @property
    def miss(self) -> str:
        """The reason of a miss in this segment, as a sentence."""
        return f"{self.label} {self.verb} not cached here"


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A prompt whose documents have an order.

    tokens: int32.
    stops: ascending positions where nodes of the tree end.
    segments: all parts of the prompt in order; they name the reason of a miss.
    repeated: ids of documents that an earlier turn contains, so this prompt omits them.
    breakpoints: marks of the client, as (stop, seconds). Other prompts may diverge at `stop`, and the prefix up to `stop` is
        pinned for `seconds`; 0: no pin.
    opening: the length of a chat's prefix before its first question: system text and documents, which new chats have in
        common; 0: no chat.
    in_rank: tokens that would be cached with all documents in retrieval rank; None: no document moved.
    hint: the line with the ranking of the last documents that moved; empty: no such line.
    """

    tokens: np.ndarray
    stops: tuple[int, ...] = ()
    documents: tuple[PlacedDocument, ...] = ()
    segments: tuple[Segment, ...] = ()
    repeated: tuple[str, ...] = ()
    breakpoints: tuple[tuple[int, float], ...] = ()
    opening: int = 0
    in_rank: int | None = None
    hint: str = ""

    @property
    def ids(self) -> np.ndarray:
        """The tokens (int32) as the model knows them."""
        return self.ids_of(self.tokens)

    # ---- for prompts that are read as one text; `slots/separate.py` overrides these ------------------------------------

    @property
    def in_pieces(self) -> bool:
        """Whether parts of the prompt are cached independently of the tokens before them."""
        return False

    @property
    def is_stage(self) -> bool:
        """Whether the layout is a stage: it is computed for another prompt, and gets no answer."""
        return False

    @property
    def texts(self) -> list[np.ndarray]:
        """The tokens (int32) of each text that has to stay cached for full reuse; the prompt's own tokens come last."""
        return [self.tokens]

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """(key, start, stop) of each document that other prompts can reuse at its place."""
        return [(document.key, document.start, document.stop) for document in self.documents]

    def ids_of(self, tokens: np.ndarray) -> np.ndarray:
        """Return tokens of the prompt or of its answer as the model knows them (int32)."""
        return tokens

    def num_placed(self, tree: PromptTree, scope: Scope, reached: int) -> int:
        """Return how many tokens after the first `reached` ones are moved to the prompt from elsewhere in the cache."""
        return 0

    def sections(self, num_tokens: int) -> list[Section]:
        """Return the sections that are computed among the first `num_tokens` tokens."""
        return [(0, num_tokens)]

    # ---- its segments --------------------------------------------------------------------------------------------------

    def splits(self, position: int) -> bool:
        """Return whether `position` lies inside a segment, and not between two."""
        return 0 < position < len(self.tokens) and all(segment.stop != position for segment in self.segments)

    def segment_at(self, position: int) -> Segment:
        """Return the segment at `position`, or the whole prompt if no segment is there."""
        whole = Segment(len(self.tokens), "the prompt")
        return next((segment for segment in self.segments if position < segment.stop), whole)


NO_LAYOUT = Layout(NO_TOKENS)
"""The layout of a request that is not laid out."""


class Prompt(Protocol):
    """A prompt whose documents may have no order yet.

    num_tokens: an upper bound on its length, before it is laid out.
    prefix: its tokens (int32) up to the first set of documents without an order; all tokens if there is no such set.
    documents: the keys of that set.
    """

    num_tokens: int
    prefix: np.ndarray
    documents: frozenset[str]

    def arrange(self, tree: PrefixIndex, scope: Scope, waiting: Collection[Prompt] = ()) -> Layout:
        """Return the layout, with the documents ordered by the KV that the tree has now.

        waiting: waiting prompts that share documents with this one.
        """
        ...


class Kind(Enum):
    """Who a request is for: a waiting client, a client's next turn (AHEAD), or no client in particular (PREFETCH).

    priority: fixed for the kind; None: the client chooses it.
    is_client: whether a client waits for the request. Other requests are computed in small steps, ahead of time.
    counts_as_use: whether KV that the request computes or finds counts as used.
    """

    CLIENT = None, True
    AHEAD = -101, True
    PREFETCH = -101, False

    def __init__(self, priority: int | None, counts_as_use: bool) -> None:
        self.priority, self.is_client, self.counts_as_use = priority, priority is None, counts_as_use


class DraftSource(Protocol):
    """A source of drafts for one request.

    num_drafted, num_accepted: tokens of all drafts so far, proposed and accepted.
    """

    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt that a client, or the server itself, wants to be computed.

    priority: requests with a higher number go first; a kind's priority overrides it.
    limit: most tokens to generate.
    follows: the id of the request whose next turn this one prefills.
    wanted_slot: the id of the slot that it waits for; -1: any slot.
    snapshot_scope: the scope of its snapshots, if the model cannot be cut at a prefix and the request may keep any.
    draft: its source of drafts, if any.
    scores_prompt: the answer has the prompt's logprobs, so the whole prompt is computed, in a scope of this request alone.
    session: the name of its session; empty: none.
    """

    id: int
    prompt: Prompt
    limit: int
    scope: Scope
    cache: bool = True
    priority: int = 0
    kind: Kind = Kind.CLIENT
    follows: int | None = None
    wanted_slot: int = -1
    snapshot_scope: Scope | None = None
    draft: DraftSource | None = None
    scores_prompt: bool = False
    session: str = ""

    def __post_init__(self) -> None:
        if self.kind.priority is not None:
            object.__setattr__(self, "priority", self.kind.priority)

    def leads_to(self, other: Request) -> bool:
        """Return whether `other` can reuse what this request computes: its fixed prefix, and its documents if it has any."""
        own, others = self.prompt, other.prompt
        start = others.prefix[: None if own.documents else len(own.prefix)]
        may_lead = self.shares_with(other) and own.documents in (frozenset(), others.documents)
        return may_lead and np.array_equal(own.prefix, start)

    def shares_with(self, other: Request) -> bool:
        """Return whether both requests read and write the cache in the same scope."""
        return self.index_scope == other.index_scope

    @property
    def index_scope(self) -> Scope:
        """The scope in which the request reads and writes the cache."""
        return self.snapshot_scope or self.scope

    @property
    def keeps(self) -> bool:
        """Whether any KV or snapshot of the request stays in the cache."""
        return self.cache or self.snapshot_scope is not None
