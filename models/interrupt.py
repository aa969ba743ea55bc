"""Aborts a batch inside llama.cpp, from another thread."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import llama_cpp

from .context import Context


class Interrupt:
    """While it is armed, a call of `set` aborts the current batch.

    llama.cpp asks a callback between any two operations of its graph. Here the callback is the C library's `strlen` over a
    byte that is zero until it is set: a Python function would wait for the interpreter's lock a thousand times a batch.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._flag = ctypes.create_string_buffer(2)
        self._callback = ctypes.cast(ctypes.CDLL(None).strlen, llama_cpp.ggml_abort_callback)

    def set(self) -> None:
        """Abort the current batch, if the interrupt is armed. From any thread."""
        self._flag[0] = b"!"

    def clear(self) -> None:
        self._flag[0] = b"\0"

    def arm(self) -> None:
        """Let `set` abort the batches that follow."""
        self._install(self._callback, ctypes.c_void_p(ctypes.addressof(self._flag)))

    def disarm(self) -> None:
        self._install(llama_cpp.ggml_abort_callback(), ctypes.c_void_p())

    def _install(self, callback: Callable[[ctypes.c_void_p], None], data: ctypes.c_void_p) -> None:
        llama_cpp.llama_set_abort_callback(self._context.handle, callback, data)
