"""A prompt in parts: tokens in a fixed place, and sets of documents whose order depends on what is cached."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import inf

import numpy as np

from ...ordering.document import Document
from ...ordering.policy import Arrangement, Step, arrange, cached_ranks, walk
from ...ordering.prompt import rank_hint
from ...slots.radix import NO_TOKENS, PrefixIndex, Run
from ...slots.request import Layout, PlacedDocument, Prompt, Segment
from ...slots.reuse import mark
from ...slots.scope import Scope
from ...slots.separate import MovedDocument, SeparateLayout

Tokenize = Callable[[str], np.ndarray]
PLACE = "\ufdd0"  # marks the place of documents in a message's text; not a Unicode character


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """Tokens (int32) in a fixed place of a prompt.

    label: where the tokens come from, in words.
    ends: whether a node of the prefix tree ends after the tokens.
    repeated: the names of earlier texts that these tokens refer to instead of repeating them.
    pin: if a cache breakpoint follows the tokens, the seconds for which it pins the prompt up to there; 0: the breakpoint
        pins nothing; None: no breakpoint follows.
    is_question: whether a user wrote the text.
    """

    tokens: np.ndarray
    label: str
    ends: bool = True
    repeated: tuple[str, ...] = ()
    pin: float | None = None
    is_question: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class DocumentSet:
    """The documents of one turn, in retrieval order. The rank of a document is its index in retrieval order.

    tokens: the tokens (int32) of each document.
    hint: tokenises the line that states the retrieval order; None: the prompt gets no such line.
    repeated: the ids of the documents that this turn leaves out because an earlier turn shows them.
    location: the tokens of a text that refers to the repeated documents.
    ranking: the ids of all documents in retrieval order, including the repeated ones; empty: no document is repeated.
    order: the documents' ranks, in the order of the prompt, which later turns keep; None: the order is not chosen yet.
    in_text: whether the documents stand at PLACE in the message's text; otherwise they stand before the text.
    number_of: the id and the number of each document that the client's program numbered, including repeated documents.
    best: the place of the most relevant document; `free`: any place.
    best_price_ms: how many milliseconds another order must save to move the most relevant document away from `best` (for
        `free`: from the first place). 0: the most relevant document always stands at `best`.
    """

    documents: tuple[Document, ...]
    tokens: tuple[np.ndarray, ...]
    policy: str
    hint: Tokenize | None
    repeated: tuple[str, ...] = ()
    ranking: tuple[str, ...] = ()
    location: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    order: tuple[int, ...] | None = None
    keep_first: int = 0  # the number of first documents, and of last documents, that keep their rank
    keep_last: int = 0
    in_text: bool = False
    number_of: tuple[tuple[str, str], ...] = ()
    best: str = "free"
    best_price_ms: float = 0.0
    longest_hint: int = -1  # tokens of the longest line; -1: count them
    keys: tuple[str, ...] = field(init=False)  # the keys of the documents, in retrieval order
    key_set: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple(document.key for document in self.documents))
        object.__setattr__(self, "key_set", frozenset(self.keys))
        if self.longest_hint < 0:
            object.__setattr__(self, "longest_hint", self._longest_hint())

    @property
    def num_tokens(self) -> int:
        """The most tokens that the set can take in a prompt. Once the set's order is chosen, `num_tokens` is exact."""
        hints = self.longest_hint + len(self.location) if self.order is None else len(self.hint_tokens(self.order))
        return sum(map(len, self.tokens)) + hints

    def hint_tokens(self, order: Sequence[int]) -> np.ndarray:
        """Return the tokens (int32) that follow the documents if they stand in this order.

        The tokens state the retrieval order and refer to the repeated documents. If no document is moved or repeated,
        there are no tokens.
        """
        _, hint = self.hint_of(order)
        return np.concatenate([self.location, hint]) if len(hint) else self.location

    def hint_of(self, order: Sequence[int]) -> tuple[str, np.ndarray]:
        """Return the line that states the retrieval order, and its tokens; both are empty if no document is moved.

        The line also ranks repeated documents, since the most relevant document may be one of them. If the line has more
        tokens than `longest_hint`, both results are empty, because the prompt has no room for it. The line can have more
        tokens than `longest_hint` only with an unusual vocabulary, in which a line with fewer documents has more tokens.
        """
        if self.hint is None or _in_rank(order):
            return "", NO_TOKENS
        text = self._ranked(order)
        hint = self.hint(text)
        return (text, hint) if len(hint) <= self.longest_hint else ("", NO_TOKENS)

    def placed(self, order: Sequence[int]) -> Iterator[tuple[Document, np.ndarray, int, bool]]:
        """Yield the documents in the order `order`: each with its tokens, its rank from 1, and whether it has moved."""
        ranks = {id: rank for rank, id in enumerate(self.ranking, 1)}
        for place, at in enumerate(order):
            document = self.documents[at]
            yield document, self.tokens[at], ranks.get(document.id, at + 1), at != place

    def without_hint(self) -> DocumentSet:
        """Return the set without the line that states the retrieval order.

        If the set's order is chosen already, return the set unchanged.
        """
        return self if self.order is not None else replace(self, hint=None, longest_hint=0)

    def _longest_hint(self) -> int:
        """Count the tokens of the longest line that may state the retrieval order; 0: there is no line.

        This is the line for documents in reverse order: the line for any other order names at most as many documents.
        """
        is_still = self.policy == "retrieval" and self.best != "last"
        if self.hint is None or is_still or len(self.documents) < 2:
            return 0
        return len(self.hint(self._ranked(range(len(self.documents))[::-1])))

    def _ranked(self, order: Sequence[int]) -> str:
        """Return the line that states the retrieval order. order: the documents' ranks, in the order of the prompt."""
        ids = [document.id for document in self.documents]
        return rank_hint([ids[at] for at in order], self.ranking or ids)


