"""Space, limits, refusals and the read cache in ``GET /metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcm.cache.api import AdmissionUsage, ReadCacheUsage, Usage, UsageReport
from kvcm.observability.traffic import OTHER, Traffic
from kvcm.observability.traffic_metrics import LABELS

_STATES = ("open", "serving", "dead", "trash")
_BLOCK_STATES = ("open", "serving")


class UsageMetrics(Collector):
    """From one report, made when scraped.

    Args:
        traffic: tells which groups and instances are shown by name; without it groups are, and
            no instances.
    """

    def __init__(self, usage: Callable[[], UsageReport], traffic: Traffic | None) -> None:
        self._usage = usage
        self._traffic = traffic

    def collect(self) -> Iterable[Metric]:
        report = self._usage()
        label = self._traffic.group_label if self._traffic is not None else str
        groups = _together(report.groups, label)
        yield _bytes("kvcm_group_bytes", ["group"], {(g,): u for g, u in groups.items()})
        yield _blocks("kvcm_group_blocks", ["group"], {(g,): u for g, u in groups.items()})
        yield from _limits("kvcm_group", "group", groups)
        storages = report.storages
        yield _bytes("kvcm_storage_bytes", ["storage"], {(s,): u for s, u in storages.items()})
        yield from _limits("kvcm_storage", "storage", storages)
        yield from self._instances(report)
        yield _refusals(
            "kvcm_refused_writes",
            "Writes of which a limit let nothing through, by group and reason.",
            _present(report.refused, report.groups, label),
        )
        yield _refusals(
            "kvcm_cut_writes",
            "Writes of which a limit let only a leading part through, by group and reason.",
            _present(report.cut, report.groups, label),
        )
        yield from _admission(
            {g: u for g, u in report.admission.items() if g in report.groups and label(g) == g}
        )
        reports = CounterMetricFamily(
            "kvcm_error_reports",
            "Blocks that readers reported, by kind and outcome.",
            labels=["kind", "outcome"],
        )
        for (kind, outcome), count in sorted(report.error_reports.items()):
            reports.add_metric([kind, outcome], count)
        yield reports
        yield GaugeMetricFamily("kvcm_write_sessions", "Open write sessions.", report.sessions)
        yield GaugeMetricFamily(
            "kvcm_overdue_write_sessions",
            "Open write sessions past their deadline: due, and not ended yet.",
            report.overdue,
        )
        yield GaugeMetricFamily("kvcm_extents", "Extents in the index.", report.extents)
        yield CounterMetricFamily(
            "kvcm_quarantined_records",
            "Times a record that does not parse was met.",
            report.quarantined,
        )
        yield GaugeMetricFamily(
            "kvcm_leadership_epoch",
            "The epoch that this manager writes under; each that leads takes a higher one.",
            report.epoch,
        )
        yield from _read_cache(report.read_cache)

    def _instances(self, report: UsageReport) -> Iterable[Metric]:
        found: dict[tuple[str, ...], Usage] = {}
        if self._traffic is not None:
            for group in self._traffic.groups():
                found[group, OTHER] = Usage()
            for name, usage in report.instances.items():
                group = self._traffic.group_label(report.owners[name])
                labels = (group, self._traffic.instance_label(report.uids[name]))
                found[labels] = _sum(found.get(labels, Usage()), usage)
        yield _bytes("kvcm_instance_bytes", LABELS, found)
        yield _blocks("kvcm_instance_blocks", LABELS, found)


def _together(usages: Mapping[str, Usage], label: Callable[[str], str]) -> dict[str, Usage]:
    """By label; what several share has no limits."""
    out: dict[str, Usage] = {}
    for name, usage in usages.items():
        if label(name) == name:
            out[name] = usage
        else:
            out[OTHER] = _sum(out.get(OTHER, Usage()), usage)
    return out


def _sum(a: Usage, b: Usage) -> Usage:
    return Usage(
        a.open_bytes + b.open_bytes,
        a.serving_bytes + b.serving_bytes,
        a.dead_bytes + b.dead_bytes,
        a.trash_bytes + b.trash_bytes,
        a.open_blocks + b.open_blocks,
        a.serving_blocks + b.serving_blocks,
    )


def _present(
    counts: Mapping[tuple[str, str], int],
    groups: Mapping[str, object],
    label: Callable[[str], str],
) -> dict[tuple[str, str], int]:
    """Of groups that are there and have a label of their own."""
    return {k: n for k, n in counts.items() if k[0] in groups and label(k[0]) == k[0]}


def _read_cache(usage: ReadCacheUsage) -> Iterable[Metric]:
    yield GaugeMetricFamily(
        "kvcm_read_cache_bytes", "Bytes of records and answers in memory.", usage.used_bytes
    )
    yield GaugeMetricFamily(
        "kvcm_read_cache_limit_bytes",
        "Bytes that records and answers in memory may take.",
        usage.limit_bytes,
    )
    yield GaugeMetricFamily(
        "kvcm_read_cache_extents", "Extents that can be answered from memory.", usage.extents
    )
    yield CounterMetricFamily(
        "kvcm_read_cache_uses", "Extents that prefix lookups went over.", usage.used
    )
    yield CounterMetricFamily(
        "kvcm_read_cache_misses",
        "Extents that had to be read from the index store, for any call. 1 - misses / uses is the "
        "hit rate.",
        usage.read,
    )


def _blocks(name: str, labels: Iterable[str], usages: Mapping[tuple[str, ...], Usage]) -> Metric:
    family = GaugeMetricFamily(name, "Blocks held, by state.", labels=[*labels, "state"])
    for key, usage in usages.items():
        for state in _BLOCK_STATES:
            family.add_metric([*key, state], getattr(usage, f"{state}_blocks"))
    return family


def _bytes(name: str, labels: Iterable[str], usages: Mapping[tuple[str, ...], Usage]) -> Metric:
    family = GaugeMetricFamily(name, "Bytes held, by state.", labels=[*labels, "state"])
    for key, usage in usages.items():
        for state in _STATES:
            family.add_metric([*key, state], getattr(usage, f"{state}_bytes"))
    return family


def _limits(prefix: str, label: str, usages: Mapping[str, Usage]) -> Iterable[Metric]:
    """Gauges of limits; what has no limit, or no mark, has no sample."""
    texts = {
        "capacity": "Bytes that the limit allows.",
        "effective": "Bytes that could be held now; less than the capacity on full storages.",
        "high": "Bytes above which eviction begins.",
        "low": "Bytes at which eviction stops.",
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
