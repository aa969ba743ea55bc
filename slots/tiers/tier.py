"""The tier protocol: places for KV below the device.

    device        cells of the pool      PrefixTree and its ledger
     |   ^        Save and Restore, operations of a step
    host memory   copies of runs         Archive, over HostTier; Snapshots, for models whose memory cannot be cut
     |   ^        written behind by `WriteBehind`, brought back at start by `load_records`
    lower tiers   records                DiskTier

A new tier is a class with the methods of `LowerTier` and one more entry in `server.loading.lower_tiers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from ..archive import Record
from ..node import Node
from ..scope import Scope

Key = TypeVar("Key", contravariant=True)


class Tier(Protocol[Key]):
    """KV as records. Key: the tier's name for one of them (host memory: the node, lower tiers: a string)."""

    def has_room(self, record: Record) -> bool:
        """Return whether `put` would take a record as things are, with no other one leaving for it."""
        ...

    def put(self, record: Record) -> bool:
        """Keep a record. False: it is refused. Older records may leave for it."""
        ...

    def get(self, key: Key, /) -> Record | None:
        """Return a record; None if it is gone."""
        ...

    def drop(self, scope: Scope) -> object:
        """Forget the records of a scope's name, with all adapters. Returns when they are gone."""
        ...


class HostMemory(Tier[Node], Protocol):
    """A tier whose copies the scheduler has made by operations of a step; what is new in it is written behind."""

    def take_unsaved(self) -> list[Node]:
        """Return the nodes whose copies were made since the last call; from the first call on they are noted."""
        ...


class LowerTier(Tier[str], Protocol):
    """A tier that may outlive the server. Three threads call it: the engine puts, the start loads, a client drops.

    `put` must not block: it runs between two steps of the engine.
    """

    @property
    def name(self) -> str:
        """The word for it in reports of where a prompt's tokens came from."""
        ...

    def __str__(self) -> str:
        """Return the place of its records, for the log."""
        ...

    def load(self, num_bytes: int) -> Iterable[str]:
        """Return the keys of the records used last, as many as take `num_bytes`; each behind those that it stands on."""
        ...

    def __contains__(self, key: str, /) -> bool:
        """Return whether a record is still there and no drop of its scope is under way; fast, for the engine's thread."""
        ...

    def close(self) -> None:
        """Finish pending writes, within some seconds."""
        ...
