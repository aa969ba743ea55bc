"""The parts of a prompt: text whose place is fixed, and sets of documents whose order is chosen at admission."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..ordering.document import Document
from ..ordering.prompt import order_hint
from ..slots.radix import NO_TOKENS

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
    keys: tuple[str, ...] = field(init=False)  # of the documents, in rank
    key_set: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple(document.key for document in self.documents))
        object.__setattr__(self, "key_set", frozenset(self.keys))

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


Part = Fixed | DocumentSet
