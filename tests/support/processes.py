"""Watches other processes by their ids: whether they have ended, and which children they have."""

import os
import select
from contextlib import contextmanager
from pathlib import Path

DEADLINE = 60.0  # s, far more than needed even on a busy machine
START = (  # an installed package, or a bare checkout at sys.argv[1]
    "import sys, types; from importlib.util import find_spec\n"
    "if find_spec('slotcache') is None:\n"
    "    package = sys.modules['slotcache'] = types.ModuleType('slotcache'); package.__path__ = [sys.argv[1]]\n"
)


@contextmanager
def watched(*pids):
    """Yield descriptors of processes, which stay valid if an id is used again."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def ended(descriptor, seconds=DEADLINE):
    """Wait up to `seconds` for the end of a process. Return whether it has ended."""
    return bool(select.select([descriptor], [], [], seconds)[0])


def children(pid):
    """Return the command lines of a process's children, by their ids."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
    return found
