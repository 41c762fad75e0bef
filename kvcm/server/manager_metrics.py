"""The manager itself in ``GET /metrics``: what runs, since when, and whether it leads."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import kvcm
from kvcm.core.clock import Clock


class ManagerMetrics(Collector):
    """Gauges; the epoch is told with the usage."""

    def __init__(self, clock: Clock, ready: Callable[[], bool], leads: Callable[[], bool]) -> None:
        self._started = clock.now()
        self._ready = ready
        self._leads = leads

    def collect(self) -> Iterable[Metric]:
        build = GaugeMetricFamily(
            "kvcm_build_info", "1; the labels tell what runs.", labels=["version", "python"]
        )
        build.add_metric([kvcm.__version__, platform.python_version()], 1)
        yield build
        yield GaugeMetricFamily(
            "kvcm_start_timestamp_seconds", "When the manager started, since 1970.", self._started
        )
        yield GaugeMetricFamily(
            "kvcm_ready", "1 while the manager serves: its index store answers.", self._ready()
        )
        yield GaugeMetricFamily(
            "kvcm_leader", "1 while this node leads: the others refuse calls.", self._leads()
        )
