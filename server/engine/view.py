"""Shows the cache, the slots and the statistics to other threads, as frozen values.

Only the engine's thread may read the cache. The thread answers each question between two steps, and the caller waits for
the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeVar

import numpy as np

from ...slots.job import Job, Phase
from ...slots.radix import Node, descendants, most_cached, path
from ...slots.request import Layout, Prompt
from ...slots.reuse import Source, prefix_cache_ratio
from ...slots.scheduler import Scheduler
from ...slots.scope import Scope
from ...slots.separate import num_kept
from ...slots.slot import Slot
from ...slots.store.record_file import Provenance
from ...slots.store.tier import LowerTier
from ..http.threads import WaitingThread
from .engine import Engine
from .generation import Generation
from .slot_files import SlotStore
from .usage import Reordering, empty_prefix, followed_by, reordering

# ---- The engine's counters and gauges, for Prometheus. ------------------------------------------------------------------

Described = dict[str, tuple[str, float]]
"""Help text and value, by name."""

Tiers = Mapping[str, LowerTier | None]
"""The tiers below host memory, by name; None: the tier does not exist, and its metrics are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine's figures at one moment: counts, cells, tokens, bytes and seconds.

    cached_tokens: the numbers of reused prompt tokens by source. num_running, num_waiting: how many clients' requests run,
    and how many wait.
    """

    gauges: Described
    counters: Described
    cached_tokens: dict[str, int]
    num_running: int
    num_waiting: int

    @classmethod
    def of(cls, engine: Engine, lower: Sequence[LowerTier], token_bytes: int) -> EngineStats:
        """Collect the figures.

        lower: the tiers below host memory. The tier of imported KV gets no metrics of its own. token_bytes: the size of one
        token's KV.
        """
        tiers: Tiers = {Source.DISK: None, **{tier.name: tier for tier in lower if tier.name != Source.IMPORTED}}
        return cls(
            gauges=_gauges(engine, tiers, token_bytes),
            counters=_counters(engine, tiers),
            cached_tokens=dict(engine.scheduler.counters.cached_tokens),
            num_running=_num_of_clients(engine.scheduler.running),
            num_waiting=_num_of_clients(engine.scheduler.waiting),
        )


def _num_of_clients(jobs: Iterable[Job]) -> int:
    return sum(job.request.kind.is_client for job in jobs)


def _gauges(engine: Engine, tiers: Tiers, token_bytes: int) -> Described:
    scheduler, tree = engine.scheduler, engine.scheduler.tree
    copies = num_kept((*scheduler.running, *scheduler.waiting))
    pinned = sum(len(node.tokens) for node in scheduler.pins.runs())
    return {
        "cells": ("KV cells in the pool", tree.device.num_cells),
        "cells_used": ("KV cells in use", scheduler.cells.num_used),
        "cells_reclaimable": ("KV cells in use that eviction could free now", tree.device.num_reclaimable),
        "host_bytes": ("Bytes of the KV copies in host memory", tree.host.num_bytes),
        "host_budget_bytes": ("Bytes that KV copies in host memory may take", tree.host.max_bytes),
        "copies_bytes": (
            "Bytes beside --cache-ram: KV of documents read separately that requests keep",
            copies * token_bytes,
        ),
        **{f"{name}_bytes": (f"Bytes of idle KV on {name}", tier.num_bytes if tier else 0) for name, tier in tiers.items()},
        **{
            f"{name}_budget_bytes": (f"Bytes that idle KV may take on {name}", tier.max_bytes if tier else 0)
            for name, tier in tiers.items()
        },
        "pinned_tokens": ("Tokens of prompts that clients pinned in the cache", pinned),
        "snapshots": ("Recurrent states in host memory", scheduler.index.host.num_states),
        "snapshot_bytes": (
            "Bytes of recurrent states in host memory, with their KV",
            sum(states.host.num_bytes for states in scheduler.trees[1:]),
        ),
        "sequences_parked": (
            "Sequences on the device that hold KV for reuse and that no request runs",
            len(tree.device.idle),
        ),
        "requests_running": ("Requests on a slot", len(scheduler.running)),
        "requests_waiting": ("Requests in the queue", len(scheduler.waiting)),
        "requests_background": ("Requests that compute a prompt ahead of its turn", len(engine.background)),
        "sleeping": ("1 while the model is out of memory", engine.sleep.is_asleep),
        "step_seconds": ("Seconds that the last step took", engine.step_seconds),
        "step_host_seconds": ("Seconds of the last step that were spent outside llama.cpp", engine.host_seconds),
    }


def _counters(engine: Engine, tiers: Tiers) -> Described:
    scheduler, tree = engine.scheduler, engine.scheduler.tree
    return {
        **scheduler.counters.shown(),
        "wakeups": ("Times that the model came back into memory after a sleep", engine.sleep.num_wakes),
        "failed_steps": ("Steps that failed, after which the device begins empty", engine.num_failed_steps),
        "hung_steps": ("Steps that took longer than --hang-after allows, and ended", engine.watchdog.num_hangs),
        "draft_model_tokens": (
            "Tokens that the draft model computed: of prompts, of answers, and drafted ones",
            engine.draft_model.num_tokens if engine.draft_model else 0,
        ),
        "draft_model_failures": (
            "Times that the draft model failed; after the third it drafts no more",
            engine.draft_model.num_failures if engine.draft_model else 0,
        ),
        "evicted_tokens": ("Tokens whose KV was evicted from the device", tree.num_evicted),
        "lost_tokens": ("Tokens whose KV was evicted from the last tier that had it", scheduler.index.host.num_lost),
        "scattered_tokens": (
            "Tokens of answers evicted from the device without a copy, because saving them takes longer than computing them",
            tree.num_uncopied,
        ),
        "saved_tokens": ("Tokens whose KV was copied to host memory", tree.copies.num_saved),
        **{
            f"{name}_written_runs": (f"Runs of KV written to {name}", tier.num_written if tier else 0)
            for name, tier in tiers.items()
        },
        **{
            f"{name}_refused_files": (f"Damaged files of KV on {name}, which were deleted", tier.num_refused if tier else 0)
            for name, tier in tiers.items()
        },
        "set_aside_tokens": (
            "Tokens of other requests whose KV was swapped out for a prefill step and restored after it",
            scheduler.cells.swap.num_swapped,
        ),
        "restored_tokens": ("Tokens whose KV was restored from host memory", tree.copies.num_restored),
        "speculations_dropped": (
            "Prompts computed ahead that were dropped for a request or for a later stage",
            engine.background.num_dropped,
        ),
        "fetches": ("Requests for which KV came from a tier below host memory", engine.fetches.num_hits),
        "fetched_tokens": ("Prompt tokens that these reads were expected to save", engine.fetches.num_tokens),
        "fetched_bytes": ("Bytes of KV read from tiers below host memory", engine.fetches.num_bytes),
        "fetch_wait_seconds": ("Seconds that requests waited for such KV", engine.fetches.seconds),
        "fetches_given_up": ("Requests that computed what took too long to fetch", engine.fetches.num_given_up),
        "overtakes": (
            "Times a later request was admitted before a waiting one",
            scheduler.waiting.num_overtakes,
        ),
    }


# ---- The state of the cache and of the slots. ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedRun:
    """A run: the consecutive tokens of one node of the prefix tree, which are cached together.

    id: the id of the prompt up to the run's end. parent: the id of the run before this one; None if this is the prompt's
    first run. adapters: as in `Scope`. disk: whether a tier below host memory also has the run, or is about to write it.
    document: the key of a document that ends with the run. sequences: the ids of the running sequences that use the run.
    """

    id: str = ""
    parent: str | None = None
    adapters: str
    start: int
    tokens: int
    device_tokens: int
    host: bool
    disk: bool
    document: str | None
    frequency: int
    in_use: bool
    pinned: bool
    sequences: tuple[int, ...]

    @classmethod
    def of(cls, node: Node, adapters: str, disk: bool) -> CachedRun:
        return cls(
            adapters=adapters,
            start=node.start,
            tokens=len(node.tokens),
            device_tokens=node.ready,
            host=node.copy is not None,
            disk=disk,
            document=next((key for _, key in node.document_of), None),
            frequency=node.frequency,
            in_use=node.in_use > 0,
            pinned=node.pinned_until > 0,
            sequences=tuple(sorted(sequence.id for sequence in node.sequences if sequence.active)),
        )


@dataclass(frozen=True, slots=True)
class WholeState:
    """A snapshot: the model's recurrent state after the first `tokens` tokens of a prompt."""

    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class CacheContents:
    """The cached KV of a scope, for all sets of LoRA adapters.

    tokens: the numbers of cached tokens by tier. runs: all runs, each after its parent; without ids until `identified` adds
    them. texts: for each run, its tokens (int32), and the index of its parent in `runs` or None if the run has no parent.
    """

    tokens: dict[str, int]
    runs: list[CachedRun]
    snapshots: list[WholeState]
    texts: list[tuple[np.ndarray, int | None]]

    @classmethod
    def of(cls, scheduler: Scheduler, scope: str) -> CacheContents:
        """Collect the contents. scope: the client's name for the scope."""
        scopes, roots, memory = scopes_of(scheduler, scope), scheduler.index.roots, scheduler.index.host
        found = [(node, one.adapters) for one in scopes if one in roots for node in descendants(roots[one])]
        nodes = [node for node, _ in found]
        device = sum(node.ready for node in nodes)
        host = sum(len(node.tokens) for node in nodes if node.copy is not None)
        states = [WholeState(node.end, memory.size_of(node.end)) for node in nodes if node.state is not None]
        places = {node: place for place, node in enumerate(nodes)}
        runs = [CachedRun.of(node, adapters, disk=memory.is_below(node)) for node, adapters in found]
        texts = [(node.tokens, places.get(node.parent) if node.parent else None) for node in nodes]
        return cls({"device": device, "host": host}, runs, states, texts)

    def identified(self) -> CacheContents:
        """Return a copy of these contents in which the runs have ids.

        Do not call it in the engine's thread, since it hashes all tokens, which takes time.
        """
        hashes: list[blake2b] = []  # of each run
        runs: list[CachedRun] = []
        for run, (tokens, place) in zip(self.runs, self.texts, strict=True):
            above = empty_prefix(run.adapters) if place is None else hashes[place]
            hashes.append(followed_by(above, tokens))
            runs.append(replace(run, id=hashes[-1].hexdigest(), parent=None if place is None else runs[place].id))
        return replace(self, runs=runs)


