"""Learns a model's costs on its device: uses the times that an earlier start has stored, or times the device now."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter

from . import gate, llama
from .context import Context
from .errors import RunnerError
from .hardware import Device, cpu_name
from .repacking import SMALLEST
from .times import Subject, Times, identify, keep_times, kept_times, summarize, timed_costs, timed_tiles
from .timing import FEW, MOST_CUTS, MOST_IDLE, DeviceTiming, MayGoOn, Stopped, TileTiming, chunk_of

logger = logging.getLogger("slotcache")


def learn_costs(context: Context, goes_on: MayGoOn = lambda _: True) -> None:
    """Give a context the costs of its device. If no earlier start has stored times of the device, time it now.

    On a CPU, only the tiles of attention are timed, because the speed of their kernels differs by a factor of up to six
    between CPUs. The other costs of a CPU follow from constants.

    goes_on: called before each batch, with the work that is timed. If `goes_on` returns False, the costs of the context stay
    as they are.
    """
    model, device = context.model, context.model.device
    if device is None and not (context.costs.tile == chunk_of(context) and model.can_trim and model.size >= SMALLEST):
        return
    if device is None and model.split.devices():
        return  # llama.cpp computes large batches on the card, even if the weights are elsewhere
    if chunk_of(context) < FEW:
        return
    name = device.name if device else "the CPU"
    try:
        with ThreadPoolExecutor(1) as pool:  # a thread of its own: OpenMP keeps workers for each thread that has computed
            times = pool.submit(_times_of, context, name, goes_on).result()
    except RunnerError as error:
        logger.warning("%s could not be timed: %s", name, error)
        return
    except Stopped:
        return
    known, context.times = context.costs, times
    context.costs = timed_costs(known, times) if device else timed_tiles(known, times)
    if device is None:
        context.unit = context.costs.token_ns / known.token_ns
    logger.info("%s: %s", name, summarize(times))


def subject_of(context: Context, device: Device | None) -> Subject:
    """Return everything on which the times of a context depend.

    device: the device; None for the CPU.
    """
    model, settings = context.model, context.settings
    return Subject(
        device=identify(device) if device else ["CPU", cpu_name(), 0],
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
            *([] if model.can_trim else ["saves"]),  # earlier versions did not time saves
            *([repr(model.split), *map(identify, model.devices)] if len(model.devices) > 1 else []),
            *model.altered,
            *(["warm"] if device else []),  # in earlier versions, times included the first use of kernels
        ],
    )


def _times_of(context: Context, name: str, goes_on: MayGoOn) -> Times:
    """Return the stored times.

    Time the device if no times are stored, or if the stored times are incomplete or no longer right.

    Raises RunnerError and Stopped.
    """
    device, doing = context.model.device, f"timing {name}"
    subject, began = subject_of(context, device), perf_counter()
    kept = kept_times(subject)
    if kept is not None and (device is None or not 0 < kept.cuts < MOST_CUTS):
        if device is None or DeviceTiming(context, goes_on, doing).agrees(kept):
            return kept
        logger.info("a token takes another time on %s than the %.2f ms that are kept", name, 1e3 * kept.step)
    logger.info("%s, once for this model and these settings: a slow one takes half a minute", doing)
    if device is None:
        times, later = TileTiming(context, goes_on, doing).run(), "later starts use these times"
    else:
        times, later = _timed(DeviceTiming(context, goes_on, doing), kept.cuts if kept else 0)
    if later:
        keep_times(subject, times)
        logger.info("timed %s in %.1f s: %s", name, perf_counter() - began, later)
    else:
        logger.info("some times of %s contradict each other: they are left out, and the next start times again", name)
    return times


def _timed(timing: DeviceTiming, cuts: int) -> tuple[Times, str]:
    """Measure the times of a device.

    Return the times, and a phrase for the log that says what later starts do with the times.

    If the times must not be stored, the phrase for the log is "".

    cuts: the number of earlier starts that ran out of time.

    Raises RunnerError and Stopped.
    """
    times = timing.run()
    if timing.is_doubtful:
        return times, ""
    if timing.is_cut and cuts + 1 < MOST_CUTS:
        return replace(times, cuts=cuts + 1), "the next start goes on"
    return replace(times, cuts=MOST_CUTS if timing.is_cut else 0), "later starts use these times"
