"""A tier below host memory: its records, its protocol, its folder, whose KV it holds.

    device        cells of the pool      PrefixTree and its device
     |   ^        Save and Restore, operations of a step
    host memory   copies of runs         HostMemory, of the prefix tree, or of states (models whose memory cannot be cut)
     |   ^        written behind by `WriteBehind`, brought back at start by `load_records`
    lower tiers   records                DiskTier

A new tier is a class with the methods of `LowerTier` and one more entry in `server.load.lower_tiers`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from .scope import Scope

Cut = Callable[[np.ndarray, int, int], np.ndarray]
"""Returns the part of a copy (uint8) at positions [start, stop)."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A run's KV. tokens: int32, the path's from position 0 to the run's end; data (uint8): the KV from `start` on.

    documents: (key, first position) of the documents that end with the run. frequency, token_cost: as in `Node`.
    state (uint8): the recurrent state behind the run, of a model that has one.
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
        """Return the size of the KV and the state."""
        return len(self.data) + (len(self.state) if self.state is not None else 0)


# ---- Folder -------------------------------------------------------------------------------------------------------------
# Folders with KV or documents. Write access to one is the power to change answers, so only the owner may have it.

STALE = 3600  # seconds; an unfinished file that is older has no writer any more


class FolderError(Exception):
    """A folder that must not or cannot hold them. The message names it, the reason, and the right state."""


def own_folder(path: Path, flag: str) -> Path:
    """Return the folder, made if it is missing, and checked. flag: the setting that names it. Raises FolderError."""
    try:
        if not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        about = path.stat()
    except OSError as error:
        raise FolderError(f"{flag} {path}: {error.strerror or error}: expected a folder to write to") from None
    if hasattr(os, "geteuid") and about.st_uid != os.geteuid():
        raise FolderError(f"{flag} {path}: it belongs to user {about.st_uid}: expected one of the server's own user")
    if about.st_mode & 0o022:
        raise FolderError(
            f"{flag} {path}: other users may write to it (mode {about.st_mode & 0o777:o}), and so change answers: "
            f"expected a folder that only its owner can write to (chmod go-w)"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise FolderError(f"{flag} {path}: Permission denied: expected a folder to write to")
    return path


def remove_stale(folder: Path) -> None:
    """Delete the unfinished files (*.tmp) of servers that have ended."""
    for left in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - STALE:
                left.unlink()


FORMAT = 3  # of records in files


# ---- Provenance ---------------------------------------------------------------------------------------------------------
# The model and the settings that computed a run's KV. Only the same model with the same settings may take it back.


@dataclass(frozen=True, slots=True)
class Provenance:
    """model: the digest of its files. settings: the digest of every setting that changes KV. Each 32 hexadecimal digits."""

    model: str
    settings: str

    @property
    def folder(self) -> str:
        """The name of the folder for just this KV, in this format."""
        return self.folder_of(FORMAT)

    def folder_of(self, version: int) -> str:
        """Return the name of the folder for this KV in a version of the format. Up to 2 the version was no part of it."""
        parts = self.model + self.settings + (str(version) if version > 2 else "")
        return hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()


class LowerTier(Protocol):
    """A tier that may outlive the server. Three threads call it: the engine puts, the start loads, a client drops.

    `put` must not block: it runs between two steps of the engine.
    """

    @property
    def name(self) -> str:
        """The word for it in reports of where a prompt's tokens came from, and in the names of its metrics."""
        ...

    max_bytes: int
    """What its records may take."""
    num_written: int
    """Records written, ever."""
    num_refused: int
    """Records that were damaged, and are gone."""

    @property
    def num_bytes(self) -> int:
        """What its records take."""
        ...

    def __str__(self) -> str:
        """Return the place of its records, for the log."""
        ...

    def has_room(self, record: Record) -> bool:
        """Return whether `put` would take a record as things are, with no other one leaving for it."""
        ...

    def put(self, record: Record) -> bool:
        """Keep a record. False: it is refused. Older records may leave for it."""
        ...

    def get(self, key: str, /) -> Record | None:
        """Return a record; None if it is gone."""
        ...

    def drop(self, scope: Scope) -> object:
        """Forget the records of a scope's name, with all adapters. Returns when they are gone."""
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
