"""Reused tokens: their origins and spans, and the marks on tokens of documents that are read separately."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np


class Source(StrEnum):
    """The origin of reused tokens, as reports and metrics name it. A lower tier that is not listed has its own name."""

    OWN = "own"  # the sequence of this conversation, continued
    FORK = "fork"  # shared with another sequence
    HOST = "host"  # a copy in host memory that was made since the start, or that a client restored
    DISK = "disk"  # a record of the disk tier
    IMPORTED = "imported"  # a record from another build or CPU, or KV that was computed after such a record
    SNAPSHOT = "snapshot"  # a recurrent state in host memory
    MOVED = "moved"  # a document that was read elsewhere
    NONE = "none"  # nothing is cached


ON_DEVICE = frozenset({Source.OWN, Source.FORK})
"""The origins whose KV is on the device. KV of any other origin comes from host memory, which takes time."""


@dataclass(frozen=True, slots=True)
class ReusedSpan:
    """Prompt tokens at positions [start, stop) that were not computed.

    source: the origin of their KV.
    seconds: the time that this reuse saved.
    """

    start: int
    stop: int
    source: str
    seconds: float


@dataclass(slots=True)
class Reuse:
    """What a request reused, and how long it was delayed.

    spans: the reused spans in order. Each span was cached at the request's first admission, or was taken over later.
    num_preempted: how often the request was preempted.
    num_overtaken: how many later requests were admitted before this one.
    fetch_seconds: how long the request waited for records of a lower tier.
    has_hole: whether the request computed tokens between two reused spans. The cache had lost the KV of these tokens.
    """

    spans: list[ReusedSpan] = field(default_factory=list[ReusedSpan])
    num_preempted: int = 0
    num_overtaken: int = 0
    fetch_seconds: float = 0.0
    has_hole: bool = False

    @property
    def cached(self) -> int:
        """The number of prompt tokens that were not computed."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def sources(self) -> dict[str, int]:
        """The number of prompt tokens that were not computed, by origin."""
        tokens: dict[str, int] = {}
        for span in self.spans:
            tokens[span.source] = tokens.get(span.source, 0) + span.stop - span.start
        return tokens

    @property
    def source(self) -> str:
        """The origin with the most prompt tokens that were not computed."""
        return max(sources, key=lambda source: sources[source]) if (sources := self.sources) else Source.NONE


def prefix_cache_ratio(num_cached: int, num_prompt: int) -> float:
    """Return the share of a prompt's tokens that were not computed; 0 for an empty prompt (ADR 007, telemetry)."""
    return num_cached / num_prompt if num_prompt else 0.0


# ---- Documents that are read separately have marked tokens. -------------------------------------------------------------
#
#     bit 30      a token of a document that is read separately
#     bit 29      the document's first token: the same tokens, cut into other documents, are another path
#     bits 27-28  unused; a record of an earlier version may have them
#     bits 0-26   the token
#
# So a prompt without such documents never matches the runs after one, and the tree needs no rule for them.

SEPARATE, FIRST = 1 << 30, 1 << 29
IDS = (1 << 27) - 1


def mark(document: np.ndarray) -> np.ndarray:
    """Return the tokens (int32) of a separately read document with their marks, as the tree knows them."""
    marked = document | np.int32(SEPARATE)
    marked[:1] |= np.int32(FIRST)
    return marked


def ids_of(tokens: np.ndarray) -> np.ndarray:
    """Return tokens (int32) without marks, as the model knows them."""
    return tokens & np.int32(IDS)
