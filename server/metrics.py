"""What Prometheus may know: totals and gauges read from the engine when asked, and histograms of latencies."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import ceil

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..slots.tiers.disk import DiskTier
from .chat.conversations import Conversations
from .engine.engine import Engine
from .engine.generation import Generation
from .engine.report import Report
from .idle import IdlePrefill

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SMOOTHING = 0.1  # weight of the newest request in the mean time a request takes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's state between two steps; counts, cells and tokens."""

    gauges: dict[str, tuple[str, float]]
    counters: dict[str, tuple[str, float]]
    cached_tokens: dict[str, int]


class Metrics:
    """One server's metrics; each server has its own registry.

    token_bytes: what one token's KV takes. open: accepted requests that the engine has not ended yet.
    """

    def __init__(
        self,
        engine: Engine,
        token_bytes: int,
        conversations: Conversations,
        open: Collection[Generation],
        idle: IdlePrefill,
        disk: DiskTier | None = None,
    ) -> None:
        self._engine, self._conversations, self._disk = engine, conversations, disk
        self._open, self._idle = open, idle
        self._token_bytes = token_bytes
        self._snapshot: Snapshot | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._requests = Counter("slotcache_requests", "Requests by how they ended", ["end"], registry=self._registry)
        self._ttft = self._histogram("slotcache_ttft_seconds", "From arrival to the first token")
        self._queue = self._histogram("slotcache_queue_seconds", "From arrival to admission")
        self._itl = self._histogram("slotcache_itl_seconds", "Mean time between two tokens of a request")
        self._mean_seconds = 1.0

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(name, help, buckets=SECONDS, registry=self._registry)

    def count_finished(self, report: Report, reason: str) -> None:
        self._requests.labels(reason).inc()
        self._ttft.observe(report.queue_time + report.prompt_time)
        self._queue.observe(report.queue_time)
        if report.num_generated > 1:
            self._itl.observe(report.generation_time / (report.num_generated - 1))
        took = report.prompt_time + report.generation_time
        self._mean_seconds += SMOOTHING * (took - self._mean_seconds)

    def count_failed(self) -> None:
        self._requests.labels("error").inc()

    def count_cancelled(self) -> None:
        self._requests.labels("cancelled").inc()

    def count_refused(self) -> None:
        self._requests.labels("refused").inc()

    def seconds_until_room(self, lanes: int) -> int:
        """For Retry-After: about how long until one of the lanes is through with a request."""
        return max(1, ceil(self._mean_seconds / lanes))

    def exposition(self, snapshot: Snapshot) -> bytes:
        """Everything in Prometheus' text format."""
        self._snapshot = snapshot
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The snapshot's values; prometheus_client calls this."""
        if self._snapshot is None:
            return
        for name, (help, value) in self._snapshot.gauges.items():
            yield GaugeMetricFamily(f"slotcache_{name}", help, value)
        held = self._conversations
        yield GaugeMetricFamily("slotcache_conversations", "Conversations that are remembered", len(held))
        yield GaugeMetricFamily("slotcache_conversation_bytes", "Memory that they take", held.num_bytes)
        yield GaugeMetricFamily(
            "slotcache_requests_open", "Accepted requests that the engine has not ended yet", len(self._open)
        )
        yield GaugeMetricFamily("slotcache_idle_bytes", "Memory kept for idle work to come", self._idle.num_bytes)
        for name, (help, value) in self._snapshot.counters.items():
            yield CounterMetricFamily(f"slotcache_{name}", help, value)
        cached = CounterMetricFamily("slotcache_cached_tokens", "Prompt tokens reused, by source", labels=["source"])
        for source in ("own", "fork", "host", "disk", "snapshot"):
            cached.add_metric([source], self._snapshot.cached_tokens.get(source, 0))
        yield cached

    def snapshot(self) -> Snapshot:
        """Read the engine's state; runs in its thread, between two steps."""
        scheduler = self._engine.scheduler
        tree, counters = scheduler.tree, scheduler.counters
        return Snapshot(
            gauges={
                "cells": ("KV cells in the pool", tree.num_cells),
                "cells_used": ("KV cells in use", scheduler.room.num_used),
                "cells_reclaimable": ("KV cells in use that eviction could free now", tree.num_reclaimable),
                "host_bytes": ("KV that has a copy in host memory", tree.host.num_tokens * self._token_bytes),
                "host_budget_bytes": ("Host memory that idle KV may take", tree.host.max_tokens * self._token_bytes),
                "disk_bytes": ("Idle KV on disk", self._disk.num_bytes if self._disk else 0),
                "disk_budget_bytes": ("What it may take there", self._disk.max_bytes if self._disk else 0),
                "pinned_tokens": (
                    "Tokens that clients asked to keep",
                    sum(len(node.tokens) for node in scheduler.holds.held()),
                ),
                "snapshots": ("Whole states kept, of a model that cannot be cut", len(scheduler.snapshots)),
                "snapshot_bytes": ("Host memory that they take", scheduler.snapshots.num_bytes),
                "sequences_parked": ("Histories kept for reuse", len(tree.parked)),
                "requests_running": ("Requests on a lane", len(scheduler.running)),
                "requests_waiting": ("Requests in the queue", len(scheduler.waiting)),
                "requests_background": (
                    "Of both, prompts that are computed ahead of their turn",
                    len(self._engine.background),
                ),
                "step_seconds": ("What the last step took", self._engine.step_seconds),
                "step_host_seconds": ("What of the last step was spent outside llama.cpp", self._engine.host_seconds),
            },
            counters={
                "steps": ("Steps", counters.steps),
                "failed_steps": ("Steps that failed", self._engine.num_failed_steps),
                "prompt_tokens": ("Prompt tokens computed", counters.prefilled_tokens),
                "idle_prompt_tokens": (
                    "Prompt tokens computed in idle time for what may come",
                    counters.idle_tokens,
                ),
                "generated_tokens": ("Tokens generated", counters.generated_tokens),
                "evicted_tokens": ("Tokens that left the device", tree.num_evicted),
                "saved_tokens": ("Tokens copied to host memory", tree.host.num_saved),
                "disk_written_runs": ("Runs written to disk", self._disk.num_written if self._disk else 0),
                "disk_refused_files": ("Files that were damaged, and are gone", self._disk.num_refused if self._disk else 0),
                "set_aside_tokens": (
                    "Tokens of others whose KV left the device while a prompt was computed, and came back",
                    scheduler.room.num_set_aside,
                ),
                "restored_tokens": ("Tokens brought back from host memory", tree.host.num_restored),
                "speculations_dropped": (
                    "Prompts computed ahead that gave way to a request or to another one",
                    self._engine.background.num_dropped,
                ),
                "preemptions": ("Requests paused because cells ran out", counters.preemptions),
                "overtakes": (
                    "Times a waiting request was overtaken by one with more of its prompt cached",
                    scheduler.waiting.num_overtakes,
                ),
            },
            cached_tokens=dict(counters.cached_tokens),
        )
