"""A request, its prompt, and the prompt's layout, in which the documents have an order."""

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
    moved: whether its place among the prompt's documents differs from its place among the request's documents.
    """

    id: str
    key: str
    start: int
    stop: int
    rank: int = 1
    moved: bool = False


class Segment(NamedTuple):
    """A part of a prompt, up to position `stop`.

    label: what the part is, in words, such as "document d1".
    verb: the verb that follows the label: "is" or "are".
    """

    stop: int
    label: str
    verb: str = "is"

    @property
    def miss(self) -> str:
        """The reason for a miss in this segment, in words."""
        return f"{self.label} {self.verb} not cached here"


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A prompt whose documents have an order.

    tokens: int32.
    stops: ascending positions where nodes of the tree must end.
    segments: all parts of the prompt, in order. The reason for a cache miss names one segment.
    repeated: the ids of documents that the prompt omits in a turn, because an earlier turn contains them.
    breakpoints: the client's cache breakpoints, as (stop, seconds). Later prompts may differ from `stop` on. The prefix up
        to `stop` is pinned for `seconds`; 0: no pin.
    opening: the length of the start of a chat that other chats may share: its system text, and the documents before its
        first question; 0: the prompt is no chat.
    in_rank: how many tokens would be cached if all documents were in retrieval rank; None: no document moved.
    hint: a line for the model with the retrieval ranking of the last set of documents that was reordered; empty: no set was
        reordered.
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
        """Whether this is the layout of a stage, which is computed for a later prompt and gets no answer itself."""
        return False

    @property
    def texts(self) -> list[np.ndarray]:
        """The texts (int32 tokens) that must be cached so that the whole prompt can be reused.

        The last text is the prompt.
        """
        return [self.tokens]

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """The key, start and stop of each document that another prompt with the same prefix can reuse."""
        return [(document.key, document.start, document.stop) for document in self.documents]

    def ids_of(self, tokens: np.ndarray) -> np.ndarray:
        """Return tokens (int32) of the prompt or of its answer as the model knows them, without marks."""
        return tokens

    def num_placed(self, tree: PromptTree, scope: Scope, reached: int) -> int:
        """Return how many tokens after the first `reached` ones can get KV that is moved from elsewhere in the cache."""
        return 0

    def sections(self, num_tokens: int) -> list[Section]:
        """Return those sections of the first `num_tokens` tokens whose KV is computed, and not moved from elsewhere."""
        return [(0, num_tokens)]

    # ---- its segments --------------------------------------------------------------------------------------------------

    def splits(self, position: int) -> bool:
        """Return whether `position` lies inside a segment, and not at the end of one."""
        return 0 < position < len(self.tokens) and all(segment.stop != position for segment in self.segments)

    def segment_at(self, position: int) -> Segment:
        """Return the segment that contains `position`; if no segment does, the whole prompt as one."""
        whole = Segment(len(self.tokens), "the prompt")
        return next((segment for segment in self.segments if position < segment.stop), whole)


NO_LAYOUT = Layout(NO_TOKENS)
"""The layout of a request that is not laid out."""


class Prompt(Protocol):
    """A prompt whose documents may have no order yet.

    num_tokens: an upper bound on the prompt's length, whatever its layout.
    prefix: the prompt's tokens (int32) up to the first set of documents without an order; all tokens if it has no such set.
    documents: the keys of the documents in the first set without an order.
    """

    num_tokens: int
    prefix: np.ndarray
    documents: frozenset[str]

    def arrange(self, tree: PrefixIndex, scope: Scope, waiting: Collection[Prompt] = ()) -> Layout:
        """Return a layout whose documents are ordered to reuse the most of the KV that the tree has now.

        waiting: waiting prompts that share documents with this one.
        """
        ...


class Kind(Enum):
    """What a request serves: a client that waits (CLIENT), a client's next turn (AHEAD), or no certain client (PREFETCH).

    priority: the priority of all requests of this kind; None: each client chooses its own.
    is_client: whether a client waits for the request. If no client waits, the request is computed in small background steps.
    counts_as_use: whether the KV that the request computes or reuses counts as used.
    """

    CLIENT = None, True
    AHEAD = -101, True
    PREFETCH = -101, False

    def __init__(self, priority: int | None, counts_as_use: bool) -> None:
        self.priority, self.is_client, self.counts_as_use = priority, priority is None, counts_as_use


class DraftSource(Protocol):
    """Makes drafts for one request.

    num_drafted, num_accepted: how many drafted tokens were checked so far, and how many of these were accepted.
    """

    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt to compute, for a client or for the server itself.

    limit: the most tokens to generate.
    priority: requests with a higher number go first. If the request's kind has a priority, the kind's priority is used
        instead.
    follows: the id of the request whose next turn this request prefills; None: it does not prefill a next turn.
    wanted_slot: the id of the slot in which the request must run; -1: any slot.
    snapshot_scope: the scope of the request's snapshots; None: the model needs no snapshots, or the request may not keep
        any.
    draft: makes the request's drafts; None: no drafts.
    scores_prompt: whether the answer contains the logprobs of the prompt. For these logprobs the whole prompt is computed,
        in a scope of this request alone.
    session: the name of the request's session; empty: none.
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
        """Return whether `other` can reuse the fixed prefix of this request, and its documents if it has any."""
        own, others = self.prompt, other.prompt
        start = others.prefix[: None if own.documents else len(own.prefix)]
        may_lead = self.shares_with(other) and own.documents in (frozenset(), others.documents)
        return may_lead and np.array_equal(own.prefix, start)

    def shares_with(self, other: Request) -> bool:
        """Return whether this request and `other` read and write the cache in the same scope."""
        return self.index_scope == other.index_scope

    @property
    def index_scope(self) -> Scope:
        """The scope in which the request reads and writes the cache."""
        return self.snapshot_scope or self.scope

    @property
    def keeps(self) -> bool:
        """Whether any KV or snapshot of the request stays in the cache."""
        return self.cache or self.snapshot_scope is not None
