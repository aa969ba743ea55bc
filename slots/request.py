"""A request: what was asked, frozen. Its prompt, and the layout of that once its documents have an order."""

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
    """A document in a prompt, at positions [start, stop). rank: in retrieval, from 1. moved: it does not stand in rank."""

    id: str
    key: str
    start: int
    stop: int
    rank: int = 1
    moved: bool = False


class Segment(NamedTuple):
    """A part of a prompt, which ends in front of `stop`. label: its origin, in words; verb: the one that goes with it."""

    stop: int
    label: str
    verb: str = "is"

    @property
    def miss(self) -> str:
        """The reason of a miss that begins in it, as a sentence."""
        return f"{self.label} {self.verb} not cached here"


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A prompt whose documents have their order.

    tokens: int32. stops: ascending positions where nodes of the tree shall end. segments: all parts of the prompt in order,
    for the reason of a miss. repeated: ids of documents that are left out here, because an earlier turn holds them.
    breakpoints: the client's marks, (stop, seconds): prompts may part there, and what is in front is pinned for so long; 0:
    not at all. opening: the tokens in front of a chat's first question: system text and documents, which new chats have in
    common; 0: this is no chat. in_rank: the tokens that would be cached with all documents in retrieval rank; None:
    none has moved. hint: the line that tells the ranking of the last ones that have; empty: there is none.
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

    # ---- where all of a prompt is read as it stands; special layouts differ ------------------------------------------

    @property
    def in_pieces(self) -> bool:
        """Whether parts of it are cached apart from what stands in front of them."""
        return False

    @property
    def is_stage(self) -> bool:
        """Whether it is no prompt to be answered, but something that has to be computed for one."""
        return False

    @property
    def texts(self) -> list[np.ndarray]:
        """The tokens (int32) of what has to stay cached for all of it to be reused; the last ones are its own."""
        return [self.tokens]

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """(key, start, stop) of the documents that are of use to other prompts where they stand."""
        return [(document.key, document.start, document.stop) for document in self.documents]

    def ids_of(self, tokens: np.ndarray) -> np.ndarray:
        """Return some of its tokens, or of its answer, as the model knows them (int32)."""
        return tokens

    def num_placed(self, tree: PromptTree, scope: Scope, reached: int) -> int:
        """Return how many tokens that are cached elsewhere now come to it behind its first `reached` ones."""
        return 0

    def sections(self, num_tokens: int) -> list[Section]:
        """Return what is computed of the first `num_tokens` tokens."""
        return [(0, num_tokens)]

    # ---- its segments --------------------------------------------------------------------------------------------------

    def splits(self, position: int) -> bool:
        """Whether a segment begins before `position` and ends behind it."""
        return 0 < position < len(self.tokens) and all(segment.stop != position for segment in self.segments)

    def segment_at(self, position: int) -> Segment:
        """Return the segment at `position`; the whole prompt, if it has none there."""
        whole = Segment(len(self.tokens), "the prompt")
        return next((segment for segment in self.segments if position < segment.stop), whole)


NO_LAYOUT = Layout(NO_TOKENS)
"""Of a request that is not laid out."""


class Prompt(Protocol):
    """A prompt whose documents may still be an unordered set; `num_tokens` bounds its length before it is laid out.

    beginning: its tokens (int32) up to the first set of documents without an order, all if it has none. documents: the keys
    of that set.
    """

    num_tokens: int
    beginning: np.ndarray
    documents: frozenset[str]

    def arrange(self, tree: PrefixIndex, scope: Scope, waiting: Collection[Prompt] = ()) -> Layout:
        """Order the documents by their KV in the tree now. waiting: the next prompts of this scope."""
        ...


class Kind(Enum):
    """Whom a request is for: a client who waits for it, a client's next turn, or no client in particular.

    priority: its own; None: its client's. is_client: a client waits for it. counts_as_use: of the KV that it computes or
    finds. What no client waits for is computed in small steps, ahead of its turn.
    """

    CLIENT = None, True
    AHEAD = -101, True
    PREFETCH = -101, False

    def __init__(self, priority: int | None, counts_as_use: bool) -> None:
        self.priority, self.is_client, self.counts_as_use = priority, priority is None, counts_as_use


class DraftSource(Protocol):
    """What drafts the next tokens of one request. num_drafted, num_accepted: tokens of its drafts, ever."""

    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What was asked. priority: those of a higher one go first; the kind's, where it has one. limit: the most tokens to
    generate.

    follows: the request whose next turn this one prefills. wanted_slot: the one that it waits for; -1: any. snapshot_scope:
    of its snapshots, if its model cannot be cut and may keep them. draft: the source of its drafts, if it has any.
    tells_prompt: its prompt is told with logprobs, so all of it is computed, in a scope of its own. session: its name, if
    it has one.
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
    tells_prompt: bool = False
    session: str = ""

    def __post_init__(self) -> None:
        if self.kind.priority is not None:
            object.__setattr__(self, "priority", self.kind.priority)

    def leads_to(self, other: Request) -> bool:
        """Return whether what it computes is of use to another one: its prompt begins so, and has all its documents."""
        own, others = self.prompt, other.prompt
        begins = others.beginning[: None if own.documents else len(own.beginning)]
        is_same = self.index_scope == other.index_scope and own.documents in (frozenset(), others.documents)
        return is_same and np.array_equal(own.beginning, begins)

    @property
    def index_scope(self) -> Scope:
        """The scope of what it reads from the cache and leaves there."""
        return self.snapshot_scope or self.scope

    @property
    def keeps(self) -> bool:
        """Whether anything of it stays in the cache."""
        return self.cache or self.snapshot_scope is not None
