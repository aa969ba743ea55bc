"""A request: what was asked, and how far it is, with its known tokens and how many of them have KV."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from operator import attrgetter
from typing import NamedTuple, Protocol

import numpy as np

from .host import PromptTree
from .lookup import Lookup
from .plan import HostCopy, Span
from .prefix_tree import PrefixTree
from .radix import NO_TOKENS, Claim, Node, RadixTree, Section, Sequence, common_prefix, path
from .reuse import Reuse, ids_of
from .scope import Scope
from .tier import Record

PATIENCE = 0.07  # of the time to compute what is fetched, that a request waits at most while nothing arrives: 0.1 in all


@dataclass(frozen=True, slots=True)
class PlacedDocument:
    """A document in a prompt, at positions [start, stop)."""

    id: str
    key: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class MovedDocument:
    """A document at positions [start, stop) of a prompt, which is read behind the prompt's prefix alone.

    id, key: as in `PlacedDocument`. prefix (int32): the tokens up to the prompt's first document, one array of all its
    documents; tokens (int32): its own.
    """

    id: str
    key: str
    start: int
    stop: int
    _: KW_ONLY
    prefix: np.ndarray
    tokens: np.ndarray

    @property
    def num_prefix(self) -> int:
        """The number of tokens up to the prompt's first document."""
        return len(self.prefix)

    @property
    def text(self) -> np.ndarray:
        """The tokens (int32) that it is read in."""
        return np.concatenate((self.prefix, self.tokens))

    @property
    def distance(self) -> int:
        """Positions from the place where it was read to that where it stands."""
        return self.start - self.num_prefix

    @property
    def moves_from(self) -> int:
        """The first position whose KV comes from there. The first document stands where it was read, behind all in front."""
        return self.start if self.distance else 0

    @property
    def needed_from(self) -> int:
        """The first position of its text whose KV is needed."""
        return self.moves_from - self.distance

    def runs(self, tree: RadixTree, scope: Scope) -> Iterator[tuple[Node, int, int]]:
        """Yield the runs that a tree has of it, each with the positions of its text that stand there."""
        match = tree.match(scope, self.text)
        for node in reversed(path(match.node)):
            start, stop = max(node.start, self.needed_from), min(node.end, match.length)
            if start < stop:
                yield node, start, stop

    def cached_runs(self, tree: RadixTree, scope: Scope) -> list[tuple[Node, int, int]]:
        """Return the same, if all of its KV is on the device or in host memory; else none."""
        at, runs = self.needed_from, list(self.runs(tree, scope))
        for node, start, stop in runs:
            if start != at or (node.copy is None and node.start + node.ready < stop):
                return []
            at = stop
        return runs if at == self.num_prefix + len(self.tokens) else []

    def is_cached(self, tree: RadixTree, scope: Scope) -> bool:
        """Return whether all of its KV is on the device or in host memory."""
        return bool(self.cached_runs(tree, scope))


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
    for the reason of a miss. repeated: ids of documents that are left out here, because an earlier turn holds them. moved:
    the documents that are read separately; their tokens are marked. reads: this is no prompt to be answered but the reading
    of a document, by its place among the moved ones of a whole prompt. breakpoints: the client's marks, (stop, seconds):
    prompts may part there, and what is in front is pinned for so long; 0: not at all. opening: the tokens in front of a
    chat's first question: system text and documents, which new chats have in common; 0: this is no chat.
    """

    tokens: np.ndarray
    stops: tuple[int, ...] = ()
    documents: tuple[PlacedDocument, ...] = ()
    segments: tuple[Segment, ...] = ()
    repeated: tuple[str, ...] = ()
    moved: tuple[MovedDocument, ...] = ()
    reads: tuple[int, Layout] | None = None
    breakpoints: tuple[tuple[int, float], ...] = ()
    opening: int = 0

    @property
    def ids(self) -> np.ndarray:
        """The tokens (int32) as the model knows them."""
        return self.ids_of(self.tokens)

    @property
    def texts(self) -> list[np.ndarray]:
        """What has to stay cached for all of it to be reused: the documents that are moved, as they are read, and itself."""
        return [*(document.text for document in self.moved), self.tokens]

    @property
    def places(self) -> list[tuple[str, int, int]]:
        """(key, start, stop) of the documents that are of use to other prompts where they stand: none that is moved."""
        return [] if self.moved else [(document.key, document.start, document.stop) for document in self.documents]

    def ids_of(self, tokens: np.ndarray) -> np.ndarray:
        """Return some of its tokens, or of its answer, as the model knows them."""
        return ids_of(tokens) if self.moved else tokens

    def moved_at(self, position: int) -> int | None:
        """Return the document, by its place among the moved ones, that brings a position's KV; None: none does."""
        at = bisect_right(self.moved, position, key=attrgetter("moves_from")) - 1
        return at if at >= 0 and position < self.moved[at].stop else None

    def num_placed(self, tree: RadixTree, scope: Scope, reached: int) -> int:
        """Return how many tokens documents that are cached now bring to it, behind its first `reached` ones."""
        behind = (document for document in self.moved if document.stop > reached)
        return sum(one.stop - max(one.moves_from, reached) for one in behind if one.is_cached(tree, scope))

    def sections(self, num_tokens: int) -> list[Section]:
        """Return what is computed of the first `num_tokens` tokens: all that stands between documents that are moved."""
        starts, stops = [0, *(one.stop for one in self.moved)], [*(one.moves_from for one in self.moved), num_tokens]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop] or [(0, num_tokens)]

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

    def arrange(self, tree: PromptTree, scope: Scope, waiting: Collection[Prompt] = ()) -> Layout:
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
    draft: Lookup | None = None
    tells_prompt: bool = False
    session: str = ""

    def __post_init__(self) -> None:
        if self.kind.priority is not None:
            object.__setattr__(self, "priority", self.kind.priority)

    @property
    def index_scope(self) -> Scope:
        """The scope of what it reads from the cache and leaves there."""
        return self.snapshot_scope or self.scope

    @property
    def keeps(self) -> bool:
        """Whether anything of it stays in the cache."""
        return self.cache or self.snapshot_scope is not None


