"""What the C library keeps of memory that was freed."""

from __future__ import annotations

import contextlib
import ctypes

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # malloc.h
LARGE = 1 << 20  # bytes


def return_large_blocks() -> None:
    """Have glibc map large blocks one by one, so that they go back to the system when they are freed.

    By itself it takes blocks up to the size of the largest one freed from the heap: copies of KV, in many sizes and in no
    order, then took 1.65 times the memory that they held. And have all threads share one heap: with one for each, every
    one of them keeps what is free in it. Does nothing with other C libraries.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LARGE)
        library.mallopt(M_ARENA_MAX, 1)
