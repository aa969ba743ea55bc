"""Documents that are read separately: the marks of their tokens, where they stand.

    bit 30      of a document that is read separately
    bit 29      its first token: the same tokens, cut into other documents, are another path
    bits 27-28  how many of its first tokens are computed in place, as an index of LINKS
    bits 0-26   the token

So no prompt without such documents ever reaches a run behind one, and the tree needs no rule for them.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import numpy as np

from .plan import HostCopy

SEPARATE, FIRST = 1 << 30, 1 << 29
LINK_BIT = 27
IDS = (1 << LINK_BIT) - 1
LINKS = (0, 8, 16, 32)
"""The numbers of link tokens."""


def mark(document: np.ndarray, num_links: int) -> np.ndarray:
    """Return a document's tokens (int32) as the tree knows them. num_links: one of LINKS."""
    marked = document | np.int32(SEPARATE | LINKS.index(num_links) << LINK_BIT)
    marked[:1] |= np.int32(FIRST)
    return marked


def ids_of(tokens: np.ndarray) -> np.ndarray:
    """Return tokens (int32) as the model knows them."""
    return tokens & np.int32(IDS)


# ---- The records of documents that are read separately: where they were read, and where they stand. ---------------------


@dataclass(frozen=True, slots=True, eq=False)
class MovedDocument:
    """A document at positions [start, stop) of a prompt, which is read behind the prompt's front alone.

    id, key: as in `PlacedDocument`. beginning (int32): the tokens up to the prompt's first document, one array of all its
    documents; tokens (int32): its own. moves_from: the first position whose KV comes from there; the link tokens in front of
    it are computed in place.
    The first document stands where it was read: with it comes all that stands in front of it, and moves_from is 0.
    """

    id: str
    key: str
    start: int
    stop: int
    _: KW_ONLY
    beginning: np.ndarray
    tokens: np.ndarray
    moves_from: int

    @property
    def front(self) -> int:
        """The number of tokens up to the prompt's first document."""
        return len(self.beginning)

    @property
    def text(self) -> np.ndarray:
        """The tokens (int32) that it is read in."""
        return np.concatenate((self.beginning, self.tokens))

    @property
    def distance(self) -> int:
        """Positions from the place where it was read to that where it stands."""
        return self.start - self.front

    @property
    def needed_from(self) -> int:
        """The first position of its text whose KV is needed."""
        return self.moves_from - self.distance


class KvPart(NamedTuple):
    """A copy of a document's KV, or of a part of it: positions [start, stop) of the text that it was read in."""

    blob: HostCopy
    start: int
    stop: int


@dataclass(slots=True)
class ReadDocuments:
    """The documents that a request has read or found, by their place in its layout.

    pieces: their KV, which a request keeps whatever leaves the cache. front, tokens: how many tokens the request itself has
    computed for it, of the front and of documents. reached: the position up to which reuse was counted. looked: how many of
    the first documents were read or found cached when they were looked for last.
    """

    pieces: dict[int, tuple[KvPart, ...]] = field(default_factory=dict)
    front: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    reached: int = 0
    looked: int = 0

    def count(self, document: int, front: int, start: int, stop: int) -> None:
        """Count computed tokens at positions [start, stop) of the text that a document is read in."""
        in_front = max(min(stop, front) - start, 0)
        self.front += in_front
        self.tokens[document] = self.tokens.get(document, 0) + stop - start - in_front

    def forget_unmade(self) -> None:
        """Forget copies that were decided and never made, because a step failed."""
        made = {at: pieces for at, pieces in self.pieces.items() if all(piece.blob.data is not None for piece in pieces)}
        self.pieces = made
