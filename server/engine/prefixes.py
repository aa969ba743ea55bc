"""The id of a prompt's beginning: a hash of its tokens, by which a client finds its own texts among the cached runs."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

ID_BYTES = 8
Hash = type(blake2b())


def beginning() -> Hash:
    """Return the hash of no tokens. `followed_by` goes on from it, and `id_of` names what it has read."""
    return blake2b(digest_size=ID_BYTES)


def followed_by(before: Hash, tokens: np.ndarray) -> Hash:
    """Return the hash of a beginning and the tokens (int32) behind it."""
    hash = before.copy()
    hash.update(np.ascontiguousarray(tokens).data)
    return hash


def id_of(hash: Hash) -> str:
    return hash.hexdigest()


def ids_at(tokens: np.ndarray, stops: Iterable[int]) -> list[str]:
    """Return the ids of a prompt's beginnings that end at ascending positions."""
    hash, start, ids = beginning(), 0, []
    for stop in stops:
        hash, start = followed_by(hash, tokens[start:stop]), stop
        ids.append(id_of(hash))
    return ids
