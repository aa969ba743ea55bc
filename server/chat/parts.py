"""The parts of a prompt: text whose place is fixed, and sets of documents whose order is chosen at admission."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...ordering.document import Document
from ...ordering.prompt import order_hint
from ...slots.radix import NO_TOKENS

Tokenize = Callable[[str], np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """Tokens (int32) in a fixed place. label: their origin, in words. ends: whether a node of the prefix tree ends here.

    repeated: names of earlier texts to which these refer, instead of showing them again.
    """

    tokens: np.ndarray
    label: str
    ends: bool = True
    repeated: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class DocumentSet:
    """The documents of one turn in retrieval rank. tokens: of each. hint: tokenises an order hint; None for no hints.

    repeated: ids of documents that an earlier turn holds and that are left out here; location: tokens that say so.
    order: the ranks in the order of an earlier prompt, which stays; None: the order is not chosen yet.
    """

    documents: tuple[Document, ...]
    tokens: tuple[np.ndarray, ...]
    policy: str
    hint: Tokenize | None
    repeated: tuple[str, ...] = ()
    location: np.ndarray = field(default_factory=lambda: NO_TOKENS)
    order: tuple[int, ...] | None = None
    keep_first: int = 0  # documents that keep their rank, at either end
    keep_last: int = 0
    longest_hint: int = -1  # tokens; -1: count them
    keys: tuple[str, ...] = field(init=False)  # of the documents, in rank
    key_set: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple(document.key for document in self.documents))
        object.__setattr__(self, "key_set", frozenset(self.keys))
        if self.longest_hint < 0:
            object.__setattr__(self, "longest_hint", self._longest_hint())

    @property
    def num_tokens(self) -> int:
        """The most tokens that it can take; the exact number once its order is chosen."""
        hints = self.longest_hint + len(self.location) if self.order is None else len(self.hint_tokens(self.order))
        return sum(map(len, self.tokens)) + hints

    def hint_tokens(self, order: Sequence[int]) -> np.ndarray:
        """Return the tokens behind documents in this order: int32, empty if nothing moved and nothing is repeated.

        A hint of more than `longest_hint` tokens is left out, because the prompt has no room for it: in an odd vocabulary
        a hint may name fewer documents in more tokens.
        """
        if self.hint is None or list(order) == list(range(len(order))):
            return self.location
        hint = self.hint(order_hint([self.documents[at] for at in order], self.documents))
        return np.concatenate([self.location, hint]) if len(hint) <= self.longest_hint else self.location

    def without_hint(self) -> DocumentSet:
        """Return the set without a hint of the ranking; unchanged if its order is chosen already."""
        return self if self.order is not None else replace(self, hint=None, longest_hint=0)

    def _longest_hint(self) -> int:
        """Count the tokens of the hint of the reversed ranking, which names all documents but one."""
        if self.hint is None or self.policy == "retrieval":
            return 0
        return len(self.hint(order_hint(self.documents[::-1], self.documents)))


Part = Fixed | DocumentSet
