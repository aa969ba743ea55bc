"""The report of a scenario: tables and bars as plain text, all data as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan
from pathlib import Path
from typing import Any

Cell = str | int | float


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column names. The first column is left-aligned, the rest right-aligned; floats have about three digits."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]

    def text(self) -> str:
        """Return the table as plain text, without a final line end."""
        cells = [list(self.columns), *([_cell(value) for value in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = [
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in cells
        ]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join([self.title, *(line.rstrip() for line in [lines[0], rule, *lines[1:]])])


@dataclass(frozen=True, slots=True)
class Bar:
    """A measured figure beside its limit: at most `limit`, or at least `limit` with `at_least`."""

    number: int
    name: str
    measured: float
    limit: float
    at_least: bool = False
    unit: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the figure keeps the limit. False for a figure that could not be measured."""
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def text(self) -> str:
        """Return one line: number, name, measured figure, limit, and whether it is met."""
        asked = f"{'at least' if self.at_least else 'at most'} {_cell(self.limit)}{self.unit}"
        word = "not measured" if isnan(self.measured) else "met" if self.is_met else "MISSED"
        return f"bar {self.number}  {self.name}: {_cell(self.measured)}{self.unit} ({asked}) {word}"


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one scenario. data: JSON values that the tables leave out.

    has_failed: requests failed that must not. A missed bar is not a failure.
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
        path.write_text(json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")


def _cell(value: Cell) -> str:
    if not isinstance(value, float):
        return str(value)
    if isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
