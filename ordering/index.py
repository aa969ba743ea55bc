"""The questions that an ordering policy may ask a cache.

Two classes answer them: slotcache's own prefix tree, exactly, and `KnowledgeTree`, a prediction for other engines.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Generic, Protocol, TypeVar, runtime_checkable

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Step(Generic[P]):
    """One cached document: its end, and the worth of its reuse.

    position: the end of the document in the cache. tokens: the tokens that can be reused. saved: `tokens` less the cost
    of their restore, in tokens of prefill, 0 or more; a document on the device saves all its tokens, a document on a
    slower tier fewer. ahead: an upper bound on the tokens that any path after this document saves, `Index.beyond`
    included; with it, the search skips branches that cannot win.
    """

    position: P
    tokens: int
    saved: float
    ahead: float = inf


class Index(Protocol[P]):
    """The cached documents and their successors. A position, of type `P`, is a place in the cache. No method changes it."""

    def start(self) -> P | None:
        """Return the position at which a request's documents begin; None if the text before them is not cached."""
        ...

    def behind(self, position: P) -> Collection[str]:
        """Return the keys of the documents that are cached directly after `position`.

        Must take constant time, and so must `in` on the result.
        """
        ...

    def follow(self, position: P, key: str) -> Step[P] | None:
        """Return the step over document `key`; None if it is not cached directly after `position`."""
        ...

    def beyond(self, position: P) -> float:
        """Return the tokens that a request saves after its last document if that document ends at `position`.

        The rest of a conversation follows the documents of an earlier turn: the same order reuses the rest, too. 0.0
        if no cached text follows.
        """
        ...


@runtime_checkable
class RecencyIndex(Protocol):
    """An index that also knows the last use of a document. Only the `recency` policy needs it."""

    def recency(self, key: str) -> float | None:
        """Return a number that is greater for later use; None for an unknown document."""
        ...
