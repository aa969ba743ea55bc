"""Prometheus metrics: counters and gauges that are read from the engine at each scrape, and histograms of latencies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from platform import python_version
from time import thread_time
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...models import llama
from ...models.context import DevicePart
from ...models.times import Times
from ...retrieval.index import Progress
from ...slots.reuse import Source
from ..chat.conversations import Conversations
from ..config.settings import VERSION
from ..engine.generation import Generation
from ..engine.usage import Report
from ..engine.view import EngineStats
from ..search.attachments import Attachments
from ..search.folder import FolderIndex
from ..search.vectors import Computed
from .idle import IdlePrefill

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
SMOOTHING = 0.1  # weight of the newest request in the mean time of a request
RECENT = 64  # finished requests in the mean of a rate
OF_LLAMA_SERVER = (
    ("counter", "prompt_tokens_total", "Prompt tokens computed"),
    ("counter", "prompt_tokens_cached_total", "Prompt tokens reused"),
    ("counter", "prompt_seconds_total", "Time spent on prompts"),
    ("counter", "tokens_predicted_total", "Tokens generated"),
    ("counter", "tokens_predicted_seconds_total", "Time spent on answers"),
    ("counter", "n_decode_total", "Steps, including steps for vectors"),
    ("counter", "n_tokens_max", "The longest prompt with its answer"),
    ("counter", "spec_decode_num_draft_tokens_total", "Tokens drafted"),
    ("counter", "spec_decode_num_accepted_tokens_total", "Drafted tokens accepted"),
    ("counter", "spec_decode_num_drafts_total", "Drafts of next tokens that a step checked"),
    ("gauge", "prompt_tokens_seconds", "Prompt tokens computed per second, over the last requests"),
    ("gauge", "predicted_tokens_seconds", "Tokens generated per second, over the last requests"),
    ("gauge", "requests_processing", "Requests on a slot"),
    ("gauge", "requests_deferred", "Requests in the queue"),
    ("gauge", "n_busy_slots_per_decode", "Requests in a step, on average"),
)
"""llama-server's metrics: kind, name, help."""


@dataclass(slots=True)
class Rate:
    """A rate of tokens.

    seconds: the time that all finished requests took together.
    recent: the tokens and the seconds of each of the last `RECENT` requests.
    """

    seconds: float = 0.0
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def count(self, tokens: int, seconds: float) -> None:
        self.seconds += seconds
        self.recent.append((tokens, seconds))

    def per_second(self) -> float:
        """Return the tokens per second over the last finished requests."""
        tokens, seconds = map(sum, zip(*self.recent, strict=True)) if self.recent else (0, 0.0)
        return tokens / seconds if seconds else 0.0


