"""Count the memory that a model needs, and choose a context and a number of GPU layers that fit."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import ceil, isinf
from pathlib import Path
from typing import Protocol

from ...models.context import Context, ContextSettings, Use, breakdown, num_sequences
from ...models.errors import ModelError, NotCounted
from ...models.hardware import HOST, INTEGRATED, fast_cores, free_memory
from ...models.model import ALL_LAYERS, Model
from ...models.model_files import OFFERED, is_fetched, is_packaged, packaged_file
from ...models.multi_token import head_settings, why_unused
from ...models.overrides import EXPERTS, Override, RopeScaling, experts_on_host, parse_metadata, parse_overrides
from ...models.repacking import is_faster_repacked, kept_layout
from ...models.split import NO_DEVICE, Split, parse_split
from ..config.settings import UNSET, Settings, SettingsError
from ..http.threads import give_way

# ---- How much of a model goes where, and the search for the most that fits. ---------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlacement:
    """The quantities that may have to be lowered, so that the model fits into memory.

    gpu_layers: this many of the last layers are on a GPU; the output counts as one layer. gpu_experts: this many of the last
    layers may have their experts on a GPU. Without a GPU, `gpu_layers` and `gpu_experts` have no meaning.
    """

    cells: int
    slots: int
    gpu_layers: int = 0
    gpu_experts: int = 0


@dataclass(frozen=True, slots=True)
class Concession:
    """A quantity that may be lowered so that the model fits.

    name: a field of `MemoryPlacement`. least, step: the possible values are `least`, `least + step`, and so on.
    """

    name: str
    least: int
    step: int = 1


Excess = Callable[[MemoryPlacement], float]
"""Returns the bytes that a placement needs beyond the limit of a device, on the device with the largest excess.