def scopes_of(scheduler: Scheduler, name: str) -> list[Scope]:
    """Return the scopes with KV that have this client's name: one scope for each set of LoRA adapters."""
    known = scheduler.index.roots
    return sorted((scope for scope in known if scope.is_shared and scope.name == name), key=lambda scope: scope.adapters)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The layout that a prompt would get, and the KV that it would reuse, if it were admitted now.

    reused: the number of reused tokens. on_device: how many of the reused tokens are on the device. reordered: as in
    `Report`.
    """

    layout: Layout
    reused: int
    on_device: int
    reordered: Reordering | None

    @classmethod
    def of(cls, scheduler: Scheduler, prompt: Prompt, scope: Scope) -> Prediction:
        tree, index = scheduler.tree, scheduler.index
        layout = prompt.arrange(index, scope)
        match = tree.match(scope, layout.tokens)
        nodes = [node for node in path(match.node) if node.start < match.length]
        on_device = sum(min(node.ready, match.length - node.start) for node in nodes)
        length = len(layout.tokens)
        reused = index.reusable(scope, layout.tokens[: most_cached(layout.sections(length), length, tree.recompute_last)])
        reordered = reordering(layout, reused, lambda start, stop: tree.seconds(start, stop - start))
        return cls(layout, reused + layout.num_placed(tree, scope, reused), min(on_device, reused), reordered)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTask:
    """A running request, as `GET /slots` shows it."""

    id_task: int
    sequence: int
    state: str
    source: str
    prompt_tokens: int
    cached_tokens: int
    prefix_cache_tokens: int
    prefix_cache_ratio: float
    computed_tokens: int
    generated_tokens: int
    limit: int
    speculative: bool

    @classmethod
    def of(cls, job: Job) -> SlotTask:
        return cls(
            id_task=job.request.id,
            sequence=job.sequence.id if job.sequence else -1,
            state="generating" if job.phase is Phase.DECODE else "prefill",
            source=job.reuse.source,
            prompt_tokens=job.num_prompt,
            cached_tokens=(cached := job.reuse.cached),
            prefix_cache_tokens=cached,
            prefix_cache_ratio=prefix_cache_ratio(cached, job.num_prompt),
            computed_tokens=job.computed,
            generated_tokens=job.num_tokens - job.num_prompt,
            limit=job.request.limit,
            speculative=job.request.draft is not None,
        )


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot, as `GET /slots` shows it.

    last: the id of the slot's last request; -1: none. sequence, tokens: the id and the length of the slot's history.
    prefix_cache_tokens, prefix_cache_ratio: the reuse of the last request. task: the running request, or None if the slot is
    idle.
    """

    id: int
    sequence: int
    last: int
    tokens: int
    prefix_cache_tokens: int
    prefix_cache_ratio: float
    task: SlotTask | None

    @classmethod
    def of(cls, slot: Slot) -> SlotState:
        return cls(
            id=slot.id,
            sequence=slot.sequence_id,
            last=slot.last,
            tokens=len(slot.history),
            prefix_cache_tokens=slot.prefix_cache_tokens,
            prefix_cache_ratio=slot.prefix_cache_ratio,
            task=SlotTask.of(slot.job) if slot.job is not None else None,
        )


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Missing:
    """The part of a prompt that has to be computed, and whether idle time can be used for it now.

    tokens: the number of tokens to compute; 0 if a lower tier has all tokens. fits: whether enough cells are free for the
    tokens to compute. idle: whether the engine has no request, the model is loaded, and its turn on a shared device is not
    ending.
    """

    tokens: int
    fits: bool
    idle: bool