# ---- The request as it goes on. -----------------------------------------------------------------------------------------


class Phase(Enum):
    """Where a request is: it waits, runs, or is done.

    FETCHING: it waits for a lower tier. READING: it runs, and computes a document for its prompt. FOLLOWING: another request
    computes its next tokens. HELD: its prompt waits for streams that end soon.
    """

    WAITING = "waiting"
    FETCHING = "fetching"
    READING = "reading"
    PREFILL = "prefill"
    FOLLOWING = "following"
    HELD = "held"
    DECODE = "decode"
    DONE = "done"


_COMPUTES = {Phase.READING, Phase.PREFILL, Phase.DECODE}
NEXT_PHASES = {
    Phase.WAITING: {Phase.FETCHING, *_COMPUTES, Phase.DONE},
    Phase.FETCHING: {Phase.WAITING, *_COMPUTES, Phase.DONE},  # one that has to run alone waits for no tier
    Phase.READING: {Phase.FOLLOWING, Phase.HELD, Phase.WAITING, Phase.DONE},
    Phase.PREFILL: {Phase.FOLLOWING, Phase.HELD, Phase.DECODE, Phase.WAITING, Phase.DONE},
    Phase.FOLLOWING: {*_COMPUTES, Phase.HELD, Phase.WAITING, Phase.DONE},
    Phase.HELD: {*_COMPUTES, Phase.FOLLOWING, Phase.WAITING, Phase.DONE},
    Phase.DECODE: {Phase.PREFILL, Phase.WAITING, Phase.DONE},  # to prefill: a grammar forces further tokens
    Phase.DONE: set[Phase](),
}


class KvPart(NamedTuple):
    """A copy of a document's KV, or of a part of it: positions [start, stop) of the text that it was read in."""

    copy: HostCopy
    start: int
    stop: int


@dataclass(slots=True)
class ReadDocuments:
    """The documents that a request has read or found, by their place in its layout.

    pieces: their KV, which a request keeps whatever leaves the cache. num_prefix, tokens: how many tokens the request itself
    has computed for it, of the prefix and of documents. reached: the position up to which reuse was counted. looked: how
    many of the first documents were read or found cached when they were looked for last.
    """

    pieces: dict[int, tuple[KvPart, ...]] = field(default_factory=dict[int, tuple[KvPart, ...]])
    num_prefix: int = 0
    tokens: dict[int, int] = field(default_factory=dict[int, int])
    reached: int = 0
    looked: int = 0

    def count(self, document: int, num_prefix: int, start: int, stop: int) -> None:
        """Count computed tokens at positions [start, stop) of the text that a document is read in."""
        in_front = max(min(stop, num_prefix) - start, 0)
        self.num_prefix += in_front
        self.tokens[document] = self.tokens.get(document, 0) + stop - start - in_front

    def forget_unmade(self) -> None:
        """Forget copies that were decided and never made, because a step failed."""
        made = {at: pieces for at, pieces in self.pieces.items() if all(piece.copy.data is not None for piece in pieces)}
        self.pieces = made


class FetchedRecord(NamedTuple):
    """A record from a lower tier, by the tier's name and its key."""

    tier: str
    key: str
    record: Record