Part = Fixed | DocumentSet


# ---- The cached part of a prompt whose sets of documents have no order yet. ---------------------------------------------
#
# The order of one set decides how much of the rest of the prompt is cached, including the next sets. So there are two
# searches. The first goes forwards and finds the nodes that each set may follow. The second goes backwards and counts the
# cached tokens after each node. For any number of sets, both take time in proportion to the prompt and to the cached paths
# of its documents.


@dataclass(frozen=True, slots=True, eq=False)
class CachedPlace:
    """A path of cached documents: the place in the prefix tree that a prompt reaches after some documents of a set.

    node: the end of the path.
    rank: the rank of the last document on the path.
    before: the path without its last document; None: this path is empty.
    gap: the number of tokens at the end of the path that are reused only together with tokens after the path; 0: a prompt
        may continue at the end of the path.
    """

    node: Run
    rank: int = -1
    before: CachedPlace | None = None
    gap: int = 0

    def order(self) -> list[int]:
        """Return the ranks of the documents on the path, from its start."""
        ranks: list[int] = []
        place: CachedPlace = self
        while place.before is not None:
            ranks.append(place.rank)
            place = place.before
        return ranks[::-1]


class CachedPrompt:
    """Finds the cached parts of one prompt in the prefix tree. Valid only while the tree does not change."""

    def __init__(self, tree: PrefixIndex, parts: Sequence[Part]) -> None:
        self.tree, self._parts = tree, parts
        sets = [at for at, part in enumerate(parts) if isinstance(part, DocumentSet)]
        self._next_set = dict(pairwise([*sets, None]))  # by the index of a set
        self._found: dict[tuple[int, Run], Arrangement] = {}  # by the index of a set and the node before it
        self._worth: dict[tuple[int, Run], int] = {}  # by the same keys: the tokens cached after the node
        self._ends: dict[tuple[int, Run], tuple[Run | None, int]] = {}  # by the index of a set and its last node
        self._texts: dict[int, np.ndarray] = {}  # by the index of a set: the fixed text after it

    def order(self, index: int, node: Run | None, waiting: Sequence[AbstractSet[str]]) -> Sequence[int]:
        """Return the best order, as ranks, for the set at `index`.

        node: the node at which the prompt before the set ends; None: the prompt before the set is not fully cached.
        waiting: for each waiting request that could reuse the order, the keys of its documents.
        """
        part = self._set(index)
        if node is not None and self._next_set[index] is not None and (index, node) not in self._found:
            self._survey(index, node)
        found = None if node is None else self._found.get((index, node))
        if found is not None and (not waiting or found.reused_documents == len(part.keys)):
            return found.order
        return self._arrange(index, node, waiting).order

    def beyond(self, index: int, place: CachedPlace) -> int:
        """Count the reusable tokens after the last document of the set at `index`: its hint, the next text, and later sets.

        place: the place after the set's last document. If a token after `place` is reusable, the gap of `place` is added
        to the count. If no token after `place` is reusable, the result is 0.
        """
        (node, length), following = self._end(index, place), self._next_set[index]
        worth = 0 if node is None or following is None else self._worth.get((following, node), 0)
        if node is not None and worth:
            return place.gap + node.end - place.node.end + worth
        return place.gap + length if length else 0

    def end(self, index: int, node: Run, order: Sequence[int]) -> tuple[Run | None, int]:
        """Return the node before the next set, and the number of reusable tokens between the two sets' documents.

        The tokens between the documents are the hint of the set at `index` and the fixed text after it. If the tree lacks
        some of these tokens, the returned node is None. node: the end of the set's last document. order: the order of the
        set.
        """
        if (end := self._ends.get((index, node))) is None:
            run = np.concatenate([self._set(index).hint_tokens(order), self._text(index)])
            match = self.tree.match_from(node, run)
            end = self._ends[index, node] = (match.exact_end, self.tree.continued(node, match))
        return end

    def _end(self, index: int, place: CachedPlace) -> tuple[Run | None, int]:
        return self._ends.get((index, place.node)) or self.end(index, place.node, place.order())

    def _survey(self, index: int, node: Run) -> None:
        """Choose the orders for the set at `index` after `node` and for all later sets, and store them in the tables."""
        levels: list[tuple[int, Collection[Run]]] = [(index, {node: None})]
        while levels[-1][1] and (following := self._next_set[index]) is not None:
            places = (place for origin in levels[-1][1] for place in self._placed(index, origin))
            ends = (self._end(index, place)[0] for place in places)
            levels.append((following, dict.fromkeys(end for end in ends if end is not None)))
            index = following
        for index, origins in reversed(levels):
            for origin in origins:
                self._settle(index, origin)

    def _settle(self, index: int, origin: Run) -> None:
        """Choose and store the order of the set at `index`, for a prompt that reaches it at `origin`.

        The orders of all later sets must be stored already.
        """
        part = self._set(index)
        found = self._found[index, origin] = self._arrange(index, origin, ())
        worth = found.reused_tokens
        if found.reused_documents == len(part.keys):
            end = walk(CachedDocuments(self, index, origin), CachedPlace(origin), [part.keys[at] for at in found.order]).end
            assert end is not None
            worth += self.beyond(index, end)
        self._worth[index, origin] = worth

    def _arrange(self, index: int, node: Run | None, waiting: Sequence[AbstractSet[str]]) -> Arrangement:
        part = self._set(index)
        cached = CachedDocuments(self, index, node)
        if part.order is not None:
            reused = walk(cached, cached.start(), [part.keys[at] for at in part.order])
            return Arrangement(tuple(part.order), reused.documents, reused.tokens)
        names = [document.id for document in part.documents]
        pays = partial(self._pays, part.best_price_ms, node) if part.best_price_ms else None
        return arrange(
            part.keys,
            cached,
            part.policy,
            keep_first=part.keep_first,
            keep_last=part.keep_last,
            names=names,
            waiting=waiting,
            best=part.best,
            pays=pays,
        )

    def _pays(self, price_ms: float, node: Run | None, in_place: float, free: float) -> bool:
        """Return whether moving the most relevant document out of its place saves more than `price_ms`.

        in_place: how many tokens after `node` are reused if the most relevant document stays in its place. free: how many
        tokens after `node` are reused in the best of all orders.
        """
        if node is None or free <= in_place:
            return False
        return 1000 * self.tree.seconds(node.end + round(in_place), round(free - in_place)) > price_ms

    def _placed(self, index: int, origin: Run) -> Iterator[CachedPlace]:
        """Yield each cached path after `origin` that has all documents of the set at `index`."""
        part = self._set(index)
        cached, ranks = CachedDocuments(self, index, origin), {key: rank for rank, key in enumerate(part.keys)}
        stack = [(CachedPlace(origin), 0)]
        while stack:
            place, count = stack.pop()
            if count < len(part.keys):
                steps = (cached.follow(place, part.keys[rank]) for rank in cached_ranks(cached, place, ranks))
                stack += [(step.position, count + 1) for step in steps if step is not None]
            elif len(set(place.order())) == count:
                yield place

    def _text(self, index: int) -> np.ndarray:
        if (text := self._texts.get(index)) is None:
            fixed = [part.tokens for part in self._parts[index + 1 : self._next_set[index]] if isinstance(part, Fixed)]
            text = self._texts[index] = np.concatenate([NO_TOKENS, *fixed])
        return text

    def _set(self, index: int) -> DocumentSet:
        part = self._parts[index]
        assert isinstance(part, DocumentSet)
        return part


