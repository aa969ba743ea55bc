"""The cached part of a prompt whose sets of documents have no order yet.

The order of one set decides how far the rest of the prompt is cached, the next sets included. So the sets are searched
twice: forwards for the nodes that each may follow, then backwards for the tokens that are cached behind each. Both take
time in proportion to the prompt and to the cached paths of its documents, for any number of sets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from ...ordering.arrangement import Arrangement, arrange
from ...ordering.index import Step
from ...ordering.policy import cached_ranks, walk
from ...slots.node import Node
from ...slots.radix import NO_TOKENS, PromptTree
from .parts import DocumentSet, Fixed, Part


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The end of placed documents of a set: `node` ends the one of this rank, and the places before it lead there.

    gap: the last tokens before it that a prompt reuses only if it is cached further; 0 if a prompt may continue here.
    """

    node: Node
    rank: int = -1
    before: Place | None = None
    gap: int = 0

    def order(self) -> list[int]:
        """Return the ranks of the documents that lead here, in order."""
        ranks: list[int] = []
        place: Place = self
        while place.before is not None:
            ranks.append(place.rank)
            place = place.before
        return ranks[::-1]


class CachedPrompt:
    """One prompt's parts against the tree. Valid for as long as the tree does not change: one arrangement."""

    def __init__(self, tree: PromptTree, parts: Sequence[Part]) -> None:
        self.tree, self._parts = tree, parts
        self.restore_share = tree.costs.restore_share
        sets = [at for at, part in enumerate(parts) if isinstance(part, DocumentSet)]
        self._next_set = dict(pairwise([*sets, None]))  # by the index of a set
        self._found: dict[tuple[int, Node], Arrangement] = {}  # by the index of a set and the node that it follows
        self._worth: dict[tuple[int, Node], int] = {}  # likewise: tokens cached behind that node
        self._ends: dict[tuple[int, Node], tuple[Node | None, int]] = {}  # by the index of a set and its last node
        self._texts: dict[int, np.ndarray] = {}  # by the index of a set: the fixed text behind it

    def order(self, index: int, node: Node | None, waiting: Sequence[AbstractSet[str]]) -> Sequence[int]:
        """Return the best order of the set at `index` behind `node`: ranks.

        node: None if nothing is cached that far. waiting: keys of the documents of requests that would share this order.
        """
        part = self._set(index)
        if node is not None and (index, node) not in self._found:
            self._survey(index, node)
        found = None if node is None else self._found[index, node]
        if found is not None and (not waiting or found.reused_documents == len(part.keys)):
            return found.order
        return self._arrange(index, node, waiting).order

    def beyond(self, index: int, place: Place) -> int:
        """Count the reusable tokens behind a set which is placed as a whole, with its gap; its hint is the first of them."""
        (node, length), following = self._end(index, place), self._next_set[index]
        worth = 0 if node is None or following is None else self._worth.get((following, node), 0)
        if node is not None and worth:
            return place.gap + node.end - place.node.end + worth
        return place.gap + length if length else 0

    def end(self, index: int, node: Node, order: Sequence[int]) -> tuple[Node | None, int]:
        """Return the node in front of the next set, None if that is not cached, and the reusable tokens behind `node`.

        They belong to the hint of the set at `index`, which is placed as a whole and ends with `node`, and to the text
        behind the set.
        """
        if (end := self._ends.get((index, node))) is None:
            run = np.concatenate([self._set(index).hint_tokens(order), self._text(index)])
            match = self.tree.match_from(node, run)
            end = self._ends[index, node] = (match.exact_end, self.tree.continued(node, match))
        return end

    def _end(self, index: int, place: Place) -> tuple[Node | None, int]:
        return self._ends.get((index, place.node)) or self.end(index, place.node, place.order())

    def _survey(self, index: int, node: Node) -> None:
        """Fill the tables for the set at `index` behind `node`, and for all sets that follow."""
        levels: list[tuple[int, Collection[Node]]] = [(index, {node: None})]
        while levels[-1][1] and (following := self._next_set[index]) is not None:
            places = (place for origin in levels[-1][1] for place in self._placed(index, origin))
            ends = (self._end(index, place)[0] for place in places)
            levels.append((following, dict.fromkeys(end for end in ends if end is not None)))
            index = following
        for index, origins in reversed(levels):
            for origin in origins:
                self._settle(index, origin)

    def _settle(self, index: int, origin: Node) -> None:
        """Choose the order of a set behind `origin`, now that all sets behind it are settled."""
        part = self._set(index)
        found = self._found[index, origin] = self._arrange(index, origin, ())
        worth = found.reused_tokens
        if found.reused_documents == len(part.keys):
            end = walk(CachedDocuments(self, index, origin), Place(origin), [part.keys[at] for at in found.order]).end
            assert end is not None
            worth += self.beyond(index, end)
        self._worth[index, origin] = worth

    def _arrange(self, index: int, node: Node | None, waiting: Sequence[AbstractSet[str]]) -> Arrangement:
        part = self._set(index)
        cached = CachedDocuments(self, index, node)
        if part.order is not None:
            reused = walk(cached, cached.start(), [part.keys[at] for at in part.order])
            return Arrangement(tuple(part.order), reused.documents, reused.tokens)
        names = [document.id for document in part.documents]
        return arrange(
            part.keys,
            cached,
            part.policy,
            keep_first=part.keep_first,
            keep_last=part.keep_last,
            names=names,
            waiting=waiting,
        )

    def _placed(self, index: int, origin: Node) -> Iterator[Place]:
        """Yield the end of every cached path behind `origin` that holds the whole set at `index`."""
        part = self._set(index)
        cached, ranks = CachedDocuments(self, index, origin), {key: rank for rank, key in enumerate(part.keys)}
        stack = [(Place(origin), 0)]
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
    """One set of documents behind a node: an `ordering.Index` whose positions are places.

    A document counts as cached where a running request is about to compute it, too: the later request waits and shares.
    """

    def __init__(self, prompt: CachedPrompt, index: int, origin: Node | None) -> None:
        self._prompt, self._index, self._origin = prompt, index, origin
        self._ranks = {key: rank for rank, key in enumerate(prompt._set(index).keys)}

    def start(self) -> Place | None:
        return None if self._origin is None else Place(self._origin)

    def behind(self, position: Place) -> Collection[str]:
        return position.node.documents

    def follow(self, position: Place, key: str) -> Step[Place] | None:
        end = position.node.documents.get(key)
        if end is None:
            return None
        tokens, gap = position.gap + end.end - position.node.end, 0
        if not self._prompt.tree.may_continue(end):
            tokens, gap = 0, tokens
        in_host_memory_only = end.blob is not None and not end.ready
        saved = tokens * (1 - self._prompt.restore_share) if in_host_memory_only else float(tokens)
        return Step(Place(end, self._ranks[key], position, gap), tokens, saved, ahead=inf if end.children else 0.0)

    def beyond(self, position: Place) -> float:
        return float(self._prompt.beyond(self._index, position))
