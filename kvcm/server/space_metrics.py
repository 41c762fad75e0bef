"""Metrics of what is being freed."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcm.reclaimer.space import SpaceControl


class SpaceMetrics(Collector):
    """Trash by storage and state, and removals under way; read when scraped."""

    def __init__(self, space: SpaceControl | None) -> None:
        self._space = space

    def collect(self) -> Iterable[Metric]:
        if self._space is None:
            return
        entries = GaugeMetricFamily(
            "kvcm_trash_entries",
            "Deletes that wait: in all (pending), failing, given up for now (dead_letter).",
            labels=["storage", "state"],
        )
        late = GaugeMetricFamily(
            "kvcm_trash_late_calls", "Delete calls that take long.", labels=["storage"]
        )
        for trash in self._space.trash():
            for state, count in (
                ("pending", trash.entries),
                ("failing", trash.failing),
                ("dead_letter", trash.dead_letters),
            ):
                entries.add_metric([trash.storage, state], count)
            late.add_metric([trash.storage], trash.late_calls)
        yield entries
        yield late
        removals = GaugeMetricFamily(
            "kvcm_removals", "Trims and removed instances under way.", labels=["what"]
        )
        under_way = [removal.what for removal in self._space.removals()]
        for what in ("trim", "instance"):
            removals.add_metric([what], under_way.count(what))
        yield removals
