"""Executes a plan: fills the batch, decodes, copies states, aborts.

The batch is filled through numpy views of its arrays, since setting each element through ctypes takes 1 to 2 us.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import numpy as np

from ..slots.plan import Clear, Drop, HostCopy, Load, Operation, Plan, Restore, Save, Share, Snap, Span, Trim
from ..slots.radix import CopySizes
from . import llama
from .context import WARM_UP, Context
from .errors import Interrupted, NoRoom, RunnerError
from .grammar import compute_masks
from .kv_state import StateLayout, join, layout_of
from .lora import NO_ADAPTERS, Adapters
from .rotation import ComputeAlone, Rotation, find_rotation
from .sampling import Sampler

# ---- Aborts a batch inside llama.cpp, from another thread. --------------------------------------------------------------


class Interrupt:
    """Aborts batches. An interrupt must be armed, and acts from a call of `set` until a call of `clear`.

    Between any two operations of its graph, llama.cpp calls a callback, which returns whether to abort. A Python callback
    would wait for Python's global lock a thousand times per batch. The callback is therefore the C library's `strlen`.
    `strlen` gets a string that is empty until `set` is called.
    """

    def __init__(self, context: Context, flag: ctypes.Array[ctypes.c_char] | None = None) -> None:
        self._context = context
        self._flag = ctypes.create_string_buffer(2) if flag is None else flag
        self._callback = ctypes.cast(ctypes.CDLL(None).strlen, llama.ggml_abort_callback)

    def on(self, context: Context) -> Interrupt:
        """Return an interrupt for another context.

        A call of `set` on either interrupt aborts the batches of both contexts.
        """
        return Interrupt(context, self._flag)

    def set(self) -> None:
        """Abort the current batch, if the interrupt is armed. Any thread may call this."""
        self._flag[0] = b"!"

    def clear(self) -> None:
        self._flag[0] = b"\0"

    def arm(self) -> None:
        """Let `set` abort batches, until `disarm` is called."""
        self._install(self._callback, ctypes.c_void_p(ctypes.addressof(self._flag)))

    def disarm(self) -> None:
        self._install(llama.ggml_abort_callback(), ctypes.c_void_p())

    def _install(self, callback: Callable[[ctypes.c_void_p], bool], data: ctypes.c_void_p) -> None:
        llama.llama_set_abort_callback(self._context.handle, callback, data)


# ---- The KV of sequences as bytes: copies out of a context and back into it. --------------------------------------------

ALL = -1
WHOLE, RECURRENT = llama.LLAMA_STATE_SEQ_FLAGS_NONE, llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
NOTHING = np.empty(0, np.uint8)


class States:
    """Copies runs and recurrent states. A run is the KV of one node of the prefix tree: a range of positions.

    llama.cpp can save only whole sequences. A run is saved in two steps: the run is copied to the scratch sequence, and the
    scratch sequence is saved.

    In a hybrid model, a run is the KV of the attention layers, and a snapshot is the recurrent state alone. If the layout of
    the states is unknown, a snapshot is the whole state, and runs are empty. An example is a model that has both a sliding
    window and recurrent layers.

    With a sliding window, llama.cpp does not save the cells that the window has passed. If a sequence fits into the window,
    all its cells are saved. A run is therefore saved in pieces that fit into the window, and these pieces are joined.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._layout: StateLayout | None = None  # None until a state has been read
        self._stateless: np.ndarray | None = None  # a recurrent state without a cell; None: runs are saved with their state
        self._has_runs = context.model.can_trim
        self._window = context.model.window
        self._num_parts = 2 if self._window and self._has_runs else 1  # attention parts of a state
        self.rotation: Rotation | str = "its KV cannot be copied by positions"  # or why runs cannot be moved

    def learn(self, run: HostCopy) -> bool:
        """Learn the layout of runs from a run that starts at position 0. Return whether the layout is a known one."""
        self._layout = layout_of(run.data, len(run), num_parts=self._num_parts) if run.data is not None else None
        return self._layout is not None

    def learn_rotation(self, compute: ComputeAlone) -> None:
        """Find out whether runs can be moved to other positions: see `find_rotation`. The layout must be known."""
        self.rotation = find_rotation(self._context.model, self._layout, self._context.num_cells, compute)

    def learn_recurrent(self, sequence: int, num_tokens: int) -> CopySizes | None:
        """Learn the layout of the states of a model with recurrent layers. Return their sizes.

        Return None if the layout is unknown.

        sequence: a sequence that has `num_tokens` tokens. The scratch sequence must be empty.
        """
        self._has_runs, self._stateless = True, self._copy(self._context.scratch, RECURRENT)
        run, state = HostCopy(0, num_tokens), HostCopy(0, num_tokens)
        self.save(sequence, run)
        self.snap(sequence, state)
        assert run.data is not None and state.data is not None
        self._layout = layout_of(run.data, num_tokens, state.data)
        if self._layout is None:
            self._has_runs, self._stateless = False, None
            return None
        return CopySizes(state=len(state.data), run_token=self._layout.token_bytes)

    def size(self, sequence: int) -> int:
        """Return the size of a sequence's whole state in bytes."""
        return llama.llama_state_seq_get_size(self._context.handle, sequence)

    def accepts(self, run: np.ndarray, start: int, stop: int) -> bool:
        """Return whether a run from a file has exactly this context's layout and the positions [start, stop)."""
        return self._layout is not None and self._layout.fits(run, start, stop)

    def accepts_recurrent(self, state: np.ndarray, num_tokens: int) -> bool:
        """Return whether a recurrent state from a file has exactly this context's layout, after `num_tokens` tokens."""
        return self._layout is not None and self._layout.fits_recurrent(state, num_tokens)

    def cut(self, run: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Return the part of a run at positions [start, stop)."""
        if self._layout is not None:
            return self._layout.cut(run, start, stop)
        return join([run], start, stop, num_parts=self._num_parts) if len(run) else run

    def save(self, sequence: int, copy: HostCopy) -> None:
        """Save a sequence's KV at the copy's positions. If a position has no cell, raise RunnerError and save nothing."""
        if not self._has_runs:
            copy.data = NOTHING
            return
        data = self._saved(sequence, copy.start, copy.stop)
        if self._layout is not None and len(data) != self._layout.size(len(copy)):
            raise RunnerError(f"the sequence {sequence} has not all of positions {copy.start} to {copy.stop}")
        copy.data = data  # after the check: a copy with data counts as saved

    def _saved(self, sequence: int, start: int, stop: int) -> np.ndarray:
        """Return the run at positions [start, stop)."""
        window = self._window or stop
        pieces = [
            self._saved_piece(sequence, max(begin, start), min(begin + window, stop))
            for begin in range(start - start % window, stop, window)  # chunked windows start at multiples of the window
        ]
        if len(pieces) == 1:
            return pieces[0]
        if self._layout is not None:
            return self._layout.join(pieces, start, stop)
        return join(pieces, start, stop, num_parts=self._num_parts)

    def _saved_piece(self, sequence: int, start: int, stop: int) -> np.ndarray:
        """Return the run at positions [start, stop). With a sliding window, the run must not be longer than the window."""
        memory, scratch = self._context.memory, self._context.scratch
        llama.llama_memory_seq_cp(memory, sequence, scratch, start, stop)
        if self._stateless is not None:  # `seq_cp` has also copied the recurrent state
            self._set(self._stateless, scratch, RECURRENT)
        data = self._copy(scratch, WHOLE)
        llama.llama_memory_seq_rm(memory, scratch, 0, ALL)
        return data

    def restore(self, restore: Restore) -> None:
        """Restore a run, or a part of a run, to a sequence. The KV moves up by `restore.distance` positions.

        The sequence loses its recurrent state.
        """
        memory, scratch, copy, distance = self._context.memory, self._context.scratch, restore.copy, restore.distance
        data, start, stop = data_of(copy), restore.start - distance, restore.stop - distance
        if not self._has_runs:
            return
        run = data if (start, stop) == (copy.start, copy.stop) else self.cut(data, start, stop)
        if distance:
            assert isinstance(self.rotation, Rotation)
            run = self.rotation.moved(run, distance)
        self._put_back(copy, run, scratch, WHOLE)
        llama.llama_memory_seq_cp(memory, scratch, restore.sequence, restore.start, restore.stop)
        llama.llama_memory_seq_rm(memory, scratch, 0, ALL)

    def snap(self, sequence: int, copy: HostCopy) -> None:
        """Copy a sequence's current state: the whole state if this model's runs are empty, else the recurrent part."""
        copy.data = self._copy(sequence, RECURRENT if self._has_runs else WHOLE)

    def load(self, copy: HostCopy, sequence: int) -> None:
        """Give a sequence a state that `snap` copied."""
        self._put_back(copy, data_of(copy), sequence, RECURRENT if self._has_runs else WHOLE)

    def _put_back(self, copy: HostCopy, data: np.ndarray, sequence: int, flags: int) -> None:
        """Load the data of a copy into a sequence.

        If the load fails, drop the data, so that no later step uses the data again.
        """
        try:
            self._set(data, sequence, flags)
        except RunnerError:
            copy.data = None
            raise

    def _copy(self, sequence: int, flags: int) -> np.ndarray:
        """Return the state of a sequence (uint8)."""
        handle = self._context.handle
        size = llama.llama_state_seq_get_size_ext(handle, sequence, flags)
        data = np.empty(size, np.uint8)
        written = llama.llama_state_seq_get_data_ext(handle, data.ctypes.data, size, sequence, flags)
        if written != size:
            raise RunnerError(f"saving the state of sequence {sequence} wrote {written} of {size} bytes")
        return data

    def _set(self, data: np.ndarray, sequence: int, flags: int) -> None:
        """Replace the state of a sequence."""
        size = len(data)
        read = llama.llama_state_seq_set_data_ext(self._context.handle, data.ctypes.data, size, sequence, flags)
        if read != size:
            raise RunnerError(f"restoring the state of sequence {sequence} read {read} of {size} bytes")


def data_of(copy: HostCopy) -> np.ndarray:
    """Return the bytes of a finished copy. Raises RunnerError if the copy has no bytes."""
    if copy.data is None:
        raise RunnerError(f"the copy of positions {copy.start} to {copy.stop} was never made")
    return copy.data


NEAR = 0.01  # of the range of the logits: the largest difference that rounding in other cells may cause
NO_SAMPLERS: Mapping[int, Sampler] = MappingProxyType({})


class Runner:
    """Runs plans on llama.cpp, and returns the sampled tokens."""

    def __init__(self, context: Context, adapters: Adapters | None = None) -> None:
        self.context = context
        self._adapters, self._applied = adapters, NO_ADAPTERS
        width = context.state_width if context.settings.is_head else 0
        self.batch = Batch(max(context.batch, context.costs.tile, WARM_UP), width)
        self.interrupt = Interrupt(context)
        self.states = States(context)
        self.on_computed: Callable[[tuple[Span, ...]], None] | None = None  # called with the spans of each computed batch
        self._beside = ThreadPoolExecutor(1, "masks")  # works while llama.cpp computes

    def run(self, plan: Plan, samplers: Mapping[int, Sampler] = NO_SAMPLERS) -> list[int]:
        """Apply the plan's operations, compute its spans, and return one sampled token for each span with `logits`.

        samplers: the samplers of these spans' requests, by request id. If several tokens of a draft are accepted, only the
        first one is returned. `Sampler.take_further` returns the accepted tokens after the first one.

        Raises NoRoom, Interrupted and RunnerError. If `run` raises NoRoom or Interrupted, all operations are done and no
        span is computed.
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
        llama.llama_synchronize(self.context.handle)  # `llama_decode` may return early, and the step is timed
        if padded:
            self.apply(Drop(self.context.scratch))
        if result == 2:  # some of the micro-batches may have been computed
            for span in plan.spans:
                self._remove(span.sequence, span.start, ALL)
        if result == 0:
            for span in plan.spans:  # before the operations below, which may take cells that a window has passed
                self._guard(span.sequence, span.start, span.stop)
        for operation in plan.afterwards:
            self.apply(operation)
        if result == 1:
            raise NoRoom
        if result == 2:
            raise Interrupted
        if result != 0:
            raise RunnerError(f"llama_decode returned {result} for a batch of {plan.num_tokens} tokens")
        if self.on_computed is not None:
            self.on_computed(plan.spans)
        return self._sample(plan.spans, samplers)

    def _apply_adapters(self, name: str) -> None:
        """Compute with the set of adapters that has this name, until the next call."""
        if name != self._applied:
            assert self._adapters is not None, "a request with adapters that are not there"
            self._adapters.apply(self.context.handle, name)
            self._applied = name

    def _decode(self, may_end_early: bool) -> int:
        if not may_end_early:
            return llama.llama_decode(self.context.handle, self.batch.struct)
        self.interrupt.arm()
        try:
            return llama.llama_decode(self.context.handle, self.batch.struct)
        finally:
            self.interrupt.disarm()

    def _pad(self, plan: Plan) -> bool:
        """Add meaningless tokens to a small batch, up to a tile of the attention kernel, if the batch is then faster.

        Return whether tokens were added.
        """
        size, tile, costs = plan.num_tokens, self.context.costs.tile, self.context.costs
        seen = sum(span.stop * len(span.tokens) for span in plan.spans)
        together = min(sum(span.stop for span in plan.spans), self.context.num_cells - plan.num_spare)
        if plan.num_spare < tile - size or not costs.pays_to_pad(size, seen, together):
            return False
        if plan.has_drafts and not self.context.model.can_trim:
            return False  # a recurrent model must compute a draft in one kernel
        self.batch.pad(size, tile, self.context.scratch)
        return True

    def unload(self) -> None:
        """Free the device's memory, and end this thread's OpenMP workers. All KV on the device is lost.

        `Context.open` allocates the memory again.
        """
        self.context.unload()
        llama.release_workers()
        self._applied = NO_ADAPTERS

    def warm_up(self) -> bool:
        """Compute a few tokens, to allocate memory before the first request.

        The warm-up also finds out whether KV can move to host memory. Return whether it can.
        """
        copy = HostCopy(0, WARM_UP)
        self.compute_zeros(0, WARM_UP)
        can_move = self.context.model.can_trim
        if can_move:
            self.states.save(0, copy)
            can_move = self.states.learn(copy)
        self.apply(Drop(0))
        if can_move:
            self.states.learn_rotation(self._compute_alone)
        return can_move

    def measure_states(self) -> CopySizes | None:
        """Return the sizes of the states of recurrent layers; None if a restored state differs from the saved one."""
        sequence = 0
        self.compute_zeros(0, WARM_UP)
        sizes = self.states.learn_recurrent(sequence, WARM_UP)
        if sizes is None:
            short = self.states.size(sequence)
            self.compute_zeros(WARM_UP, 2 * WARM_UP)
            each = (self.states.size(sequence) - short) // WARM_UP
            sizes = CopySizes(state=short - WARM_UP * each, state_token=each)
        self.apply(Drop(sequence))
        come_back = self._states_come_back()
        self.clear()
        return sizes if come_back else None

    def _states_come_back(self) -> bool:
        """Return whether a sequence with a restored run and state continues as the original sequence does.

        Snapshots need two things that llama.cpp does not promise: that a partial state is complete, and that a sequence
        other than the saved one can load it.
        """
        text = np.arange(1, WARM_UP + 2, dtype=np.int32) * (self.context.model.num_vocab // (WARM_UP + 2))
        run, state = HostCopy(0, WARM_UP), HostCopy(0, WARM_UP)
        before, after = HostCopy(0, WARM_UP + 1), HostCopy(0, WARM_UP + 1)
        self._try(Span(0, 0, 0, text[:WARM_UP], logits=True))
        self.apply(Save(0, run))
        self.apply(Snap(0, state))
        expected = self._next_logits(0, text)
        self.apply(Snap(0, before))
        try:
            self.apply(Restore(run, 1, 0, WARM_UP))
            self.apply(Load(state, 1))
        except RunnerError:
            return False
        found = self._next_logits(1, text)
        self.apply(Snap(0, after))
        is_near = np.abs(found - expected).max() <= NEAR * np.ptp(expected)
        return bool(is_near and np.array_equal(data_of(after), data_of(before)))

    def goes_back(self) -> bool:
        """Return whether a sequence continues correctly after its last tokens were cut off.

        The sequence must continue like one that never had the cut tokens. llama.cpp promises correct rollbacks for all
        models with recurrent layers for which it supports them, but not all of these models were tested here.
        """
        num_tokens = 1 + int(self.context.rollback)
        text = np.arange(1, num_tokens + 1, dtype=np.int32) * (self.context.model.num_vocab // (num_tokens + 1))
        try:
            self._try(Span(0, 0, 0, text, logits=True))
            self.apply(Trim(0, 1, num_tokens))
            found = self._next_logits(0, text[[0, -1]])
            self._try(Span(0, 1, 0, text[:1], logits=True))
            expected = self._next_logits(1, text[[0, -1]])
        except RunnerError:
            return False
        finally:
            self.clear()
        return bool(np.abs(found - expected).max() <= NEAR * np.ptp(expected))

    def _next_logits(self, sequence: int, text: np.ndarray) -> np.ndarray:
        """Return the logits after the last token of a text. The sequence must have all tokens of `text` but the last."""
        self._try(Span(0, sequence, len(text) - 1, text[-1:], logits=True))
        return self.logits(1)[0].copy()

    def compute_zeros(self, start: int, stop: int, *sequences: int, drafted: int = 0) -> None:
        """Compute meaningless tokens at positions [start, stop) of `sequences`, or of sequence 0 if none is given.

        drafted: how many tokens before the last one also get logits.
        """
        zeros = np.zeros(stop - start, np.int32)
        self._try(*(Span(0, sequence, start, zeros, logits=True, drafted=drafted) for sequence in sequences or (0,)))
        self.logits(1)  # waits for the device

    def _try(self, *spans: Span) -> None:
        """Compute spans that belong to no request. Raises RunnerError."""
        self.batch.fill(spans)
        result = llama.llama_decode(self.context.handle, self.batch.struct)
        if result != 0:
            num_tokens = sum(len(span.tokens) for span in spans)
            raise RunnerError(f"llama_decode returned {result} for {num_tokens} tokens of no meaning")

    def _compute_alone(self, token: int, positions: Sequence[int]) -> list[np.ndarray]:
        """Return the run (uint8) of a token at each of several positions. In each run, the token sees no other token."""
        runs: list[np.ndarray] = []
        size = min(WARM_UP, self.context.scratch)
        for first in range(0, len(positions), size):
            copies = [HostCopy(position, position + 1) for position in positions[first : first + size]]
            one = np.array([token], np.int32)
            self._try(*(Span(0, sequence, copy.start, one, logits=True) for sequence, copy in enumerate(copies)))
            for sequence, copy in enumerate(copies):
                self.states.save(sequence, copy)
                runs.append(data_of(copy))
            for sequence in range(size):
                self.apply(Drop(sequence))
        return runs

    def clear(self) -> None:
        """Free every cell and zero its data."""
        if self.context.handle:
            llama.llama_memory_clear(self.context.memory, True)

    def apply(self, operation: Operation) -> None:
        memory = self.context.memory
        match operation:
            case Share(source, target, start, stop):
                llama.llama_memory_seq_cp(memory, source, target, start, stop)
                self._guard(target, start, stop)
            case Trim(sequence, start, stop):
                if not self._remove(sequence, start, stop):
                    raise RunnerError(f"this model's memory cannot be trimmed: {operation}")
            case Drop(sequence):
                self._remove(sequence, 0, ALL)
            case Save(sequence, copy):
                self.states.save(sequence, copy)
            case Restore():
                self.states.restore(operation)
                self._guard(operation.sequence, operation.start, operation.stop)
            case Snap(sequence, copy):
                self.states.snap(sequence, copy)
            case Load(copy, sequence):
                self.states.load(copy, sequence)
            case Clear():
                llama.llama_memory_clear(memory, False)

    def _guard(self, sequence: int, start: int, stop: int) -> None:
        """With a sliding window, share the cells at these positions with the sequence's twin: see `Context`."""
        if self.context.twin:
            llama.llama_memory_seq_cp(self.context.memory, sequence, sequence + self.context.twin, start, stop)

    def _remove(self, sequence: int, start: int, stop: int) -> bool:
        if self.context.twin:
            llama.llama_memory_seq_rm(self.context.memory, sequence + self.context.twin, start, stop)
        return llama.llama_memory_seq_rm(self.context.memory, sequence, start, stop)

    def logits(self, num_rows: int) -> np.ndarray:
        """Return the last batch's logits, (rows with logits, vocabulary), float32.

        The next batch overwrites the returned logits.
        """
        pointer = llama.llama_get_logits(self.context.handle)
        return np.ctypeslib.as_array(pointer, (num_rows, self.context.model.num_vocab))

    def _sample(self, spans: tuple[Span, ...], samplers: Mapping[int, Sampler]) -> list[int]:
        num_rows = sum(span.num_rows for span in spans)
        if not num_rows:
            return []
        logits = self.logits(num_rows)
        tokens: list[int] = []
        row, last = 0, -1
        for span in spans:
            last += len(span.tokens)
            if span.scored is not None:
                samplers[span.request].score_prompt(logits[row : row + span.num_scored], span.scored)
                row += span.num_scored
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
    """A llama_batch over numpy arrays, so that numpy can fill it.

    size: the largest number of tokens.
    width: for a multi-token head, which reads a hidden state with each token, the numbers in a state; otherwise 0.
    """

    def __init__(self, size: int, width: int = 0) -> None:
        self.token = np.zeros(size, np.int32)
        self.position = np.zeros(size, np.int32)
        self.sequence = np.zeros(size, np.int32)
        self.wants_logits = np.zeros(size, np.int8)
        self._count = np.ones(size, np.int32)
        self._pointers = np.arange(size, dtype=np.uintp) * self.sequence.itemsize + self.sequence.ctypes.data
        self._steps = np.arange(size, dtype=np.int32)
        int32s, int8s = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_int8)
        self.struct = llama.llama_batch(
            token=self.token.ctypes.data_as(int32s),
            pos=self.position.ctypes.data_as(int32s),
            n_seq_id=self._count.ctypes.data_as(int32s),
            seq_id=self._pointers.ctypes.data_as(ctypes.POINTER(int32s)),
            logits=self.wants_logits.ctypes.data_as(int8s),
        )
        self.states = np.zeros((size, width), np.float32)
        if width:
            self.struct.embd = self.states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def fill(self, spans: tuple[Span, ...]) -> None:
        start = 0
        for span in spans:
            stop = start + len(span.tokens)
            self.token[start:stop] = span.tokens
            self.position[start:stop] = self._steps[: stop - start] + span.start
            self.sequence[start:stop] = span.sequence
            self.wants_logits[start:stop] = 0
            self.wants_logits[stop - 1 - span.drafted : stop] = span.logits
            self.wants_logits[start : start + span.num_scored] = 1
            start = stop
        self.struct.n_tokens = start

    def pad(self, start: int, stop: int, sequence: int) -> None:
        """Fill rows [start, stop) with tokens of `sequence`, from position 0 on, without logits."""
        self.token[start:stop] = 0
        self.position[start:stop] = self._steps[: stop - start]
        self.sequence[start:stop] = sequence
        self.wants_logits[start:stop] = 0
        self.struct.n_tokens = stop
