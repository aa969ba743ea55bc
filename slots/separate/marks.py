"""Marked tokens: documents that are read separately have other tokens in the prefix tree than the same text read jointly.

    bit 30      of a document that is read separately
    bit 29      its first token: the same tokens, cut into other documents, are another path
    bits 27-28  how many of its first tokens are computed in place, as an index of LINKS
    bits 0-26   the token

So no prompt without such documents ever reaches a run behind one, and the tree needs no rule for them.
"""

from __future__ import annotations

import numpy as np

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
