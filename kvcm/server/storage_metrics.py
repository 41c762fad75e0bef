"""Metrics of the storages' health."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcm.core.health import HealthState
from kvcm.observability.histogram import Timings, histograms
from kvcm.server.backends import StorageHealth


class StorageMetrics(Collector):
    """State, probes and free space of each storage; read when scraped."""

    def __init__(
        self, statuses: Callable[[], Iterable[StorageHealth]], probe_timings: Timings | None = None
    ) -> None:
        self._statuses = statuses
        self._probe_timings = probe_timings if probe_timings is not None else Timings()

    def collect(self) -> Iterable[Metric]:
        state = GaugeMetricFamily(
            "kvcm_storage_state",
            "1 for the state a storage is in, by its probes and readers, or else disabled.",
            labels=["storage", "type", "state"],
        )
        changes = CounterMetricFamily(
            "kvcm_storage_state_changes",
            "Times a storage came into a state.",
            labels=["storage", "state"],
        )
        free = GaugeMetricFamily(
            "kvcm_storage_free_bytes",
            "Free on the storage itself at its last probe, where it tells.",
            labels=["storage"],
        )
        breaker = GaugeMetricFamily(
            "kvcm_storage_breaker_open",
            "1 while a storage is left alone because several readers could not read it.",
            labels=["storage"],
        )
        writable = GaugeMetricFamily(
            "kvcm_storage_writable",
            "0 while a storage is full or read-only, though it can be read.",
            labels=["storage"],
        )
        for status in self._statuses():
            name = status.config.global_unique_name
            shown = status.state.name.lower() if status.config.enabled else "disabled"
            kind = status.config.type_name
            for known in (*(s.name.lower() for s in HealthState), "disabled"):
                state.add_metric([name, kind, known], float(known == shown))
            for to, count in status.changes.items():
                changes.add_metric([name, to.name.lower()], count)
            if status.free_bytes is not None:
                free.add_metric([name], status.free_bytes)
            writable.add_metric([name], float(not status.unwritable))
            breaker.add_metric([name], float(status.breaker_open))
        yield from (state, changes, free, writable, breaker)
        yield histograms(
            "kvcm_storage_probe_seconds",
            "Duration of probes by result (good, bad). Moves when idle, too.",
            ("storage", "result"),
            self._probe_timings,
        )
