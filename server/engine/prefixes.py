"""The id of a prompt's beginning: a hash of its tokens, by which a client finds its own texts among the cached runs."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

ID_BYTES = 8


def beginning(adapters: str) -> blake2b:
    """Return the hash of no tokens, of KV that these LoRA adapters compute. `followed_by` goes on, and `id_of` names it."""
    return blake2b(adapters.encode(), digest_size=ID_BYTES)


def followed_by(before: blake2b, tokens: np.ndarray) -> blake2b:
    """Return the hash of a beginning and the tokens (int32) behind it."""
    hash = before.copy()
    hash.update(np.ascontiguousarray(tokens).data)
    return hash


def id_of(hash: blake2b) -> str:
    return hash.hexdigest()


def ids_at(tokens: np.ndarray, stops: Iterable[int], adapters: str = "") -> list[str]:
    """Return the ids of a prompt's beginnings that end at ascending positions. adapters: as in `Scope`."""
    hash, start, ids = beginning(adapters), 0, []
    for stop in stops:
        hash, start = followed_by(hash, tokens[start:stop]), stop
        ids.append(id_of(hash))
    return ids
