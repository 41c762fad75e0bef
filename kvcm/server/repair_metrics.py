"""Repair in ``GET /metrics``."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcm.reclaimer.repair import Repair
from kvcm.reclaimer.repair_report import Kind


class RepairMetrics(Collector):
    """Counters of all runs since the start, and the latest run."""

    def __init__(self, repair: Repair) -> None:
        self._repair = repair

    def collect(self) -> Iterable[Metric]:
        totals = self._repair.totals
        found = CounterMetricFamily("kvcm_repair_found", "Damage found.", labels=["kind"])
        fixed = CounterMetricFamily("kvcm_repair_fixed", "Damage mended.", labels=["kind"])
        for kind in Kind:
            found.add_metric([kind], totals.found.get(kind, 0))
            fixed.add_metric([kind], totals.fixed.get(kind, 0))
        yield found
        yield fixed
        yield CounterMetricFamily("kvcm_repair_runs", "Runs that ended.", totals.runs)
        yield CounterMetricFamily(
            "kvcm_repair_stopped", "Runs that left a storage to a human.", totals.stopped
        )
        yield CounterMetricFamily(
            "kvcm_repair_errors", "What runs could not look at or mend.", totals.errors
        )
        yield GaugeMetricFamily(
            "kvcm_repair_last_end_seconds",
            "When the latest run ended, since 1970.",
            totals.last_end,
        )
        yield GaugeMetricFamily(
            "kvcm_repair_last_run_seconds", "How long the latest run took.", totals.last_seconds
        )
