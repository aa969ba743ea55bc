"""llama.cpp's saved sequence state, as bytes: cutting a range of positions out of it.

Layout (llama_kv_cache::state_write, one stream): magic, sequence id, streams, cells; for each cell position, holders,
holder; whether V is transposed, layers; for each layer K's type and row size, then a row a cell; then V likewise, or, if
transposed, its type, element size and width, then a row of cells for each of its numbers.
"""

from __future__ import annotations

import numpy as np

HEADER = 16  # bytes: four 32-bit numbers
CELL = 12  # bytes: position, number of holders, holder
COUNT_AT = 3  # the number of cells, among the header's numbers


def cut(state: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The part of a saved state (uint8) at positions [start, stop), as a saved state of its own."""
    header = state[:HEADER].copy()
    numbers = header.view(np.int32)
    count = int(numbers[COUNT_AT])
    cells = state[HEADER : HEADER + CELL * count].reshape(count, CELL)
    positions = np.ascontiguousarray(cells[:, :4]).view(np.int32)[:, 0]
    kept = np.flatnonzero((positions >= start) & (positions < stop))
    numbers[COUNT_AT] = len(kept)
    reader = _Reader(state, HEADER + CELL * count, count, kept)
    parts = [header, cells[kept].reshape(-1)]
    transposed, layers = (int(number) for number in reader.take(parts, 8).view(np.uint32))
    for _ in range(layers):
        reader.rows(parts)
    for _ in range(layers):
        reader.columns(parts) if transposed else reader.rows(parts)
    return np.concatenate(parts)


def shape(state: np.ndarray) -> bytes:
    """Whether V is transposed, the layers, and the types and sizes of their rows: the same for all states of a context."""
    return cut(state, 0, 0)[HEADER:].tobytes()


def is_of(state: np.ndarray, start: int, stop: int) -> bool:
    """Whether a saved state is of just the positions [start, stop), in order."""
    numbers = state[:HEADER].copy().view(np.int32)
    count = int(numbers[COUNT_AT])
    cells = state[HEADER : HEADER + CELL * count].copy().view(np.int32).reshape(-1, 3)
    return len(cells) == count == stop - start and bool((cells[:, 0] == np.arange(start, stop)).all())


def is_known(state: np.ndarray) -> bool:
    """Whether a saved state has the layout above; models with more than a position in a cell have another one."""
    count = int(state[:HEADER].copy().view(np.int32)[COUNT_AT])
    cells = state[HEADER : HEADER + CELL * count].copy().view(np.int32).reshape(count, 3)
    return bool((cells[:, 1] == 1).all() and (cells[:, 0] == np.arange(count)).all())


class _Reader:
    """Walks through the layers and keeps the chosen cells of each."""

    def __init__(self, state: np.ndarray, at: int, count: int, kept: np.ndarray) -> None:
        self._state, self._at, self._count = state, at, count
        together = len(kept) > 0 and kept[-1] - kept[0] + 1 == len(kept)
        self._kept = slice(int(kept[0]), int(kept[-1]) + 1) if together else kept  # a slice copies far faster

    def take(self, parts: list[np.ndarray], size: int) -> np.ndarray:
        """The next `size` bytes, which are kept as they are."""
        taken = self._state[self._at : self._at + size].copy()
        parts.append(taken)
        self._at += size
        return taken

    def rows(self, parts: list[np.ndarray]) -> None:
        """One layer of (cells, row) bytes behind its type and row size."""
        row = int(self.take(parts, 12)[4:].copy().view(np.uint64)[0])
        parts.append(self._block(self._count * row).reshape(self._count, row)[self._kept].reshape(-1))

    def columns(self, parts: list[np.ndarray]) -> None:
        """One transposed layer of (width, cells, element) bytes behind its type, element size and width."""
        _, element, width = (int(number) for number in self.take(parts, 12).view(np.uint32))
        block = self._block(width * self._count * element).reshape(width, self._count, element)
        parts.append(block[:, self._kept].reshape(-1))

    def _block(self, size: int) -> np.ndarray:
        self._at += size
        return self._state[self._at - size : self._at]
