"""The errors of models.

LibraryError        no usable library of llama.cpp
ModelError          the model cannot be served: the file is missing, is no GGUF, or needs too much memory
ChangedFile         the file has changed since it was loaded: KV of the old content may be in memory
NotCounted          this build of llama.cpp does not report its memory use
RunnerError         llama.cpp failed while computing, so its context cannot be trusted any more
NoRoom              the batch did not fit; memory is as it was before, so free cells and try again
Interrupted         the batch was aborted on request; memory is as it was before
UnknownAdapter      a request names a LoRA adapter that the model does not have; no scale has changed
"""

from __future__ import annotations


class LibraryError(ImportError):
    """No library of llama.cpp can be used.

    The message is one line: the library's path and version, the reason, the remedy.
    """


class ModelError(Exception):
    """A model cannot be loaded or served. The message names the file, the error and the remedy."""


class ChangedFile(ModelError):
    """A file no longer has the content that was loaded."""


class NotCounted(ModelError):
    """llama.cpp does not report its memory use, or reports it in an unknown form."""


class RunnerError(RuntimeError):
    """llama.cpp failed, and its context cannot be trusted any more."""


class Interrupted(Exception):
    """llama_decode was aborted."""


class NoRoom(Exception):
    """llama_decode found no free cells for the batch."""


class UnknownAdapter(Exception):
    """No LoRA adapter has this number. The message names the valid numbers."""

    def __init__(self, number: int, num_adapters: int) -> None:
        known = f"0 to {num_adapters - 1}" if num_adapters else "no entry, since --lora names no adapter"
        super().__init__(f"expected {known}")
        self.number = number
