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


UNLOAD = """
import ctypes
import re
from pathlib import Path
from slotcache.models.context import Context, ContextSettings
from slotcache.models.demo import FILE
from slotcache.models.model import Model

def taken():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

context = Context(Model(FILE, may_unload=True), ContextSettings(num_cells=64, num_sequences=4))
blocks = [ctypes.create_string_buffer(b"x" * 50_000) for _ in range(1000)]
held = blocks[::20]  # what is free lies between them
before = taken()
del blocks
kept = taken()
context.unload()
print(before - kept, kept - taken())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_what_was_freed_goes_back_when_a_model_is_unloaded():
    found = subprocess.run([sys.executable, "-c", UNLOAD], check=True, capture_output=True, text=True).stdout
    by_itself, by_the_unload = map(int, found.split())
    assert by_itself < 10 << 20 and by_the_unload > 40 << 20
