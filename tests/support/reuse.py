"""The strategies of reuse that a server gives its scheduler."""

from typing import Any

from slotcache.slots.separate import SeparateDocuments
from slotcache.slots.snapshots import Snapshots


def reuse_with(snapshots: Snapshots) -> dict[str, Any]:
    """Return arguments for a scheduler: separate documents, and snapshots if they have a budget."""
    if not snapshots.host.max_bytes:
        return {"strategies": [SeparateDocuments]}
    return {"strategies": [SeparateDocuments, snapshots.strategy], "index": snapshots}
