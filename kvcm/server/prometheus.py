"""``GET /metrics``: calls and space, read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvcm.cache.api import AdmissionUsage, Usage, UsageReport
from kvcm.server.callstats import CallStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("open", "serving", "dead", "trash")


class _Manager(Collector):
    def __init__(self, usage: Callable[[], UsageReport]) -> None:
        self._usage = usage

    def collect(self) -> Iterable[Metric]:
        report = self._usage()
        yield _bytes("kvcm_group_bytes", "group", report.groups)
        yield from _limits("kvcm_group", "group", report.groups)
        yield _bytes("kvcm_storage_bytes", "storage", report.storages)
        yield from _limits("kvcm_storage", "storage", report.storages)
        yield _refusals(
            "kvcm_refused_writes",
            "Writes of which a limit let nothing through, by group and reason.",
            report.refused,
        )
        yield _refusals(
            "kvcm_cut_writes",
            "Writes of which a limit let only a leading part through, by group and reason.",
            report.cut,
        )
        yield from _admission(report.admission)
        reports = CounterMetricFamily(
            "kvcm_error_reports",
            "Blocks that readers reported, by kind and outcome.",
            labels=["kind", "outcome"],
        )
        for (kind, outcome), count in sorted(report.error_reports.items()):
            reports.add_metric([kind, outcome], count)
        yield reports
        yield GaugeMetricFamily("kvcm_write_sessions", "Open write sessions.", report.sessions)
        yield GaugeMetricFamily("kvcm_extents", "Extents in the index.", report.extents)
        yield CounterMetricFamily(
            "kvcm_quarantined_records",
            "Times a record that does not parse was met.",
            report.quarantined,
        )


def _bytes(name: str, label: str, usages: dict[str, Usage]) -> Metric:
    family = GaugeMetricFamily(name, "Bytes by state.", labels=[label, "state"])
    for key, usage in usages.items():
        for state in _STATES:
            family.add_metric([key, state], getattr(usage, f"{state}_bytes"))
    return family


def _limits(prefix: str, label: str, usages: dict[str, Usage]) -> Iterable[Metric]:
    """Gauges of limits; what has no limit, or no mark, has no sample."""
    texts = {
        "capacity": "Bytes that the limit allows.",
        "effective": "Bytes that it could hold now; less than the capacity on full storages.",
        "high": "Bytes above which eviction begins.",
        "low": "Bytes at which it stops.",
    }
    for name, text in texts.items():
        family = GaugeMetricFamily(f"{prefix}_{name}_bytes", text, labels=[label])
        for key, usage in usages.items():
            value = getattr(usage.limit, name) if usage.limit is not None else None
            if value is not None:
                family.add_metric([key], value)
        yield family


def _refusals(name: str, text: str, counts: dict[tuple[str, str], int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["group", "reason"])
    for (group, reason), count in sorted(counts.items()):
        family.add_metric([group, reason], count)
    return family


def _admission(usages: dict[str, AdmissionUsage]) -> Iterable[Metric]:
    blocks = CounterMetricFamily(
        "kvcm_admission_blocks",
        "Blocks that TinyLFU compared with what they would displace, by group and outcome.",
        labels=["group", "outcome"],
    )
    uncounted = CounterMetricFamily(
        "kvcm_admission_uncounted_requests",
        "Requests whose keys TinyLFU did not count because too many waited.",
        labels=["group"],
    )
    for group, usage in sorted(usages.items()):
        blocks.add_metric([group, "admitted"], usage.admitted)
        blocks.add_metric([group, "refused"], usage.refused)
        uncounted.add_metric([group], usage.uncounted)
    yield blocks
    yield uncounted


def exposition(
    stats: CallStats, usage: Callable[[], UsageReport], *more: Collector
) -> Callable[[], bytes]:
    """A function that gives the current text of ``/metrics``."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in (stats, _Manager(usage), *more):
        registry.register(collector)
    return lambda: generate_latest(registry)
