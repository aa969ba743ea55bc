"""One line on stderr with the progress of a benchmark."""

import sys
from time import monotonic
from types import TracebackType
from typing import TextIO

EVERY = 10
"""Steps between two lines if the output is not a terminal."""


class Progress:
    """Counts steps of `total` under a label: one line that updates on a terminal, else a line every ten steps."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self.label, self.total = label, total
        self.done = 0
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._started = monotonic()

    def __enter__(self) -> "Progress":
        self._show("")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_terminal:
            print(file=self._stream)

    def step(self, note: str = "") -> None:
        """Count one more step. note: shown at the end of the line."""
        self.done += 1
        if self._is_terminal or self.done % EVERY == 0 or self.done == self.total:
            self._show(note)

    def _show(self, note: str) -> None:
        line = f"{self.label}  {self.done}/{self.total}  {monotonic() - self._started:.0f} s  {note}".rstrip()
        if self._is_terminal:
            print(f"\r\x1b[2K{line}", end="", file=self._stream, flush=True)
        else:
            print(line, file=self._stream, flush=True)