0 or less: the placement fits.
"""


def search(wanted: MemoryPlacement, concessions: Sequence[Concession], excess: Excess) -> MemoryPlacement | None:
    """Return the fitting placement that is nearest to the wanted placement.

    Lower the quantities to their least values, one by one in the order of the concessions, until the placement fits. Then
    raise each lowered quantity, in the opposite order, as far as the placement still fits. Return None if the placement
    does not fit with all quantities at their least values.
    """
    found, lowered = wanted, []
    for concession in concessions:
        if excess(found) <= 0:
            break
        found = replace(found, **{concession.name: min(concession.least, getattr(wanted, concession.name))})
        lowered.append(concession)
    if excess(found) > 0:
        return None
    for concession in reversed(lowered):
        found = _raised(found, concession, getattr(wanted, concession.name), excess)
    return found


def _raised(found: MemoryPlacement, concession: Concession, most: int, excess: Excess) -> MemoryPlacement:
    """Raise one quantity of a fitting placement, to at most `most`, as far as the placement still fits. Return the result.

    Trying a value may load a model again, so few values should be tried. Memory grows linearly with most quantities, so
    the next value is interpolated. If a tried value narrows the range by less than half, the next value halves the range.
    """

    def at(step: int) -> MemoryPlacement:
        return replace(found, **{concession.name: min(concession.least + step * concession.step, most)})

    low, high = 0, max(-(-(most - concession.least) // concession.step), 0)
    if (over := excess(at(high))) <= 0:
        return at(high)
    halves = False
    while high - low > 1:
        room, width = -excess(at(low)), high - low
        share = 0.5 if halves or isinf(over) else room / (room + over)
        tried = min(max(low + int(width * share), low + 1), high - 1)
        if (beyond := excess(at(tried))) <= 0:
            low = tried
        else:
            high, over = tried, beyond
        halves = high - low > width // 2
    return at(low)


# ---- From settings to the context of a model. ---------------------------------------------------------------------------

DEFAULT_CONTEXT = 16384  # cells without --ctx-size, for models with a longer trained length
LONG_CONTEXT = 65536  # most cells that --fit chooses; agents start with 25,000 tokens and more


CELLS = 256  # llama.cpp pads the pool of cells to a multiple of this number
ROLLBACK = 4  # drafted tokens that a recurrent state can go back; each token costs one more state for each sequence


def num_cells(settings: Settings, model: Model, most: int = DEFAULT_CONTEXT) -> int:
    """Return the wanted number of cells, rounded up to a multiple of `CELLS`.

    most: the largest number if --ctx-size is not set.
    """
    return whole_cells(settings.ctx_size or min(model.context_train or DEFAULT_CONTEXT, most))


def whole_cells(count: int) -> int:
    """Return the number of cells that llama.cpp allocates for `count` cells."""
    return ceil(count / CELLS) * CELLS


def context_settings(settings: Settings, model: Model) -> ContextSettings:
    return ContextSettings(
        num_cells=num_cells(settings, model),
        batch=max(settings.batch_size, settings.parallel),
        micro_batch=settings.ubatch_size,
        flash_attention=settings.flash_attn,
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
        threads=settings.threads or fast_cores(),
        num_sequences=num_sequences(model, settings.parallel, moves_idle=settings.cache_ram > 0),
        rollback=0 if model.can_trim or settings.draft_mode == "off" else ROLLBACK,
        gives_states=settings.uses_head and not why_unused(model),
    )


# ---- The memory that the served model may use on each device. -----------------------------------------------------------

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limit:
    """The memory of one device, in bytes, and how much of it the model may use.

    free: the free memory; infinite if the device does not report it. cap: the value of --device-memory; 0: no cap. aside:
    at least this many bytes stay free, even if the margin is smaller. lent: the names of the integrated GPUs that use this
    memory.

    counts_weights: whether weights in this memory count as used memory. If a GPU has memory of its own, the weights in host
    memory do not count: they are mapped from the file, so the system may drop them and read them again.
    """

    free: float
    cap: int
    counts_weights: bool
    aside: int = 0
    lent: tuple[str, ...] = ()

    def most(self, margin: int) -> float:
        """Return the most bytes that the model may use. margin: bytes of the device's free memory that stay free."""
        return min(max(self.free - max(margin, self.aside), 0), self.cap or math.inf)

    def excess(self, use: Use, others: Sequence[Use], margin: int) -> float:
        """Return the bytes that the model uses beyond `most`; 0 or less if it fits.

        use: the use of this device. others: the uses of all devices, since integrated GPUs may use the memory of this
        device.
        """
        return use.total - (0 if self.counts_weights else use.weights) + self.shared(others) - self.most(margin)

    def shared(self, uses: Sequence[Use]) -> int:
        """Return how many bytes of this memory are used by integrated GPUs."""
        return sum(use.total for use in uses if use.device in self.lent)

    def why(self, margin: int) -> str:
        """Describe what determines the result of `most`: --device-memory or the free memory."""
        if self.cap and self.most(margin) == self.cap:
            return "--device-memory"
        stay = max(margin, self.aside)
        return "memory unknown" if math.isinf(self.free) else f"{mib(self.free)} free, {mib(stay)} stay so"


def limits(settings: Settings) -> dict[str, Limit]:
    """Return the limits of host memory and of each GPU that may get layers. The keys are ggml's device names.

    --device-memory limits the GPUs, or host memory if there is no GPU. The use of an integrated GPU also counts as use of
    host memory.
    """
    gpus, others = split_of(settings).devices(), beside(settings)
    cap = max(settings.device_memory * MIB - others, 1) if settings.device_memory else 0
    found = {gpu.name: Limit((gpu.free - others) if gpu.total else math.inf, cap, True) for gpu in gpus}
    lent = tuple(gpu.name for gpu in gpus if gpu.kind == INTEGRATED)
    return found | {HOST: Limit(free_memory() - others, 0 if gpus else cap, len(lent) == len(gpus), lent=lent)}


