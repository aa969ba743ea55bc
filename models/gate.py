"""Tests a library of llama.cpp before its first use, in a trial with a small model.

The trial computes KV, saves and restores it, and checks that the logits of the next token stay the same. A library whose
parameter structures have the expected layout can still fail: a function may have other arguments, or this CPU may be unable
to run the build. This process therefore asks the library for devices or results only after the trial.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from ..slots.plan import Drop, HostCopy, Restore, Save, Span
from . import builds, cards, llama
from .context import Context, ContextSettings
from .demo import FILE
from .errors import ModelError, RunnerError
from .hardware import FAILED, HIDDEN, devices, hide_cards, load_backends, unloaded_backends
from .model import ALL_LAYERS, Model
from .model_files import digest
from .runner import Runner
from .sampling import Sampler
from .sampling_params import Sampling
from .trial import COMPLAINS, PASSED, command, failure, instructions

PROMPT = "<|im_start|>user\nWhich river does Tarnwick lie on?<|im_end|>\n<|im_start|>assistant\n"
ROUNDING = 0.02  # of the range of the logits: how much a card's kernels for few and for many rows may differ


@cache
def identity() -> str:
    """Return a digest of everything that affects the bits of KV: the library, its CPU plug-in, and the CPU's features.

    The same files compute different bits on different CPUs, because the C library has different code for each CPU.
    """
    load_backends()
    parts = digest(files_in_use()), llama.llama_print_system_info(), instructions()
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def files_in_use() -> list[Path]:
    """Return the loaded files of llama.cpp, sorted by name.

    If the system does not list loaded files, return only the library's file.
    """
    with contextlib.suppress(OSError):
        folder = llama.LIBRARY.path.resolve().parent
        found = (path for path in llama.loaded_libraries() if path.parent == folder or path.name.startswith("libggml"))
        return sorted(found, key=lambda path: path.name)
    return [llama.LIBRARY.path]


@cache
def check() -> None:
    """Raise ModelError unless this library passes the trial on the CPU, now or at an earlier start.

    The trial uses no card, because a fault of the card is not the library's fault.
    """
    environment = os.environ | HIDDEN | {llama.VARIABLES[0]: str(llama.LIBRARY.path.parent)}
    if reason := failure(llama.LIBRARY.path, "computes", command("models.gate"), env=environment):
        raise ModelError(str(llama.LIBRARY.refused(f"fails a trial with a small model: {reason}")))


def exclude_failing_card(asked: str = "", goes_on: Callable[[], bool] = lambda: True) -> None:
    """Try the library on the card, if there is one. If the trial fails, no card computes in this process.

    asked: the flag with which the user requests layers on a card; empty if the user did not request them.
    goes_on: called ten times a second. Once `goes_on` returns False, the trial ends.

    Raises ModelError if the trial was stopped, or if it failed and `asked` names a flag.
    """
    found = [str(device) for device in devices() if device.is_gpu]
    if not found or not (reason := builds.library_failure_on_card(llama.LIBRARY.path, goes_on=goes_on)):
        return
    if not goes_on():
        raise ModelError(f"the trial on {', '.join(found)} was stopped")
    why = f"{', '.join(found)} is not used: it fails a trial with a small model: {reason}"
    if asked:
        raise ModelError(f"{asked}: {why}; without {asked.partition(' ')[0]} the CPU computes")
    hide_cards(FAILED, why)


class Complaints(logging.Handler):
    """Prints llama.cpp's errors at once, because the process may end right after an error."""

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if llama.COMPLAINTS and llama.COMPLAINTS[-1] == line:
            print(f"{COMPLAINS}{line}", file=sys.stderr, flush=True)


def main(where: str = "CPU") -> None:
    """Try this process's library. Print that it passes, or exit with the reason on one line.

    where: CPU or card.
    """
    llama.logger.addHandler(Complaints())
    llama.logger.setLevel(logging.DEBUG)
    try:
        result = trial() if where == "CPU" else trial_on_card()
    except (ModelError, RunnerError) as error:
        result = str(error)
    if result != PASSED:
        sys.exit(result)
    print(PASSED)


def trial_on_card() -> str:
    """Run `trial` with all layers on a card. The logits that the trial compares may differ by rounding.

    Raises ModelError and RunnerError.
    """
    if not any(device.is_gpu for device in devices()):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in unloaded_backends().items())
        is_vulkan = any("vulkan" in path.name for path in llama.backends())
        return reasons or (cards.NO_DRIVER if is_vulkan else "it finds no card")
    return trial(ALL_LAYERS, ROUNDING)


def trial(gpu_layers: int = 0, rounding: float = 0.0) -> str:
    """Compute with a small model, save its KV, restore it to another sequence, and compare the next logits.

    Return PASSED, or what is wrong. Raises ModelError and RunnerError.

    rounding: the allowed difference of the logits, as a share of their range; 0 requires equal bits.
    """
    model = Model(FILE, gpu_layers=gpu_layers)
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
    following = np.array([chosen], np.int32)
    computed = _logits(runner, Span(0, 0, len(tokens), following, logits=True))
    runner.apply(Drop(0))
    runner.apply(Restore(copy, 1, 0, len(tokens)))
    restored = _logits(runner, Span(0, 1, len(tokens), following, logits=True))
    is_same = np.abs(computed - restored).max() <= rounding * np.ptp(computed)
    return PASSED if is_same else "KV does not come back as it was saved"


def _logits(runner: Runner, span: Span) -> np.ndarray:
    """Compute a span, and return the logits after it. Raises RunnerError."""
    runner.batch.fill((span,))
    if result := llama.llama_decode(runner.context.handle, runner.batch.struct):
        raise RunnerError(f"llama_decode returned {result}")
    return runner.logits(1)[0].copy()
