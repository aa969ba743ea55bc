"""The engine's counters and gauges, for Prometheus. Read in the engine's thread, between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from ...slots.separate.reading import num_kept
from ...slots.tiers.disk import DiskTier
from .engine import Engine

Described = dict[str, tuple[str, float]]
"""Values by name, each with its help text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Counts, cells, tokens, bytes and seconds. cached_tokens: prompt tokens reused, by source."""

    gauges: Described
    counters: Described
    cached_tokens: dict[str, int]

    @classmethod
    def of(cls, engine: Engine, disk: DiskTier | None, token_bytes: int) -> Figures:
        """token_bytes: of one token's KV."""
        return cls(
            gauges=_gauges(engine, disk, token_bytes),
            counters=_counters(engine, disk),
            cached_tokens=dict(engine.scheduler.counters.cached_tokens),
        )


def _gauges(engine: Engine, disk: DiskTier | None, token_bytes: int) -> Described:
    scheduler, tree = engine.scheduler, engine.scheduler.tree
    copies = num_kept((*scheduler.running, *scheduler.waiting))
    pinned = sum(len(node.tokens) for node in scheduler.pins.runs())
    return {
        "cells": ("KV cells in the pool", tree.ledger.num_cells),
        "cells_used": ("KV cells in use", scheduler.cells.num_used),
        "cells_reclaimable": ("KV cells in use that eviction could free now", tree.ledger.num_reclaimable),
        "host_bytes": ("KV that has a copy in host memory", tree.host.num_tokens * token_bytes),
        "host_budget_bytes": ("Host memory that idle KV may take", tree.host.max_tokens * token_bytes),
        "copies_bytes": ("Host memory beside it: documents that requests keep to move", copies * token_bytes),
        "disk_bytes": ("Idle KV on disk", disk.num_bytes if disk else 0),
        "disk_budget_bytes": ("What it may take there", disk.max_bytes if disk else 0),
        "pinned_tokens": ("Tokens that clients asked to keep", pinned),
        "snapshots": ("Recurrent states kept, of a model that cannot be cut", len(scheduler.snapshots)),
        "snapshot_bytes": ("Host memory that they take with the KV in front of them", scheduler.snapshots.num_bytes),
        "sequences_parked": ("Histories kept for reuse", len(tree.ledger.parked)),
        "requests_running": ("Requests on a lane", len(scheduler.running)),
        "requests_waiting": ("Requests in the queue", len(scheduler.waiting)),
        "requests_background": ("Of both, prompts that are computed ahead of their turn", len(engine.background)),
        "sleeping": ("1 while the model is out of memory", engine.sleep.is_asleep),
        "step_seconds": ("What the last step took", engine.step_seconds),
        "step_host_seconds": ("What of the last step was spent outside llama.cpp", engine.host_seconds),
    }


def _counters(engine: Engine, disk: DiskTier | None) -> Described:
    scheduler, tree, counters = engine.scheduler, engine.scheduler.tree, engine.scheduler.counters
    return {
        "steps": ("Steps", counters.steps),
        "spans": ("Requests in steps: one for each request that a step computed", counters.spans),
        "wakeups": ("Times the model came back into memory", engine.sleep.num_wakes),
        "failed_steps": ("Steps that failed", engine.num_failed_steps),
        "prompt_tokens": ("Prompt tokens computed", counters.prefilled_tokens),
        "idle_prompt_tokens": ("Prompt tokens computed in idle time for what may come", counters.idle_tokens),
        "generated_tokens": ("Tokens generated", counters.generated_tokens),
        "forced_tokens": ("Tokens of them that a grammar left no choice about", counters.forced_tokens),
        "drafts": ("Drafts of next tokens that a step checked", counters.drafts),
        "drafted_tokens": ("Tokens of them", counters.drafted_tokens),
        "accepted_tokens": ("Tokens of them that were the sampler's choice", counters.accepted_tokens),
        "evicted_tokens": ("Tokens that left the device", tree.num_evicted),
        "saved_tokens": ("Tokens copied to host memory", tree.host.num_saved),
        "disk_written_runs": ("Runs written to disk", disk.num_written if disk else 0),
        "disk_refused_files": ("Files that were damaged, and are gone", disk.num_refused if disk else 0),
        "set_aside_tokens": (
            "Tokens of others whose KV left the device while a prompt was computed, and came back",
            scheduler.cells.num_swapped,
        ),
        "restored_tokens": ("Tokens brought back from host memory", tree.host.num_restored),
        "speculations_dropped": (
            "Prompts computed ahead that gave way to a request or to another one",
            engine.background.num_dropped,
        ),
        "preemptions": ("Requests paused because cells ran out", counters.preemptions),
        "overtakes": (
            "Times a waiting request was overtaken by one with more of its prompt cached",
            scheduler.waiting.num_overtakes,
        ),
    }