class View:
    """Answers questions about the cache and the slots. Any thread may use this object.

    If a method's `scope` is a `str`, it is a client's name for the scope. lower: the tiers below host memory. token_bytes:
    the size of one token's KV. made_by: as in `SlotStore`. disk_thread: a thread for work that waits for a disk.
    """

    def __init__(self, engine: Engine, lower: Sequence[LowerTier], *, token_bytes: int, made_by: Provenance | None) -> None:
        self._engine, self._scheduler, self._lower = engine, engine.scheduler, lower
        self._token_bytes = token_bytes
        self.slot_store = SlotStore(engine, made_by)
        self.disk_thread = WaitingThread("disk-requests")

    @property
    def keeps_snapshots(self) -> bool:
        """Whether the cache keeps snapshots of recurrent states.

        The cache keeps snapshots if the model cannot cut a sequence at an arbitrary position, and --cache-ram has room for
        them.
        """
        return any(states.host.max_bytes > 0 for states in self._scheduler.trees[1:])

    @property
    def can_cut(self) -> bool:
        """Whether the model can remove wrongly drafted tokens from the end of a sequence."""
        return self._engine.runner.context.rollback > 0

    @property
    def has_draft_model(self) -> bool:
        return self._engine.draft_model is not None

    @property
    def state_tokens(self) -> int:
        """The number of tokens whose KV is as large as one recurrent state; 0 for a model without recurrent states."""
        return self._scheduler.index.host.sizes.state // max(self._token_bytes, 1)

    @property
    def num_slots(self) -> int:
        return len(self._scheduler.slots)

    async def why_unmovable(self) -> str:
        """Return why saved KV cannot be moved to other positions, or an empty text if it can."""
        found = await self._ask(lambda: self._engine.runner.states.rotation)
        return found if isinstance(found, str) else ""

    async def contents(self, scope: str) -> CacheContents:
        found = await self._ask(lambda: CacheContents.of(self._scheduler, scope))
        return await asyncio.to_thread(found.identified)

    async def predict(self, prompt: Prompt, scope: Scope) -> Prediction:
        """Predict the layout and the reuse of a prompt. The cache does not change."""
        return await self._ask(lambda: Prediction.of(self._scheduler, prompt, scope))

    async def missing(self, prompt: Prompt, scope: Scope) -> Missing:
        """Return the part of a prompt that idle prefill would compute. The cache does not change."""

        def question() -> Missing:
            is_idle = self._scheduler.idle and self._engine.sleep.is_awake and not self._engine.sleep.is_ending
            tokens, fits = self._scheduler.cells.forecast(prompt, scope)
            return Missing(0 if tokens and self._engine.fetches.has_all(prompt, scope) else tokens, fits, idle=is_idle)

        return await self._ask(question)

    async def make_room(self, prompt: Prompt, scope: Scope) -> bool:
        """Make room for a prefetch as `Cells.make_room` does. Return whether there is room.

        If a request runs or waits, or the model is not loaded, make no room, and return False.
        """
        scheduler, sleep = self._scheduler, self._engine.sleep
        return await self._ask(lambda: scheduler.idle and sleep.is_awake and scheduler.cells.make_room(prompt, scope))

    async def pin(self, generation: Generation, seconds: float) -> int:
        """Pin the prompt of a finished generation for `seconds`. Return how many of the prompt's tokens are pinned now.

        If the prompt's documents are cached independently of the prompt, they are pinned, too.
        """
        pins, scope = self._scheduler.pins, generation.request.index_scope
        counts = await self._ask(lambda: [pins.pin(scope, text, seconds) for text in generation.job.layout.texts])
        return counts[-1]

    async def unpin(self, generation: Generation) -> None:
        """Undo `pin` for the prompt of a finished generation."""
        pins, scope = self._scheduler.pins, generation.request.index_scope
        await self._ask(lambda: [pins.unpin(scope, text) for text in generation.job.layout.texts])

    def retire(self, session: str, branches: Sequence[tuple[Scope, np.ndarray]]) -> Future[int]:
        """Mark the KV that only this session has used, so that the marked KV is evicted before other KV.

        branches: the scope and the tokens (int32) of each prompt of the session. The future gets the number of marked
        tokens.
        """
        index, counters = self._scheduler.index, self._scheduler.counters

        def retire_all() -> int:
            retired = sum(index.retire(scope, tokens, session) for scope, tokens in branches)
            counters.retired_tokens += retired
            return retired

        return self._engine.inbox.ask(retire_all)

    async def drop(self, scope: str) -> int:
        """Drop the KV of a scope from all tiers, except the KV that running requests use.

        Return the number of tokens dropped from the device and host memory.
        """
        dropped = await self._ask(lambda: self._drop(scope))
        for tier in self._lower:
            await self.disk_thread.run(tier.drop, Scope.shared(scope))
            # Drop again: a fetch may have read a run back before the tier dropped it.
            await self._ask(lambda: self._drop(scope))
        return dropped

    async def slots(self) -> list[SlotState]:
        """Return the slots and the progress of their running requests."""
        return await self._ask(lambda: [SlotState.of(slot) for slot in self._scheduler.slots])

    def close(self) -> None:
        """Wait until the threads for files and disks have ended."""
        self.slot_store.close()
        self.disk_thread.close()

    async def stats(self) -> EngineStats:
        return await self._ask(lambda: EngineStats.of(self._engine, self._lower, self._token_bytes))

    async def _ask(self, question: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._engine.inbox.ask(question))

    def _drop(self, scope: str) -> int:
        """Drop a scope from device and host memory. Runs in the engine's thread.

        The scope's background generations end first, because they would fill the scope again.
        """
        self._engine.background.drop_scope(scope)
        scopes = scopes_of(self._scheduler, scope)
        for one in scopes:
            self._scheduler.drafts.forget(one)
        return sum(tree.drop(one) for one in scopes for tree in self._scheduler.trees)
