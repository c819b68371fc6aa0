"""Counters of the server, as Prometheus reads them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from perspectron.serve.served import Served

Reading = Callable[[Served], float]
GAUGES: dict[str, tuple[str, Reading]] = {
    "rows": ("Texts that are read or drawn from", lambda served: served.engine.active),
    "waiting": ("Texts that wait for a row", lambda served: served.engine.waiting),
    "store_bytes": ("Bytes of states in memory", lambda served: _store(served, "used_bytes")),
}
COUNTERS: dict[str, tuple[str, Reading]] = {
    "steps": ("Steps of the rows", lambda served: served.engine.counters.steps),
    "drawn_tokens": ("Tokens drawn", lambda served: served.engine.counters.drawn),
    "drafted_tokens": ("Tokens of drafts that were read", lambda served: _drafts(served, "drafted")),
    "accepted_tokens": ("Tokens of drafts that were drawn", lambda served: _drafts(served, "accepted")),
    "finished": ("Texts that came to their end", lambda served: served.engine.counters.finished),
    "cancelled": ("Texts whose clients left", lambda served: served.engine.counters.cancelled),
    "failed": ("Texts that ended in an error", lambda served: served.engine.counters.failed),
    "store_hits": ("Prompts that began at a stored state", lambda served: _store(served, "hits")),
    "store_misses": ("Prompts read from the start", lambda served: _store(served, "misses")),
    "store_tokens_saved": ("Tokens that were not read again", lambda served: _store(served, "tokens_saved")),
    "store_evicted": ("States that made room", lambda served: _store(served, "evicted")),
    "store_damaged": ("Stored files that were dropped", lambda served: _store(served, "damaged")),
    "store_failed": ("Reads and writes that the disk refused", lambda served: _store(served, "failed")),
}


class Metrics:
    """The engines' counters, read when asked for, and the time that requests wait for their first token."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, models: Sequence[Served]) -> None:
        self.models, self.registry = models, CollectorRegistry()
        self.registry.register(self)
        self.first_token = Histogram(
            "perspectron_first_token_seconds",
            "From request to first token",
            ["model"],
            registry=self.registry,
        )
        self.requests = Counter("perspectron_requests", "Answers begun", ["model"], registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """The engines' counters as they are now."""
        kinds: list[tuple[Any, dict[str, tuple[str, Reading]]]] = [
            (GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)
        ]  # fmt: skip
        for kind, table in kinds:
            for name, (about, read) in table.items():
                family = kind(f"perspectron_{name}", about, labels=["model"])
                for served in self.models:
                    family.add_metric([served.name], float(read(served)))
                yield family

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


def _drafts(served: Served, name: str) -> float:
    drafts = served.engine.drafts
    return 0.0 if drafts is None else float(getattr(drafts.counts, name))


def _store(served: Served, name: str) -> float:
    store = served.engine.store
    if store is None:
        return 0.0
    return float(getattr(store if hasattr(store, name) else store.counters, name))
