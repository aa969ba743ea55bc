"""Compares how fast the libraries of llama.cpp on this machine compute a model, each in a separate process."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired
from time import perf_counter
from types import MappingProxyType

from ..slots.child import run_child
from . import gate, llama
from .builds import installed_builds
from .cards import CARD_BUILDS, drivers, root_folder
from .context import Context, ContextSettings
from .hardware import HIDDEN, hide_cards, load_backends
from .llama import VARIABLES, Library
from .model import ALL_LAYERS, Model
from .model_files import cache_folder, files_of, keep, stamp
from .repacking import ANSWER, GAIN
from .runner import Runner
from .split import parse_split
from .trial import command, instructions

logger = logging.getLogger("slotcache")
PROMPT, STEPS = 512, 16  # tokens of a prompt; steps of one token, of which the fastest counts
ROUNDS = 3  # over all libraries, since a machine's speed changes; the fastest prefill and decode count
PATIENCE = 120  # s for one library in one round, including the trial of a new library


@dataclass(frozen=True, slots=True)
class LibrarySpeed:
    """The speed of a library in tokens per second.

    refused: why the library could not be timed; empty if it was timed.
    """

    prefill: float = 0.0
    decode: float = 0.0
    refused: str = ""

    @property
    def turn(self) -> float:
        """The seconds that a prompt and its answer take."""
        return PROMPT / self.prefill + ANSWER / self.decode

    def best(self, other: LibrarySpeed) -> LibrarySpeed:
        if self.refused or other.refused:
            return self if self.refused else other
        return LibrarySpeed(max(self.prefill, other.prefill), max(self.decode, other.decode))


def installed() -> list[Library]:
    """Return the library in use, then the other libraries in search order."""
    used = llama.LIBRARY.path.resolve().parent
    return [llama.LIBRARY, *(found for found in llama.places() if found.path.resolve() != used)]


Offload = tuple[int, str, str, str, int]
"""The number of layers on GPUs, then --device, --split-mode, --tensor-split and --main-gpu."""


def compare(model: Path, threads: int, offload: Offload, log: Callable[[str], None]) -> dict[Library, LibrarySpeed]:
    """Return the speed of each library. The first entry is the library in use.

    log: called with a library's name before each timing.
    """
    speeds: dict[Library, LibrarySpeed] = {}
    found = installed()
    for number in range(ROUNDS):
        for library in found:
            if not (known := speeds.get(library)) or not known.refused:
                log(f"round {number + 1} of {ROUNDS}: {library}")
                speed = _speed(library, model, threads, offload)
                speeds[library] = known.best(speed) if known else speed
    return speeds


AS_LLAMA_CPP = ("", "layer", "", 0)  # the default split
MORE = 5.0  # s that the CPU may take beyond the card's time, which includes compiling kernels


def hide_slower_card(model: Path, threads: int) -> None:
    """Use no card in this process if `auto` chose a build for cards, but the CPU computes this model faster.

    The CPU is timed once, and so is the card with all layers on it. The times are stored for later starts. If the card or
    the CPU cannot be timed, the card is used. Call this before the backends are loaded; afterwards it does nothing.
    """
    build = llama.LIBRARY.origin.removeprefix("npm-")
    if build not in CARD_BUILDS or installed_builds().asked != "auto" or load_backends.cache_info().currsize:
        return
    parts = [*map(stamp, [*files_of(model), llama.LIBRARY.path])], drivers(root_folder()), instructions(), threads
    kept = cache_folder() / "cards" / hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
    if (turns := _kept_turns(kept)) is None:
        logger.info("timing %s on the card and on the CPU, once for this model", model.name)
        turns = _turns(model, threads)
        with suppress(OSError):
            keep(kept, json.dumps(turns))
    card, cpu = turns
    if cpu and card and cpu < card:
        hide_cards("auto", f"the CPU computes {model.name} faster, a prompt and its answer in {cpu:.2f} s, not {card:.2f}")


def _kept_turns(kept: Path) -> tuple[float, float] | None:
    with suppress(OSError, ValueError, TypeError):
        card, cpu = map(float, json.loads(kept.read_bytes()[:100]))
        return card, cpu
    return None


def _turns(model: Path, threads: int) -> tuple[float, float]:
    """Return the seconds of a turn on the card and on the CPU.

    Both numbers are 0 if the card or the CPU cannot be timed, or if the CPU is far slower than the card.
    """
    began = perf_counter()
    card = _speed(llama.LIBRARY, model, threads, (ALL_LAYERS, *AS_LLAMA_CPP))
    patience = perf_counter() - began + MORE
    cpu = card if card.refused else _speed(llama.LIBRARY, model, threads, (0, *AS_LLAMA_CPP), patience, HIDDEN)
    return (0.0, 0.0) if cpu.refused else (card.turn, cpu.turn)


def _speed(
    library: Library,
    model: Path,
    threads: int,
    offload: Offload,
    patience: float = PATIENCE,
    hidden: Mapping[str, str] = MappingProxyType({}),
) -> LibrarySpeed:
    """Return a library's speed, measured in a separate process.

    hidden: additions to the environment of the process.
    """
    folder = library.path if library.path.is_dir() else library.path.parent
    child = command("models.libraries", str(model), str(threads), *map(str, offload))
    environment = os.environ | {VARIABLES[0]: str(folder), **hidden}
    try:
        done = run_child(child, env=environment, timeout=patience)
    except (OSError, TimeoutExpired) as error:
        return LibrarySpeed(refused=str(error))
    try:
        prefill, decode = map(float, done.stdout.splitlines()[-1].split())
        return LibrarySpeed(prefill, decode)
    except (IndexError, ValueError):  # the process ended before its last line of two numbers
        said = (done.stderr.decode("utf-8", "replace").splitlines() or [f"ended with code {done.returncode}"])[-1]
        return LibrarySpeed(refused=said.partition("Error: ")[2] or said)


def main(path: str, threads: str, gpu_layers: str, *split: str) -> None:
    """Print the tokens per second of this process's library, in prefill and in decode. Raises ModelError and RunnerError.

    split: the values of `Offload` that follow the number of layers.
    """
    gate.check()
    settings = ContextSettings(num_cells=2 * PROMPT, batch=PROMPT, threads=int(threads), num_sequences=2)
    names, mode, shares, main_gpu = split
    model = Model(Path(path), int(gpu_layers), split=parse_split(names, mode, shares, int(main_gpu)))
    runner = Runner(Context(model, settings))
    _round(runner)  # untimed: the system reads the file, and llama.cpp allocates
    print(*_round(runner), flush=True)


def _round(runner: Runner) -> tuple[float, float]:
    prefill = _seconds(runner, 0, PROMPT)
    step = min(_seconds(runner, at, at + 1) for at in range(PROMPT, PROMPT + STEPS))
    runner.clear()
    return PROMPT / prefill, 1 / step


def _seconds(runner: Runner, start: int, stop: int) -> float:
    began = perf_counter()
    runner.compute_zeros(start, stop)
    return perf_counter() - began


def as_table(speeds: dict[Library, LibrarySpeed]) -> list[str]:
    """Return one line per library: its tokens per second, and the ratio to the library in use."""
    used = speeds[llama.LIBRARY]
    width = max(len(str(library)) for library in speeds)
    lines = [f"{'library':{width}}  {'prefill':>17}  {'decode':>17}"]
    for library, speed in speeds.items():
        if speed.refused:
            lines.append(f"{library!s:{width}}  not timed: {speed.refused}")
            continue
        shares = [(speed.prefill, used.prefill), (speed.decode, used.decode)]
        cells = [f"{number:>8,.0f}/s {f'({number / first:.2f})' if first else '':>7}" for number, first in shares]
        lines.append("  ".join([f"{library!s:{width}}", *cells]) + ("  in use" if library == llama.LIBRARY else ""))
    return lines


def faster(speeds: dict[Library, LibrarySpeed]) -> Library | None:
    """Return the fastest library, if it takes clearly less time than the library in use; else None."""
    timed = {library: speed.turn for library, speed in speeds.items() if not speed.refused}
    if llama.LIBRARY not in timed:
        return None
    best = min(timed, key=lambda library: timed[library])
    return best if timed[best] < GAIN * timed[llama.LIBRARY] else None
