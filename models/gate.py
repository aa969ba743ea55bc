"""Tries a library of llama.cpp once before it is used: a small model is computed, saved and restored, and compared.

A library with our layout can still be another one inside: a function with other arguments, a build that this CPU cannot
run. The trial has a process of its own, which such a library may end. Its result is kept for the library's very bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import subprocess
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
from .model_files import cache_folder, digest, keep
from .runner import Runner
from .sampling import Sampler
from .sampling_params import Sampling

PATIENCE = 60  # s
PROMPT = "<|im_start|>user\nWhich river does Tarnwick lie on?<|im_end|>\n<|im_start|>assistant\n"
PASSED = "passed"
MAPS = Path("/proc/self/maps")


@cache
def identity() -> str:
    """Return a digest of the library and of the plug-in that it chose for this CPU: KV of another build is other KV."""
    load_backends()
    parts = digest(files_in_use()), llama.llama_print_system_info()
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def files_in_use() -> list[Path]:
    """Return the files of llama.cpp that this process has loaded, in order; where Linux does not tell, its library."""
    with contextlib.suppress(OSError):
        lines = MAPS.read_text().splitlines()
        mapped = {Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/") and ".so" in line}
        folder = llama.LIBRARY.path.resolve().parent
        return sorted(path for path in mapped if path.parent == folder or path.name.startswith("libggml"))
    return [llama.LIBRARY.path]


@cache
def check() -> None:
    """Raise ModelError unless this library has passed the trial, now or at an earlier start."""
    kept = cache_folder() / "libraries" / identity()
    if kept.is_file():
        return
    result = _try()
    if result != PASSED:
        raise ModelError(str(llama.LIBRARY.refused(result)))
    with contextlib.suppress(OSError):  # without a cache directory, it is tried at every start
        keep(kept, str(llama.LIBRARY))


def _try() -> str:
    """Return what the trial found."""
    try:
        done = subprocess.run(command("models.gate"), capture_output=True, text=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"could not be tried: {error}"
    if done.returncode < 0:
        return f"ended a small model's process: {signal.strsignal(-done.returncode)}"
    lines = (done.stdout if done.returncode == 0 else done.stderr).splitlines()
    return lines[-1] if lines else "could not be tried"


def main() -> None:
    """Print what a trial of this process's library finds, in one line."""
    print(trial())


def trial() -> str:
    """Compute a small model, save its KV, restore it as another sequence's, and compare the next logits to the bit."""
    model = Model(FILE, gpu_layers=0)
    settings = ContextSettings(num_cells=256, batch=64, flash_attention="off", threads=1, num_sequences=4)
    context = Context(model, settings)
    runner, copy = Runner(context), HostCopy(0, 0)
    tokens = model.tokenize(PROMPT, special=True)
    try:
        first = _logits(runner, Span(0, 0, 0, tokens, logits=True))
        sampler = Sampler(model, Sampling(temperature=1.0, top_k=1, typical_p=0.9))
        chosen = sampler.choose(first.copy(), context.handle, len(tokens) - 1)
        sampler.close()
        if not np.isfinite(first).all() or chosen != first.argmax():
            return "computes a small model wrongly"
        copy = HostCopy(0, len(tokens))
        runner.apply(Save(0, copy))
        behind = np.array([chosen], np.int32)
        computed = _logits(runner, Span(0, 0, len(tokens), behind, logits=True))
        runner.apply(Drop(0))
        runner.apply(Restore(copy, 1, 0, len(tokens)))
        restored = _logits(runner, Span(0, 1, len(tokens), behind, logits=True))
    except RunnerError as error:
        return f"fails with a small model: {error}"
    return PASSED if np.array_equal(computed, restored) else "does not restore KV as it was saved"


def _logits(runner: Runner, span: Span) -> np.ndarray:
    """Compute a span; return the logits behind it. Raises RunnerError."""
    runner.batch.fill((span,))
    if result := llama.llama_decode(runner.context.handle, runner.batch.struct):
        raise RunnerError(f"llama_decode returned {result}")
    return runner.logits(1)[0].copy()
