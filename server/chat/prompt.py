"""A prompt as parts, and its layout once its documents have an order.

The order is chosen at admission, by the prefix tree as it is then, over the whole conversation. Documents of an earlier turn
keep their order, because the rest of the conversation is cached behind that order only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from ...ordering.document import Document
from ...slots.node import Node
from ...slots.radix import NO_TOKENS, PromptTree
from ...slots.request import Layout, PlacedDocument, Prompt
from ...slots.scope import Scope
from ...slots.separate.marks import mark
from ...slots.separate.moved import Moved
from .cached import CachedPrompt
from .parts import DocumentSet, Fixed, Part


class ChatPrompt:
    """The parts of a prompt, in order. Satisfies `slots.request.Prompt`."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self.num_tokens = sum(part.num_tokens for part in parts)
        self._first_set = next((at for at, part in enumerate(parts) if isinstance(part, DocumentSet)), len(parts))

    def arrange(self, tree: PromptTree, scope: Scope, waiting: Collection[Prompt] = ()) -> Layout:
        """Choose the order of each set of documents by the tree and the waiting prompts, and join all parts."""
        layout, cached = _LayoutBuilder(), CachedPrompt(tree, self.parts)
        node = tree.roots.get(scope)
        before: list[np.ndarray] = []  # tokens in front of the first set
        previous: int | None = None  # the set before
        order: Sequence[int] = ()
        for index, part in enumerate(self.parts):
            if isinstance(part, Fixed):
                layout.add(part.tokens, part.label, part.ends)
                layout.repeat(part.repeated)
                before.append(part.tokens)
                continue
            if node and previous is not None:
                node, _ = cached.end(previous, node, order)
            elif node:
                node = _follow(tree, node, before)
            order = cached.order(index, node, self._sharing(waiting, index)) if part.order is None else part.order
            for at in order:
                layout.add_document(part.documents[at], part.tokens[at])
                node = node and node.documents.get(part.keys[at])
            hint = part.hint_tokens(order)
            layout.add(hint, "the hints", ends=False)
            layout.repeat(part.repeated)
            previous = index
        return layout.build()

    def _sharing(self, waiting: Collection[Prompt], index: int) -> list[frozenset[str]]:
        """Return the keys of other prompts' documents in place of part `index`, for prompts that are equal up to it.

        Only a prompt's first set qualifies: the tokens in front of a later set depend on the order of the earlier ones.
        """
        if index != self._first_set:
            return []
        alike = (prompt for prompt in waiting if isinstance(prompt, ChatPrompt) and prompt._first_set == index)
        longer = (other for other in alike if index < len(other.parts))
        same = (other.parts[index] for other in longer if all(map(_is_same_text, self.parts[:index], other.parts[:index])))
        return [part.key_set for part in same if isinstance(part, DocumentSet)]


class SeparatePrompt(ChatPrompt):
    """A prompt whose documents are read separately, each behind the text in front of the first of them.

    They stand in retrieval rank, or as an earlier turn has shown them: their order does not decide what is reused.
    num_links: how many of a document's first tokens are computed in place.
    """

    def __init__(self, parts: Sequence[Part], num_links: int) -> None:
        super().__init__([_in_rank(part) if isinstance(part, DocumentSet) else part for part in parts])
        self._layout = self._lay_out(num_links)

    def arrange(self, tree: PromptTree, scope: Scope, waiting: Collection[Prompt] = ()) -> Layout:
        """Return its one layout."""
        return self._layout

    def _lay_out(self, num_links: int) -> Layout:
        layout = _LayoutBuilder(num_links)
        for part in self.parts:
            if isinstance(part, Fixed):
                layout.add(part.tokens, part.label, part.ends)
            else:
                for at in part.order or ():
                    layout.add_separate(part.documents[at], part.tokens[at])
                layout.add(part.hint_tokens(part.order or ()), "the hints", ends=False)
            layout.repeat(part.repeated)
        return layout.build()


def _in_rank(documents: DocumentSet) -> DocumentSet:
    """Return documents in retrieval rank, unless they have an order."""
    return documents if documents.order is not None else replace(documents, order=tuple(range(len(documents.documents))))


def _follow(tree: PromptTree, node: Node, runs: Sequence[np.ndarray]) -> Node | None:
    """Return the node that ends exactly where `runs` end behind `node`, if one does."""
    if not runs:
        return node
    return tree.match_from(node, np.concatenate(runs)).exact_end


def _is_same_text(one: Part, other: Part) -> bool:
    return isinstance(one, Fixed) and isinstance(other, Fixed) and np.array_equal(one.tokens, other.tokens)


class _LayoutBuilder:
    """Joins parts and counts their positions."""

    def __init__(self, num_links: int = 0) -> None:
        self._tokens: list[np.ndarray] = []
        self._stops: list[int] = []
        self._documents: list[PlacedDocument] = []
        self._segments: list[tuple[int, str]] = []
        self._repeated: list[str] = []
        self._length = 0
        self._num_links = num_links
        self._front: np.ndarray | None = None  # in front of documents that are read separately
        self._moved: list[Moved] = []

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

    def add_separate(self, document: Document, tokens: np.ndarray) -> None:
        """Add a document that is read separately."""
        if self._front is None:
            self._front = np.concatenate([NO_TOKENS, *self._tokens])
            self._stops.append(self._length)
        start, front = self._length, len(self._front)
        self.add(mark(tokens, self._num_links), f"document {document.id}", ends=True)
        self._documents.append(PlacedDocument(document.id, document.key, start, self._length))
        moves_from = 0 if start == front else start + self._num_links
        if moves_from < self._length:
            place = (document.id, document.key, start, self._length)
            self._moved.append(Moved(*place, beginning=self._front, tokens=tokens, moves_from=moves_from))

    def repeat(self, ids: Sequence[str]) -> None:
        self._repeated += ids

    def build(self) -> Layout:
        if self._moved and self._moved[-1].stop == self._length:
            self._end_in_text()
        return Layout(
            np.concatenate([NO_TOKENS, *self._tokens]),
            stops=tuple(self._stops),
            documents=tuple(self._documents),
            segments=tuple(self._segments),
            repeated=tuple(self._repeated),
            moved=tuple(self._moved),
        )

    def _end_in_text(self) -> None:
        """Count the last token as text behind the last document: a prompt ends in a token that is computed."""
        last = self._moved.pop()
        self._tokens[-1] = np.concatenate((self._tokens[-1][:-1], last.tokens[-1:]))
        if last.moves_from < last.stop - 1:
            self._moved.append(replace(last, stop=last.stop - 1, tokens=last.tokens[:-1]))
