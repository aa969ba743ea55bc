"""Measures a model on this machine; chooses the layout of its weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import platform
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import monotonic, perf_counter

from ..slots.child import start_child
from ..slots.plan import Drop, HostCopy, Restore, Save, Trim
from . import gate, llama
from .context import Context, ContextSettings
from .errors import RunnerError
from .hardware import Device, devices, free_memory
from .model import Model, check_file
from .model_files import cache_folder, digest, files_of, keep, stamp
from .runner import ALL, Runner
from .times import Subject, Times, identify, keep_times, kept_times, summarize, timed_costs, timed_tiles
from .trial import command

# ---- Repacking ----------------------------------------------------------------------------------------------------------
# Whether a CPU computes a model faster with its weights in another layout: measured at the model's first start.
#
# It depends on the CPU, on llama.cpp's kernels for it, and on the quantisation: on an EPYC, Q4_0 takes 0.7 of the time
# and Q4_K 1.3. The measurement is a process of its own, since some machines report AMX and forbid its use, which ends the
# process.

logger = logging.getLogger("slotcache")
SMALLEST = 64 << 20  # bytes: a smaller model is fast either way
PROMPT, ANSWER = 256, 32  # tokens of the turn that is compared
GAIN = 0.9  # of the time: less is noise, and not worth a second copy of the weights
ROUNDS = 4  # turns of each layout; the fastest counts
STEPS = 4  # of one token in a turn; the fastest stands for all of its answer
ENOUGH = 15.0  # s, loading included: no further round begins
REPACK_PATIENCE = 60.0  # s, for all of it
LOOK = 0.1  # s between looks at whether to go on
LARGEST = 128  # bytes of a file of times
LAYOUTS = {b"repacked": True, b"plain": False}


def is_faster_repacked(path: Path, threads: int, goes_on: Callable[[], bool] = lambda: True) -> bool:
    """Return whether a turn takes less time with repacked weights. Its times are kept, as those of devices are.

    goes_on: asked ten times a second; once it says no, the answer is no, and nothing is kept.
    Raises ModelError if the file is no model.
    """
    check_file(path)
    size = sum(file.stat().st_size for file in files_of(path))
    if not SMALLEST <= size <= free_memory() / 2:  # repacked weights are no pages of the file
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
    """Return whether weights are repacked: as at the first start with this folder of KV, else as it is chosen now.

    KV of one layout is not that of the other, and less free memory is enough for another choice. choose: None is no choice,
    and is not kept. Raises ModelError if the file is no model.
    """
    check_file(path)
    parts = gate.identity(), digest(files_of(path))
    kept = folder / "layouts" / hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
    with contextlib.suppress(OSError):
        if kept.is_file() and (known := kept.read_bytes()[:LARGEST]) in LAYOUTS:
            return LAYOUTS[known] and sum(file.stat().st_size for file in files_of(path)) <= free_memory()
    if (chosen := choose()) is not None:
        with contextlib.suppress(OSError):  # of a folder that may only be read: it is chosen at every start
            keep(kept, "repacked" if chosen else "plain")
    return bool(chosen)


def main(path: str, threads: str) -> None:
    """Print the seconds of a turn with the weights as they are, and repacked.

    Both are loaded and take turns: the speed of a machine changes by more than the layouts differ.
    """
    latest = monotonic() + ENOUGH
    runners = [_runner(Path(path), int(threads), repack) for repack in (False, True)]
    times = [[*map(_turn, runners)]]
    while len(times) < ROUNDS and monotonic() < latest:
        times.append([*map(_turn, runners)])
    print(*map(min, zip(*times, strict=True)), flush=True)


def _measure(path: Path, threads: int, goes_on: Callable[[], bool]) -> list[float]:
    """Return the seconds of a turn without and with repacked weights; one number alone if they cannot be used.

    Raises OSError if no process can be started.
    """
    child = command("models.timing", str(path), str(threads))
    latest = monotonic() + REPACK_PATIENCE
    with start_child(child, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and monotonic() < latest and goes_on():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK)
        process.kill()
        told = process.communicate()[0]
    with contextlib.suppress(ValueError):  # a library may print something else
        return [*map(float, told.split())] or [0.0]
    return [0.0]


def _runner(path: Path, threads: int, repack: bool) -> Runner:
    model = Model(path, 0, repack=repack)
    runner = Runner(Context(model, ContextSettings(num_cells=2 * PROMPT, threads=threads, num_sequences=2)))
    _seconds(runner, 1)  # the system reads the file
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
    """Return the times that are kept; None: there are none."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        if kept.is_file():  # a pipe would wait for a writer
            with kept.open("rb") as file:
                return [float(seconds) for seconds in json.loads(file.read(LARGEST))][:2] or None
    return None


def _name(path: Path, threads: int) -> str:
    """Return a name of all that the times depend on."""
    system = llama.llama_print_system_info().decode("utf-8", "replace")
    parts = ([*map(stamp, files_of(path))], platform.machine(), _cpu(), llama.LIBRARY.version, system, threads, ROUNDS)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _cpu() -> str:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith("model name")), "")
    return platform.processor()


