"""What can go wrong with a model, as a user sees it.

ModelError          the file cannot be served: not there, not a GGUF, too big for the memory
RunnerError         llama.cpp failed while computing; the context is no longer to be trusted
NoRoom              the batch did not fit; memory is as it was before, so free something and try again
Interrupted         somebody wanted the batch ended; memory is as it was before
"""

from __future__ import annotations


class ModelError(Exception):
    """A model that cannot be loaded or served. The message says what, where and what would be right."""


class RunnerError(RuntimeError):
    """A fatal error of llama.cpp."""


class Interrupted(Exception):
    """llama_decode was stopped on the way."""


class NoRoom(Exception):
    """llama_decode found no cells for the batch."""
