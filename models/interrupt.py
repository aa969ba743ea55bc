"""Stopping llama.cpp in the middle of a batch, from another thread."""

from __future__ import annotations

import ctypes
from math import inf
from time import perf_counter
from typing import Any

import llama_cpp

from .context import TILE, Context

MOMENT = 0.05  # seconds


class Interrupt:
    """While it is armed, a batch that is being computed ends early once somebody calls `set`.

    Unless most of it is done and the rest takes a moment: that is less than would be lost, and often it is what is wanted
    next.

    llama.cpp asks a callback between any two operations of its graph. Here that is the C library's `strlen` over a byte
    that is zero until it is set, so that nobody has to wait for Python's lock a thousand times a batch.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._flag = ctypes.create_string_buffer(2)
        self._token_seconds = inf  # in the last batch that was finished
        self._began, self._num_tokens = 0.0, 0
        self._until = inf  # when the batch is too near its end
        self._callback: Any = ctypes.cast(ctypes.CDLL(None).strlen, llama_cpp.ggml_abort_callback)

    def set(self) -> None:
        """End what is being computed, if it may be ended. From any thread."""
        if perf_counter() < self._until:
            self._flag[0] = b"!"

    @property
    def is_set(self) -> bool:
        return self._flag[0] != b"\0"

    def clear(self) -> None:
        self._flag[0] = b"\0"

    def arm(self, num_tokens: int) -> None:
        """A batch of so many tokens, which is computed from now on, may be ended."""
        self._began, self._num_tokens = perf_counter(), max(num_tokens, TILE)
        expected = self._token_seconds * self._num_tokens
        self._until = self._began + max(expected / 2, expected - MOMENT)
        self._set(self._callback, ctypes.addressof(self._flag))

    def disarm(self, is_finished: bool) -> None:
        """It is over."""
        if is_finished:
            self._token_seconds = (perf_counter() - self._began) / self._num_tokens
        self._until = inf
        self._set(llama_cpp.ggml_abort_callback(), None)

    def _set(self, callback: Any, data: Any) -> None:
        llama_cpp.llama_set_abort_callback(self._context.handle, callback, data)