def excesses(limits: Mapping[str, Limit], uses: Sequence[Use], margin: int) -> dict[str, float]:
    """Return each device's `Limit.excess`, by the device's name."""
    return {use.device: limits[use.device].excess(use, uses, margin) for use in uses if use.device in limits}


def beside(settings: Settings) -> int:
    """Estimate the bytes of what is loaded beside the served model, from the sizes of the files.

    The estimate covers the embedding model, the reranker, the draft model and the LoRA adapters.
    """
    files = [embedding_file(settings), settings.rerank_model, settings.draft_model, *settings.lora.split(",")]
    files += [entry.rpartition(":")[0] for entry in settings.lora_scaled.split(",")]
    paths = [Path(file).expanduser() for file in files if file]
    return sum(path.stat().st_size for path in paths if path.is_file())


def draft_cell_bytes(settings: Settings) -> int:
    """Return the bytes of a draft model's KV for each cell of the served model; 0 without a draft model."""
    if not settings.draft_model:
        return 0
    with closing(open_beside(settings, settings.draft_model, is_simulated=True)) as draft:
        return draft.kv_bytes("f16", "f16")


WORDS_ALONE = "none"


def embedding_file(settings: Settings) -> str:
    """Return the file of the embedding model; empty if no embedding model is used.

    With --docs and no --embedding-model, the packaged embedding model is used if it has already been downloaded.
    """
    if settings.embedding_model == WORDS_ALONE:
        return ""
    if is_packaged(settings.embedding_model):
        return str(packaged_file(settings.embedding_model))
    is_default = not settings.embedding_model and settings.docs and not settings.embeddings and is_fetched(OFFERED)
    return str(packaged_file(OFFERED)) if is_default else settings.embedding_model


ASIDE = 2 << 30  # bytes of host memory that stay free for the system even with a long context


def aside(settings: Settings) -> int:
    """Return the bytes of host memory that stay free if the context is longer than `DEFAULT_CONTEXT`.

    Of the bytes that stay free, `ASIDE` are for the system. The rest is for idle KV: as much as --cache-ram sets, but at
    most `ASIDE`. Idle KV cannot use up the system's bytes, because it takes at most half of the memory that is free after
    the start.
    """
    return ASIDE + min(settings.cache_ram * MIB, ASIDE)


def mib(size: float) -> str:
    return f"{size / MIB:,.0f} MiB"


