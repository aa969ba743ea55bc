"""Tries a library of llama.cpp once before it is used: a small model is computed, saved and restored, and compared.

A library with our layout can still be another one inside: a function with other arguments, a build that this CPU cannot
run. So the trial comes before this process has it compute anything, be it to name its devices.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from functools import cache
from pathlib import Path

import numpy as np

from ..slots.plan import Drop, HostCopy, Restore, Save, Span
from . import llama
from .context import Context, ContextSettings
from .demo import FILE
from .errors import ModelError, RunnerError
from .hardware import command, load_backends
from .model import Model
from .model_files import digest
from .runner import Runner
from .sampling import Sampler
from .sampling_params import Sampling
from .trial import PASSED, failure, instructions

PROMPT = "<|im_start|>user\nWhich river does Tarnwick lie on?<|im_end|>\n<|im_start|>assistant\n"


@cache
def identity() -> str:
    """Return a digest of the library, of the plug-in that it chose, and of what this CPU has: KV of another is other KV.

    The same file computes otherwise on another CPU, where the C library's functions have code for it.
    """
    load_backends()
    parts = digest(files_in_use()), llama.llama_print_system_info(), instructions()
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def files_in_use() -> list[Path]:
    """Return the files of llama.cpp that this process has loaded, by their names; where Linux does not tell, its library."""
    with contextlib.suppress(OSError):
        folder = llama.LIBRARY.path.resolve().parent
        found = (path for path in llama.loaded_libraries() if path.parent == folder or path.name.startswith("libggml"))
        return sorted(found, key=lambda path: path.name)
    return [llama.LIBRARY.path]


@cache
def check() -> None:
    """Raise ModelError unless this library passes the trial, or has passed it at an earlier start."""
    if reason := failure(llama.LIBRARY.path, "computes", command("models.gate")):
        raise ModelError(str(llama.LIBRARY.refused(f"fails a trial with a small model: {reason}")))


def main() -> None:
    """Print that this process's library passes the trial, or exit with what is wrong, in one line."""
    try:
        result = trial()
    except (ModelError, RunnerError) as error:
        result = str(error)
    if result != PASSED:
        sys.exit(result)
    print(PASSED)


def trial() -> str:
    """Compute a small model, save its KV, restore it as another sequence's, and compare the next logits to the bit.

    Raises ModelError and RunnerError.
    """
    model = Model(FILE, gpu_layers=0)
    settings = ContextSettings(num_cells=256, batch=64, flash_attention="off", threads=1, num_sequences=4)
    context = Context(model, settings)
    runner = Runner(context)
    tokens = model.tokenize(PROMPT, special=True)
    first = _logits(runner, Span(0, 0, 0, tokens, logits=True))
    sampler = Sampler(model, Sampling(temperature=1.0, top_k=1, typical_p=0.9))
    chosen = sampler.choose(first.copy(), context.handle, len(tokens) - 1)
    sampler.close()
    if not np.isfinite(first).all() or chosen != first.argmax():
        return "it is computed wrongly"
    copy = HostCopy(0, len(tokens))
    runner.apply(Save(0, copy))
    behind = np.array([chosen], np.int32)
    computed = _logits(runner, Span(0, 0, len(tokens), behind, logits=True))
    runner.apply(Drop(0))
    runner.apply(Restore(copy, 1, 0, len(tokens)))
    restored = _logits(runner, Span(0, 1, len(tokens), behind, logits=True))
    return PASSED if np.array_equal(computed, restored) else "KV does not come back as it was saved"


def _logits(runner: Runner, span: Span) -> np.ndarray:
    """Compute a span; return the logits behind it. Raises RunnerError."""
    runner.batch.fill((span,))
    if result := llama.llama_decode(runner.context.handle, runner.batch.struct):
        raise RunnerError(f"llama_decode returned {result}")
    return runner.logits(1)[0].copy()
