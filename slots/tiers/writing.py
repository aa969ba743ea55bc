"""From host memory to disk: every copy of KV that is new is handed to the disk tier, which writes it behind."""

from __future__ import annotations

from ..archive import Archive
from ..scheduler import Scheduler
from .disk import DiskTier


class WriteBehind:
    """Lives in the engine's thread. disk None: nothing is kept."""

    def __init__(self, scheduler: Scheduler, archive: Archive, disk: DiskTier | None) -> None:
        self.disk = disk
        self._host, self._snapshots, self._archive = scheduler.tree.host, scheduler.snapshots, archive
        if disk is not None:
            self._host.news, self._snapshots.news = [], []

    def write(self) -> None:
        """Hand over the copies that were made since the last call, but for those of private runs."""
        host, snapshots = self._host, self._snapshots
        if self.disk is None or not (host.news or snapshots.news):
            return
        runs, states = host.news or (), snapshots.news or ()
        host.news, snapshots.news = [], []
        for record in (*map(self._archive.record, runs), *map(snapshots.record, states)):
            if record is not None and record.scope.is_shared:
                self.disk.write(record)
