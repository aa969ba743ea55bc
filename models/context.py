"""The llama_context: its parameters, and its memory on each device."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import llama
from .errors import ModelError, NotCounted
from .hardware import HOST, Device, devices, free_memory
from .model import Model
from .times import Times, costs_of

MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
FEW_SEQUENCES = 64
NOT_SHARED = frozenset({"deepseek4"})
"""Architectures whose sequences can only be copied whole (GGML_ASSERT in `llama_kv_cache_dsv4::seq_cp`)."""
WARM_UP = 4  # tokens of the first batch, which every context can compute
CLOSED = llama.llama_context_p(0)
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "iq4_nl": 20, "q5_0": 6, "q5_1": 7}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSettings:
    """The settings of a context.

    num_cells: KV cells in the pool, at least one for each sequence.
    batch: the most tokens of one call of `llama_decode`.
    micro_batch: the most tokens that llama.cpp computes at once (n_ubatch).
    flash_attention: on, off or auto.
    cache_type_k, cache_type_v: the number formats of the KV.
    threads: CPU threads; 0 lets llama.cpp choose.
    num_sequences: the number of sequence ids. One id is for the scratch sequence, the other ids are for the prefix tree.
    With a sliding window, half of the ids belong to twins (see `Context`).
    rollback: for models with recurrent layers, the most tokens to cut off the end of a sequence. llama.cpp keeps a state for
    each of these tokens. llama.cpp may support fewer tokens than are set here: `Context.rollback` is the number that it
    supports.
    gives_states: llama.cpp provides the last hidden states, for `Context.states`.
    is_head: the context is for the model's multi-token head, which reads a hidden state together with each token.
    """

    num_cells: int
    batch: int = 512
    micro_batch: int = 512
    flash_attention: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    threads: int = 0
    num_sequences: int = MAX_SEQUENCES
    rollback: int = 0
    gives_states: bool = False
    is_head: bool = False


class Context:
    """The pool of KV cells and the graphs that compute with it. Only one thread at a time may use a context.

    times: the measured times from which `costs` follows; None if nothing was measured.
    unit: the measured time per token on this CPU, divided by the time that `times.py` assumes; 1 without timing.
    max_rows: the most rows of logits in a step.
    scratch: the id of the sequence through which KV is saved and restored. The prefix tree uses the sequence ids below
    `scratch`.
    twin: with a sliding window, each sequence has a twin: a second sequence with the same cells. `twin` is what to add to a
    sequence's id to get the id of its twin. Without a sliding window, `twin` is 0. Twins are needed because llama.cpp
    overwrites a cell that the window has passed, although a later prompt may continue there. llama.cpp never overwrites a
    cell that two sequences share.
    """

    def __init__(self, model: Model, settings: ContextSettings) -> None:
        if (architecture := model.metadata("general.architecture")) in NOT_SHARED:
            why = "llama.cpp copies only whole sequences of it, and ends the process where a part is to be shared"
            raise ModelError(f"{model.path}: the architecture {architecture} cannot be served here: {why}")
        params = llama.llama_context_default_params()
        kernel_size = min(settings.micro_batch, settings.batch)
        self.costs = costs_of(model, flash_attention=settings.flash_attention, kernel_size=kernel_size)
        # With a window, the last kernel of a batch could reuse cells that the first kernel has just filled.
        # If results must be exact, the last of several kernels must not get only a few tokens.
        one_kernel = model.window or self.costs.recompute_last > 1
        batch = min(settings.batch, settings.micro_batch) if one_kernel else settings.batch
        # llama.cpp allocates a row of logits for each sequence. It aborts the process if a batch or the pool has fewer
        # tokens than rows. So n_ctx and n_batch are raised, and `batch` below limits our steps.
        params.n_ctx = max(settings.num_cells, settings.num_sequences)
        params.n_batch = max(batch, self.costs.tile, settings.num_sequences, WARM_UP)
        params.n_ubatch = min(settings.micro_batch, batch)
        # A step asks for one row of logits per sequence or, with drafts, for a few rows per sequence.
        params.n_seq_max = params.n_outputs_max = self.max_rows = settings.num_sequences
        params.kv_unified = True
        params.swa_full = True  # tokens that the window has passed keep their cells
        params.flash_attn_type = FLASH_ATTENTION[settings.flash_attention]
        params.type_k = CACHE_TYPES[settings.cache_type_k]
        params.type_v = CACHE_TYPES[settings.cache_type_v]
        # llama.cpp also aborts the process unless a kernel computes at least two tokens more than the rollback.
        params.n_rs_seq = max(min(settings.rollback, params.n_ubatch - 2), 0)
        params.ctx_type = int(settings.is_head)  # LLAMA_CONTEXT_TYPE_MTP
        model.rope_scaling.apply(params)
        if settings.threads:
            params.n_threads = params.n_threads_batch = settings.threads
        self.model, self.settings = model, settings
        self.times: Times | None = None
        self.unit = 1.0
        self._params = params
        self.handle = CLOSED
        self.open()
        self.scratch: int = (settings.num_sequences - 1) // 2 if model.window else settings.num_sequences - 1
        self.twin: int = self.scratch + 1 if model.window else 0
        self.num_cells: int = llama.llama_n_ctx(self.handle)
        self.batch: int = min(batch, llama.llama_n_batch(self.handle))
        self.rollback: float = math.inf if model.can_trim else llama.llama_n_rs_seq(self.handle)
        """The most tokens that can be cut off the end of a sequence."""

    def open(self) -> None:
        """Allocate an empty pool. Load the weights if they are unloaded. Raises ModelError."""
        handle = open_context(self.model, self._params)
        try:
            if self.settings.gives_states:
                _state_function(GIVE_STATES, None, ctypes.c_bool, ctypes.c_bool)(handle, True, False)
            memory = llama.llama_get_memory(handle)
            if not memory:
                about = self.model.description
                raise ModelError(f"{self.model.path} keeps no KV, so it is no text generation model: {about}")
        except ModelError:
            llama.llama_free(handle)
            self.model.weights.exit()
            raise
        self.memory, self.handle = memory, handle

    @property
    def state_width(self) -> int:
        """The size of a hidden state, in numbers."""
        return llama.llama_model_n_embd_out(self.model.handle)

    def states(self, num_tokens: int) -> np.ndarray:
        """Return the last hidden states of the last batch, (tokens, width), float32.

        The next batch overwrites the returned states.
        """
        pointer = _state_function(STATES, ctypes.POINTER(ctypes.c_float))(self.handle)
        return np.ctypeslib.as_array(pointer, (num_tokens, self.state_width))

    def unload(self) -> None:
        """Free the pool, and the weights if they may be unloaded and no other context uses them. `open` restores both."""
        self.close()
        self.model.weights.exit()

    def close(self) -> None:
        if self.handle:
            llama.llama_free(self.handle)
            self.handle = CLOSED


def num_sequences(model: Model, slots: int, *, moves_idle: bool) -> int:
    """Return how many sequence ids a server needs.

    Each slot needs two ids, the second one for prefill ahead of a request. If every prefix of KV can be reused, idle KV
    gets more ids. Each id takes memory for a row of logits, and each step iterates over all pairs of ids.

    moves_idle: idle KV can move to host memory.
    """
    least = 2 * slots + 2
    if not model.can_trim:
        return least
    if not moves_idle:
        return MAX_SEQUENCES
    return min((2 if model.window else 1) * max(FEW_SEQUENCES, least), MAX_SEQUENCES)  # with or without twins


def open_context(model: Model, params: llama.llama_context_params) -> llama.llama_context_p:
    """Create a llama.cpp context, and count it as one that needs the weights in memory. Raises ModelError."""
    model.weights.enter()
    handle = llama.llama_init_from_model(model.handle, params)
    if not handle:
        model.weights.exit()
        raise ModelError(f"cannot make a context of {params.n_ctx} cells for {model.path.name}: {llama.last_complaint()}")
    return handle


# ---- The last hidden states, which a multi-token head reads. ------------------------------------------------------------
#
# llama-server reads them with functions of llama.cpp's C++ header. Each build exports these functions, and their arguments
# are plain values.

GIVE_STATES = "_Z26llama_set_embeddings_nextnP13llama_contextbb"  # (context, on or off, only for rows with logits)
STATES = "_Z26llama_get_embeddings_nextnP13llama_context"


def _state_function(name: str, result: Any, *arguments: Any) -> Any:
    """Return llama.cpp's function of this name, which is one for hidden states.

    Raises ModelError if this build of llama.cpp lacks the function.
    """
    function = getattr(llama.library, name, None)
    if function is None:
        raise ModelError(f"llama.cpp of {llama.LIBRARY} has no {name}, so it reports no hidden states: --spec-type none")
    function.restype, function.argtypes = result, [ctypes.c_void_p, *arguments]
    return function


# ---- The memory that a context takes on each device, as llama.cpp counts it. --------------------------------------------
#
# Only one source is complete: a C++ function of libllama that llama-server's `--fit` also calls. The log reports weights
# only once they are loaded, and no public function reports memory. Weights could be counted from the file, but llama.cpp
# chooses the place of each tensor by the device, the layer, and the operations of a backend.
#
# The function returns a `std::map`, which is read here in the layout of GNU's library. llama-cpp-python is pinned to one
# version, so an update cannot change the layout unnoticed. A map of another form raises an error.

FUNCTION = "_Z26llama_get_memory_breakdownPK13llama_context"
MOST_BUFFERS = 256  # kinds of buffers; a larger count means another layout of the map


@dataclass(frozen=True, slots=True)
class Use:
    """The memory in use on one device, in bytes.

    kv: the KV and recurrent states.
    compute: the buffer of the graphs.
    """

    device: str
    weights: int
    kv: int
    compute: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute


class _Map(ctypes.Structure):
    _fields_ = (
        ("compare", ctypes.c_size_t),
        ("color", ctypes.c_size_t),
        ("root", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
    )


class _Node(ctypes.Structure):
    _fields_ = (
        ("color", ctypes.c_size_t),
        ("parent", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("buffer_type", ctypes.c_void_p),
        ("weights", ctypes.c_size_t),
        ("kv", ctypes.c_size_t),
        ("compute", ctypes.c_size_t),
    )


def breakdown(context: llama.llama_context_p) -> tuple[Use, ...]:
    """Return the memory that a context uses on each device. Raises NotCounted if this build of llama.cpp does not report it.

    llama.cpp does not count the logits of a step, one row for each sequence, so they are added here.
    """
    function = getattr(llama.library, FUNCTION, None)
    if function is None:
        raise NotCounted("this build of llama.cpp does not report its memory use: --fit has no effect")
    function.restype, function.argtypes = _Map, [ctypes.c_void_p]
    found = function(context)  # the few nodes of the map leak: only C++ can free them
    if found.count > MOST_BUFFERS or bool(found.root) != bool(found.count):
        raise NotCounted("this build of llama.cpp reports its memory use in an unknown form: --fit has no effect")
    uses = {HOST: Use(HOST, 0, 0, _logit_bytes(context))}
    for node in _nodes(found.root):
        name = _device_of(node.buffer_type)
        use = uses.get(name, Use(name, 0, 0, 0))
        uses[name] = replace(
            use, weights=use.weights + node.weights, kv=use.kv + node.kv, compute=use.compute + node.compute
        )
    return tuple(sorted(uses.values(), key=lambda use: use.device == HOST))


@dataclass(frozen=True, slots=True)
class DevicePart:
    """A device's part of a loaded model. A draft model on the device is not included.

    device: the device, with its free memory after the load.
    layers: how many layers the device has. The output counts as a layer. `layers` is None if llama.cpp does not report the
    layers.
    use: the memory in use; None if llama.cpp does not report it.
    """

    device: Device
    layers: int | None
    use: Use | None


def parts_of(context: Context) -> tuple[DevicePart, ...]:
    """For each device that has a part of the model, return this part. GPUs come before the CPU.

    This asks each device how much memory is free. During the call, devices in another process (RPC) must not compute.
    """
    layers, uses = context.model.layers, dict[str, Use]()
    with suppress(NotCounted):
        uses = {use.device: use for use in breakdown(context.handle)}
    own = context.model.device
    names = {HOST, *layers, *uses} | ({own.name} if own else set())
    return tuple(
        DevicePart(
            replace(device, free=free_memory()) if device.name == HOST else device,
            layers.get(device.name, 0) if layers else None,
            uses.get(device.name, Use(device.name, 0, 0, 0)) if uses else None,
        )
        for device in devices()
        if device.name in names
    )


def _logit_bytes(context: llama.llama_context_p) -> int:
    model = llama.llama_get_model(context)
    assert model
    vocab = llama.llama_model_get_vocab(model)
    assert vocab
    return llama.llama_n_seq_max(context) * llama.llama_vocab_n_tokens(vocab) * ctypes.sizeof(ctypes.c_float)


def _nodes(address: int | None) -> Iterator[_Node]:
    if address:
        node = _Node.from_address(address)
        yield from _nodes(node.left)
        yield node
        yield from _nodes(node.right)


def _device_of(buffer_type: int) -> str:
    """Return the name of the device whose memory a buffer type uses. A buffer in host memory belongs to the CPU."""
    kind = llama.ggml_backend_buffer_type_t(buffer_type)
    device = llama.ggml_backend_buft_get_device(kind)
    return HOST if llama.ggml_backend_buft_is_host(kind) or not device else llama.ggml_backend_dev_name(device).decode()
