"""Durations in buckets, as Prometheus counts them; plain numbers, no locks, one thread."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric

CALL_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""For what somebody waits for."""
ROUND_BOUNDS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.5, 10.0, 60.0)
"""For what goes on in the background."""


class Histogram:
    """Observations by upper bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = CALL_BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Up to and with each bound, then the rest; not added up."""
        self.total = 0.0

    def observe(self, value: float) -> None:
        """One observation."""
        self.total += value
        self.counts[bisect_left(self.bounds, value)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Bound and how many were not above it, up to ``+Inf``."""
        count, out = 0, []
        for bound, more in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            count += more
            out.append((bound, float(count)))
        return out


class Timings(dict[tuple[str, ...], Histogram]):
    """Histograms by their label values, made when first needed."""

    def __init__(self, bounds: Sequence[float] = CALL_BOUNDS_S) -> None:
        super().__init__()
        self._bounds = bounds

    def __missing__(self, labels: tuple[str, ...]) -> Histogram:
        made = self[labels] = Histogram(self._bounds)
        return made


def histograms(
    name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], Histogram]
) -> Metric:
    """A metric of histograms by their label values."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, histogram in sorted(values.items()):
        family.add_metric(list(key), histogram.buckets(), histogram.total)
    return family