class CachedDocuments:
    """An `ordering.Index` of the documents of one set that are cached after a node.

    The positions of this index are `CachedPlace`s.

    A document that a running request has yet to compute counts as cached: the prompt waits for the document's KV and
    shares it.
    """

    def __init__(self, prompt: CachedPrompt, index: int, origin: Run | None) -> None:
        self._prompt, self._index, self._origin = prompt, index, origin
        self._ranks = {key: rank for rank, key in enumerate(prompt._set(index).keys)}

    def start(self) -> CachedPlace | None:
        return None if self._origin is None else CachedPlace(self._origin)

    def after(self, position: CachedPlace) -> Collection[str]:
        return position.node.documents

    def follow(self, position: CachedPlace, key: str) -> Step[CachedPlace] | None:
        end = position.node.documents.get(key)
        if end is None:
            return None
        tokens, gap = position.gap + end.end - position.node.end, 0
        if not self._prompt.tree.may_continue(end):
            tokens, gap = 0, tokens
        saved = tokens * self._prompt.tree.saved_share(end)
        return Step(CachedPlace(end, self._ranks[key], position, gap), tokens, saved, ahead=inf if end.children else 0.0)

    def beyond(self, position: CachedPlace) -> float:
        return float(self._prompt.beyond(self._index, position))


