"""A llama.cpp context with one unified pool of KV cells for all sequences."""

from __future__ import annotations

from dataclasses import dataclass

import llama_cpp

from . import log
from .costs import costs_of
from .errors import ModelError
from .hardware.times import Times
from .model import Model

MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
FEW_SEQUENCES = 64
WARM_UP = 4  # tokens of the first batch, however small the steps are
CLOSED = llama_cpp.llama_context_p(0)
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "iq4_nl": 20, "q5_0": 6, "q5_1": 7}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSettings:
    """num_cells: KV cells in the pool, at least one for each sequence. batch, micro_batch: tokens of a call, of a kernel.

    flash_attention: on, off or auto. cache_type_k, cache_type_v: number formats of the KV. threads 0: llama.cpp's choice.
    num_sequences: the tree's, and a scratch sequence; with a sliding window the tree has half of them.
    """

    num_cells: int
    batch: int = 512
    micro_batch: int = 512
    flash_attention: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    threads: int = 0
    num_sequences: int = MAX_SEQUENCES


class Context:
    """The pool and the graphs over it. One thread at a time may use it.

    costs: of this model on this device. times: where it was timed, they follow from these. max_rows: of logits in a step.
    scratch: the sequence through which ranges are saved and restored; the tree has the ids below it. twin: with a sliding
    window, the offset from a sequence's id to a second one that holds the same cells, else 0. llama.cpp reuses a cell that
    the window has passed, although a later prompt may continue from there; it does not if two sequences hold the cell.
    """

    def __init__(self, model: Model, settings: ContextSettings) -> None:
        params = llama_cpp.llama_context_default_params()
        kernel_size = min(settings.micro_batch, settings.batch)
        self.costs = costs_of(model, flash_attention=settings.flash_attention, kernel_size=kernel_size)
        # With a window, a batch of several kernels could reuse cells for its end that its beginning has just filled.
        # Where results must be exact, the last of several kernels must not get only a few tokens.
        one_kernel = model.window or self.costs.rest > 1
        batch = min(settings.batch, settings.micro_batch) if one_kernel else settings.batch
        # llama.cpp allocates a row of logits for each sequence, and aborts the process if a batch or the pool is smaller.
        # So n_ctx and n_batch are raised for it, and `batch` below limits our steps.
        params.n_ctx = max(settings.num_cells, settings.num_sequences)
        params.n_batch = max(batch, self.costs.tile, settings.num_sequences, WARM_UP)
        params.n_ubatch = min(settings.micro_batch, batch)
        # A step asks for a row of logits a sequence, or, with drafts, for a few a sequence.
        params.n_seq_max = params.n_outputs_max = self.max_rows = settings.num_sequences
        params.kv_unified = True
        params.swa_full = True  # else tokens that the window has passed have no cells
        params.flash_attn_type = FLASH_ATTENTION[settings.flash_attention]
        params.type_k = CACHE_TYPES[settings.cache_type_k]
        params.type_v = CACHE_TYPES[settings.cache_type_v]
        if settings.threads:
            params.n_threads = params.n_threads_batch = settings.threads
        self.model, self.settings = model, settings
        self.times: Times | None = None
        self._params = params
        self.handle = CLOSED
        self.open()
        self.scratch: int = (settings.num_sequences - 1) // 2 if model.window else settings.num_sequences - 1
        self.twin: int = self.scratch + 1 if model.window else 0
        self.num_cells: int = llama_cpp.llama_n_ctx(self.handle)
        self.batch: int = min(batch, llama_cpp.llama_n_batch(self.handle))

    def open(self) -> None:
        """Allocate the pool, empty, and load the weights if they rest. Raises ModelError."""
        handle = open_context(self.model, self._params)
        memory = llama_cpp.llama_get_memory(handle)
        if not memory:
            raise ModelError(f"{self.model.path} keeps no KV, so it is no text generation model: {self.model.description}")
        self.memory, self.handle = memory, handle

    def rest(self) -> None:
        """Free the memory until `open`; the weights go, too, unless another context computes with them."""
        self.close()
        self.model.weights.leave()

    def close(self) -> None:
        if self.handle:
            llama_cpp.llama_free(self.handle)
            self.handle = CLOSED


def num_sequences(model: Model, lanes: int, *, moves_idle: bool) -> int:
    """Return the ids that a server needs: for each lane one and one ahead, and for KV that stays on the device while idle.

    Each id costs a row of logits, and each step passes over all pairs of ids. moves_idle: idle KV moves to host memory.
    """
    least = 2 * lanes + 2
    if not model.can_trim:
        return least
    return max(FEW_SEQUENCES, least) if moves_idle and not model.window else MAX_SEQUENCES


def open_context(model: Model, params: llama_cpp.llama_context_params) -> llama_cpp.llama_context_p:
    """Make a llama.cpp context, which counts among those that keep the weights in memory. Raises ModelError."""
    model.weights.enter()
    handle = llama_cpp.llama_init_from_model(model.handle, params)
    if not handle:
        model.weights.leave()
        raise ModelError(f"cannot make a context of {params.n_ctx} cells for {model.path.name}: {log.last_complaint()}")
    return handle
