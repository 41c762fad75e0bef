"""Metrics of the best possible hit rates and what stands between."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcm.observability.ceiling import Ceilings
from kvcm.observability.ceiling_report import ScopeReport, WindowReport

_WINDOWS_SPLIT = ("1h", "24h")
"""By cause, series are many."""


class CeilingMetrics(Collector):
    """From the last report, at most some seconds old."""

    def __init__(self, ceilings: Ceilings | None) -> None:
        self._ceilings = ceilings

    def collect(self) -> Iterable[Metric]:
        if self._ceilings is None:
            return
        report = self._ceilings.snapshot()
        groups = [scope for scope in report.scopes if not scope.instance]
        instances = [scope for scope in report.scopes if scope.instance]
        yield from _families("group", groups)
        yield from _families("instance", instances)
        weight = GaugeMetricFamily(
            "kvcm_ceiling_sample_weight",
            "Keys for one whose fate is followed, to tell why blocks are missed; 1 = all of them.",
        )
        weight.add_metric([], report.sample_weight)
        uncounted = CounterMetricFamily(
            "kvcm_ceiling_uncounted_events",
            "Lookups and other events that were left out because too many waited.",
        )
        uncounted.add_metric([], report.uncounted)
        yield from (weight, uncounted)


def _families(kind: str, scopes: Iterable[ScopeReport]) -> Iterable[Metric]:
    labels = ["group", "window"] if kind == "group" else ["group", "instance_id", "window"]
    prefix = f"kvcm_{kind}_window"
    blocks = GaugeMetricFamily(
        f"{prefix}_blocks",
        "Blocks that prefix lookups asked for in the last 15m, 1h or 24h, and a little before.",
        labels=labels,
    )
    hit = GaugeMetricFamily(
        f"{prefix}_hit_ratio", "Share of these blocks that were hits.", labels=labels
    )
    ceiling = GaugeMetricFamily(
        f"{prefix}_ceiling_ratio",
        "Share of these blocks that were asked for before in the window: what a cache without "
        "limits, empty at its beginning, would have hit.",
        labels=labels,
    )
    misses = GaugeMetricFamily(
        f"{prefix}_misses",
        "Blocks of the window that were no hits, by cause; they add up exactly.",
        labels=[*labels, "cause"],
    )
    space = GaugeMetricFamily(
        f"{prefix}_more_space_bytes",
        "Bytes more that would have made nine of ten evicted blocks hits; 0 without any.",
        labels=labels,
    )
    for scope in scopes:
        for window in scope.windows:
            found = [scope.group, scope.instance, window.window]
            values = [value for value in found if value]
            blocks.add_metric(values, window.blocks)
            hit.add_metric(values, window.hit_rate)
            ceiling.add_metric(values, window.ceiling)
            space.add_metric(values, _space(window))
            if window.window in _WINDOWS_SPLIT:
                for cause, count in window.misses.items():
                    misses.add_metric([*values, cause], count)
    yield from (blocks, hit, ceiling, misses, space)


def _space(window: WindowReport) -> int:
    most = window.most_space
    return most.more_bytes if most is not None else 0
