"""The KV of sequences as bytes: copied out of a context and back into it."""

from __future__ import annotations

import ctypes
from typing import cast

import llama_cpp
import numpy as np

from ...slots.node import Blob, Sizes
from ...slots.plan import Restore
from ..context import Context
from ..errors import RunnerError
from ..state import Layout, cut, layout_of
from .rotation import Rotation
from .selftest import ComputeAlone, find_rotation

ALL = -1
WHOLE, RECURRENT = llama_cpp.LLAMA_STATE_SEQ_FLAGS_NONE, llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
NOTHING = np.empty(0, np.uint8)


class States:
    """Copies runs and recurrent states. llama.cpp only saves whole sequences: a run goes through the scratch sequence.

    Of a hybrid, a run is the KV of its attention layers, and a snapshot is its recurrent state alone. In a layout that is
    not known, as with a sliding window beside recurrent layers, a snapshot is the whole state, and runs are empty.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._layout: Layout | None = None  # once a state was made
        self._stateless: np.ndarray | None = None  # a recurrent state without a cell, of a model whose runs are apart
        self._has_runs = context.model.can_trim
        self.rotation: Rotation | str = "its KV cannot be copied by positions"  # or why runs cannot be moved

    def learn(self, run: Blob) -> bool:
        """Note the layout of runs, read off one from position 0 on; return whether ranges can be cut out of them."""
        self._layout = layout_of(run.data, len(run)) if run.data is not None else None
        return self._layout is not None

    def learn_rotation(self, compute: ComputeAlone) -> None:
        """Find out whether runs can be moved: see `find_rotation`. The layout is known."""
        self.rotation = find_rotation(self._context.model, self._layout, self._context.num_cells, compute)

    def learn_recurrent(self, sequence: int, num_tokens: int) -> Sizes | None:
        """Note the layout of a model with recurrent layers; return the sizes of its states, None for a layout not known.

        sequence: it has this many tokens. The scratch sequence has none.
        """
        self._has_runs, self._stateless = True, self._copy(self._context.scratch, RECURRENT)
        run, state = Blob(0, num_tokens), Blob(0, num_tokens)
        self.save(sequence, run)
        self.snap(sequence, state)
        assert run.data is not None and state.data is not None
        self._layout = layout_of(run.data, num_tokens, state.data)
        if self._layout is None:
            self._has_runs, self._stateless = False, None
            return None
        attention = self._layout.attention
        return Sizes(state=len(state.data), run_token=attention.token_bytes if attention else 0)

    def size(self, sequence: int) -> int:
        """Return the bytes of a sequence's whole state."""
        return llama_cpp.llama_state_seq_get_size(self._context.handle, llama_cpp.llama_seq_id(sequence))

    def accepts(self, run: np.ndarray, start: int, stop: int) -> bool:
        """Return whether a run from a file is of positions [start, stop) and of this context, to its last byte."""
        return self._layout is not None and self._layout.fits(run, start, stop)

    def accepts_recurrent(self, state: np.ndarray, num_tokens: int) -> bool:
        """Return whether a recurrent state from a file is of this context, behind that many tokens, to its last byte."""
        return self._layout is not None and self._layout.fits_recurrent(state, num_tokens)

    def cut(self, run: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Return the part of a run at positions [start, stop)."""
        if self._layout is not None:
            return self._layout.cut(run, start, stop)
        return cut(run, start, stop) if len(run) else run

    def save(self, sequence: int, blob: Blob) -> None:
        """Copy the run at the blob's positions."""
        memory, scratch = self._context.memory, self._context.scratch
        if not self._has_runs:
            blob.data = NOTHING
            return
        llama_cpp.llama_memory_seq_cp(memory, sequence, scratch, blob.start, blob.stop)
        if self._stateless is not None:  # `seq_cp` has given it the sequence's recurrent state, too
            self._set(self._stateless, scratch, RECURRENT)
        blob.data = self._copy(scratch, WHOLE)  # only now: a blob with data counts as saved
        llama_cpp.llama_memory_seq_rm(memory, scratch, 0, ALL)

    def restore(self, restore: Restore) -> None:
        """Give a sequence the cells of a run, or of a part of it, or moved. Its recurrent state is lost."""
        memory, scratch, blob, distance = self._context.memory, self._context.scratch, restore.blob, restore.distance
        data, start, stop = data_of(blob), restore.start - distance, restore.stop - distance
        if not self._has_runs:
            return
        run = data if (start, stop) == (blob.start, blob.stop) else self.cut(data, start, stop)
        if distance:
            assert isinstance(self.rotation, Rotation)
            run = self.rotation.moved(run, distance)
        self._set(run, scratch, WHOLE)
        llama_cpp.llama_memory_seq_cp(memory, scratch, restore.sequence, restore.start, restore.stop)
        llama_cpp.llama_memory_seq_rm(memory, scratch, 0, ALL)

    def snap(self, sequence: int, blob: Blob) -> None:
        """Copy the present state of a sequence: the recurrent part, or all of it where runs are empty."""
        blob.data = self._copy(sequence, RECURRENT if self._has_runs else WHOLE)

    def load(self, blob: Blob, sequence: int) -> None:
        """Give a sequence such a state."""
        self._set(data_of(blob), sequence, RECURRENT if self._has_runs else WHOLE)

    def _copy(self, sequence: int, flags: int) -> np.ndarray:
        """Return the state of a sequence (uint8)."""
        handle, id = self._context.handle, llama_cpp.llama_seq_id(sequence)
        size = llama_cpp.llama_state_seq_get_size_ext(handle, id, _flags(flags))
        data = np.empty(size, np.uint8)
        written = llama_cpp.llama_state_seq_get_data_ext(handle, _bytes_of(data), size, id, _flags(flags))
        if written != size:
            raise RunnerError(f"saving the state of sequence {sequence} wrote {written} of {size} bytes")
        return data

    def _set(self, data: np.ndarray, sequence: int, flags: int) -> None:
        """Replace the state of a sequence."""
        handle, id, size = self._context.handle, llama_cpp.llama_seq_id(sequence), len(data)
        read = llama_cpp.llama_state_seq_set_data_ext(handle, _bytes_of(data), size, id, _flags(flags))
        if read != size:
            raise RunnerError(f"restoring the state of sequence {sequence} read {read} of {size} bytes")


def data_of(blob: Blob) -> np.ndarray:
    """Return the bytes of a copy that was made."""
    if blob.data is None:
        raise RunnerError(f"the copy of positions {blob.start} to {blob.stop} was never made")
    return blob.data


def _flags(flags: int) -> llama_cpp.llama_state_seq_flags:
    return llama_cpp.llama_state_seq_flags(flags)


def _bytes_of(data: np.ndarray) -> ctypes.Array[ctypes.c_uint8]:
    """Return a pointer to the bytes of an array (uint8), with the type that llama_cpp declares for it."""
    return cast("ctypes.Array[ctypes.c_uint8]", data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
