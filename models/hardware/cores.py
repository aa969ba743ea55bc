"""The number of threads that compute fastest on this CPU, as Linux describes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SYSTEM = Path("/sys")


def fast_cores(system: Path = SYSTEM) -> int:
    """Return the number of cores that a process should compute on, 1 or more.

    Threads wait for each other after each matrix, so the slowest one sets the pace: two threads on one core, an efficiency
    core beside performance cores, or more threads than a container's quota make all of them slower.
    """
    usable = _usable()
    if performance := usable & set(_listed(system / "devices/cpu_core/cpus")):  # of a hybrid Intel
        usable = performance
    cores = {_siblings(system, cpu) for cpu in usable}
    return max(1, min(len(cores), _quota(system)))


def _usable() -> set[int]:
    """Return the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))  # not Linux


def _siblings(system: Path, cpu: int) -> frozenset[int]:
    """Return the CPUs of a CPU's core."""
    return frozenset(_listed(system / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or frozenset({cpu})


def _quota(system: Path) -> int:
    """Return the whole CPUs whose time a container may use, 1 or more."""
    with suppress(OSError, ValueError):
        quota, period = (system / "fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            return max(1, int(quota) // int(period))
    return 1 << 16


def _listed(file: Path) -> Iterator[int]:
    """Yield the numbers of a list such as 0-3,8; none if there is no such file."""
    with suppress(OSError, ValueError):
        for part in file.read_text().split(","):
            first, _, last = part.partition("-")
            yield from range(int(first), int(last or first) + 1)
