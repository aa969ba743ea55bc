"""The disk tier's thread, held in the middle of each write, while other servers write and delete."""

import os
import threading

import numpy as np
import pytest
from slotcache.slots.record import Record
from slotcache.slots.scope import Scope
from slotcache.slots.store.disk import DiskTier

from server.conftest import DEADLINE, until
from server.engine.test_disk import HERE, files


def record(number, scope="s"):
    tokens = np.arange(number, number + 10, dtype=np.int32)
    return Record(Scope.shared(scope), tokens, 0, np.full(1000, number, np.uint8))


class Gate:
    """Stops one thread whenever it is about to finish a file."""

    def __init__(self, sync):
        self._sync, self._arrived, self._open = sync, threading.Semaphore(0), threading.Semaphore(0)
        self.thread = None

    def sync(self, number):
        if threading.current_thread() is self.thread:
            self._arrived.release()
            assert self._open.acquire(timeout=DEADLINE)
        self._sync(number)

    def await_one(self):
        assert self._arrived.acquire(timeout=DEADLINE)

    def let_on(self, times=1):
        self._open.release(times)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(os.fsync)
    monkeypatch.setattr(os, "fsync", gate.sync)
    return gate


def test_what_is_dropped_again_while_it_is_written_is_gone(tmp_path, gate):
    disk = DiskTier(tmp_path, 1 << 20, HERE)
    gate.thread = disk._thread
    disk.put(record(1, "other"))
    gate.await_one()
    assert not disk.drop(Scope.shared("s"), seconds=0)
    disk.put(record(2))  # computed after the drop
    gate.let_on()
    gate.await_one()
    assert not disk.drop(Scope.shared("s"), seconds=0)  # while the record of it is half written
    gate.let_on()
    until(lambda: disk.idle)
    assert len(files(tmp_path)) == 1
    gate.let_on()  # the index
    disk.close()


@pytest.fixture
def two(tmp_path, gate):
    """Two servers' tiers on a folder; the second one wrote a file while the first one was writing."""
    one, other = DiskTier(tmp_path, 5000, HERE), DiskTier(tmp_path, 5000, HERE)
    gate.thread = one._thread
    one.put(record(1))
    gate.await_one()
    other.put(record(2))
    until(lambda: other.idle)
    gate.let_on(10)
    until(lambda: one.idle)
    yield one, other
    for disk in (one, other):
        disk.close()


def test_what_another_server_wrote_meanwhile_is_dropped_too(tmp_path, two):
    assert two[0].drop(Scope.shared("s"))
    assert not files(tmp_path)


def test_what_another_server_wrote_meanwhile_is_under_the_bound(tmp_path, two):
    for number in range(3, 8):
        two[0].put(record(number))
        until(lambda: two[0].idle)
    assert sum(one.stat().st_size for one in files(tmp_path)) == two[0].num_bytes <= 5000
