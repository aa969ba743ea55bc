"""Freed memory goes back to the system."""

import ctypes
import subprocess
import sys

import pytest

ALLOCATE = """
import ctypes
import numpy as np
from slotcache.models.heap import return_large_blocks

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
if {called}:
    return_large_blocks()
largest = np.ones(24 << 20, np.uint8)
del largest  # from here on glibc would take smaller blocks from the heap
before = libc.mallinfo2().hblkhd
block = np.ones(8 << 20, np.uint8)
print(libc.mallinfo2().hblkhd - before)
"""


def mapped(called):
    """Return the bytes mapped for a block of 8 MiB after a block of 24 MiB was freed."""
    script = ALLOCATE.replace("{called}", str(called))
    return int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc 2.33 or newer")
def test_a_large_block_is_mapped_alone_after_any_free():
    assert mapped(called=False) == 0
    assert mapped(called=True) >= 8 << 20
