"""Slows the reads of a disk tier, or holds them."""

import threading
import time
from contextlib import contextmanager

from slotcache.server import load


class Abused:
    """A tier with slow reads. Everything else is unchanged.

    seconds: the time added to each read.
    bytes_per_second: the speed at which a record is read.
    gate: while it is closed, reads wait.
    """

    def __init__(self, tier, seconds=0.0, bytes_per_second=float("inf")):
        self._tier, self.seconds, self.bytes_per_second = tier, seconds, bytes_per_second
        self.gate = threading.Event()
        self.gate.set()
        self.num_reads = 0

    def __getattr__(self, name):
        return getattr(self._tier, name)

    def __contains__(self, key):
        return key in self._tier

    def __str__(self):
        return str(self._tier)

    def get(self, key):
        self.num_reads += 1
        self.gate.wait()
        record = self._tier.get(key)
        size = record.num_bytes if record is not None else 0
        if delay := self.seconds + size / self.bytes_per_second:
            time.sleep(delay)  # the time of a slow disk
        return record


@contextmanager
def abused(monkeypatch, **speed):
    """Give slow disks to servers that start within the context. Yield a list of their tiers."""
    tiers, lower_tiers = [], load.lower_tiers

    def slow(*server):
        tiers.extend(found := [Abused(tier, **speed) for tier in lower_tiers(*server)])
        return found

    monkeypatch.setattr(load, "lower_tiers", slow)
    try:
        yield tiers
    finally:
        for tier in tiers:
            tier.gate.set()
