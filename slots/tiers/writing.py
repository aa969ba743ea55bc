"""From host memory to lower tiers: each new copy of KV is handed over once, and written behind."""

from __future__ import annotations

from collections.abc import Sequence

from .tier import HostMemory, LowerTier


class WriteBehind:
    """Lives in the engine's thread. host: the tiers in host memory. lower: the tiers that get their records.

    Runs of private scopes, and those that no later process could use, stay in host memory.
    """

    def __init__(self, host: Sequence[HostMemory], lower: Sequence[LowerTier]) -> None:
        self.lower = tuple(lower)
        self._host = tuple(host) if lower else ()
        for tier in self._host:
            tier.take_unsaved()  # from now on it notes them

    def write(self) -> None:
        """Hand over the copies that were made since the last call."""
        for tier in self._host:
            for node in tier.take_unsaved():
                record = tier.get(node)
                if node.blob is not None and record is not None and record.scope.is_shared and record.scope.is_lasting:
                    node.blob.is_written = any([below.put(record) for below in self.lower])
