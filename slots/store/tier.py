"""The protocol of tiers below host memory, and the writes to them.

    device         cells      PrefixTree, DeviceCells
     |    ^                   Save, Restore
    host memory    copies     HostMemory
     |    ^                   WriteBehind, Fetches
    lower tiers    records    DiskTier

The table shows what each tier contains, and the class that manages it. Between two tiers are the names of what moves KV down
and up. To add a tier, write a class with the methods of `LowerTier`, and add it to `server.load.lower_tiers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..host import HostMemory
from ..record import Record, file_name
from ..scope import Scope
from .record_index import RecordIndex


class LowerTier(Protocol):
    """A tier below host memory, whose records may outlive the server.

    Several threads call it: the engine's thread calls `put`, other threads read or drop records. `put` must not block, since
    it is called between two steps of the engine.

    index: the index of all records. A record's key is its `file_name`.
    """

    @property
    def name(self) -> str:
        """The short name of the tier. Reports use it as the origin of reused tokens, and names of metrics contain it."""
        ...

    index: RecordIndex
    max_bytes: int
    """The most bytes that its records may have."""
    num_written: int
    """How many records were written since the start."""
    num_refused: int
    """How many records were deleted because they were damaged."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all records of the tier."""
        ...

    def __str__(self) -> str:
        """Return where the records are, in words for the log."""
        ...

    def has_room(self, num_bytes: int) -> bool:
        """Return whether `put` would accept `num_bytes` bytes now.

        This method must be fast: the engine's thread calls it.
        """
        ...

    def put(self, record: Record) -> bool:
        """Keep a record, and evict other records if need be. Return False if the record is refused."""
        ...

    def get(self, key: str, /) -> Record | None:
        """Return the record with a key; None if it is gone. Reading the record may take long."""
        ...

    def drop(self, scope: Scope) -> object:
        """Forget the records of all scopes with this scope's name, whatever their adapters.

        Wait until the records are gone.
        """
        ...

    def wait(self) -> None:
        """Wait until the index has all records of earlier processes."""
        ...

    def __contains__(self, key: str, /) -> bool:
        """Return whether a record is stored or about to be stored, and its scope is not being dropped.

        This method must be fast: the engine's thread calls it.
        """
        ...

    def close(self) -> None:
        """Finish pending writes. Give up after some seconds."""
        ...


class WriteBehind:
    """Passes each new copy in host memory to the lower tiers once, in the engine's thread.

    Copies of private scopes, and copies that no later process could use, are not passed on. Through this object, host memory
    also knows what the lower tiers have: see `Below`.
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
        """Pass on the copies that were made since the last call of this method."""
        for node in self._host.take_unsaved() if self.lower else ():
            record = self._host.get(node)
            if record is not None and record.scope.may_outlive:
                node.record = file_name(record) if any([below.put(record) for below in self.lower]) else ""
