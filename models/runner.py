"""Carries out plans on a llama.cpp context. No other module computes.

The batch is filled through numpy views over its arrays; writing it element by element through ctypes costs 1-2 us a write.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import cast

import llama_cpp
import numpy as np

from ..slots.node import Blob
from ..slots.plan import Clear, Drop, Load, Operation, Plan, Restore, Save, Share, Snap, Span, Trim
from .adapters import NO_ADAPTERS, Adapters
from .context import WARM_UP, Context
from .errors import Interrupted, NoRoom, RunnerError
from .grammar.constraint import compute_masks
from .interrupt import Interrupt
from .sampling import Sampler
from .state import Layout, cut, layout_of

ALL = -1
NO_SAMPLERS: Mapping[int, Sampler] = MappingProxyType({})


class Runner:
    """Plan in, sampled tokens out."""

    def __init__(self, context: Context, adapters: Adapters | None = None) -> None:
        self.context = context
        self._adapters, self._applied = adapters, NO_ADAPTERS
        self.batch = Batch(max(context.batch, context.costs.tile, WARM_UP))
        self.interrupt = Interrupt(context)
        self._layout: Layout | None = None  # of saved states, once one was made
        self._beside = ThreadPoolExecutor(1, "masks")  # for work while llama.cpp computes

    def run(self, plan: Plan, samplers: Mapping[int, Sampler] = NO_SAMPLERS) -> list[int]:
        """Apply the operations, compute the spans, sample where a span asks for it; one token for each such span.

        samplers: by request id, for each request with a span that asks.
        Raises NoRoom and Interrupted (all operations are done, the spans are not computed), and RunnerError.
        """
        for operation in plan.operations:
            self.apply(operation)
        if not plan.spans:
            return []
        self.batch.fill(plan.spans)
        self._apply_adapters(plan.adapters)
        padded = self._pad(plan)
        constraints = [samplers[span.request].constraint for span in plan.spans if span.logits and span.request in samplers]
        compute_masks([one for one in constraints if one is not None], self._beside)
        result = self._decode(may_end_early=plan.background and self.context.model.can_trim)
        if padded:
            self.apply(Drop(self.context.scratch))
        if result == 2:  # the first of several micro-batches may have been computed
            for span in plan.spans:
                self._remove(span.sequence, span.start, ALL)
        for operation in plan.afterwards:
            self.apply(operation)
        if result == 1:
            raise NoRoom
        if result == 2:
            raise Interrupted
        if result != 0:
            raise RunnerError(f"llama_decode returned {result} for a batch of {plan.num_tokens} tokens")
        if self.context.twin:
            for span in plan.spans:
                self._guard(span.sequence, span.start, span.stop)
        return self._sample(plan.spans, samplers)

    def _apply_adapters(self, name: str) -> None:
        """Compute with another set of adapters, if it is another one."""
        if name != self._applied:
            assert self._adapters is not None, "a request with adapters that are not there"
            self._adapters.apply(self.context.handle, name)
            self._applied = name

    def _decode(self, may_end_early: bool) -> int:
        if not may_end_early:
            return llama_cpp.llama_decode(self.context.handle, self.batch.struct)
        self.interrupt.arm()
        try:
            return llama_cpp.llama_decode(self.context.handle, self.batch.struct)
        finally:
            self.interrupt.disarm()

    def _pad(self, plan: Plan) -> bool:
        """Fill a small batch up to a tile of the attention kernel with meaningless tokens, where that is faster."""
        size, tile, costs = plan.num_tokens, self.context.costs.tile, self.context.costs
        seen = sum(span.stop * len(span.tokens) for span in plan.spans)
        together = min(sum(span.stop for span in plan.spans), self.context.num_cells - plan.num_spare)
        if plan.num_spare < tile - size or not costs.pays_to_pad(size, seen, together):
            return False
        self.batch.pad(size, tile, self.context.scratch)
        return True

    def rest(self) -> None:
        """Free the memory of the device until `Context.open`. Its KV is lost."""
        self.context.rest()
        self._applied = NO_ADAPTERS

    def warm_up(self) -> bool:
        """Compute a few tokens, so that the first request need not allocate; return whether KV can move to host memory."""
        blob = Blob(0, WARM_UP)
        self._compute_zeros(0, WARM_UP)
        model = self.context.model
        can_move = model.can_trim and not model.window  # llama.cpp saves no cells that a window has passed
        if can_move:
            self._save(0, blob)
            can_move = self._learn_layout(blob)
        self.apply(Drop(0))
        return can_move

    def accepts(self, data: np.ndarray, start: int, stop: int) -> bool:
        """Return whether a state from a file is of positions [start, stop) and of this context, to its last byte."""
        return self._layout is not None and self._layout.fits(data, start, stop)

    def _learn_layout(self, blob: Blob) -> bool:
        """Note the layout of saved states; return whether ranges of positions can be cut out of them."""
        self._layout = layout_of(blob.data, len(blob)) if blob.data is not None else None
        return self._layout is not None and self._layout.can_cut

    def measure_state(self) -> tuple[int, int]:
        """Return the bytes of a whole state: a fixed number, and a number for each of its tokens."""
        sizes: list[int] = []
        sequence = 0
        for start in (0, WARM_UP):
            self._compute_zeros(start, start + WARM_UP)
            sizes.append(self._state_size(sequence))
        self._write(sequence, blob := Blob(0, 2 * WARM_UP))
        self._learn_layout(blob)
        self.apply(Drop(sequence))
        each = (sizes[1] - sizes[0]) // WARM_UP
        return sizes[0] - WARM_UP * each, each

    def _compute_zeros(self, start: int, stop: int) -> None:
        self.batch.fill((Span(0, 0, start, np.zeros(stop - start, np.int32), logits=True),))
        result = llama_cpp.llama_decode(self.context.handle, self.batch.struct)
        if result != 0:
            raise RunnerError(f"the first llama_decode returned {result}")

    def clear(self) -> None:
        """Free every cell and zero its data."""
        if self.context.handle:
            llama_cpp.llama_memory_clear(self.context.memory, True)

    def apply(self, operation: Operation) -> None:
        memory = self.context.memory
        match operation:
            case Share(source, target, start, stop):
                llama_cpp.llama_memory_seq_cp(memory, source, target, start, stop)
                self._guard(target, start, stop)
            case Trim(sequence, start, stop):
                if not self._remove(sequence, start, stop):
                    raise RunnerError(f"this model's memory cannot be trimmed: {operation}")
            case Drop(sequence):
                self._remove(sequence, 0, ALL)
            case Save(sequence, blob):
                self._save(sequence, blob)
            case Restore(blob, sequence, start, stop):
                self._restore(blob, sequence, start, stop)
            case Snap(sequence, blob):
                self._write(sequence, blob)
            case Load(blob, sequence):
                self._read(blob, blob.data, sequence)
            case Clear():
                llama_cpp.llama_memory_clear(memory, False)

    def _guard(self, sequence: int, start: int, stop: int) -> None:
        """With a sliding window, let the sequence's twin hold these cells, too."""
        if self.context.twin:
            llama_cpp.llama_memory_seq_cp(self.context.memory, sequence, sequence + self.context.twin, start, stop)

    def _remove(self, sequence: int, start: int, stop: int) -> bool:
        if self.context.twin:
            llama_cpp.llama_memory_seq_rm(self.context.memory, sequence + self.context.twin, start, stop)
        return llama_cpp.llama_memory_seq_rm(self.context.memory, sequence, start, stop)

    def _save(self, sequence: int, blob: Blob) -> None:
        """Save a range through the scratch sequence, since llama.cpp saves whole sequences."""
        scratch = self.context.scratch
        llama_cpp.llama_memory_seq_cp(self.context.memory, sequence, scratch, blob.start, blob.stop)
        self._write(scratch, blob)
        llama_cpp.llama_memory_seq_rm(self.context.memory, scratch, 0, ALL)

    def _restore(self, blob: Blob, sequence: int, start: int, stop: int) -> None:
        scratch = self.context.scratch
        whole = (start, stop) == (blob.start, blob.stop)
        data = blob.data if whole or blob.data is None else cut(blob.data, start, stop)
        self._read(blob, data, scratch)
        llama_cpp.llama_memory_seq_cp(self.context.memory, scratch, sequence, start, stop)
        self._guard(sequence, start, stop)
        llama_cpp.llama_memory_seq_rm(self.context.memory, scratch, 0, ALL)

    def _state_size(self, sequence: int) -> int:
        return llama_cpp.llama_state_seq_get_size(self.context.handle, llama_cpp.llama_seq_id(sequence))

    def _write(self, sequence: int, blob: Blob) -> None:
        """Copy the whole state of a sequence into a blob."""
        size, handle = self._state_size(sequence), self.context.handle
        data = np.empty(size, np.uint8)
        written = llama_cpp.llama_state_seq_get_data(handle, _bytes_of(data), size, llama_cpp.llama_seq_id(sequence))
        if written != size:
            raise RunnerError(f"saving {len(blob)} tokens wrote {written} of {size} bytes")
        blob.data = data  # only now: a blob with data counts as saved

    def _read(self, blob: Blob, data: np.ndarray | None, sequence: int) -> None:
        """Copy a blob, or a part of it, into an empty sequence."""
        if data is None:
            raise RunnerError(f"the copy of positions {blob.start} to {blob.stop} was never made")
        size, handle = len(data), self.context.handle
        read = llama_cpp.llama_state_seq_set_data(handle, _bytes_of(data), size, llama_cpp.llama_seq_id(sequence))
        if read != len(data):
            raise RunnerError(f"restoring positions {blob.start} to {blob.stop} read {read} of {len(data)} bytes")

    def logits(self, num_rows: int) -> np.ndarray:
        """Return the last batch's logits, (rows that asked for them, vocabulary), float32: the next run overwrites them."""
        pointer = llama_cpp.llama_get_logits(self.context.handle)
        return np.ctypeslib.as_array(pointer, (num_rows, self.context.model.num_vocab))

    def _sample(self, spans: tuple[Span, ...], samplers: Mapping[int, Sampler]) -> list[int]:
        num_rows = sum(span.logits for span in spans)
        if not num_rows:
            return []
        logits = self.logits(num_rows)
        tokens: list[int] = []
        last = -1
        for span in spans:
            last += len(span.tokens)
            if span.logits:
                tokens.append(samplers[span.request].choose(logits[len(tokens)], self.context.handle, last))
        return tokens


