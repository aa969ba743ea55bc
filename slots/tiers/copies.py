"""Copies of runs in host memory: made when a run leaves the device, when a step needs it, or while there is time."""

from __future__ import annotations

from ..ledger import Ledger
from ..node import Blob, Node, Sequence
from ..plan import Save
from ..radix import path


class Copies(Ledger):
    """Decides which runs get a copy in the host tier, and what leaves it for them."""

    def save_if_free(self, node: Node) -> Blob | None:
        """The run's copy in host memory; made now if all of it has been computed and the budget has room as it is."""
        if node.complete and self.host.has_room(len(node.tokens)):
            self._save(node, node.longest_holder())
        return node.blob

    def save_ahead(self) -> bool:
        """Copy one idle run to host memory while there is time, so that it can leave the device for nothing later.

        The beginnings come first: a run is of no use without what stands before it. False when every idle run has a copy
        or the budget has no room; nothing is dropped for it.
        """
        for sequence in self.parked.values():
            for node in reversed(list(path(sequence.tip))):
                if node.blob is None and sequence.length >= node.end and self.host.has_room(len(node.tokens)):
                    return self._save(node, sequence)
        return False

    def _save(self, node: Node, sequence: Sequence) -> bool:
        """See that a run has a copy in host memory; False where the tier has no room for it."""
        if node.blob is not None:
            return True
        host, size = self.host, len(node.tokens)
        if size > host.max_tokens:
            return False
        while not host.has_room(size):
            least = host.least()
            if least is None:
                return False
            host.drop(least)
            if not least.ready:
                self._unlink_all(least)
        self._operations.append(Save(sequence.id, host.save(node)))
        return True