# ---- A prompt as parts, and its layout with ordered documents. ----------------------------------------------------------
#
# The order is chosen at admission, for the whole conversation and by the prefix tree at that time. Documents of an earlier
# turn keep their order, because the rest of the conversation is cached only after that order.


class ChatPrompt:
    """A prompt as a list of parts. Implements `slots.request.Prompt`."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.num_tokens = sum(part.num_tokens for part in parts)
        sets = ((at, part) for at, part in enumerate(parts) if isinstance(part, DocumentSet) and part.order is None)
        self._first_free, free = next(sets, (len(parts), None))
        self.documents: frozenset[str] = frozenset() if free is None else free.key_set
        runs = (run for part in self.parts[: self._first_free] for run in _runs(part))
        self.prefix = np.concatenate([NO_TOKENS, *runs])

    def arrange(self, tree: PrefixIndex, scope: Scope, waiting: Collection[Prompt] = ()) -> Layout:
        """Choose an order for each set of documents, and lay out all parts.

        The order depends on the tree, and on the waiting prompts that could reuse it.
        """
        layout, cached = _LayoutBuilder(), CachedPrompt(tree, self.parts)
        node = tree.roots.get(scope)
        before: list[np.ndarray] = []  # tokens before the first set
        previous: int | None = None  # the index of the set before this part
        order: Sequence[int] = ()
        has_moved = False
        for index, part in enumerate(self.parts):
            if isinstance(part, Fixed):
                layout.add_text(part)
                layout.repeat(part.repeated)
                before.append(part.tokens)
                continue
            if node and previous is not None:
                node, _ = cached.end(previous, node, order)
            elif node:
                node = _follow(tree, node, before)
            order = cached.order(index, node, self._sharing(waiting, index)) if part.order is None else part.order
            for document in part.placed(order):
                layout.add_document(*document)
                node = node and node.documents.get(document[0].key)
            layout.add(part.hint_tokens(order), "the hints", ends=False, verb="are")
            layout.repeat(part.repeated)
            if part.order is None and not _in_rank(order):
                has_moved, (layout.hint, _) = True, part.hint_of(order)
            previous = index
        return layout.build(self._cached_in_rank(tree, scope) if has_moved else None)

    def _cached_in_rank(self, tree: PrefixIndex, scope: Scope) -> int:
        """Count the tokens that the prompt would reuse if each set without a chosen order were in retrieval order."""
        if (root := tree.roots.get(scope)) is None:
            return 0
        tokens = np.concatenate([NO_TOKENS, *(run for part in self.parts for run in _runs(part))])
        return min(tree.continued(root, tree.match_from(root, tokens)), max(len(tokens) - tree.recompute_last, 0))

    def _sharing(self, waiting: Collection[Prompt], index: int) -> list[frozenset[str]]:
        """Return the document keys of each waiting prompt that could share the order of the set at `index`.

        A waiting prompt could share the order if it has the same tokens before the set. Only the order of the first set
        without a chosen order can be shared, because it decides which tokens stand before the later sets.
        """
        if index != self._first_free:
            return []
        alike = (other for other in waiting if isinstance(other, ChatPrompt) and other.documents)
        return [other.documents for other in alike if np.array_equal(self.prefix, other.prefix)]


class SeparatePrompt(ChatPrompt):
    """A prompt whose documents are read separately: each as if it directly followed the text before the first document.

    The order of the documents does not affect the reuse of KV. The documents therefore keep retrieval order, or the order
    that they had in an earlier turn.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__([_kept_in_rank(part) if isinstance(part, DocumentSet) else part for part in parts])
        self._layout = self._lay_out()
        self.prefix = self._layout.tokens

    def arrange(self, tree: PrefixIndex, scope: Scope, waiting: Collection[Prompt] = ()) -> Layout:
        """Return the only possible layout."""
        return self._layout

    def _lay_out(self) -> Layout:
        layout = _LayoutBuilder()
        for part in self.parts:
            if isinstance(part, Fixed):
                layout.add_text(part)
            else:
                for document in part.placed(part.order or ()):
                    layout.add_separate(*document)
                layout.add(part.hint_tokens(part.order or ()), "the hints", ends=False, verb="are")
            layout.repeat(part.repeated)
        return layout.build()