class Metrics:
    """The metrics of one server, in a registry of their own.

    open: the requests that the engine has not ended yet.
    parts, times: the devices' reports and their measured times, from the server's start. A scrape does not query
        the devices again, since they may be computing.
    """

    def __init__(
        self,
        conversations: Conversations,
        open: Collection[Generation],
        idle: IdlePrefill,
        parts: Sequence[DevicePart],
        times: Times | None,
    ) -> None:
        self._conversations, self._open, self._idle = conversations, open, idle
        self._parts, self._times = parts, times
        self._stats: EngineStats | None = None
        self._computed = Computed()
        self._folder_index: FolderIndex | None = None
        self._attachments: Attachments | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._requests = Counter("slotcache_requests", "Requests by how they ended", ["end"], registry=self._registry)
        self._ttft = self._histogram("slotcache_ttft_seconds", "From arrival to the first token")
        self._queue = self._histogram("slotcache_queue_seconds", "From arrival to admission")
        self._itl = self._histogram("slotcache_itl_seconds", "Mean time between two tokens of a request")
        name, help = "slotcache_prefix_cache_ratio", "Share of a finished request's prompt that was not computed"
        self._ratio = Histogram(name, help, buckets=SHARES, registry=self._registry)
        name, help = "slotcache_prefix_cache_tokens", "Prompt tokens of finished requests that were not computed"
        self._prefix_tokens = Counter(name, help, registry=self._registry)
        self._mean_seconds = 1.0
        self._prompts, self._answers = Rate(), Rate()
        self._longest = 0  # tokens of a prompt and its answer

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(name, help, buckets=SECONDS, registry=self._registry)

    def count_finished(self, report: Report, reason: str) -> None:
        self._requests.labels(reason).inc()
        self._ttft.observe(report.queue_time + report.prompt_time)
        self._queue.observe(report.queue_time)
        self._ratio.observe(report.prefix_cache_ratio)
        self._prefix_tokens.inc(report.num_cached)
        if report.num_generated > 1:
            self._itl.observe(report.generation_time / (report.num_generated - 1))
        self._prompts.count(report.num_prompt - report.num_cached, report.prompt_time)
        self._answers.count(max(report.num_generated - 1, 0), report.generation_time)
        self._longest = max(self._longest, report.num_prompt + report.num_generated)
        took = report.prompt_time + report.generation_time
        self._mean_seconds += SMOOTHING * (took - self._mean_seconds)

    def count_unanswered(self, end: Literal["error", "cancelled", "refused"]) -> None:
        """Count a request that ended without an answer."""
        self._requests.labels(end).inc()

    def seconds_until_room(self, slots: int) -> int:
        """Estimate the seconds until a slot becomes free, for the header Retry-After. slots: the number of slots."""
        return max(1, ceil(self._mean_seconds / slots))

    def exposition(
        self, stats: EngineStats, computed: Computed, folder_index: FolderIndex | None, attachments: Attachments
    ) -> bytes:
        """Return all metrics in Prometheus' text format.

        computed: the counts of the texts for which vectors or scores were computed.
        """
        self._stats, self._computed = stats, computed
        self._folder_index, self._attachments = folder_index, attachments
        return generate_latest(self._registry) + _written(self._as_llama_server(stats, computed))

    def _as_llama_server(self, stats: EngineStats, computed: Computed) -> dict[str, float]:
        """Return the values of llama-server's metrics."""
        counters = stats.counters
        steps, spans = counters["steps"][1], counters["spans"][1]
        return {
            "prompt_tokens_total": counters["prompt_tokens"][1] + computed.tokens,
            "prompt_tokens_cached_total": sum(stats.cached_tokens.values()),
            "prompt_seconds_total": self._prompts.seconds,
            "tokens_predicted_total": counters["generated_tokens"][1],
            "tokens_predicted_seconds_total": self._answers.seconds,
            "n_decode_total": steps + computed.steps,
            "spec_decode_num_draft_tokens_total": counters["drafted_tokens"][1],
            "spec_decode_num_accepted_tokens_total": counters["accepted_tokens"][1],
            "spec_decode_num_drafts_total": counters["drafts"][1],
            "n_tokens_max": self._longest,
            "prompt_tokens_seconds": self._prompts.per_second(),
            "predicted_tokens_seconds": self._answers.per_second(),
            "requests_processing": stats.num_running,
            "requests_deferred": stats.num_waiting,
            "n_busy_slots_per_decode": spans / max(steps, 1),
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. prometheus_client calls this method."""
        if self._stats is None:
            return
        for name, (help, value) in self._stats.gauges.items():
            yield GaugeMetricFamily(f"slotcache_{name}", help, value)
        stored, counters = self._conversations, self._stats.counters
        for name, help, value in (
            ("conversations", "Conversations that are stored", len(stored)),
            ("conversation_bytes", "Bytes of memory that stored conversations take", stored.num_bytes),
            ("requests_open", "Accepted requests that the engine has not ended yet", len(self._open)),
            ("idle_bytes", "Bytes of memory kept for idle work to come", self._idle.num_bytes),
        ):
            yield GaugeMetricFamily(f"slotcache_{name}", help, value)
        loop = ("Seconds of processor time of the event loop's thread", thread_time())
        evicted = ("Stored conversations that were deleted to make room", stored.num_evicted)
        for name, (help, value) in {"loop_seconds": loop, "conversations_evicted": evicted, **counters}.items():
            yield CounterMetricFamily(f"slotcache_{name}", help, value)
        cached = CounterMetricFamily("slotcache_cached_tokens", "Prompt tokens reused, by source", labels=["source"])
        tokens = dict.fromkeys(Source, 0) | self._stats.cached_tokens  # also of tiers with other names
        del tokens[Source.NONE]
        for source, number in tokens.items():
            cached.add_metric([source], number)
        yield cached
        yield _of_build()
        yield from _of_devices(self._parts)
        yield from _of_times(self._parts, self._times)
        yield from _of_vectors(self._computed)
        yield from _of_folder(self._folder_index)
        yield from _of_attachments(self._attachments)


def _of_build() -> Metric:
    """Return the versions of server, llama.cpp and Python, as labels of a metric that is always 1."""
    versions = {"version": VERSION, "llama_cpp": llama.LIBRARY.version, "python": python_version()}
    info = GaugeMetricFamily("slotcache_build_info", "The versions of this server", labels=list(versions))
    info.add_metric(list(versions.values()), 1)
    return info


OF_A_DEVICE: tuple[tuple[str, str, Callable[[DevicePart], float | None]], ...] = (
    ("memory_bytes", "Bytes of memory that a device has", lambda part: part.device.total or None),
    (
        "free_bytes",
        "Bytes of memory that a device had free after the load of the model",
        lambda part: part.device.free if part.device.total else None,
    ),
    ("layers", "Layers of the model on a device, the output being one more", lambda part: part.layers),
    ("weights_bytes", "Bytes of the weights of the model on a device", lambda part: part.use and part.use.weights),
    ("kv_bytes", "Bytes of the pool of KV cells on a device, with recurrent states", lambda part: part.use and part.use.kv),
    ("compute_bytes", "Bytes of the compute buffer on a device", lambda part: part.use and part.use.compute),
)
"""The metrics of each device: name, help, and a function that returns the value; None: the value is unknown."""


def _of_devices(parts: Sequence[DevicePart]) -> Iterator[Metric]:
    """Yield the metrics of the devices that have a part of the model. The values were measured when the server started."""
    info = GaugeMetricFamily(
        "slotcache_device_info", "A device that has a part of the model", labels=["device", "description", "kind"]
    )
    for part in parts:
        info.add_metric([part.device.name, part.device.description, part.device.kind], 1)
    yield info
    for name, help, value_of in OF_A_DEVICE:
        gauge = GaugeMetricFamily(f"slotcache_device_{name}", help, labels=["device"])
        for part in parts:
            if (value := value_of(part)) is not None:
                gauge.add_metric([part.device.name], value)
        yield gauge


def _of_times(parts: Sequence[DevicePart], times: Times | None) -> Iterator[Metric]:
    """Yield the measured times of the first device that has layers of the model.

    If no times are known, the metrics have no values.
    """
    step = GaugeMetricFamily("slotcache_device_step_seconds", "Seconds to compute a token, as measured", labels=["device"])
    labels = ["device", "tokens"]
    chunk = GaugeMetricFamily(
        "slotcache_device_chunk_seconds", "Seconds to compute a batch of tokens, as measured", labels=labels
    )
    timed = next((part.device.name for part in parts if part.layers != 0), None)
    if times is not None and timed is not None and times.step:
        step.add_metric([timed], times.step)
        if times.chunk:
            chunk.add_metric([timed, str(times.chunk_tokens)], times.chunk)
    yield from (step, chunk)


def _of_vectors(computed: Computed) -> Iterator[Metric]:
    """Yield the metrics about vectors and scores."""
    for name, help, number in (
        ("texts", "Texts that became vectors or scores", computed.texts),
        ("tokens", "Tokens of the texts that became vectors or scores", computed.tokens),
        ("steps", "Steps that computed texts for vectors or scores", computed.steps),
        ("loads", "Times that a model for vectors or scores came back into memory", computed.loads),
    ):
        yield CounterMetricFamily(f"slotcache_vector_{name}", help, number)
    yield GaugeMetricFamily("slotcache_vector_models", "Models for vectors or scores in memory", computed.in_memory)


def _of_folder(index: FolderIndex | None) -> Iterator[Metric]:
    """Yield the metrics of the server's documents; all are 0 without --docs."""
    now, ahead = index.index.progress if index else Progress(), index.prefixes if index else None
    for name, help, number in (
        ("files", "Files of --docs that can be read", now.files),
        ("files_left", "Files of --docs that wait to be read", now.files_left),
        ("documents", "Documents in the index of --docs", now.chunks),
        ("vectors", "Vectors in the index of --docs", now.vectors),
        ("clusters", "Clusters of vectors in the index of --docs; 0: a search compares all vectors", now.clusters),
        ("read_ahead", "Documents prefilled before any question", ahead.num_documents if ahead else 0),
        ("read_ahead_tokens", "Tokens of documents prefilled before any question", ahead.num_tokens if ahead else 0),
    ):
        yield GaugeMetricFamily(f"slotcache_docs_{name}", help, number)
    searches = index.num_searches if index else 0
    yield CounterMetricFamily("slotcache_docs_searches", "Searches in the documents of --docs", searches)


def _of_attachments(files: Attachments | None) -> Iterator[Metric]:
    yield GaugeMetricFamily("slotcache_attached_files", "Attached files that are kept", files.num_kept if files else 0)
    yield GaugeMetricFamily("slotcache_attached_vectors", "Vectors of attached files", files.num_vectors if files else 0)
    for name, help, number in (
        ("read", "Attached files that were read", files.num_read if files else 0),
        ("failed", "Attached files that could not be read", files.num_failed if files else 0),
        ("searches", "Searches in attached files", files.num_searches if files else 0),
    ):
        yield CounterMetricFamily(f"slotcache_attached_{name}", help, number)


class _VectorMetrics:
    """The metrics of a server that generates no text. prometheus_client collects them from this object."""

    def __init__(self, computed: Computed) -> None:
        self._computed = computed

    def collect(self) -> Iterator[Metric]:
        yield _of_build()
        yield from _of_vectors(self._computed)


def exposition_of_vectors(computed: Computed) -> bytes:
    """Return all metrics of a server that generates no text, in the same format as `Metrics.exposition`."""
    registry = CollectorRegistry()
    registry.register(_VectorMetrics(computed))
    values = {"prompt_tokens_total": computed.tokens, "n_decode_total": computed.steps}
    return generate_latest(registry) + _written(values)


def _written(values: Mapping[str, float]) -> bytes:
    """Return llama-server's metrics in Prometheus' text format. A metric without a value is 0."""
    return "".join(
        f"# HELP llamacpp:{name} {help}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {float(values.get(name, 0))!r}\n"
        for kind, name, help in OF_LLAMA_SERVER
    ).encode()
