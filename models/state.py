"""llama.cpp's saved sequence state, as bytes: cutting a range of positions out of it, and checking that it is whole.

A state is a magic number, the sequence's id, and one part for each memory of the model.

- Attention (llama_kv_cache::state_write, one stream): streams, cells; for each cell position, holders, holder; whether V is
  transposed, layers; for each layer K's type and row size, then a row a cell; then V likewise, or, if transposed, its type,
  element size and width, then a row of cells for each of its numbers.
- Recurrent (llama_memory_recurrent::state_write): one cell with its position and no holder; whether S is transposed, layers;
  then for each tensor its type and row size, and one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

HEADER = 16  # bytes: four 32-bit numbers
CELL = 12  # bytes: position, number of holders, holder
COUNT_AT = 3  # the number of cells, among the header's numbers
MAGIC, PREFACE = 4, 8  # bytes: the magic number; that and the sequence's id
MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ
RECURRENT_CELL = 12  # bytes: the number of cells, which is 1, position, number of holders
BLOCK = 12  # bytes before the numbers of a tensor


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


@dataclass(frozen=True, slots=True)
class Part:
    """One memory in a state. lead: the 8 bytes behind its cells.

    blocks: of each tensor, the 12 bytes before its numbers, and how many bytes of numbers a cell has.
    """

    is_recurrent: bool
    lead: bytes
    blocks: tuple[tuple[bytes, int], ...]

    def size(self, num_tokens: int) -> int:
        """Return how many bytes this part takes in a state of that many tokens."""
        cells = 1 if self.is_recurrent else num_tokens
        opening = RECURRENT_CELL if self.is_recurrent else 8 + CELL * num_tokens
        return opening + len(self.lead) + sum(BLOCK + cells * size for _, size in self.blocks)

    def opening(self, start: int, stop: int, holder: int = 0) -> bytes:
        """Return the cells of a state of positions [start, stop), in this order."""
        if self.is_recurrent:
            return np.array([1, stop - 1, 0], np.int32).tobytes()
        cells = np.full((stop - start, 3), (0, 1, holder), np.int32)
        cells[:, 0] = np.arange(start, stop)
        return np.array([1, stop - start], np.int32).tobytes() + cells.tobytes()

    def fits(self, state: np.ndarray, start: int, stop: int, holder: int) -> bool:
        """Whether bytes of the right length are this part, in all but the numbers of its tensors and the order of its cells.

        A state has its cells as they stand in the pool. Each position must be there once.
        """
        if self.is_recurrent and start:
            return False  # it stands for all tokens from the first one on
        opening = self.opening(start, stop, holder) + self.lead
        if _in_order(state[: len(opening)], 0 if self.is_recurrent else stop - start) != opening:
            return False
        at, cells = len(opening), 1 if self.is_recurrent else stop - start
        for head, size in self.blocks:
            if state[at : at + BLOCK].tobytes() != head:
                return False
            at += BLOCK + cells * size
        return True


@dataclass(frozen=True, slots=True)
class Layout:
    """The common part of all states of one context: all but positions and the numbers of the tensors."""

    magic: bytes
    parts: tuple[Part, ...]

    @property
    def can_cut(self) -> bool:
        """Whether `cut` knows such states."""
        return len(self.parts) == 1 and not self.parts[0].is_recurrent

    def fits(self, state: np.ndarray, start: int, stop: int) -> bool:
        """Whether a state (uint8) is of just the positions [start, stop) of this context, to its last byte.

        llama.cpp reads it without a complaint then. The numbers of its tensors may be any.
        """
        if not 0 <= start < stop < 1 << 31 or len(state) != self._size(stop - start):
            return False
        holder = int(state[MAGIC:PREFACE].copy().view(np.int32)[0])
        if state[:MAGIC].tobytes() != self.magic or not 0 <= holder < MOST_SEQUENCES:
            return False
        at = PREFACE
        for part in self.parts:
            size = part.size(stop - start)
            if not part.fits(state[at : at + size], start, stop, holder):
                return False
            at += size
        return True

    def _size(self, num_tokens: int) -> int:
        return PREFACE + sum(part.size(num_tokens) for part in self.parts)


def layout_of(state: np.ndarray, num_tokens: int) -> Layout | None:
    """Return the layout of a context, read off a state of its first tokens; None for a layout that is not listed above."""
    parts: list[Part] = []
    at = PREFACE
    try:
        while at < len(state):
            part = _recurrent(state, at) if _number(state, at + 4) == num_tokens - 1 else _attention(state, at, num_tokens)
            parts.append(part)
            at += part.size(num_tokens)
    except (IndexError, ValueError):
        return None
    layout = Layout(state[:MAGIC].tobytes(), tuple(parts))
    return layout if layout.fits(state, 0, num_tokens) else None


def _attention(state: np.ndarray, at: int, count: int) -> Part:
    at += 8 + CELL * count
    lead, transposed, layers = state[at : at + 8].tobytes(), _number(state, at), _number(state, at + 4)
    blocks: list[tuple[bytes, int]] = []
    at += 8
    for index in range(2 * layers):
        is_columns = bool(transposed) and index >= layers
        size = _number(state, at + 4) * (_number(state, at + 8) if is_columns else 1)
        blocks.append((state[at : at + BLOCK].tobytes(), size))
        at += BLOCK + count * size
    return Part(False, lead, tuple(blocks))


def _in_order(opening: np.ndarray, num_cells: int) -> bytes:
    """Return the first bytes of an attention's part, with its cells in the order of their positions."""
    begin, end = 8, 8 + CELL * num_cells
    cells = np.frombuffer(opening[begin:end].tobytes(), np.int32).reshape(num_cells, 3)
    in_order = cells[np.argsort(cells[:, 0], kind="stable")]
    return opening[:begin].tobytes() + in_order.tobytes() + opening[end:].tobytes()


def _recurrent(state: np.ndarray, at: int) -> Part:
    at += RECURRENT_CELL
    lead = state[at : at + 8].tobytes()
    blocks: list[tuple[bytes, int]] = []
    at += 8
    while at < len(state):
        size = _number(state, at + 4)
        blocks.append((state[at : at + BLOCK].tobytes(), size))
        at += BLOCK + size
    return Part(True, lead, tuple(blocks))


def _number(state: np.ndarray, at: int) -> int:
    """A 32-bit number, the lower half of longer ones. Raises IndexError."""
    return int(state[at : at + 4].copy().view(np.uint32)[0])


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
