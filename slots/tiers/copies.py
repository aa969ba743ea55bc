"""Copies of runs in host memory: made when a run leaves the device, when a step needs it, or in idle time."""

from __future__ import annotations

from collections.abc import Callable

from ..ledger import Ledger
from ..node import Blob, Node, Sequence
from ..plan import Save
from ..radix import path
from .host import HostTier
from .restoring import restores


class Copies:
    """Decides which runs get a copy in the host tier and which copies leave it for them, and brings copies back.

    rest: how many of a path's last tokens are not brought back. remove: takes a run that has lost its last copy out of the
    tree, with the runs behind it.
    """

    def __init__(self, ledger: Ledger, host: HostTier, rest: int, remove: Callable[[Node], None]) -> None:
        self._ledger, self._host, self._rest, self._remove = ledger, host, rest, remove

    def save_if_free(self, node: Node) -> Blob | None:
        """Return the run's copy, made now if all of the run has been computed and no other copy has to leave for it."""
        if node.complete and self._host.has_room(len(node.tokens)):
            self.save(node, node.longest_holder())
        return node.blob

    def save_ahead(self) -> bool:
        """Copy one idle run to host memory in idle time, so that its later eviction costs nothing.

        Beginnings come first: a run is of no use without the runs before it. Return False when every idle run has a copy or
        the tier is full; no copy is dropped for it.
        """
        for sequence in self._ledger.parked.values():
            for node in reversed(list(path(sequence.tip))):
                if node.blob is None and sequence.length >= node.end and self._host.has_room(len(node.tokens)):
                    return self.save(node, sequence)
        return False

    def save(self, node: Node, sequence: Sequence) -> bool:
        """Make sure that a run has a copy in host memory. Return False if the tier has no room for it."""
        if node.blob is not None:
            return True
        host, size = self._host, len(node.tokens)
        if size > host.max_tokens:
            return False
        while not host.has_room(size):
            least = host.least()
            if least is None:
                return False
            host.drop(least)
            if not least.ready:
                self._remove(least)
        self._ledger.perform(Save(sequence.id, host.save(node)))
        return True

    def restorable(self, sequence: Sequence) -> int:
        """Return how many tokens `restore` would bring back, each into a free cell."""
        return sum(restore.stop - restore.start for restore, _ in restores(sequence, self._rest))

    def restore(self, sequence: Sequence) -> list[tuple[str, int]]:
        """Bring back the copies that follow on the sequence's path, up to its last `rest` tokens.

        Return the tier that each copy came from (host, disk), and how many tokens, in order.
        """
        restored: list[tuple[str, int]] = []
        for restore, nodes in restores(sequence, self._rest):
            source, size = restore.blob.source, restore.stop - restore.start
            restored.append((source, size))
            self._ledger.perform(restore)
            for node in nodes:
                self._ledger.count_ready(node, min(node.end, restore.stop) - node.start)
                node.sequences.add(sequence)
            sequence.length = restore.stop
        self._host.num_restored += sum(size for _, size in restored)
        return restored
