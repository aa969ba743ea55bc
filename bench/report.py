"""Results of a benchmark: tables, statistics, the machine, progress, and errors."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import isfinite, isnan, nan
from pathlib import Path
from subprocess import TimeoutExpired
from time import monotonic
from types import TracebackType
from typing import Any, TextIO

from ..server.config.settings import VERSION
from ..slots.child import run_child

# ---- Errors that end a benchmark early. ---------------------------------------------------------------------------------
#
# BenchError      a precondition is wrong or missing; one clear message
#   ServerError   a server did not start
#   Skip          a scenario that cannot run here, which is not a failure


class BenchError(Exception):
    """Ends the benchmark with its message and exit code 2."""


class ServerError(BenchError):
    """A server did not start. The message has the end of its log."""


class Skip(BenchError):
    """A scenario cannot run here, for example because its data is missing. Exit code 0."""


# ---- The origin of a result: machine, versions, commit, date. -----------------------------------------------------------


def describe(llama_server: str | None = None) -> dict[str, Any]:
    """Return processor, cores, memory, GPUs, versions, git commit, date and the command line, as JSON values."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": (_output("nvidia-smi", ["--query-gpu=name,memory.total", "--format=csv,noheader"]) or "").splitlines(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "slotcache": VERSION,
        "llama_cpp_python": _version("llama-cpp-python"),
        "llama_server": _output(llama_server, ["--version"]) if llama_server else None,
        "git_commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the checkout, with `+` if files differ from the commit; None for an installed package."""
    folder = Path(__file__).resolve().parents[1]
    if not (folder / ".git").exists() or not (commit := _output("git", ["-C", str(folder), "rev-parse", "HEAD"])):
        return None
    return commit + ("+" if _output("git", ["-C", str(folder), "status", "--porcelain"]) else "")


def _output(program: str, arguments: Sequence[str]) -> str | None:
    """Return the output of a program; None if it is absent or fails."""
    if shutil.which(program) is None:
        return None
    try:
        done = run_child([program, *arguments], timeout=20)
    except (OSError, TimeoutExpired):
        return None
    # llama-server prints its version to stderr.
    return None if done.returncode else (done.stdout or done.stderr).decode("utf-8", "replace").strip()


# ---- One line on stderr with the progress of a benchmark. ---------------------------------------------------------------

EVERY = 10
"""Steps between two lines of progress if the output is not a terminal."""


class Progress:
    """Counts steps up to `total` under a label. A terminal shows one changing line; other output, a line every ten steps."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self.label, self.total = label, total
        self.done = 0
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._started = monotonic()

    def __enter__(self) -> Progress:
        self._show("")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_terminal:
            print(file=self._stream)

    def step(self, note: str = "") -> None:
        """Count one more step. note: a text for the end of the line."""
        self.done += 1
        if self._is_terminal or self.done % EVERY == 0 or self.done == self.total:
            self._show(note)

    def _show(self, note: str) -> None:
        line = f"{self.label}  {self.done}/{self.total}  {monotonic() - self._started:.0f} s  {note}".rstrip()
        if self._is_terminal:
            print(f"\r\x1b[2K{line}", end="", file=self._stream, flush=True)
        else:
            print(line, file=self._stream, flush=True)


Cell = str | int | float


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column names. The first column is left-aligned, the rest right-aligned. Floats have about three digits."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]

    def text(self) -> str:
        """Return the table as plain text, without a final line end."""
        cells = [list(self.columns), *([_cell(value) for value in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        sides = [str.ljust, *[str.rjust] * (len(widths) - 1)]
        lines = ["  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)) for row in cells]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join([self.title, *(line.rstrip() for line in [lines[0], rule, *lines[1:]])])


@dataclass(frozen=True, slots=True)
class Bar:
    """A measured figure and its target: at most `limit`, or with `at_least`, at least `limit`."""

    number: int
    name: str
    measured: float
    limit: float
    at_least: bool = False
    unit: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the figure meets the target. False if the figure could not be measured."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def text(self) -> str:
        """Return one line with number, name, measured figure, limit, and whether the bar is met."""
        asked = f"{'at least' if self.at_least else 'at most'} {_cell(self.limit)}{self.unit}"
        word = "not measured" if isnan(self.measured) else "met" if self.is_met else "MISSED"
        return f"bar {self.number}  {self.name}: {_cell(self.measured)}{self.unit} ({asked}) {word}"


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one scenario.

    data: JSON values that are not in the tables.
    has_failed: whether requests failed that must not fail. A missed bar is not a failure.
    """

    scenario: str
    tables: Sequence[Table]
    bars: Sequence[Bar] = ()
    notes: Sequence[str] = ()
    data: dict[str, Any] = field(default_factory=dict)
    has_failed: bool = False

    def text(self) -> str:
        """Return tables, notes and bars as plain text."""
        parts = [table.text() for table in self.tables]
        parts += ["\n".join(lines) for lines in (self.notes, [bar.text() for bar in self.bars]) if lines]
        return "\n\n".join(parts)

    def write(self, path: Path, machine: dict[str, Any]) -> None:
        """Write the report to `path` as one JSON object. Figures that are infinite or not a number become null."""
        tables = [{"title": table.title, "columns": table.columns, "rows": table.rows} for table in self.tables]
        bars = [{f: getattr(bar, f) for f in bar.__slots__} | {"met": bar.is_met} for bar in self.bars]
        value = {"scenario": self.scenario, "machine": machine, "tables": tables, "bars": bars}
        value |= {"notes": self.notes, "data": self.data}
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # an earlier result stays complete until this one is
        aside.write_text(json.dumps(finite(value), indent=1, allow_nan=False) + "\n")
        aside.replace(path)


def _cell(value: Cell) -> str:
    if not isinstance(value, float):
        return str(value)
    if isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def finite(value: Any) -> Any:
    """Return a JSON value with null for figures that are infinite or not a number."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


# ---- Figures that summarise many measurements. --------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of `values` are, interpolated linearly; not a number without values."""
    if not values:
        return nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; not a number without values."""
    return sum(values) / len(values) if values else nan


def median(values: Sequence[float]) -> float:
    """Return the 50th percentile; not a number without values."""
    return percentile(values, 0.5)


@dataclass(frozen=True, slots=True)
class Summary:
    """The mean, 50th and 95th percentile and maximum of `count` values, in the unit of the values."""

    count: int
    mean: float
    p50: float
    p95: float
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary:
        """Summarise `values`. Values that are not a number are ignored."""
        numbers = [value for value in values if not isnan(value)]
        shares = (percentile(numbers, 0.5), percentile(numbers, 0.95), max(numbers, default=nan))
        return cls(len(numbers), mean(numbers), *shares)

    @classmethod
    def median_of(cls, rounds: Sequence[Summary]) -> Summary:
        """Return the median of each figure over repeated rounds, so that one disturbed round does not decide."""
        return cls(
            sum(summary.count for summary in rounds),
            *(median([getattr(summary, name) for summary in rounds]) for name in ("mean", "p50", "p95", "maximum")),
        )
