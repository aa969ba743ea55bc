"""Points of a curve. Each is measured once and stored as a line of JSON, so that a stopped run can continue."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import nan, sqrt
from pathlib import Path
from statistics import stdev
from time import monotonic
from typing import Any

from .report import BenchError, Cell, finite, mean

LOADED = 0.1
"""The share of the machine that other processes may use while a point is measured. With more, its times count as loaded."""
STUDENT = (nan, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 0.975 quantile of Student's t, by degrees of freedom."""
NORMAL = 1.96


@dataclass(slots=True)
class Points:
    """The points of a panel, in one file. machine: describes the machine; called once, before the first measured point."""

    path: Path
    machine: Callable[[], dict[str, Any]]
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)
    _commit: str | None = None

    def __post_init__(self) -> None:
        """Read the stored points. Raises BenchError if the file is not from this bench or cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                file.seek(0)
                whole, newline, cut = file.read().rpartition(b"\n")
                if cut:  # a run was killed while it wrote
                    file.truncate(len(whole) + len(newline))
        except OSError as error:
            raise BenchError(f"--out {self.path.parent}: {error.strerror}: expected a folder that can be written") from None
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                if "point" in row:
                    self._known[_name(row["point"])] = row
            except (ValueError, TypeError):
                raise BenchError(f"{self.path}:{number} is no line of this bench: move the file away") from None

    def point(self, point: Mapping[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the figures of a point from its line, or measure them now.

        point: all values that the figures depend on, as JSON.
        """
        name = _name(point)
        self._used.add(name)
        if (row := self._known.get(name)) is None:
            shown = [str(value) for value in point.values() if not isinstance(value, dict)]
            print(f"  {', '.join(shown)}", file=sys.stderr, flush=True)
            if self._commit is None:
                about = self.machine()
                self._commit = str(about.get("git_commit"))
                self._append({"machine": about})
            load = _Load()
            row = {"point": dict(point), "figures": finite(measure())}
            row |= {"others": load.others(), "commit": self._commit}
            self._append(row)
            self._known[name] = row
        return row["figures"]

    def notes(self) -> list[str]:
        """Return warnings about this run's points: if other processes were busy, or if points are of several commits."""
        rows = [self._known[name] for name in self._used if name in self._known]
        loaded = [row["others"] for row in rows if (row["others"] or 0.0) > LOADED]
        commits = {row["commit"] for row in rows}
        notes = []
        if loaded:
            text = f"loaded: in {len(loaded)} of {len(rows)} points other processes took over {LOADED:.0%} of the machine"
            notes.append(f"{text}, {max(loaded):.0%} at most: their times are no result")
        if len(commits) > 1:
            notes.append(f"{self.path} has points of {len(commits)} commits: a new --out measures all at one")
        return notes

    def _append(self, row: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write((json.dumps(finite(row)) + "\n").encode())


def _name(point: Mapping[str, Any]) -> str:
    return json.dumps(point, sort_keys=True)


class _Load:
    """Measures the processor time of other processes since its creation."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = monotonic(), _busy_seconds(), _own_seconds()

    def others(self) -> float | None:
        """Return the other processes' share of the machine; None if the system does not report it."""
        if self._busy is None or (busy := _busy_seconds()) is None:
            return None
        seconds = busy - self._busy - (_own_seconds() - self._own)
        return round(max(0.0, seconds) / max(monotonic() - self._began, 1e-9) / (os.cpu_count() or 1), 3)


def _busy_seconds() -> float | None:
    """Return the busy seconds of all processors since the machine's start; None if the system is not Linux."""
    with suppress(OSError, ValueError):
        user, nice, system, _, _, irq, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
        return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    return None


def _own_seconds() -> float:
    """Return the processor time of this process and of its ended children, such as servers."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def interval(values: Sequence[float]) -> float:
    """Return half the width of the mean's 95 % confidence interval; not a number for fewer than two values."""
    count = len(values)
    if count < 2:
        return nan
    return (STUDENT[count - 1] if count <= len(STUDENT) else NORMAL) * stdev(values) / sqrt(count)


def spread(values: Sequence[float]) -> Cell:
    """Return the mean of independent runs, with its 95 % confidence interval if there are two runs or more."""
    if len(values) < 2:
        return mean(values)
    return f"{mean(values):.2f} ± {interval(values):.2f}"
