"""The index of record files: the runs in them, the files that stand on a file, and the file that leaves first.

A run is of no use without the runs before it. So a file counts as used a moment after every file that stands on it: then no
file stands on the least recently used one. The order lives in the files' times, and outlives the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..node import Node
from ..radix import RadixTree, path
from ..scope import Scope

MOMENT = 1000  # ns: what file systems tell apart


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """A file with the run at positions [start, stop). used: ns. node: the index's node that ends where the run does."""

    path: Path
    scope: str
    start: int
    stop: int
    size: int
    used: int
    node: Node


class FileIndex(RadixTree):
    """All files of one folder. `_covers` has the files whose runs cover a node."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[Path, Entry] = {}
        self.num_bytes = 0
        self._covers: dict[Node, list[Entry]] = {}

    def add(self, file: Path, scope: str, start: int, tokens: np.ndarray, *, size: int, used: int) -> Entry:
        """Add a file with the KV of `tokens` (int32) from `start` on."""
        node = self.insert(self.root(Scope.read(scope)), tokens, (start,))[len(tokens)]
        entry = Entry(path=file, scope=scope, start=start, stop=len(tokens), size=size, used=used, node=node)
        self.entries[file] = entry
        for covered in self._run(entry):
            self._covers.setdefault(covered, []).append(entry)
        self.num_bytes += size
        return entry

    def remove(self, entry: Entry) -> None:
        """Forget a file."""
        del self.entries[entry.path]
        self.num_bytes -= entry.size
        for covered in self._run(entry):
            self._covers[covered].remove(entry)
        for node in path(entry.node):
            if node.children or self._covers.get(node):
                break
            self._covers.pop(node, None)
            self._unlink(node)

    def stands_on_files(self, scope: str, start: int, tokens: np.ndarray) -> bool:
        """Return whether all KV before the run from `start` on is in files."""
        match = self.match(Scope.read(scope), tokens[:start])
        return match.length == start and all(self._covers.get(node) for node in path(match.node))

    def beginnings(self, scope: str, start: int, tokens: np.ndarray) -> list[Entry]:
        """Return the files that a run from `start` on stands on, and shorter files from `start` on, the deepest first."""
        match = self.match(Scope.read(scope), tokens)
        nodes = list(path(match.node))
        on_path = {node for node in nodes if node.end <= match.length}
        found: set[Entry] = set()
        for node in nodes:
            for entry in self._covers.get(node, ()):
                is_needed = node.start < start and entry.start < start
                is_shorter = entry.start == start and entry.stop < len(tokens) and entry.node in on_path  # a state, say
                if is_needed or is_shorter:
                    found.add(entry)
        return sorted(found, key=lambda entry: (entry.start, entry.stop), reverse=True)

    def use(self, entries: list[Entry], now: int) -> list[Entry]:
        """Count these files, the deepest first, as used one after the other from `now` on. Return those with a new time."""
        changed: list[Entry] = []
        for entry in entries:
            now += MOMENT
            if entry.used < now:
                entry.used = now
                changed.append(entry)
            now = entry.used
        return changed

    def settle(self) -> None:
        """Correct the times of files that other servers wrote: each must come after those that stand on it.

        Deep files first: a file has its final time before it moves the files that it stands on.
        """
        for entry in sorted(self.entries.values(), key=lambda entry: (entry.start, entry.stop), reverse=True):
            for beginning in self.beginnings(entry.scope, entry.start, self._tokens(entry)):
                beginning.used = max(beginning.used, entry.used + MOMENT)

    def newest_first(self) -> list[Entry]:
        """Return the files by their last use; each comes before all that stand on it."""
        return sorted(self.entries.values(), key=_use, reverse=True)

    def oldest(self) -> Entry | None:
        """Return the file that leaves next; no file stands on it."""
        return min(self.entries.values(), key=_use, default=None)

    def _run(self, entry: Entry) -> Iterator[Node]:
        for node in path(entry.node):
            if node.end <= entry.start:
                return
            yield node

    def _tokens(self, entry: Entry) -> np.ndarray:
        return np.concatenate([node.tokens for node in path(entry.node)][::-1])

    def _split(self, lower: Node, at: int) -> Node:
        upper = super()._split(lower, at)
        self._covers[upper] = list(self._covers.get(lower, ()))
        return upper


def _use(entry: Entry) -> tuple[int, int]:
    return entry.used, -entry.start