# ---- The chosen placement and the reasons: lines for the log and `doctor`, values for `/props`. -------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A placement and the memory that it uses on each device.

    error: llama.cpp's error if it cannot create a context for the placement; empty otherwise.
    """

    placement: MemoryPlacement
    uses: tuple[Use, ...]
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The wanted placement, the chosen placement, and the reasons.

    margin: bytes that stay free on each device. num_layers: the number of the model's layers, where the output counts as
    one layer; 0 if there is no GPU. has_experts: whether some layers are mixtures of experts. has_overrides: whether -ot
    places some tensors. notes: remarks for the user, which `lines` yields last.
    """

    wanted: Counted
    chosen: Counted
    limits: dict[str, Limit]
    margin: int
    num_layers: int
    has_experts: bool
    has_overrides: bool = False
    notes: Sequence[str] = ()

    def lines(self) -> Iterator[str]:
        """Yield the decision as lines of text.

        The lines state the limits, the wanted placement with the memory that it lacks, the chosen placement, and the use
        of each device.
        """
        for name, limit in self.limits.items():
            names = " and of ".join((name, *limit.lent))
            yield f"memory of {names}: at most {mib(limit.most(self.margin))} ({limit.why(self.margin)})"
        if self.chosen.placement != self.wanted.placement:
            lacks = self.wanted.error or ", ".join(self.lacking(self.wanted.uses).values())
            yield f"wanted: {self.described(self.wanted.placement)}: {lacks}"
            yield f"fitted: {self.described(self.chosen.placement)}"
        else:
            yield f"fits as it is: {self.described(self.chosen.placement)}"
        yield from map(described_use, self.chosen.uses)
        yield from self.notes

    def lacking(self, uses: Sequence[Use]) -> dict[str, str]:
        """Describe how much memory each device lacks, by the device's name. Devices that lack none are left out."""
        found = excesses(self.limits, uses, self.margin)
        return {device: f"{device} lacks {ceil(excess / MIB):,} MiB" for device, excess in found.items() if excess > 0}

    def described(self, placement: MemoryPlacement) -> str:
        parts = [f"{placement.cells:,} cells (-c)", f"{placement.slots} slots (-np)"]
        if self.num_layers:
            gpus = [use.device for use in self.chosen.uses if use.device != HOST]
            where = f"{len(gpus)} GPUs" if len(gpus) > 1 else "the GPU"
            parts.append(f"{placement.gpu_layers} of {self.num_layers} layers on {where} (-ngl)")
            if self.has_experts and placement.gpu_experts < self.num_layers - 1:
                on_host = self.num_layers - 1 - placement.gpu_experts
                parts.append(f"the experts of the first {on_host} layers in host memory (-ncmoe)")
            if self.has_overrides:
                parts.append("tensors elsewhere (-ot)")
        return ", ".join(parts)

    def shown(self) -> dict[str, object]:
        """Return the decision as JSON for `/props`."""
        return {
            "devices": [
                {
                    "name": use.device,
                    "weights": use.weights,
                    "kv": use.kv,
                    "compute": use.compute,
                    "most": int(self.limits[use.device].most(self.margin)) if self._is_limited(use.device) else None,
                }
                for use in self.chosen.uses
            ],
            "decision": list(self.lines()),
        }

    def _is_limited(self, device: str) -> bool:
        return device in self.limits and self.limits[device].most(self.margin) != float("inf")


def described_use(use: Use) -> str:
    """Describe the use of a device in one line."""
    return f"{use.device}: {mib(use.total)}: weights {mib(use.weights)}, KV {mib(use.kv)}, compute buffer {mib(use.compute)}"


# ---- The memory that settings need, as llama.cpp counts it without allocating it. ---------------------------------------

MOST_COUNTED = 1 << 20
"""The most cells of a context that llama.cpp counts. Since each cell costs time and memory, larger uses are extrapolated."""


class LoadProgress(Protocol):
    """A callback that reports a load's progress. The callback returns False to abort the load.

    share: the share of the weights that is loaded, from 0 to 1. doing: what the load does at the moment, in words; empty
    while it loads weights.
    """

    def __call__(self, share: float, doing: str = "") -> bool: ...


def open_model(
    settings: Settings,
    path: Path,
    progress: LoadProgress | None = None,
    *,
    is_simulated: bool = False,
    vocab_only: bool = False,
) -> Model:
    """Load the served model. Raises ModelError and SettingsError. progress, is_simulated, vocab_only: as in `Model`."""
    every = (Override(EXPERTS, HOST),) if settings.cpu_moe else ()
    return Model(
        path,
        settings.gpu_layers,
        progress,
        vocab_only,
        repack=settings.repack == "on",
        may_unload=settings.may_unload and not (is_simulated or vocab_only),
        split=split_of(settings),
        overrides=(*parse_overrides(settings.override_tensor), *every, *experts_on_host(settings.n_cpu_moe)),
        metadata=parse_metadata(settings.override_kv),
        rope_scaling=rope_scaling_of(settings),
        is_simulated=is_simulated,
        with_heads=settings.uses_head,
        between=give_way,
    )


def open_beside(settings: Settings, file: str, *, is_simulated: bool = False) -> Model:
    """Load another model on the devices of the served model. Raises ModelError.

    The flags that override metadata and rotary positions apply only to the served model.
    """
    return Model(
        Path(file).expanduser(),
        settings.gpu_layers,
        repack=settings.repack == "on",
        may_unload=settings.may_unload and not is_simulated,
        split=split_of(settings),
        is_simulated=is_simulated,
        between=give_way,
    )


