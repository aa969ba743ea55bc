"""What an ordering policy may ask of a cache.

Two things answer: the engine's own prefix tree (exact), and a `KnowledgeTree` over document keys for engines that are
not ours.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Generic, Protocol, TypeVar, runtime_checkable

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Step(Generic[P]):
    """One cached document: where it ends, and what reusing it is worth.

    `tokens` are its reusable tokens. `saved` is that less the cost of restoring them, in tokens of prefill, never
    below 0: a document on the device saves all of its tokens, one on a slower tier fewer. `ahead` is an upper bound
    on what any path behind it saves, `Index.beyond` included; an index that knows it spares the search the branches
    that cannot win.
    """

    position: P
    tokens: int
    saved: float
    ahead: float = inf


class Index(Protocol[P]):
    """Which documents are cached behind which, as positions of type `P`. Asking never changes the index."""

    def start(self) -> P | None:
        """Where the request's documents begin in the cache, None when nothing is cached up to there."""
        ...

    def behind(self, position: P) -> Collection[str]:
        """Keys of the documents that are cached right behind `position`; in constant time, and so is `in` of it."""
        ...

    def follow(self, position: P, key: str) -> Step[P] | None:
        """The step over document `key` where it is cached right behind `position`, else None."""
        ...

    def beyond(self, position: P) -> float:
        """Tokens saved behind `position` once the whole set is placed, 0.0 when nothing follows.

        An earlier turn's documents are followed by the rest of the conversation: the order they were read in keeps
        all of it.
        """
        ...


@runtime_checkable
class RecencyIndex(Protocol):
    """An index that also knows when a document was last used; the recency baseline asks for it."""

    def recency(self, key: str) -> float | None:
        """A number that grows with later use, None for a document never seen."""
        ...