@dataclass(slots=True, eq=False)
class Fetch:
    """What is read from a lower tier for a request that waits, by the name of the tier. It begins when it is read.

    texts (int32): the prompt, and what its documents are read in. gained: the tokens that it spares. seconds: to compute
    these. num_bytes: of the records. keys: of the records that are not adopted yet, beginnings first, with their sizes.
    arrived: records ahead of the first of these; None: one that is gone. held: the copies that stay for it, each with a
    node that it is of. wanted_at: when the request could have been admitted without it; 0: not yet.
    """

    job: Job
    tier: str
    texts: list[np.ndarray]
    gained: int
    seconds: float
    num_bytes: int
    keys: deque[tuple[str, int]] = field(default_factory=deque[tuple[str, int]])
    arrived: dict[str, Record | None] = field(default_factory=dict[str, "Record | None"])
    held: dict[HostCopy, Node] = field(default_factory=dict[HostCopy, Node])
    num_adopted: int = 0  # bytes
    began: float = 0.0
    wanted_at: float = 0.0
    is_over: bool = False

    def patience_left(self, now: float) -> float:
        """Return the seconds that it may still go on as it is: see `slots/lower_tiers.py`."""
        if not self.wanted_at:
            return self.seconds
        return self.seconds * (PATIENCE + self.num_adopted / self.num_bytes) - (now - self.wanted_at)


class Strategy(Protocol):
    """How jobs come by KV that they need not compute. One serves all jobs of its kind; the usual one is `PlainKV`."""

    def stage(self, job: Job, whole: Layout) -> Layout:
        """Return what is computed next of a prompt: all of it, or a document that has to be read before."""
        ...

    def has_room(self, job: Job, others: Iterable[Job]) -> bool:
        """Return whether what it keeps beside the cells has room. others: the jobs that run or wait."""
        ...

    def begin(self, job: Job, waiting: Iterable[Job]) -> None:
        """Give it a sequence, with all KV that its prompt finds, and set `computed`."""
        ...

    def catch_up(self, job: Job, num_cells: int) -> None:
        """Take over what others have computed since its last span. num_cells: that the step has taken."""
        ...

    def next_stop(self, job: Job) -> int:
        """Return where its next span ends at the latest; where it stands, if nothing can be computed now."""
        ...

    def sharable(self, leader: Job, upto: int) -> int:
        """Return how many of the first `upto` tokens others can take over once `leader` has computed them."""
        ...

    def reached(self, job: Job, span: Span) -> bool:
        """Keep what stands behind a computed span. True: the stage has ended, and the job goes back to the queue."""
        ...

    def leave(self, job: Job) -> None:
        """Keep what its sequence holds, and give that up."""
        ...


