"""The memory that programs may still take: of the machine, or of the container that this process runs in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Container:
    """The files in which Linux tells a container's memory. cached: the lines of `stat` that count files."""

    limit: str
    used: str
    stat: str
    cached: tuple[str, ...]


CONTAINERS = (  # cgroups of version 2, and of version 1
    Container("memory.max", "memory.current", "memory.stat", ("active_file", "inactive_file")),
    Container(
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        ("total_active_file", "total_inactive_file"),
    ),
)


def free_memory(root: Path = ROOT) -> int:
    """Return bytes. The page cache counts as free: it gives way, and it has just read the model."""
    folder = root / "sys/fs/cgroup"
    left = [room for container in CONTAINERS if (room := _room(folder, container)) is not None]
    return max(min([_of_machine(root / "proc/meminfo"), *left]), 0)


def _of_machine(file: Path) -> int:
    with suppress(OSError, KeyError):
        return _counts(file, ":")["MemAvailable"] << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _room(folder: Path, container: Container) -> int | None:
    """Return the bytes that a container has left; None: it has no limit."""
    with suppress(OSError, ValueError):
        limit, used = (int((folder / name).read_text()) for name in (container.limit, container.used))
        counts = _counts(folder / container.stat, "")
        return limit - used + sum(counts.get(name, 0) for name in container.cached)
    return None


def _counts(file: Path, mark: str) -> dict[str, int]:
    """Return the numbers of a file with a name and a number a line. mark: behind the names. Raises OSError."""
    return dict(_lines(file.read_text(), mark))


def _lines(text: str, mark: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, number, *_ = [*line.split(), "", ""]
        if number.isdecimal():
            yield name.removesuffix(mark), int(number)