FEW = 16  # tokens of a short run
SCATTERED = 4  # tokens in cells apart: without flash attention, a card takes a second for them
MOST_DEPTH, MOST_IDLE = 512, 8192  # cells
DEEP = 128  # cells: fewer tell little of attention on a CPU, however slow it is
PATIENCE = 0.5  # s for each kind of work: a slow device does less of it
TRIES = 3  # of each kind of work; the fastest counts
TURNS, ENOUGH_TURNS = 5, 5.0  # of the times of a CPU's tiles; s: no further one begins
SLOW = 2.0  # s for a chunk on a CPU: from there on its tiles stay as they are assumed


def learn_costs(context: Context, goes_on: Callable[[], bool] = lambda: True) -> None:
    """Give a context the costs of its device, timed now unless their times are kept from an earlier start.

    Those of the CPU are known, but for the tiles of its attention: kernels for it differ by as much as six times. goes_on:
    asked before each batch; once it says no, nothing is learnt.
    """
    model, device = context.model, context.model.device
    if device is None and not (context.costs.tile == chunk_of(context) and model.can_trim and model.size >= SMALLEST):
        return
    if device is None and any(one.is_gpu for one in devices()):
        return  # llama.cpp computes large batches there, whatever holds the weights
    if chunk_of(context) < FEW:
        return
    name, costs_by = (device.name, timed_costs) if device else ("the CPU", timed_tiles)
    subject, began = subject_of(context, device), perf_counter()
    times = kept_times(subject)
    if times is None:
        logger.info("timing %s, once for this model and these settings: a slow one takes half a minute", name)
        try:
            with ThreadPoolExecutor(1) as pool:  # its own thread: OpenMP keeps workers for each thread that has computed
                times = pool.submit(Timing(context, goes_on).run, moves=device is not None).result()
        except RunnerError as error:
            logger.warning("%s could not be timed: %s", name, error)
            return
        except Stopped:
            return
        keep_times(subject, times)
        logger.info("timed %s in %.1f s: later starts use these times", name, perf_counter() - began)
    known, context.times, context.costs = context.costs, times, costs_by(context.costs, times)
    if device is None:
        context.unit = context.costs.token_ns / known.token_ns
    logger.info("%s: %s", name, summarize(times))


