"""The errors of models, and llama.cpp's log.

ModelError          the file cannot be served: missing, not a GGUF, too big for the memory
NotCounted          this build of llama.cpp does not tell the memory that it takes
RunnerError         llama.cpp failed while computing; the context is no longer to be trusted
NoRoom              the batch did not fit; memory is as it was before, so free something and try again
Interrupted         the batch was aborted on request; memory is as it was before
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque

from . import llama


class ModelError(Exception):
    """A model that cannot be loaded or served. The message names the file, the error and the remedy."""


class NotCounted(ModelError):
    """llama.cpp counts its memory in no known way."""


class RunnerError(RuntimeError):
    """A fatal error of llama.cpp."""


class Interrupted(Exception):
    """llama_decode was aborted."""


class NoRoom(Exception):
    """llama_decode found no cells for the batch."""


# ---- llama.cpp's own log, turned into Python's, with its last complaints kept for error messages. -----------------------

logger = logging.getLogger("slotcache.llama")
ERROR = 4  # ggml's levels: 1 debug, 2 info, 3 warning, 4 error, 5 continued
NO_REASON = "failed to load model"  # the end of a line that only repeats that a load has failed
COMPLAINTS: deque[str] = deque(maxlen=8)


@llama.llama_log_callback
def _forward(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    line = text.decode("utf-8", "replace").rstrip()
    if level == ERROR and not line.endswith(NO_REASON):
        COMPLAINTS.append(line)
    if line:
        logger.debug("%s", line)


def capture() -> None:
    """Send llama.cpp's log to the logger `slotcache.llama` at DEBUG, instead of stderr."""
    llama.llama_log_set(_forward, ctypes.c_void_p(0))


def last_complaint() -> str:
    """Return the last error that llama.cpp logged, for a message of ours."""
    return COMPLAINTS[-1] if COMPLAINTS else "llama.cpp gave no reason"
