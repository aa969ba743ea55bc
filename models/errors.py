"""The errors of models.

LibraryError        no library of llama.cpp that can be used
ModelError          the file cannot be served: missing, not a GGUF, too big for the memory
ChangedFile         the file has other bytes than when it was loaded: KV of the old bytes may be in memory
NotCounted          this build of llama.cpp does not report the memory that it takes
RunnerError         llama.cpp failed while computing; the context is no longer to be trusted
NoRoom              the batch did not fit; memory is as it was before, so free cells and try again
Interrupted         the batch was aborted on request; memory is as it was before
UnknownAdapter      a set names a LoRA adapter that the model does not have; scales stay as they were
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
    """llama.cpp does not report its memory in a known form."""


class RunnerError(RuntimeError):
    """llama.cpp failed, and its context cannot be trusted any more."""


class Interrupted(Exception):
    """llama_decode was aborted."""


class NoRoom(Exception):
    """llama_decode found no cells for the batch."""


class UnknownAdapter(Exception):
    """No LoRA adapter has this number. The message says which numbers are expected."""

    def __init__(self, number: int, num_adapters: int) -> None:
        known = f"0 to {num_adapters - 1}" if num_adapters else "no entry, since --lora names no adapter"
        super().__init__(f"expected {known}")
        self.number = number
