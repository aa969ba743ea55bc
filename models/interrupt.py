"""Stopping llama.cpp in the middle of a batch, from another thread."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp

from .context import Context


class Interrupt:
    """While it is armed, a batch that is being computed ends early once somebody calls `set`.

    llama.cpp asks a callback between any two operations of its graph. Here that is the C library's `strlen` over a byte
    that is zero until it is set, so that nobody has to wait for Python's lock a thousand times a batch.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._flag = ctypes.create_string_buffer(2)
        self._callback: Any = ctypes.cast(ctypes.CDLL(None).strlen, llama_cpp.ggml_abort_callback)

    def set(self) -> None:
        """End what is being computed, if it may be ended. From any thread."""
        self._flag[0] = b"!"

    def clear(self) -> None:
        self._flag[0] = b"\0"

    def arm(self) -> None:
        """What is computed from now on may be ended."""
        self._set(self._callback, ctypes.addressof(self._flag))

    def disarm(self) -> None:
        self._set(llama_cpp.ggml_abort_callback(), None)

    def _set(self, callback: Any, data: Any) -> None:
        llama_cpp.llama_set_abort_callback(self._context.handle, callback, data)