def chunk_of(context: Context) -> int:
    """Return the tokens of the chunks to time: two of them fit in one batch, and four in the pool."""
    return min(context.costs.chunk, context.batch // 2, context.num_cells // 4)


def subject_of(context: Context, device: Device | None) -> Subject:
    """Return all that the times of a context depend on. device: None is the CPU."""
    model, settings = context.model, context.settings
    return Subject(
        device=identify(device) if device else ["CPU", _cpu(), 0],
        engine=[llama.LIBRARY.version, gate.identity()],
        model=[model.description, model.num_layers, model.width, model.attention_width, model.num_parameters, model.size],
        settings=[
            model.gpu_layers,
            [[override.pattern, override.buffer] for override in model.overrides],
            settings.flash_attention,
            settings.cache_type_k,
            settings.cache_type_v,
            settings.threads,
            settings.micro_batch,
            model.repack,
            min(settings.num_cells, MOST_IDLE),
            *([] if model.can_trim else ["saves"]),  # their times of before had none
        ],
    )


class Stopped(Exception):
    """The server ends: nothing more is to be timed."""


class Timing:
    """Uses the pool of a context that nothing else uses, and leaves it empty. goes_on: as in `learn_costs`."""

    def __init__(self, context: Context, goes_on: Callable[[], bool] = lambda: True) -> None:
        self._context, self._runner, self._chunk = context, Runner(context), chunk_of(context)
        self._goes_on = goes_on

    def run(self, *, moves: bool = True) -> Times:
        """Return the times; without moves, those of batches, deep ones among them. Raises RunnerError and Stopped."""
        try:
            return self._run(moves)
        finally:
            self._runner.clear()

    def _run(self, moves: bool) -> Times:
        size, model = self._chunk, self._context.model
        for tokens in (size, 1):  # llama.cpp allocates, and a card loads its kernels
            self._batch(tokens)
        step, chunk = self._batch(1), self._batch(size)
        if not moves and chunk > SLOW:
            return Times(chunk_tokens=size, step=step, chunk=chunk, double=chunk)
        double = self._batch(2 * size) if moves else chunk  # else it is timed in turns with others
        times = Times(chunk_tokens=size, step=step, chunk=chunk, double=double)
        most = self._context.num_cells - 4 * size
        trained = (model.context_train or most) - 2 * size
        fewest = 1 if moves else DEEP // size
        num_chunks = max(fewest, min(round(PATIENCE / chunk), MOST_DEPTH // size, most // (4 * size), trained // size))
        depth = num_chunks * size
        if not model.can_trim:
            return self._add_saves(times)
        if most < 4 * depth or trained < depth:
            return times
        return self._add_moves(times, depth, most) if moves else self._in_turns(times, depth)

    def _add_saves(self, times: Times) -> Times:
        """Return the times with those of saves, where the runs of a hybrid are apart from its states.

        Of as many tokens in one stretch: what a save takes beside its cells, the recurrent state's way too, is in both.
        """
        try:
            sizes = None if llama.llama_model_is_recurrent(self._context.model.handle) else self._runner.measure_states()
        except RunnerError:  # the engine, which measures them again, says so
            return times
        if sizes is None or not sizes.run_token:
            return times
        save_scattered = self._save_scattered()
        self._runner.compute_zeros(0, SCATTERED)
        save_few = fastest(lambda: self._runner.apply(Save(0, HostCopy(0, SCATTERED))))
        return replace(times, few=SCATTERED, save_few=save_few, scattered=SCATTERED, save_scattered=save_scattered)

    def _add_moves(self, times: Times, depth: int, most: int) -> Times:
        """Return the times with those behind `depth` tokens, of moves, and beside idle cells: at most `most` in all."""
        size, save_scattered = self._chunk, self._save_scattered()
        times = self._add_depth(times, depth)
        save_few, restore_few = self._move(FEW)
        save, restore = self._move(depth)
        idle, last = self._fill(depth, most), self._context.scratch - 1
        return replace(
            times,
            few=FEW,
            save=save,
            restore=restore,
            save_few=save_few,
            restore_few=restore_few,
            scattered=SCATTERED,
            save_scattered=save_scattered,
            idle=idle,
            step_idle=self._batch(1, sequence=last),
            chunk_idle=self._batch(size, sequence=last),
        )

    def _in_turns(self, times: Times, depth: int) -> Times:
        """Return the times with those behind `depth` tokens, of each the least of some turns with those in an empty pool.

        Attention is their difference, a few milliseconds, and a machine's speed moves by more from one second to the next.
        """
        began, turns = perf_counter(), list[dict[str, float]]()
        while len(turns) < TURNS and (not turns or perf_counter() - began < ENOUGH_TURNS):
            turn = {"chunk": self._batch(self._chunk), "double": self._batch(2 * self._chunk)}
            deep = self._add_depth(times, depth)
            turns.append(turn | {"short_deep": deep.short_deep, "chunk_deep": deep.chunk_deep})
            self._runner.clear()
        return replace(times, depth=depth, **{name: min(turn[name] for turn in turns) for name in turns[0]})

    def _add_depth(self, times: Times, depth: int) -> Times:
        """Return the times with those behind `depth` tokens, which stay."""
        size = self._chunk
        for start in range(0, depth, size):
            self._compute(start, start + size)
        return replace(times, depth=depth, short_deep=self._batch(size - 1, depth), chunk_deep=self._batch(size, depth))

    def _save_scattered(self) -> float:
        """Return the seconds to save tokens that were computed beside those of another sequence, one at a time."""
        for position in range(SCATTERED):
            self._runner.compute_zeros(position, position + 1, 0, 1)
        seconds = fastest(lambda: self._runner.apply(Save(0, HostCopy(0, SCATTERED))))
        self._runner.clear()
        return seconds

    def _fill(self, depth: int, most: int) -> int:
        """Copy sequence 0 to sequences with cells of their own, as far as time and ids allow; return the cells in use."""
        copy, used, began = HostCopy(0, depth), depth, perf_counter()
        self._runner.apply(Save(0, copy))
        for sequence in range(1, self._context.scratch - 1):
            if used + depth > min(MOST_IDLE, most) or perf_counter() - began > PATIENCE:
                break
            self._runner.apply(Restore(copy, sequence, 0, depth))
            used += depth
        return used

    def _batch(self, size: int, start: int = 0, sequence: int = 0) -> float:
        """Return the seconds of a batch, which leaves no cells."""

        def undo() -> None:
            self._runner.apply(Trim(sequence, start, ALL) if start else Drop(sequence))

        return fastest(lambda: self._compute(start, start + size, sequence), undo, fewest=2 if start else 1)

    def _compute(self, start: int, stop: int, sequence: int = 0) -> None:
        if not self._goes_on():
            raise Stopped
        self._runner.compute_zeros(start, stop, sequence)

    def _move(self, size: int) -> tuple[float, float]:
        """Return the seconds to save the first `size` cells of sequence 0, and to bring them back as those of another."""
        copy, runner = HostCopy(0, size), self._runner
        save = fastest(lambda: runner.apply(Save(0, copy)))
        return save, fastest(lambda: runner.apply(Restore(copy, 1, 0, size)), lambda: runner.apply(Drop(1)))


def fastest(act: Callable[[], None], undo: Callable[[], None] = lambda: None, fewest: int = 1) -> float:
    """Return the seconds of the fastest of some tries; a slow act is done `fewest` times."""
    tries: list[float] = []
    while len(tries) < fewest or (len(tries) < TRIES and sum(tries) < PATIENCE):
        began = perf_counter()
        act()
        tries.append(perf_counter() - began)
        undo()
    return min(tries)
