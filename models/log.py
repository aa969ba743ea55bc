"""llama.cpp's own log, turned into Python's, with its last complaints kept for error messages."""

from __future__ import annotations

import ctypes
import logging
from collections import deque

import llama_cpp

logger = logging.getLogger("slotcache.llama")
ERROR = 4  # ggml's levels: 1 debug, 2 info, 3 warning, 4 error, 5 continued
NO_REASON = "failed to load model"  # the end of a line that only repeats that a load has failed
COMPLAINTS: deque[str] = deque(maxlen=8)


@llama_cpp.llama_log_callback
def _forward(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    line = text.decode("utf-8", "replace").rstrip()
    if level == ERROR and not line.endswith(NO_REASON):
        COMPLAINTS.append(line)
    if line:
        logger.debug("%s", line)


def capture() -> None:
    """Send llama.cpp's log to the logger `slotcache.llama` at DEBUG, instead of stderr."""
    llama_cpp.llama_log_set(_forward, ctypes.c_void_p(0))


def last_complaint() -> str:
    """Return the last error that llama.cpp logged, for a message of ours."""
    return COMPLAINTS[-1] if COMPLAINTS else "llama.cpp gave no reason"
