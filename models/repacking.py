"""Measures, at the first start with a model, whether the CPU computes it faster if its weights have another layout.

The result depends on the CPU, on llama.cpp's kernels for the CPU, and on the quantization. On an EPYC, repacked Q4_0 weights
take 0.7 times as long as plain weights, and repacked Q4_K weights 1.3 times as long. The measurement runs in a separate
process, because some machines report AMX but forbid its use, which ends the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import monotonic, perf_counter

from ..slots.child import start_child
from . import gate, llama
from .context import Context, ContextSettings
from .hardware import cpu_name, free_memory
from .model import Model, check_file
from .model_files import cache_folder, digest, files_of, keep, stamp
from .runner import Runner
from .trial import command

logger = logging.getLogger("slotcache")
SMALLEST = 64 << 20  # bytes; a smaller model is fast with either layout
PROMPT, ANSWER = 256, 32  # tokens of the turn that is compared
GAIN = 0.9  # the ratio of times below which another choice is worthwhile, in spite of noise and a second copy of the weights
ROUNDS = 4  # turns with each layout; the fastest counts
STEPS = 4  # steps of one token in a turn; the fastest stands for all steps of the answer
ENOUGH = 15.0  # s, loading included, after which no further round begins
PATIENCE = 60.0  # s for the whole measurement
LOOK = 0.1  # s between two calls of `goes_on`
LARGEST = 128  # bytes of a file with times
LAYOUTS = {b"repacked": True, b"plain": False}


def is_faster_repacked(path: Path, threads: int, goes_on: Callable[[], bool] = lambda: True) -> bool:
    """Return whether a prompt and its answer take clearly less time with repacked weights.

    The times are stored for later starts.

    goes_on: called ten times a second. Once it returns False, the result is False, and no times are stored.

    Raises ModelError if the file is no model.
    """
    check_file(path)
    size = sum(file.stat().st_size for file in files_of(path))
    if not SMALLEST <= size <= free_memory() / 2:  # unlike plain weights, repacked ones are no pages of the file
        return False
    kept = cache_folder() / "times" / f"{_name(path, threads)}.repack"
    times = _read(kept)
    if times is None:
        logger.info("trying another layout of the weights, once for this file: it may take some seconds")
        try:
            times = _measure(path, threads, goes_on)
        except OSError as error:
            logger.info("the weights stay as they are: %s", error)
            return False
        if not goes_on():
            return False
        with contextlib.suppress(OSError):
            keep(kept, json.dumps(times))
    plain, *repacked = times
    if repacked:
        turn = f"a turn of {PROMPT} + {ANSWER} tokens takes"
        logger.info("%s %.2f s with repacked weights, %.2f s without", turn, repacked[0], plain)
    else:
        logger.info("the weights stay as they are: the other layout could not be timed")
    return bool(repacked) and repacked[0] < GAIN * plain


def kept_layout(folder: Path, path: Path, choose: Callable[[], bool | None]) -> bool:
    """Return whether to repack weights. When a server first starts with this folder of KV, `choose` decides.

    The choice is stored in the folder. Later starts use the stored choice, because KV of one layout cannot be used with
    the other layout, and `choose` could decide otherwise if free memory has changed. A stored choice of repacked weights
    has no effect while memory is too small for them.

    choose: returns the choice, or None for no choice, which is not stored.

    Raises ModelError if the file is no model.
    """
    check_file(path)
    parts = gate.identity(), digest(files_of(path))
    kept = folder / "layouts" / hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
    with contextlib.suppress(OSError):
        if kept.is_file() and (known := kept.read_bytes()[:LARGEST]) in LAYOUTS:
            return LAYOUTS[known] and sum(file.stat().st_size for file in files_of(path)) <= free_memory()
    if (chosen := choose()) is not None:
        with contextlib.suppress(OSError):  # with a read-only folder, every start chooses the layout
            keep(kept, "repacked" if chosen else "plain")
    return bool(chosen)


def main(path: str, threads: str) -> None:
    """Print the seconds of a turn with plain and with repacked weights.

    Both models are loaded and then timed alternately, because the speed of the machine may change by more than the
    difference between the layouts.
    """
    latest = monotonic() + ENOUGH
    runners = [_runner(Path(path), int(threads), repack) for repack in (False, True)]
    times = [[*map(_turn, runners)]]
    while len(times) < ROUNDS and monotonic() < latest:
        times.append([*map(_turn, runners)])
    print(*map(min, zip(*times, strict=True)), flush=True)


def _measure(path: Path, threads: int, goes_on: Callable[[], bool]) -> list[float]:
    """Return the seconds of a turn with plain and with repacked weights; only one number if they could not be timed.

    Raises OSError if no process can be started.
    """
    child = command("models.repacking", str(path), str(threads))
    latest = monotonic() + PATIENCE
    with start_child(child, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and monotonic() < latest and goes_on():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK)
        process.kill()
        printed = process.communicate()[0]
    with contextlib.suppress(ValueError):  # a library may print something else
        return [*map(float, printed.split())] or [0.0]
    return [0.0]


def _runner(path: Path, threads: int, repack: bool) -> Runner:
    model = Model(path, 0, repack=repack)
    runner = Runner(Context(model, ContextSettings(num_cells=2 * PROMPT, threads=threads, num_sequences=2)))
    _seconds(runner, 1)  # untimed: the system reads the file
    return runner


def _turn(runner: Runner) -> float:
    """Return the seconds of a prompt and its answer."""
    return _seconds(runner, PROMPT) + ANSWER * min(_seconds(runner, 1) for _ in range(STEPS))


def _seconds(runner: Runner, size: int) -> float:
    began = perf_counter()
    runner.compute_zeros(0, size)
    seconds = perf_counter() - began
    runner.clear()
    return seconds


def _read(kept: Path) -> list[float] | None:
    """Return the stored times; None if there are none."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        if kept.is_file():  # a pipe would wait for a writer
            with kept.open("rb") as file:
                return [float(seconds) for seconds in json.loads(file.read(LARGEST))][:2] or None
    return None


def _name(path: Path, threads: int) -> str:
    """Return a file name that changes with everything that the times depend on."""
    system = llama.llama_print_system_info().decode("utf-8", "replace")
    parts = ([*map(stamp, files_of(path))], platform.machine(), cpu_name(), llama.LIBRARY.version, system, threads, ROUNDS)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
