"""Times a device that is not the CPU, at the first start of a model on it: a second or two."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter

import llama_cpp

from ...slots.node import Blob
from ...slots.plan import Drop, Restore, Save, Trim
from ..context import Context
from ..costs import timed_costs
from ..errors import RunnerError
from ..memory.states import ALL
from ..runner import Runner
from .device import Device
from .times import Subject, Times, identify, keep_times, kept_times, summarize

logger = logging.getLogger("slotcache")
FEW = 16  # tokens of a short run
MOST_DEPTH, MOST_IDLE = 512, 8192  # cells
PATIENCE = 0.5  # s for each kind of work: a slow device does less of it
TRIES = 3  # of each kind of work; the fastest counts


def learn_costs(context: Context) -> None:
    """Give a context the costs of its device, timed now unless their times are kept from an earlier start.

    The costs of the CPU are known.
    """
    device = context.model.device
    if device is None or chunk_of(context) < FEW:
        return
    subject, began = subject_of(context, device), perf_counter()
    times = kept_times(subject)
    if times is None:
        try:
            with ThreadPoolExecutor(1) as pool:  # its own thread: OpenMP keeps workers for each thread that has computed
                times = pool.submit(Timing(context).run).result()
        except RunnerError as error:
            logger.warning("%s could not be timed: %s", device.name, error)
            return
        keep_times(subject, times)
        logger.info("timed %s in %.1f s: later starts use these times", device.name, perf_counter() - began)
    context.times, context.costs = times, timed_costs(context.costs, times)
    logger.info("%s: %s", device.name, summarize(times))


def chunk_of(context: Context) -> int:
    """Return the tokens of the chunks to time: two of them fit in one batch, and four in the pool."""
    return min(context.costs.chunk, context.batch // 2, context.num_cells // 4)


def subject_of(context: Context, device: Device) -> Subject:
    """Return all that the times of a context depend on."""
    model, settings = context.model, context.settings
    return Subject(
        device=identify(device),
        engine=[llama_cpp.__version__, llama_cpp.llama_print_system_info().decode("utf-8", "replace")],
        model=[model.description, model.num_layers, model.width, model.attention_width, model.num_parameters, model.size],
        settings=[
            model.gpu_layers,
            [[override.pattern, override.buffer] for override in model.overrides],
            settings.flash_attention,
            settings.cache_type_k,
            settings.cache_type_v,
            settings.threads,
            settings.micro_batch,
            min(settings.num_cells, MOST_IDLE),
            list(map(str, model.overrides)),
        ],
    )


class Timing:
    """Uses the pool of a context that nothing else uses, and leaves it empty."""

    def __init__(self, context: Context) -> None:
        self._context, self._runner, self._chunk = context, Runner(context), chunk_of(context)

    def run(self) -> Times:
        """Return the times. Raises RunnerError."""
        size = self._chunk
        for tokens in (size, 1):  # llama.cpp allocates, and a card loads its kernels
            self._batch(tokens)
        step, chunk, double = (self._batch(tokens) for tokens in (1, size, 2 * size))
        times = Times(chunk_tokens=size, step=step, chunk=chunk, double=double)
        model, most = self._context.model, self._context.num_cells - 4 * size
        if not model.can_trim or model.window or most < 4 * size:
            return times
        num_chunks = max(1, min(round(PATIENCE / chunk), MOST_DEPTH // size, most // (4 * size)))
        try:
            return self._add_moves(times, num_chunks * size, most)
        finally:
            self._runner.clear()

    def _add_moves(self, times: Times, depth: int, most: int) -> Times:
        """Return the times with those behind `depth` tokens, of moves, and beside idle cells: at most `most` in all."""
        size = self._chunk
        for start in range(0, depth, size):
            self._runner.compute_zeros(start, start + size)
        times = replace(times, depth=depth, short_deep=self._batch(size - 1, depth), chunk_deep=self._batch(size, depth))
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
            idle=idle,
            step_idle=self._batch(1, sequence=last),
            chunk_idle=self._batch(size, sequence=last),
        )

    def _fill(self, depth: int, most: int) -> int:
        """Copy sequence 0 to sequences with cells of their own, as far as time and ids allow; return the cells in use."""
        blob, used, began = Blob(0, depth), depth, perf_counter()
        self._runner.apply(Save(0, blob))
        for sequence in range(1, self._context.scratch - 1):
            if used + depth > min(MOST_IDLE, most) or perf_counter() - began > PATIENCE:
                break
            self._runner.apply(Restore(blob, sequence, 0, depth))
            used += depth
        return used

    def _batch(self, size: int, start: int = 0, sequence: int = 0) -> float:
        """Return the seconds of a batch, which leaves no cells."""

        def undo() -> None:
            self._runner.apply(Trim(sequence, start, ALL) if start else Drop(sequence))

        return fastest(lambda: self._runner.compute_zeros(start, start + size, sequence), undo)

    def _move(self, size: int) -> tuple[float, float]:
        """Return the seconds to save the first `size` cells of sequence 0, and to bring them back as those of another."""
        blob, runner = Blob(0, size), self._runner
        save = fastest(lambda: runner.apply(Save(0, blob)))
        return save, fastest(lambda: runner.apply(Restore(blob, 1, 0, size)), lambda: runner.apply(Drop(1)))


def fastest(act: Callable[[], None], undo: Callable[[], None] = lambda: None) -> float:
    """Return the seconds of the fastest of some tries; a slow act is not tried again."""
    tries: list[float] = []
    while len(tries) < TRIES and sum(tries) < PATIENCE:
        began = perf_counter()
        act()
        tries.append(perf_counter() - began)
        undo()
    return min(tries)
