"""Stores the figures of an unfinished run in a file, which remains if the run fails or is killed.

`--json OUT` writes OUT when a run is done. Until then, each request, round or figure adds a line of JSON to OUT.unfinished.
The first line has the scenario and the machine. A line is one write to the end of the file, which takes the same time in a
long run. Rewriting the whole growing result each time would slow the measured programs.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from .report import BenchError, finite

SUFFIX = ".unfinished"
ROUND = "begins_round"


class Journal:
    """The lines of one run. Raises BenchError at the start if the file cannot be written."""

    def __init__(self, out: Path, scenario: str, machine: dict[str, Any]) -> None:
        self.path = out.with_name(out.name + SUFFIX)
        self.num_figures = 0  # the number of notes, except notes that begin a round
        self._began = monotonic()
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        except OSError as error:
            raise BenchError(f"--json {out}: {error.strerror}: expected a file that can be written") from None
        self._write({"unfinished": True, "scenario": scenario, "machine": machine})

    def note(self, figures: dict[str, Any]) -> None:
        """Append new figures."""
        self.num_figures += ROUND not in figures
        self._write({"at": round(monotonic() - self._began, 3)} | figures)

    def close(self, *, is_finished: bool) -> None:
        """End the journal. The file remains only if the run is unfinished and has measured something."""
        os.close(self._file)
        if is_finished or not self.num_figures:
            with suppress(OSError):
                self.path.unlink()

    def _write(self, value: dict[str, Any]) -> None:
        os.write(self._file, (json.dumps(finite(value), default=str) + "\n").encode())


_journal: Journal | None = None  # a process runs one scenario, so it has one journal


def begin(out: Path, scenario: str, machine: dict[str, Any]) -> Journal:
    """Start a journal. Later calls of `note` write to it."""
    global _journal
    _journal = Journal(out, scenario, machine)
    return _journal


def end(*, is_finished: bool) -> None:
    """End the journal, if there is one."""
    global _journal
    if _journal is not None:
        _journal.close(is_finished=is_finished)
        _journal = None


def note(**figures: Any) -> None:
    """Append new figures, as JSON values, if the run has a journal. `begins_round` is the number of a new round."""
    if _journal is not None:
        _journal.note(figures)
