"""The front's metrics: requests by their end, and the reuse of documents that was expected and told."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)
LONG = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)


class Metrics:
    """One front's metrics; each front has its own registry. size: returns the parts that the upstream should have."""

    def __init__(self, size: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        prefix = "slotcache_order"
        self.requests = Counter(f"{prefix}_requests", "Relayed requests by status", ["status"], registry=registry)
        self.failures = Counter(f"{prefix}_failures", "Failures of the upstream", ["code"], registry=registry)
        self.documents = Counter(f"{prefix}_documents", "Documents in chats", registry=registry)
        self.repeated = Counter(f"{prefix}_repeated", "Documents left out: an earlier turn shows them", registry=registry)
        self.expected = Counter(f"{prefix}_expected", "Documents that were expected to be cached", registry=registry)
        self.cached = Counter(f"{prefix}_cached", "Documents that were cached, as the upstream told", registry=registry)
        self.prompt_tokens = Counter(f"{prefix}_prompt_tokens", "Tokens of these prompts", registry=registry)
        self.cached_tokens = Counter(f"{prefix}_cached_tokens", "Tokens of them that were cached", registry=registry)
        self.untold = Counter(f"{prefix}_untold", "Answers that tell no cached tokens", registry=registry)
        self.ordering = Histogram(f"{prefix}_seconds", "From a body to the order", buckets=SECONDS, registry=registry)
        self.waiting = Histogram(f"{prefix}_wait_seconds", "Until the upstream's head", buckets=LONG, registry=registry)
        Gauge(f"{prefix}_nodes", "Documents and texts that the upstream should have", registry=registry).set_function(size)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
