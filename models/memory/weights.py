"""The tensors of a model in memory, while a context computes with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock

import llama_cpp

from .. import log
from ..digest import check_unchanged, files_of, stamp
from ..errors import ModelError

GGUF_MAGIC = b"GGUF"
CLOSED = llama_cpp.llama_model_p(0)


class Weights:
    """Loaded at once. Safe from several threads.

    may_rest: they are freed when the last context leaves, and loaded again when one enters. head: the model's metadata and
    vocabulary, which stay. stamps: of its files. on_load: called behind each later load, to make again what was freed with
    them; may raise ModelError.
    """

    def __init__(self, path: Path, params: llama_cpp.llama_model_params, *, may_rest: bool) -> None:
        self.stamps = {file: stamp(file) for file in files_of(path)}
        self.on_load: list[Callable[[], None]] = []
        self._path, self._params, self._may_rest = path, params, may_rest
        self._lock, self._num_contexts = Lock(), 0
        self._handle = self.head = _load(path, params)
        if may_rest:
            params.vocab_only = True
            self.head = _load(path, params)
            params.vocab_only = False

    @property
    def handle(self) -> llama_cpp.llama_model_p:
        """The loaded model. Raises ModelError while the weights rest: llama.cpp would end the process."""
        if not self._handle:
            raise ModelError(f"{self._path} is not in memory")
        return self._handle

    def enter(self) -> None:
        """Count one more context, for which the weights are loaded if they rest. Raises ModelError."""
        with self._lock:
            if not self._handle:
                self._load_again()
            self._num_contexts += 1

    def leave(self) -> None:
        """Count one context less."""
        with self._lock:
            self._num_contexts -= 1
            if self._may_rest and not self._num_contexts:
                self._free()

    def close(self) -> None:
        """Free all. No context is left."""
        if self.head != self._handle:
            llama_cpp.llama_model_free(self.head)
        self._free()
        self.head = CLOSED

    def _free(self) -> None:
        if self._handle:
            llama_cpp.llama_model_free(self._handle)
        self._handle = CLOSED

    def _load_again(self) -> None:
        check_unchanged(self.stamps)  # KV of other weights may be in host memory
        self._handle = _load(self._path, self._params)
        try:
            for act in self.on_load:
                act()
        except ModelError:
            self._free()
            raise


def _load(path: Path, params: llama_cpp.llama_model_params) -> llama_cpp.llama_model_p:
    """Load a model from its file. Raises ModelError."""
    log.COMPLAINTS.clear()  # of earlier loads
    handle = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not handle:
        raise ModelError(f"cannot load {path}: {log.last_complaint()}")
    return handle


def check_file(path: Path) -> None:
    """Raise ModelError with one clear line unless `path` is a readable GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read the model {path}: {error.strerror}") from None
    if magic != GGUF_MAGIC:
        raise ModelError(f"{path} is not a GGUF file: it begins with {magic!r}, not with {GGUF_MAGIC!r}")