def split_of(settings: Settings) -> Split:
    """Return how the settings divide the layers among devices. Raises ModelError."""
    return parse_split(settings.device, settings.split_mode, settings.tensor_split, settings.main_gpu)


def card_flag(settings: Settings) -> str:
    """Return the flag, with its value, by which the user asks for layers on a GPU.

    Return an empty text if no flag asks for that.
    """
    if settings.gpu_layers not in (ALL_LAYERS, 0):
        return f"-ngl {'all' if settings.gpu_layers < 0 else settings.gpu_layers}"
    return "" if settings.device in ("", NO_DEVICE) or not settings.gpu_layers else f"--device {settings.device}"


def rope_scaling_of(settings: Settings) -> RopeScaling:
    """Return how the settings scale rotary positions. Raises SettingsError."""
    if settings.rope_scale and settings.rope_freq_scale:
        raise SettingsError("--rope-scale and --rope-freq-scale: give one of them")
    return RopeScaling(
        kind=settings.rope_scaling,
        base=settings.rope_freq_base,
        scale=1 / settings.rope_scale if settings.rope_scale else settings.rope_freq_scale,
        original=settings.yarn_orig_ctx,
        ext_factor=settings.yarn_ext_factor,
        attn_factor=settings.yarn_attn_factor,
        beta_fast=settings.yarn_beta_fast,
        beta_slow=settings.yarn_beta_slow,
    )


