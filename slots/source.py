"""The origins of prompt tokens that are not computed."""

from __future__ import annotations

from enum import StrEnum


class Source(StrEnum):
    """One word each, in answers and in metrics. A further tier below host memory counts by its own name."""

    OWN = "own"  # the sequence of this conversation, continued
    FORK = "fork"  # shared with another sequence
    HOST = "host"  # a copy in host memory that was made since the start, or that a client restored
    DISK = "disk"  # a record of the disk tier
    SNAPSHOT = "snapshot"  # a recurrent state in host memory
    MOVED = "moved"  # a document that was read elsewhere
    NONE = "none"  # nothing is cached


ON_DEVICE = frozenset({Source.OWN, Source.FORK})
"""The origins whose KV is there already. All others' comes from host memory: that takes time, too."""
