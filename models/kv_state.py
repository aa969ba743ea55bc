"""llama.cpp's saved state of a sequence, as bytes: cuts out a range of positions, joins ranges, and checks a state.

A state consists of a magic number, the sequence's id, and one part for each memory of the model.

An attention part (llama_kv_cache::state_write, one stream) starts with the number of streams and the number of cells. The
cells follow, each with its position, the number of sequences that hold it, and the id of the sequence. If rotary positions
have several dimensions, two more positions and the cell's token come before the sequence's id. After all cells, two numbers
say whether V is transposed, and how many layers there are. K of each layer is next: its type, its row size, and a row for
each cell. V of each layer is last, in the same form as K unless V is transposed. A transposed V of a layer starts with its
type, the size of an element, and the width. For each index below the width, a row has the elements at this index in all
cells.

The recurrent part (llama_memory_recurrent::state_write) starts with the number of cells, which is 0 or 1. A cell of the
recurrent part has its position and the number of sequences that hold the cell; this number is 0. After the cell of the
recurrent part, two numbers say whether S is transposed, and how many layers there are. Each recurrent tensor is next: its
type, its row size and, if there is a cell, a row.

For a hybrid model, two kinds of states are saved: runs, which have attention cells and no recurrent cell, and recurrent
parts without an attention part. A model with a sliding window has two attention parts. The first attention part is for the
layers that see all earlier tokens, the second one is for the layers with the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .errors import RunnerError

HEADER = 16  # bytes: four 32-bit numbers
CELL = 12  # bytes: position, number of holders, holder
WIDE_CELL = 24  # bytes: position, number of holders, x, y, token, holder
COUNT_AT = 3  # the index of the number of cells among the header's numbers
MAGIC, PREFACE = 4, 8  # bytes: the magic number; the magic number with the sequence's id
MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ
RECURRENT_CELL = 8  # bytes: position, number of holders
BLOCK = 12  # bytes before the numbers of a tensor
TOKEN_AT = 4  # the index of the token among a wide cell's numbers


def join(runs: Sequence[np.ndarray], start: int, stop: int, *, cell: int = CELL, num_parts: int = 1) -> np.ndarray:
    """Return one run (uint8) of positions [start, stop), from runs that together contain these positions.

    cell: the size of a cell in bytes.
    num_parts: the number of attention parts.

    Raises RunnerError if the number of cells in a part differs from the number of positions.
    """
    readers = [_Reader(run, start, stop) for run in runs]
    joined = [_of_all(readers, PREFACE)]
    for _ in range(num_parts):
        cells = [reader.cells(cell) for reader in readers]
        if (count := sum(map(len, cells))) != stop - start:
            raise RunnerError(f"saved KV has {count} cells for positions {start} to {stop}")
        lead = _of_all(readers, 8)
        joined += [np.array([1, count], np.int32).view(np.uint8), *(each.reshape(-1) for each in cells), lead]
        transposed, layers = (int(number) for number in lead.copy().view(np.uint32))
        for layer in range(2 * layers):
            is_columns = bool(transposed) and layer >= layers
            head = _of_all(readers, BLOCK)
            blocks = [reader.block(head, is_columns) for reader in readers]
            block = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1 if is_columns else 0)
            joined += [head, block.reshape(-1)]
    joined.append(readers[0].rest())  # in a hybrid model: the recurrent part without a cell
    return np.concatenate(joined)


def _of_all(readers: Sequence[_Reader], size: int) -> np.ndarray:
    """The next `size` bytes are the same in all runs: read them from each run, and return them once."""
    return [reader.take(size) for reader in readers][-1]


@dataclass(frozen=True, slots=True)
class Attention:
    """The form of an attention part in a state.

    cell: the size of a cell in bytes.
    lead: the 8 bytes between the cells and the first block.
    blocks: for each tensor, the 12 bytes before its numbers, and how many bytes of numbers it has for each cell.
    """

    cell: int
    lead: bytes
    blocks: tuple[tuple[bytes, int], ...]

    @property
    def token_bytes(self) -> int:
        """The size of one token's cell and KV in bytes."""
        return self.cell + sum(size for _, size in self.blocks)

    def size(self, num_tokens: int) -> int:
        """Return how many bytes this part takes in a state of `num_tokens` tokens."""
        return 8 + len(self.lead) + BLOCK * len(self.blocks) + num_tokens * self.token_bytes

    def fits(self, state: np.ndarray, start: int, stop: int, sequence: int) -> bool:
        """Return whether `state` has the form of this part, and contains each position [start, stop) once.

        The length of `state` must be right.

        The cells may have any order, since llama.cpp writes them in the order of its pool. The numbers in the tensors (K and
        V) are not checked.
        """
        cells, at = stop - start, 8 + self.cell * (stop - start)
        if state[:8].tobytes() != np.array([1, cells], np.int32).tobytes():
            return False
        numbers = np.frombuffer(state[8:at].tobytes(), np.int32).reshape(cells, -1).copy()
        numbers[:, TOKEN_AT:-1] = 0  # a wide cell may have any token
        if not np.array_equal(numbers[np.argsort(numbers[:, 0], kind="stable")], self._cells(start, stop, sequence)):
            return False
        lead = state[at : at + len(self.lead)].tobytes()
        return lead == self.lead and _has_blocks(state, at + len(self.lead), self.blocks, cells)

    def _cells(self, start: int, stop: int, sequence: int) -> np.ndarray:
        """Return the cells of a part for positions [start, stop), in order of position: (cells, numbers), int32."""
        cells = np.zeros((stop - start, self.cell // 4), np.int32)
        cells[:, :TOKEN_AT] = np.arange(start, stop)[:, None]
        cells[:, 1], cells[:, TOKEN_AT:], cells[:, -1] = 1, 0, sequence
        return cells


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The form of the recurrent layers' part in a state.

    lead, blocks: as in `Attention`, but one cell stands for all tokens.
    """

    lead: bytes
    blocks: tuple[tuple[bytes, int], ...]

    def size(self, num_cells: int) -> int:
        """Return how many bytes this part takes in a state.

        num_cells: 0 or 1.
        """
        each = RECURRENT_CELL + sum(size for _, size in self.blocks)
        return 4 + len(self.lead) + BLOCK * len(self.blocks) + num_cells * each

    def fits(self, state: np.ndarray, num_tokens: int) -> bool:
        """Return whether `state` has the form of this part after `num_tokens` tokens. The length of `state` must be right.

        num_tokens: 0 if the part has no cell.

        The numbers in the tensors are not checked.
        """
        opening = np.array([1, num_tokens - 1, 0] if num_tokens else [0], np.int32).tobytes() + self.lead
        is_opening = state[: len(opening)].tobytes() == opening
        return is_opening and _has_blocks(state, len(opening), self.blocks, 1 if num_tokens else 0)


def _has_blocks(state: np.ndarray, at: int, blocks: tuple[tuple[bytes, int], ...], cells: int) -> bool:
    """Return whether each tensor starts with the expected bytes.

    at: where the first tensor starts.
    """
    for head, size in blocks:
        if state[at : at + BLOCK].tobytes() != head:
            return False
        at += BLOCK + cells * size
    return True


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The common form of all states of one context: everything but the positions and the numbers in the tensors.

    attention: the attention parts: none, one, or two with a sliding window.
    recurrent: the recurrent part; None if the model has no recurrent layers.
    """

    magic: bytes
    attention: tuple[Attention, ...]
    recurrent: Recurrent | None

    @property
    def token_bytes(self) -> int:
        """The size of one token of a run in bytes."""
        return sum(part.token_bytes for part in self.attention)

    def fits(self, run: np.ndarray, start: int, stop: int) -> bool:
        """Return whether a run (uint8) has exactly this context's layout and the positions [start, stop).

        llama.cpp can read a run that fits. All bytes are checked, except for the numbers in the tensors.
        """
        if not 0 <= start < stop < 1 << 31 or len(run) != self.size(stop - start) or not self._has_preface(run):
            return False
        at = PREFACE
        for part in self.attention:
            begin, at = at, at + part.size(stop - start)
            if not part.fits(run[begin:at], start, stop, _signed(run, MAGIC)):
                return False
        return self.recurrent is None or self.recurrent.fits(run[at:], 0)

    def fits_recurrent(self, state: np.ndarray, num_tokens: int) -> bool:
        """Return whether a state (uint8) has exactly the form of a recurrent part after `num_tokens` tokens."""
        if self.recurrent is None or not 0 < num_tokens < 1 << 31:
            return False
        is_whole = len(state) == PREFACE + self.recurrent.size(1) and self._has_preface(state)
        return is_whole and self.recurrent.fits(state[PREFACE:], num_tokens)

    def cut(self, run: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Return a run with only the positions [start, stop) of `run`."""
        return self.join([run], start, stop) if self.attention else run

    def join(self, runs: Sequence[np.ndarray], start: int, stop: int) -> np.ndarray:
        """Return one run of positions [start, stop), from runs that together contain these positions. Raises RunnerError."""
        return join(runs, start, stop, cell=self.attention[0].cell, num_parts=len(self.attention))

    def size(self, num_tokens: int) -> int:
        """Return the size of a run of `num_tokens` tokens in bytes."""
        attention = sum(part.size(num_tokens) for part in self.attention)
        return PREFACE + attention + (self.recurrent.size(0) if self.recurrent else 0)

    def _has_preface(self, state: np.ndarray) -> bool:
        return state[:MAGIC].tobytes() == self.magic and 0 <= _signed(state, MAGIC) < MOST_SEQUENCES


def layout_of(
    run: np.ndarray, num_tokens: int, recurrent: np.ndarray | None = None, *, num_parts: int = 1
) -> StateLayout | None:
    """Return the layout of a context's states, found in a run that starts at position 0; None if it is unknown.

    num_tokens: the number of tokens in the run.
    recurrent: the state of the recurrent layers after these tokens, if the model has such layers.
    num_parts: the number of attention parts.
    """
    try:
        part = _recurrent(recurrent, PREFACE) if recurrent is not None else None
        has_attention = part is None or len(run) > PREFACE + part.size(0)
        for cell in (CELL, WIDE_CELL) if has_attention else (0,):
            attention = _attention(run, num_tokens, cell, num_parts) if has_attention else ()
            layout = StateLayout(run[:MAGIC].tobytes(), attention, part)
            is_recurrent_known = recurrent is None or layout.fits_recurrent(recurrent, num_tokens)
            if is_recurrent_known and layout.fits(run, 0, num_tokens):
                return layout
    except (IndexError, ValueError):
        return None
    return None


def _attention(state: np.ndarray, count: int, cell: int, num_parts: int) -> tuple[Attention, ...]:
    """Read up to `num_parts` parts, each with `count` cells of `cell` bytes. Stop at a part that `_part` cannot read."""
    parts: list[Attention] = []
    at = PREFACE
    while len(parts) < num_parts and (part := _part(state, at, count, cell)):
        parts.append(part)
        at += part.size(count)
    return tuple(parts)


def _part(state: np.ndarray, at: int, count: int, cell: int) -> Attention | None:
    """Read the part at byte `at`; None if the part would be longer than the state."""
    at += 8 + cell * count
    lead, transposed, layers = state[at : at + 8].tobytes(), _number(state, at), _number(state, at + 4)
    blocks: list[tuple[bytes, int]] = []
    at += 8
    for index in range(2 * layers):
        if at + BLOCK > len(state):
            return None
        is_columns = bool(transposed) and index >= layers
        size = _number(state, at + 4) * (_number(state, at + 8) if is_columns else 1)
        blocks.append((state[at : at + BLOCK].tobytes(), size))
        at += BLOCK + count * size
    return Attention(cell, lead, tuple(blocks))


def _recurrent(state: np.ndarray, at: int) -> Recurrent:
    at += 4 + RECURRENT_CELL
    lead = state[at : at + 8].tobytes()
    blocks: list[tuple[bytes, int]] = []
    at += 8
    while at < len(state):
        size = _number(state, at + 4)
        blocks.append((state[at : at + BLOCK].tobytes(), size))
        at += BLOCK + size
    return Recurrent(lead, tuple(blocks))


def _number(state: np.ndarray, at: int) -> int:
    """Return the 32-bit number at byte `at`, or the lower half of a 64-bit number. Raises IndexError."""
    return int(state[at : at + 4].copy().view(np.uint32)[0])


def _signed(state: np.ndarray, at: int) -> int:
    """Return a signed 32-bit number. Raises IndexError."""
    return int(state[at : at + 4].copy().view(np.int32)[0])


class _Reader:
    """Reads a run from its start. The "kept" cells are those at positions [start, stop)."""

    def __init__(self, run: np.ndarray, start: int, stop: int) -> None:
        self._run, self._start, self._stop = run, start, stop
        self._at = self._count = 0
        self._kept: slice | np.ndarray = slice(0)

    def take(self, size: int) -> np.ndarray:
        """Return the next `size` bytes."""
        self._at += size
        return self._run[self._at - size : self._at]

    def rest(self) -> np.ndarray:
        """Return the unread bytes."""
        return self._run[self._at :]

    def cells(self, cell: int) -> np.ndarray:
        """Start a part, and return its cells at the kept positions, (cells, bytes)."""
        self._count = int(self.take(8).copy().view(np.int32)[1])
        cells = self.take(cell * self._count).reshape(self._count, cell)
        positions = np.ascontiguousarray(cells[:, :4]).view(np.int32)[:, 0]
        kept = np.flatnonzero((positions >= self._start) & (positions < self._stop))
        together = len(kept) > 0 and kept[-1] - kept[0] + 1 == len(kept)
        self._kept = slice(int(kept[0]), int(kept[-1]) + 1) if together else kept  # a slice is copied much faster
        return cells[kept]

    def block(self, head: np.ndarray, is_columns: bool) -> np.ndarray:
        """Return the kept cells of one layer's tensor.

        head: the 12 bytes before the tensor.
        is_columns: the tensor is transposed. A transposed tensor has the shape (width, cells, element bytes), any other
        tensor has the shape (cells, row bytes).
        """
        if not is_columns:
            row = int(head[4:].copy().view(np.uint64)[0])
            return self.take(self._count * row).reshape(self._count, row)[self._kept]
        _, element, width = (int(number) for number in head.copy().view(np.uint32))
        return self.take(width * self._count * element).reshape(width, self._count, element)[:, self._kept]
