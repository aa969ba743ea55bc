"""The protocol of tiers below host memory, and the writes to them.

    device        cells of the pool      PrefixTree and its device
     |   ^        Save and Restore, operations of a step
    host memory   copies of runs         HostMemory, of the prefix tree, or of states (models that cannot be cut)
     |   ^        written by `WriteBehind`, fetched by `Fetches`
    lower tiers   records                DiskTier

A new tier is a class with the methods of `LowerTier` and one more entry in `server.load.lower_tiers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..host import HostMemory
from ..record import Record, file_name
from ..scope import Scope
from .record_index import RecordIndex


class LowerTier(Protocol):
    """A tier that may outlive the server.

    Several threads call it: the engine's thread puts records, other threads read or drop them.

    `put` must not block: it runs between two steps of the engine.

    index: all records, by key (`file_name`).
    """

    @property
    def name(self) -> str:
        """The short name of the tier, for reports of the origin of a prompt's tokens, and for names of metrics."""
        ...

    index: RecordIndex
    max_bytes: int
    """Most bytes of its records."""
    num_written: int
    """Records written, ever."""
    num_refused: int
    """Records that were damaged, and are gone."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its records."""
        ...

    def __str__(self) -> str:
        """Return the place of its records, for the log."""
        ...

    def has_room(self, num_bytes: int) -> bool:
        """Return whether `put` would take `num_bytes` bytes now; fast, for the engine's thread."""
        ...

    def put(self, record: Record) -> bool:
        """Keep a record, and evict older ones if need be. False: the record is refused."""
        ...

    def get(self, key: str, /) -> Record | None:
        """Return a record; None if it is gone. It may take long."""
        ...

    def drop(self, scope: Scope) -> object:
        """Forget the records of all scopes with this scope's name, whatever their adapters. Return once they are gone."""
        ...

    def wait(self) -> None:
        """Return once the index has all records of an earlier process."""
        ...

    def __contains__(self, key: str, /) -> bool:
        """Return whether a record is stored or about to be, and no drop of its scope is under way.

        Fast, for the engine's thread.
        """
        ...

    def close(self) -> None:
        """Finish pending writes, within some seconds."""
        ...


class WriteBehind:
    """Passes each new copy of KV to lower tiers once, in the engine's thread.

    lower: the tiers that get copies.

    Runs of private scopes, and runs that no later process could use, stay in host memory. Host memory asks this object what
    the lower tiers have: see `Below`.
    """

    def __init__(self, host: HostMemory, lower: Sequence[LowerTier]) -> None:
        self._host, self.lower = host, tuple(lower)
        if lower:
            host.write_behind(self)

    def has_accepted(self, key: str) -> bool:
        return any(key in below for below in self.lower)

    def has_written(self, key: str) -> bool:
        return any(key in below.index.entries for below in self.lower)

    def takes(self, num_bytes: int) -> bool:
        return any(below.has_room(num_bytes) for below in self.lower)

    def write(self) -> None:
        """Pass on the copies that were made since the last call."""
        for node in self._host.take_unsaved() if self.lower else ():
            record = self._host.get(node)
            if record is not None and record.scope.may_outlive:
                node.record = file_name(record) if any([below.put(record) for below in self.lower]) else ""