class Measure:
    """Simulates the model to find out how much memory a context takes.

    The last simulated model stays open, so that measuring another context of this model takes only milliseconds.
    """

    def __init__(self, settings: Settings, path: Path) -> None:
        self._path, self._settings = path, settings
        self._known: dict[Settings, tuple[Use, ...] | ModelError] = {}
        self.model = open_model(settings, path, is_simulated=True)

    def close(self) -> None:
        self.model.close()

    def __call__(self, settings: Settings) -> tuple[Use, ...]:
        """Return the use of each device.

        Raises ModelError if llama.cpp cannot create the context, whether for lack of memory or for another reason.
        """
        if settings.ctx_size <= MOST_COUNTED:
            return self._counted(settings)
        half, most = (self._counted(replace(settings, ctx_size=cells)) for cells in (MOST_COUNTED // 2, MOST_COUNTED))
        steps = (settings.ctx_size - MOST_COUNTED) / (MOST_COUNTED // 2)
        return tuple(_further(one, other, steps) for one, other in zip(half, most, strict=True))

    def _counted(self, settings: Settings) -> tuple[Use, ...]:
        if settings not in self._known:
            try:
                self._known[settings] = self._count(settings)
            except ModelError as error:
                self._known[settings] = error
        found = self._known[settings]
        if isinstance(found, ModelError):
            raise found
        return found

    def _count(self, settings: Settings) -> tuple[Use, ...]:
        if (settings.gpu_layers, settings.n_cpu_moe) != (self._settings.gpu_layers, self._settings.n_cpu_moe):
            self.model.close()
            self.model, self._settings = open_model(settings, self._path, is_simulated=True), settings
        shape = context_settings(settings, self.model)
        found = self._breakdown(shape)
        if not shape.gives_states:
            return found
        beside = {use.device: use for use in self._breakdown(head_settings(shape, settings.parallel))}
        of_head = [beside.get(use.device, Use(use.device, 0, 0, 0)) for use in found]
        return tuple(
            replace(use, kv=use.kv + more.kv, compute=use.compute + more.compute)
            for use, more in zip(found, of_head, strict=True)
        )

    def _breakdown(self, shape: ContextSettings) -> tuple[Use, ...]:
        context = Context(self.model, shape)
        try:
            return breakdown(context.handle)
        finally:
            context.close()


def _further(one: Use, other: Use, steps: float) -> Use:
    """Extrapolate a device's use from its uses with a smaller context (`one`) and with a larger context (`other`).

    steps: how far the result lies beyond `other`, in multiples of the difference from `one` to `other`.
    """
    kv, compute = (int(b + (b - a) * steps) for a, b in ((one.kv, other.kv), (one.compute, other.compute)))
    return replace(other, kv=kv, compute=compute)


logger = logging.getLogger("slotcache")
SHARES = (1, 0.5, 0.25, 0.125, 0)  # shares of --fit-target that may stay free; the first share with a fit is chosen
READ_AGAIN = "the weights are larger than the free memory: the system reads them again and again, which is slow"


def fit(settings: Settings, path: Path) -> tuple[Settings, Decision | None]:
    """Return settings with which the model fits, and the decision.

    The decision is None for an encoder, or if memory cannot be counted. A setting that the user changed from its default is
    kept, except that -c is rounded up to a multiple of `CELLS`. With --fit off no setting but -c is changed. Raises
    ModelError if the model does not fit.
    """
    measure = Measure(settings, path)
    try:
        if not measure.model.can_chat:
            return settings, None
        fitting = Fitting(settings, measure)
        decision = fitting.decide()
        return fitting.placed(decision.chosen.placement), decision
    except NotCounted as error:
        logger.warning("%s", error)
        return settings, None
    finally:
        measure.close()


class Fitting:
    """The search for the placement of one model on this machine."""

    def __init__(self, settings: Settings, measure: Measure) -> None:
        self.settings, self.measure, model = settings, measure, measure.model
        self.name, self.num_layers, self.has_experts = model.path.name, model.num_layers, model.num_expert_layers > 0
        on_gpu = self.num_layers + 1 if settings.gpu_layers < 0 else min(settings.gpu_layers, self.num_layers + 1)
        self.wanted = MemoryPlacement(
            cells=num_cells(settings, model, max(LONG_CONTEXT, settings.fit_ctx) if settings.fit else DEFAULT_CONTEXT),
            slots=settings.parallel,
            gpu_layers=on_gpu,
            gpu_experts=0 if settings.cpu_moe else max(self.num_layers - settings.n_cpu_moe, 0),
        )
        self.draft_cell = draft_cell_bytes(settings)
        self.count(self.wanted)  # before `limits`, so that the memory that CUDA itself takes is already in use
        self.limits = limits(settings)
        self.has_gpu = len(self.limits) > 1
        self.counts_weights = self.limits[HOST].counts_weights
        self.flags = [*model.described_flags()]

    def decide(self) -> Decision:
        """Choose a placement. Raises ModelError if none fits."""
        if not self.settings.ctx_size and self.wanted.cells > DEFAULT_CONTEXT:
            least = min(max(DEFAULT_CONTEXT, whole_cells(self.settings.fit_ctx)), self.wanted.cells)
            if (decision := self._lengthened(least)) is not None:
                return decision
            self.wanted, self.limits = replace(self.wanted, cells=least), limits(self.settings)
        for margin, counts_weights, note in self._rungs():
            self.limits[HOST] = replace(self.limits[HOST], counts_weights=counts_weights)
            may = list(self._concessions()) if self.settings.fit else []
            chosen = search(self.wanted, may, lambda placement, margin=margin: self.excess(placement, margin))
            if chosen is not None:
                return self._decision(chosen, margin, note)
        raise ModelError(self._complaint())

    def _lengthened(self, least: int) -> Decision | None:
        """Choose a context of at least `least` cells, without lowering another quantity.

        Return None if no such context fits.
        """
        host, margin = self.limits[HOST], self.settings.fit_target * MIB
        self.limits[HOST] = replace(host, counts_weights=self.counts_weights, aside=aside(self.settings))
        longer = Concession("cells", least, CELLS)
        chosen = search(self.wanted, [longer], lambda placement: self.excess(placement, margin))
        if chosen is not None:
            return self._decision(chosen, margin, "")
        return None

    def _rungs(self) -> Iterator[tuple[int, bool, str]]:
        """Yield the rules by which a placement may count as fitting, from the strictest to the loosest.

        Each rule has three parts: the margin, whether weights in host memory count as used memory, and a note for the user
        about the rule's drawback. If the rule has no drawback, the note is empty.
        """
        target = self.settings.fit_target * MIB if self.settings.fit else 0
        for share in SHARES if target else (0,):
            note = f"of --fit-target only {mib(target * share)} stay free" if target and share < 1 else ""
            yield int(target * share), self.counts_weights, note
        host = self.limits[HOST]
        if self.counts_weights and not host.cap:
            for share in (0.5, 0):
                yield int(max(host.free, 0) * share), False, READ_AGAIN

    def _concessions(self) -> Iterator[Concession]:
        """Yield the quantities that may be lowered because no flag sets them.

        The quantity whose lowering does the least harm comes first.
        """
        given = self.settings
        is_given = {
            "cells": given.ctx_size > 0,
            "slots": given.is_given("parallel"),
            "gpu_experts": given.is_given("n_cpu_moe") or given.cpu_moe or bool(given.override_tensor),
            "gpu_layers": given.gpu_layers != UNSET.gpu_layers,
        }
        return (concession for concession in self._possible(given.fit_ctx) if not is_given[concession.name])

    def _possible(self, least_cells: int) -> Iterator[Concession]:
        """Yield the quantities that could be lowered on this machine, even if a flag sets them."""
        yield Concession("cells", whole_cells(least_cells), CELLS)
        yield Concession("slots", 1)
        if self.has_gpu and self.has_experts:
            yield Concession("gpu_experts", 0)
        if self.has_gpu:
            yield Concession("gpu_layers", 0)

    def placed(self, placement: MemoryPlacement) -> Settings:
        """Return the settings for a placement.

        -ngl changes only if the placement differs from the wanted placement in `gpu_layers`. -ncmoe changes only if the
        placement differs from it in `gpu_experts`.
        """
        changed: dict[str, int] = {"ctx_size": placement.cells, "parallel": placement.slots}
        if placement.gpu_layers != self.wanted.gpu_layers:
            changed["gpu_layers"] = placement.gpu_layers
        if placement.gpu_experts != self.wanted.gpu_experts:
            changed["n_cpu_moe"] = self.num_layers - placement.gpu_experts
        return replace(self.settings, **changed)

    def excess(self, placement: MemoryPlacement, margin: int) -> float:
        """Return the bytes that a placement lacks on the device with the largest lack; 0 or less if the placement fits.

        The result is infinite if llama.cpp cannot create a context for the placement.
        """
        counted = self.count(placement)
        lacking = excesses(self.limits, counted.uses, margin).values()
        return math.inf if counted.error else max(lacking, default=0)

    def count(self, placement: MemoryPlacement) -> Counted:
        """Count the memory of a placement. The KV of a draft model counts on each device, since it may be on any of them."""
        try:
            uses = self.measure(self.placed(placement))
            of_draft = placement.cells * self.draft_cell
            return Counted(placement=placement, uses=tuple(replace(use, kv=use.kv + of_draft) for use in uses))
        except NotCounted:
            raise
        except ModelError as error:
            return Counted(placement=placement, uses=(), error=str(error))

    def _decision(self, chosen: MemoryPlacement, margin: int, note: str) -> Decision:
        return Decision(
            wanted=self.count(self.wanted),
            chosen=self.count(chosen),
            limits=self.limits,
            margin=margin,
            num_layers=self.num_layers + 1 if self.has_gpu else 0,
            has_experts=self.has_experts,
            has_overrides=bool(self.settings.override_tensor),
            notes=[*self._rounded(), *self.flags, *filter(None, [note])],
        )

    def _rounded(self) -> Iterator[str]:
        """Yield a note if llama.cpp rounds --ctx-size up."""
        given = self.settings.ctx_size
        if given % CELLS:
            yield f"-c {given} is raised to {self.wanted.cells:,}: llama.cpp allocates cells by {CELLS}"

    def _complaint(self) -> str:
        """Describe in one line which memory is missing and which flags would help."""
        wanted = self._decision(self.wanted, 0, "")
        would = self._any_that_fits()
        if wanted.wanted.error and would is None:
            return wanted.wanted.error
        uses = wanted.wanted.uses
        lacking = wanted.lacking(uses)
        lacks = wanted.wanted.error or ", ".join(
            f"{lacking[use.device]} of {self._taken(use, uses)}" for use in uses if use.device in lacking
        )
        others = f" and {mib(size)} of other models" if (size := beside(self.settings)) else ""
        return f"{self.name} does not fit with {wanted.described(self.wanted)}{others}: {lacks}; {self._advice(would)}"

    def _taken(self, use: Use, uses: Sequence[Use]) -> str:
        """Describe the use of a device's memory, including the use by integrated GPUs that share it."""
        parts = f"weights {mib(use.weights)}, KV {mib(use.kv)}, compute buffer {mib(use.compute)}"
        limit = self.limits[use.device]
        lent = f", {', '.join(limit.lent)} {mib(limit.shared(uses))}" if limit.lent else ""
        return f"{mib(use.total + limit.shared(uses))} ({parts}{lent})"

    def _any_that_fits(self) -> MemoryPlacement | None:
        """Search for any placement that fits, even if it contradicts the user's flags.

        First search for placements with at least --fit-ctx cells. If none of them fits, also search for placements with
        fewer cells.
        """
        for cells in (self.settings.fit_ctx, CELLS):
            if found := search(self.wanted, list(self._possible(cells)), lambda placement: self.excess(placement, 0)):
                return found
        return None

    def _advice(self, would: MemoryPlacement | None) -> str:
        if would is None:
            remedies = "it takes a smaller file, more memory, or a higher --device-memory"
            return f"{CELLS} cells and a slot do not fit either: {remedies}"
        flags = {
            "-c": (would.cells, self.wanted.cells),
            "-np": (would.slots, self.wanted.slots),
            "-ngl": (would.gpu_layers, self.wanted.gpu_layers),
            "-ncmoe": (self.num_layers - would.gpu_experts, self.num_layers - self.wanted.gpu_experts),
        }
        changed = " ".join(f"{flag} {new}" for flag, (new, old) in flags.items() if new != old)
        can_choose = not self.settings.fit and would.cells >= min(self.settings.fit_ctx, self.wanted.cells)
        return f"it fits with {changed}" + (", or --fit chooses" if can_choose else "")


# ---- `--repack auto`: the layout of weights that the CPU computes. ------------------------------------------------------


def with_layout(settings: Settings, path: Path, progress: LoadProgress | None = None) -> Settings:
    """Replace `--repack auto` by the faster layout of the weights.

    The ordinary layout is chosen with a GPU, and with --flash-attn off, because that flag promises results that are exact to
    the bit. With --cache-dir, the first start stores its choice of a layout in that folder. Later starts keep this choice,
    because KV of one layout cannot be used with the other layout. progress: as in `Model`.
    """
    if settings.repack != "auto":
        return settings
    if settings.flash_attn == "off" or split_of(settings).devices():
        return replace(settings, repack="off")
    goes_on = (lambda: progress(0.0, "trying another layout of the weights")) if progress else (lambda: True)

    def choose() -> bool | None:
        is_faster = is_faster_repacked(path, settings.threads or fast_cores(), goes_on)
        return is_faster if goes_on() else None

    is_faster = kept_layout(Path(settings.cache_dir).expanduser(), path, choose) if settings.cache_dir else choose()
    return replace(settings, repack="on" if is_faster else "off")
