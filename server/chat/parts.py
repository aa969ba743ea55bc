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
    longest_hint: int = -1  # tokens; counted where it is not given
    keys: tuple[str, ...] = field(init=False)  # of the documents, in rank
    key_set: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple(document.key for document in self.documents))
        object.__setattr__(self, "key_set", frozenset(self.keys))
        if self.longest_hint < 0:
            object.__setattr__(self, "longest_hint", self._longest_hint())

    @property
    def num_tokens(self) -> int:
        """The most tokens it can take; what it takes once its order is chosen."""
        hints = self.longest_hint + len(self.location) if self.order is None else len(self.hint_tokens(self.order))
        return sum(map(len, self.tokens)) + hints

    def hint_tokens(self, order: Sequence[int]) -> np.ndarray:
        """What stands behind the documents in this order: int32, empty where nothing moved and nothing is repeated.

        A hint that names fewer documents and still takes more tokens than the longest, as an odd vocabulary might have it,
        is left out: there is room for the longest only.
        """
        if self.hint is None or list(order) == list(range(len(order))):
            return self.location
        hint = self.hint(order_hint([self.documents[at] for at in order], self.documents))
        return np.concatenate([self.location, hint]) if len(hint) <= self.longest_hint else self.location

    def without_hint(self) -> DocumentSet:
        """The same with no hint of the ranking, if its order is yet to be chosen."""
        return self if self.order is not None else replace(self, hint=None, longest_hint=0)

    def _longest_hint(self) -> int:
        """Tokens of the hint of the ranking backwards, which names all documents but one."""
        if self.hint is None or self.policy == "retrieval":
            return 0
        return len(self.hint(order_hint(self.documents[::-1], self.documents)))


Part = Fixed | DocumentSet
