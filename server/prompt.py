"""A prompt as parts: text whose place is fixed, and sets of documents whose order is chosen at admission.

The order is chosen against the prefix tree as it is at that moment, over the whole conversation: an earlier turn's
documents are placed as they were read then, because all that follows them is cached behind that order only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from ..ordering.arrangement import arrange
from ..ordering.document import Document
from ..ordering.index import Step
from ..ordering.prompt import order_hint
from ..slots.node import Node
from ..slots.radix import NO_TOKENS
from ..slots.request import Layout, PlacedDocument, Prompt
from ..slots.tree import PrefixTree

Tokenize = Callable[[str], np.ndarray]
RESTORE_COST = 0.01  # of prefilling the same tokens: 0.4 ms against 170 ms for 200 tokens of a 114 M model on 2 cores


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """Tokens (int32) that stand where they stand. label: what they are, in words. ends: whether a node ends here."""

    tokens: np.ndarray
    label: str
    ends: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class DocumentSet:
    """The documents of one turn in retrieval rank. tokens: of each. hint: tokenises an order hint; None for no hints.

    repeated: ids of those that an earlier turn holds, which do not stand here again; location: tokens that say so.
    order: ranks in the order in which they once stood in a prompt, which is the one they keep; None: not chosen yet.
    """

    documents: tuple[Document, ...]
    tokens: tuple[np.ndarray, ...]
    policy: str
    hint: Tokenize | None
    repeated: tuple[str, ...] = ()
    location: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    order: tuple[int, ...] | None = None
    keep_first: int = 0  # documents that stay where they are, at either end
    keep_last: int = 0

    @property
    def keys(self) -> list[str]:
        """What each document is known by."""
        return [document.key for document in self.documents]

    @property
    def num_tokens(self) -> int:
        """The most tokens it can take: the hint, where there is one, is longest when its ids are one token a byte."""
        hint = len(order_hint(self.documents[::-1], self.documents).encode()) if self.hint else 0
        return sum(map(len, self.tokens)) + len(self.location) + hint

    def hint_tokens(self, order: Sequence[int]) -> np.ndarray:
        """What stands behind the documents in this order: int32, empty where nothing moved and nothing is repeated."""
        if self.hint is None or list(order) == list(range(len(order))):
            return self.location
        return np.concatenate([self.location, self.hint(order_hint([self.documents[at] for at in order], self.documents))])


class ChatPrompt:
    """The parts of a prompt, in order. Satisfies `slots.request.Prompt`."""

    def __init__(self, parts: Sequence[Fixed | DocumentSet]) -> None:
        self.parts = tuple(parts)
        self.num_tokens = sum(part.num_tokens for part in parts)

    def arrange(self, tree: PrefixTree, scope: Hashable, waiting: Collection[Prompt] = ()) -> Layout:
        """Fix the order of every set of documents by what the tree holds and what waits, and join everything."""
        layout = _LayoutBuilder()
        node = tree.roots.get(scope)
        behind: list[np.ndarray] = []  # tokens laid out since the end of `node`
        for index, part in enumerate(self.parts):
            if isinstance(part, Fixed):
                layout.add(part.tokens, part.label, part.ends)
                behind.append(part.tokens)
                continue
            node = node and _follow(tree, node, behind)
            order = self._arranged(index, tree, node, waiting) if part.order is None else part.order
            keys = part.keys
            for at in order:
                layout.add_document(part.documents[at], part.tokens[at])
                node = node and node.documents.get(keys[at])
            hint = part.hint_tokens(order)
            layout.add(hint, "the hints", ends=False)
            layout.repeat(part.repeated)
            behind = [hint]
        return layout.build()

    def _arranged(self, index: int, tree: PrefixTree, node: Node | None, waiting: Collection[Prompt]) -> Sequence[int]:
        """The best order of the documents of part `index`, which follow `node`."""
        part = self.parts[index]
        assert isinstance(part, DocumentSet)
        cached = CachedDocuments(tree, node, part, self.parts[index + 1 :])
        names = [document.id for document in part.documents]
        others = [other.keys for prompt in waiting if (other := self._sharing(prompt, index))]
        return arrange(part.keys, cached, part.policy, part.keep_first, part.keep_last, names, others).order

    def _sharing(self, prompt: Prompt, index: int) -> DocumentSet | None:
        """The documents that another prompt has where this one has part `index`, if both are the same up to there."""
        part = prompt.parts[index] if isinstance(prompt, ChatPrompt) and index < len(prompt.parts) else None
        if not isinstance(prompt, ChatPrompt) or not isinstance(part, DocumentSet):
            return None
        return part if all(map(_is_same_text, self.parts[:index], prompt.parts[:index])) else None


class CachedDocuments:
    """What the prefix tree knows about one set of documents: an `ordering.Index` whose positions are nodes.

    A document counts as cached where a running request is about to compute it, too: whoever needs it waits and shares.
    """

    def __init__(
        self, tree: PrefixTree, origin: Node | None, part: DocumentSet, rest: Sequence[Fixed | DocumentSet]
    ) -> None:
        self._tree, self._origin, self._part, self._rest = tree, origin, part, rest
        self._ranks = {document.key: rank for rank, document in enumerate(part.documents)}

    def start(self) -> Node | None:
        return self._origin

    def follow(self, position: Node, key: str) -> Step[Node] | None:
        end = position.documents.get(key)
        if end is None:
            return None
        tokens = end.end - position.end
        in_host_memory_only = end.blob is not None and not end.ready
        saved = tokens * (1 - RESTORE_COST) if in_host_memory_only else float(tokens)
        return Step(end, tokens, saved, ahead=inf if end.children else 0.0)

    def beyond(self, position: Node) -> float:
        """How far the rest of the prompt is cached behind the whole set, placed on the path that ends at `position`."""
        hint = self._part.hint_tokens(self._order_of(position))
        return float(_reusable(self._tree, position, hint, self._rest))

    def _order_of(self, position: Node) -> list[int]:
        """The order in which the set stands on the path that ends at `position`, read backwards."""
        order: list[int] = []
        while position is not self._origin:
            # Two documents may read the same, so that a run ends both of them: one of them is behind us then.
            ranked = ((origin, self._ranks.get(key)) for origin, key in position.document_of)
            position, rank = next((origin, rank) for origin, rank in ranked if rank is not None and rank not in order)
            order.append(rank)
        return order[::-1]


def _reusable(tree: PrefixTree, node: Node, first: np.ndarray, parts: Sequence[Fixed | DocumentSet]) -> int:
    """Tokens of `first` and `parts` that are cached behind `node`, sets of documents placed for the most of them."""
    fixed = list(itertools.takewhile(lambda part: isinstance(part, Fixed), parts))
    run = np.concatenate([first, *(part.tokens for part in fixed if isinstance(part, Fixed))])
    match = tree.match_from(node, run)
    following = parts[len(fixed) :]
    if not following or match.length < len(run) or match.node.end != node.end + len(run):
        return match.length
    documents, rest = following[0], following[1:]
    assert isinstance(documents, DocumentSet)
    cached = CachedDocuments(tree, match.node, documents, rest)
    keys = documents.keys
    found = arrange(keys, cached, documents.policy, documents.keep_first, documents.keep_last)
    if found.reused_documents < len(keys):
        return match.length + found.reused_tokens
    end = match.node
    for at in found.order:
        end = end.documents[keys[at]]
    return match.length + found.reused_tokens + int(cached.beyond(end))


def _follow(tree: PrefixTree, node: Node, runs: Sequence[np.ndarray]) -> Node | None:
    """The node that ends exactly where `runs` end behind `node`, if there is one."""
    if not runs:
        return node
    tokens = np.concatenate(runs)
    match = tree.match_from(node, tokens)
    return match.node if match.length == len(tokens) and match.node.end == node.end + len(tokens) else None


def _is_same_text(one: Fixed | DocumentSet, other: Fixed | DocumentSet) -> bool:
    return isinstance(one, Fixed) and isinstance(other, Fixed) and np.array_equal(one.tokens, other.tokens)


class _LayoutBuilder:
    """Joins parts and keeps count of where they stand."""

    def __init__(self) -> None:
        self._tokens: list[np.ndarray] = []
        self._stops: list[int] = []
        self._documents: list[PlacedDocument] = []
        self._segments: list[tuple[int, str]] = []
        self._repeated: list[str] = []
        self._length = 0

    def add(self, tokens: np.ndarray, label: str, ends: bool) -> None:
        if not len(tokens):
            return
        self._tokens.append(tokens)
        self._length += len(tokens)
        self._segments.append((self._length, label))
        if ends:
            self._stops.append(self._length)

    def add_document(self, document: Document, tokens: np.ndarray) -> None:
        start = self._length
        self.add(tokens, f"document {document.id}", ends=True)
        self._documents.append(PlacedDocument(document.id, document.key, start, self._length))

    def repeat(self, ids: Sequence[str]) -> None:
        self._repeated += ids

    def build(self) -> Layout:
        return Layout(
            np.concatenate(self._tokens),
            tuple(self._stops),
            tuple(self._documents),
            tuple(self._segments),
            tuple(self._repeated),
        )