def _bytes_of(data: np.ndarray) -> ctypes.Array[ctypes.c_uint8]:
    """Return a pointer to the bytes of an array (uint8), with the type that llama_cpp declares for it."""
    return cast("ctypes.Array[ctypes.c_uint8]", data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))


class Batch:
    """A llama_batch over arrays of our own, so that numpy can write them. size: most tokens it can hold."""

    def __init__(self, size: int) -> None:
        self.token = np.zeros(size, np.int32)
        self.position = np.zeros(size, np.int32)
        self.sequence = np.zeros(size, np.int32)
        self.wants_logits = np.zeros(size, np.int8)
        self._count = np.ones(size, np.int32)
        self._pointers = np.arange(size, dtype=np.uintp) * self.sequence.itemsize + self.sequence.ctypes.data
        self._steps = np.arange(size, dtype=np.int32)
        int32s, int8s = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int8)
        self.struct = llama_cpp.llama_batch(
            token=self.token.ctypes.data_as(int32s),
            pos=self.position.ctypes.data_as(int32s),
            n_seq_id=self._count.ctypes.data_as(int32s),
            seq_id=self._pointers.ctypes.data_as(ctypes.POINTER(int32s)),
            logits=self.wants_logits.ctypes.data_as(int8s),
        )

    def fill(self, spans: tuple[Span, ...]) -> None:
        start = 0
        for span in spans:
            stop = start + len(span.tokens)
            self.token[start:stop] = span.tokens
            self.position[start:stop] = self._steps[: stop - start] + span.start
            self.sequence[start:stop] = span.sequence
            self.wants_logits[start:stop] = 0
            self.wants_logits[stop - 1] = span.logits
            start = stop
        self.struct.n_tokens = start

    def pad(self, start: int, stop: int, sequence: int) -> None:
        """Fill rows [start, stop) with tokens of `sequence`, from its position 0, without logits."""
        self.token[start:stop] = 0
        self.position[start:stop] = self._steps[: stop - start]
        self.sequence[start:stop] = sequence
        self.wants_logits[start:stop] = 0
        self.struct.n_tokens = stop
