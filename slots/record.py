"""A record: the KV of a run, with all tokens of the prompt up to the run's end. Lower tiers and files store records."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from .scope import Scope

SUFFIX = ".kv"

Cut = Callable[[np.ndarray, int, int], np.ndarray]
"""Returns the part of a copy (uint8) at positions [start, stop)."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """The KV of a run.

    tokens (int32): all tokens from position 0 to the run's end.
    data (uint8): the KV from `start` on.
    documents: (key, first position) of the documents that end with the run.
    frequency, token_cost: as in `Node`.
    state (uint8): the recurrent state after the run, of a model that has one.
    """

    scope: Scope
    tokens: np.ndarray
    start: int
    data: np.ndarray
    _: KW_ONLY
    documents: tuple[tuple[str, int], ...] = ()
    frequency: int = 1
    token_cost: float = 0.0
    state: np.ndarray | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of the KV and the state."""
        return len(self.data) + (len(self.state) if self.state is not None else 0)

    def used_once(self) -> Record:
        """Return the record with a frequency of 1 and a token cost of at most 1, since a file must not set its own worth."""
        return replace(self, frequency=1, token_cost=min(self.token_cost, 1.0))


def file_name(record: Record) -> str:
    """Return the file name of a record.

    Records of the same run of the same scope have the same file name. The name reveals neither the run nor the scope.
    """
    place = [record.scope.text, record.start, *["state"] * (record.state is not None)]
    digest = hashlib.blake2b(json.dumps(place).encode(), digest_size=16)
    digest.update(record.tokens.tobytes())
    return digest.hexdigest() + SUFFIX