def _in_rank(order: Sequence[int]) -> bool:
    return list(order) == list(range(len(order)))


def _kept_in_rank(documents: DocumentSet) -> DocumentSet:
    """Return the set with retrieval order as its chosen order. If an order is chosen already, return the set unchanged."""
    return documents if documents.order is not None else replace(documents, order=tuple(range(len(documents.documents))))


def _follow(tree: PrefixIndex, node: Run, runs: Sequence[np.ndarray]) -> Run | None:
    """Follow tokens from `node`. Return the node that ends exactly after the last token; None: there is no such node."""
    if not runs:
        return node
    return tree.match_from(node, np.concatenate(runs)).exact_end


def _runs(part: Part) -> Iterator[np.ndarray]:
    """Yield the tokens of a part: of a text, or of a set's documents and its hint.

    A set without a chosen order is in retrieval order.
    """
    if isinstance(part, Fixed):
        yield part.tokens
    else:
        order = range(len(part.documents)) if part.order is None else part.order
        yield from (part.tokens[at] for at in order)
        yield part.hint_tokens(order)


class _LayoutBuilder:
    """Joins the parts of a prompt into a layout, and notes where each part ends."""

    def __init__(self) -> None:
        self._tokens: list[np.ndarray] = []
        self._stops: list[int] = []
        self._documents: list[PlacedDocument] = []
        self._segments: list[Segment] = []
        self._repeated: list[str] = []
        self._length = 0
        self._prefix: np.ndarray | None = None  # the text before documents that are read separately
        self._moved: list[MovedDocument] = []
        self._breakpoints: list[tuple[int, float]] = []
        self._opening: int | None = None  # the number of tokens before the first question
        self.hint = ""

    def add_text(self, part: Fixed) -> None:
        """Add a text in a fixed place.

        Note where the text's breakpoint is, and where the prompt's first question starts.
        """
        if part.is_question and self._opening is None:
            self._opening = self._length
        if part.pin is not None:
            self._breakpoints.append((self._length + len(part.tokens), part.pin))
        self.add(part.tokens, part.label, part.ends)

    def add(self, tokens: np.ndarray, label: str, ends: bool, *, verb: str = "is") -> None:
        if not len(tokens):
            return
        self._tokens.append(tokens)
        self._length += len(tokens)
        self._segments.append(Segment(self._length, label, verb))
        if ends:
            self._stops.append(self._length)

    def add_document(self, document: Document, tokens: np.ndarray, rank: int, moved: bool) -> None:
        start = self._length
        self.add(tokens, f"document {document.id}", ends=True)
        placed = PlacedDocument(document.id, document.key, start, self._length, rank=rank, moved=moved)
        self._documents.append(placed)

    def add_separate(self, document: Document, tokens: np.ndarray, rank: int, moved: bool) -> None:
        if self._prefix is None:
            self._prefix = np.concatenate([NO_TOKENS, *self._tokens])
            self._stops.append(self._length)
        start = self._length
        self.add_document(document, mark(tokens), rank, moved)
        if len(tokens):
            place = (document.id, document.key, start, self._length)
            self._moved.append(MovedDocument(*place, prefix=self._prefix, tokens=tokens))

    def repeat(self, ids: Sequence[str]) -> None:
        self._repeated += ids

    def build(self, in_rank: int | None = None) -> Layout:
        if self._moved and self._moved[-1].stop == self._length:
            self._end_in_text()
        lay_out = partial(SeparateLayout, moved=tuple(self._moved)) if self._moved else Layout
        return lay_out(
            np.concatenate([NO_TOKENS, *self._tokens]),
            stops=tuple(self._stops),
            documents=tuple(self._documents),
            segments=tuple(self._segments),
            repeated=tuple(self._repeated),
            breakpoints=tuple(self._breakpoints),
            opening=self._opening or 0,
            in_rank=in_rank,
            hint=self.hint.strip(),
        )

    def _end_in_text(self) -> None:
        """Make the prompt's last token, which belongs to a separate document, a part of the text.

        The last token of a prompt is always computed, so it cannot come from a document's KV.
        """
        last = self._moved.pop()
        self._tokens[-1] = np.concatenate((self._tokens[-1][:-1], last.tokens[-1:]))
        if last.moves_from < last.stop - 1:
            self._moved.append(replace(last, stop=last.stop - 1, tokens=last.tokens[:-1]))
