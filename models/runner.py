"""Carries out plans on a llama.cpp context. No other module computes.

The batch is filled through numpy views over its arrays; writing it element by element through ctypes costs 1-2 us a write.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import llama_cpp
import numpy as np

from ..slots.node import Blob, Sizes
from ..slots.plan import Clear, Drop, Load, Operation, Plan, Restore, Save, Share, Snap, Span, Trim
from .adapters import NO_ADAPTERS, Adapters
from .context import WARM_UP, Context
from .errors import Interrupted, NoRoom, RunnerError
from .grammar.constraint import compute_masks
from .interrupt import Interrupt
from .memory.states import ALL, States, data_of
from .sampling import Sampler

NO_SAMPLERS: Mapping[int, Sampler] = MappingProxyType({})


class Runner:
    """Plan in, sampled tokens out."""

    def __init__(self, context: Context, adapters: Adapters | None = None) -> None:
        self.context = context
        self._adapters, self._applied = adapters, NO_ADAPTERS
        self.batch = Batch(max(context.batch, context.costs.tile, WARM_UP))
        self.interrupt = Interrupt(context)
        self.states = States(context)
        self._beside = ThreadPoolExecutor(1, "masks")  # for work while llama.cpp computes

    def run(self, plan: Plan, samplers: Mapping[int, Sampler] = NO_SAMPLERS) -> list[int]:
        """Apply the operations, compute the spans, sample where a span asks for it; one token for each such span.

        samplers: by request id, for each request with a span that asks. Tokens behind right ones of a draft stay with them.
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
        llama_cpp.llama_synchronize(self.context.handle)  # a device computes behind the call: the time of a step is learnt
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
        self.compute_zeros(0, WARM_UP)
        model = self.context.model
        can_move = model.can_trim and not model.window  # llama.cpp saves no cells that a window has passed
        if can_move:
            self.states.save(0, blob)
            can_move = self.states.learn(blob)
        self.apply(Drop(0))
        if can_move:
            self.states.learn_rotation(self._compute_alone)
        return can_move

    def measure_states(self) -> Sizes:
        """Return the sizes of the states of a model with recurrent layers."""
        sequence = 0
        self.compute_zeros(0, WARM_UP)
        sizes = self.states.learn_recurrent(sequence, WARM_UP)
        if sizes is None:
            short = self.states.size(sequence)
            self.compute_zeros(WARM_UP, 2 * WARM_UP)
            each = (self.states.size(sequence) - short) // WARM_UP
            sizes = Sizes(state=short - WARM_UP * each, state_token=each)
        self.apply(Drop(sequence))
        return sizes

    def compute_zeros(self, start: int, stop: int, sequence: int = 0) -> None:
        """Compute tokens of no meaning at positions [start, stop) of a sequence, to the last one's logits."""
        self._try(Span(0, sequence, start, np.zeros(stop - start, np.int32), logits=True))
        self.logits(1)  # waits for the device

    def _try(self, *spans: Span) -> None:
        """Compute spans that are no request's."""
        self.batch.fill(spans)
        result = llama_cpp.llama_decode(self.context.handle, self.batch.struct)
        if result != 0:
            num_tokens = sum(len(span.tokens) for span in spans)
            raise RunnerError(f"llama_decode returned {result} for {num_tokens} tokens of no meaning")

    def _compute_alone(self, token: int, positions: Sequence[int]) -> list[np.ndarray]:
        """Return the runs (uint8) of a token at positions, each in a sequence of its own, a few at a time."""
        runs: list[np.ndarray] = []
        size = min(WARM_UP, self.context.scratch)
        for first in range(0, len(positions), size):
            blobs = [Blob(position, position + 1) for position in positions[first : first + size]]
            one = np.array([token], np.int32)
            self._try(*(Span(0, sequence, blob.start, one, logits=True) for sequence, blob in enumerate(blobs)))
            for sequence, blob in enumerate(blobs):
                self.states.save(sequence, blob)
                runs.append(data_of(blob))
            for sequence in range(size):
                self.apply(Drop(sequence))
        return runs

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
                self.states.save(sequence, blob)
            case Restore():
                self.states.restore(operation)
                self._guard(operation.sequence, operation.start, operation.stop)
            case Snap(sequence, blob):
                self.states.snap(sequence, blob)
            case Load(blob, sequence):
                self.states.load(blob, sequence)
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

    def logits(self, num_rows: int) -> np.ndarray:
        """Return the last batch's logits, (rows that asked for them, vocabulary), float32: the next run overwrites them."""
        pointer = llama_cpp.llama_get_logits(self.context.handle)
        return np.ctypeslib.as_array(pointer, (num_rows, self.context.model.num_vocab))

    def _sample(self, spans: tuple[Span, ...], samplers: Mapping[int, Sampler]) -> list[int]:
        num_rows = sum(span.logits + span.drafted for span in spans)
        if not num_rows:
            return []
        logits = self.logits(num_rows)
        tokens: list[int] = []
        row, last = 0, -1
        for span in spans:
            last += len(span.tokens)
            if not span.logits:
                continue
            sampler, first = samplers[span.request], last - span.drafted
            if span.drafted:
                tokens.append(sampler.choose_along(span.draft, logits[row:], self.context.handle, first))
            else:
                tokens.append(sampler.choose(logits[row], self.context.handle, first))
            row += 1 + span.drafted
        return tokens


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
            self.wants_logits[stop - 1 - span.drafted : stop] = span.logits
            start = stop
        self.struct.n_tokens = start

    def pad(self, start: int, stop: int, sequence: int) -> None:
        """Fill rows [start, stop) with tokens of `sequence`, from its position 0, without logits."""
        self.token[start:stop] = 0
        self.position[start:stop] = self._steps[: stop - start]
        self.sequence[start:stop] = sequence
        self.wants_logits[start:stop] = 0
        self.struct.n_tokens = stop