@dataclass(slots=True, eq=False)
class Job:
    """A request from its submission to its end: it waits, runs, is preempted and resumes. The scheduler owns it.

    `tokens[:num_tokens]` are known: the prompt, then generated tokens, sampled or forced by a grammar. `computed` of them
    have KV; it chases `num_tokens`, and these alone tell prefill from decode: see `computes`.
    """

    request: Request
    phase: Phase = Phase.WAITING
    strategy: Strategy = field(init=False)  # once it is laid out
    layout: Layout = NO_LAYOUT
    tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    num_prompt: int = 0
    num_tokens: int = 0
    computed: int = 0
    started_at: int = 0  # `computed` at its admission
    due: int = 0  # the count of prompt tokens, those of all requests, at which no later prompt goes before this one any more
    recompute_last: int = 1  # its last tokens, which are computed even if they are cached (see `Costs`)
    held: float = 0.0  # seconds for which it has waited for streams while it ran
    stops: tuple[int, ...] = ()  # where its prefill pauses for a snapshot
    taken: Node | None = None  # the run that its last snapshot stands behind; see there whether it is still kept
    claimed: int = 0  # tokens whose path is in the tree; computed ones beyond are private to it
    num_scattered: int = 0  # spans of its answer that were computed beside others: each stands in cells of its own
    sequence: Sequence | None = None
    slot: int = -1
    readings: ReadDocuments = field(default_factory=ReadDocuments)  # of documents that are read separately
    reuse: Reuse = field(default_factory=Reuse)
    fetch: Fetch | None = None  # until it runs
    behind: deque[FetchedRecord] = field(default_factory=deque[FetchedRecord])  # of which holes keep it, beginnings first
    resumes_at: int = 0  # where its prefill pauses for the first of these; 0: nowhere
    num_expected: int | None = None  # tokens that device and host had of it when lower tiers were asked; None: they were not
    num_failures: int = 0  # steps that failed while it ran, before its first token

    def enter(self, phase: Phase) -> None:
        """Go on to a phase. Raises AssertionError where none leads there from the present one."""
        if phase is not self.phase:
            assert phase in NEXT_PHASES[self.phase], f"request {self.request.id}: {self.phase.value}, then {phase.value}"
            self.phase = phase

    def go_on(self) -> None:
        """Enter the phase in which it computes its next tokens."""
        self.enter(self.computes)

    def lay_out(self, layout: Layout) -> None:
        """Take the prompt of its next stage, with room for all tokens to generate."""
        self.layout = layout
        self.num_prompt = self.num_tokens = len(layout.tokens)
        self.tokens = np.empty(self.num_prompt + self.request.limit, np.int32)
        self.tokens[: self.num_prompt] = layout.tokens

    def claim(self, tree: PrefixTree) -> Claim:
        """Put its prompt into the tree, with nodes that end where its segments end."""
        stops = [*self.layout.stops, self.num_tokens]
        places, sections = self.layout.places, self.layout.sections(self.num_tokens)
        request, tokens = self.request, self.tokens[: self.num_tokens]
        return tree.claim(
            request.scope,
            tokens,
            stops,
            places,
            counts_as_use=request.kind.counts_as_use,
            sections=sections,
            session=request.session,
        )

    def ids(self, start: int, stop: int) -> np.ndarray:
        """Return tokens as the model knows them."""
        return self.layout.ids_of(self.tokens[start:stop])

    def told(self, start: int, stop: int) -> np.ndarray | None:
        """Return the prompt's tokens at positions [start + 1, stop + 1), if their logprobs are told."""
        last = min(stop + 1, self.num_prompt)
        return self.ids(start + 1, last) if self.request.tells_prompt and start + 1 < last else None

    def step_back(self) -> Job:
        """Be laid out again: a document has been read."""
        self.layout, self.computed = NO_LAYOUT, 0
        return self

    def start_over(self) -> None:
        """Begin again: a step failed before its first token. The time that it has waited stays."""
        self.step_back()
        self.claimed, self.taken, self.sequence = 0, None, None
        self.reuse = Reuse(num_overtaken=self.reuse.num_overtaken)
        self.readings.reached = 0
        self.readings.forget_unmade()

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what made a step fail: it runs alone until its first token shows that it is not."""
        return self.num_failures > 0 and self.num_tokens == self.num_prompt

    @property
    def has_begun(self) -> bool:
        """Whether it ran before, and waits to go on."""
        return self.reuse.num_preempted > 0 or bool(self.readings.pieces)

    @property
    def keeps_layout(self) -> bool:
        """Whether its layout still holds. The cache may have lost documents since, but not those that it has a copy of."""
        return self.layout is not NO_LAYOUT and len(self.readings.pieces) >= len(self.layout.moved)

    @property
    def is_reading(self) -> bool:
        """Whether it reads a document for its prompt, and samples nothing."""
        return self.layout.reads is not None

    def append(self, token: int) -> None:
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1

    def force(self, token: int) -> None:
        """Append a token that a grammar left no choice about. Those that are forced at once are computed together."""
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        if self.phase is Phase.DECODE:
            self.enter(Phase.PREFILL)

    def accept(self, token: int) -> None:
        """Append the token that was sampled behind a drafted one: that one was right, so its KV counts."""
        self.append(token)
        self.computed += 1
        if self.request.draft is not None:
            self.request.draft.num_accepted += 1

    def waits_for(self, leader: Job, min_shared: int) -> bool:
        """Return whether `leader` is about to compute the next tokens of this one: `min_shared` or more since its start.

        Only tokens in the tree count: generated ones are private, even where two requests generate the same one.
        """
        if leader.request.index_scope != self.request.index_scope or leader.computed != self.computed:
            return False
        shared = common_prefix(leader.tokens[: leader.claimed], self.tokens[: self.claimed])
        shared = self.strategy.sharable(leader, min(shared, self.num_tokens - self.recompute_last))
        return shared > self.computed and shared - self.started_at >= min_shared

    @property
    def computes(self) -> Phase:
        """What its next span is, if it runs. DECODE: a single generated token; several that a grammar forced are prefill."""
        if self.is_reading:
            return Phase.READING
        is_decode = self.num_tokens > self.num_prompt and self.computed == self.num_tokens - 1
        return Phase.DECODE if is_decode else Phase.PREFILL

    @property
    def answering(self) -> bool:
        """Whether only tokens of its answer are left to compute: the next one, or several that a grammar forced."""
        return self.computed >= self.num_prompt

    @property
    def num_lacking(self) -> int:
        """Tokens that are left to compute, those of documents that are moved not among them."""
        return sum(max(stop - max(start, self.computed), 0) for start, stop in self.layout.sections(self.num_tokens))

    @property
    def num_private(self) -> int:
        """Cells it holds outside the tree: generated tokens."""
        return max(self.computed - self.claimed, 0)
