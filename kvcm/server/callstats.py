"""Counts and durations of calls, per RPC; plain numbers, read by GetMetrics and Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcm.core.errors import ErrorCode
from kvcm.observability.histogram import Histogram, Timings, histograms

_KEYS = (0, 16, 128, 1_024)
SIZES = ("0", "1-16", "17-128", "129-1024", "1025+")
"""Size classes of calls, by their keys (token ids, when there are no keys)."""
_FAILED = frozenset(
    {
        ErrorCode.INTERNAL_ERROR,
        ErrorCode.SERVICE_NOT_READY,
        ErrorCode.IO_ERROR,
        ErrorCode.UNKNOWN_ERROR,
    }
)


def outcome_of(code: ErrorCode) -> str:
    """``ok``; ``failed`` when the manager or what it needs is at fault; else ``refused``."""
    if code is ErrorCode.OK:
        return "ok"
    return "failed" if code in _FAILED else "refused"


@dataclass(slots=True)
class _Kind:
    """Calls of one RPC, code and size class; kinds of one outcome share a histogram."""

    durations: Histogram
    calls: int = 0


@dataclass(slots=True)
class ApiStats:
    """Of one RPC, both transports and services together."""

    calls: int = 0
    seconds: float = 0.0
    timings: Timings = field(default_factory=Timings)
    """By outcome and size class."""
    kinds: dict[tuple[ErrorCode, int], _Kind] = field(default_factory=dict)

    def codes(self) -> Counter[ErrorCode]:
        """Calls by code."""
        counts: Counter[ErrorCode] = Counter()
        for (code, _), kind in self.kinds.items():
            counts[code] += kind.calls
        return counts

    @property
    def mean_us(self) -> float:
        """Mean duration in microseconds."""
        return self.seconds / self.calls * 1e6 if self.calls else 0.0


class CallStats(Collector):
    """Statistics by RPC name."""

    def __init__(self) -> None:
        self._apis: dict[str, ApiStats] = {}

    def record(self, api: str, code: ErrorCode, seconds: float, keys: int = 0) -> None:
        """One call that ended; it asked about so many ``keys``."""
        stats = self._apis.get(api)
        if stats is None:
            stats = self._apis[api] = ApiStats()
        stats.calls += 1
        stats.seconds += seconds
        key = code, bisect_left(_KEYS, keys)
        kind = stats.kinds.get(key)
        if kind is None:
            kind = stats.kinds[key] = _Kind(stats.timings[outcome_of(code), SIZES[key[1]]])
        kind.calls += 1
        kind.durations.observe(seconds)

    def items(self) -> Iterator[tuple[str, ApiStats]]:
        """RPCs called so far, by name."""
        return iter(sorted(self._apis.items()))

    def collect(self) -> Iterable[Metric]:
        calls = CounterMetricFamily(
            "kvcm_calls", "Calls by RPC and application code.", labels=["api", "code"]
        )
        timings: dict[tuple[str, ...], Histogram] = {}
        for api, stats in self.items():
            for code, count in sorted(stats.codes().items()):
                calls.add_metric([api, ErrorCode(code).name], count)
            timings.update({(api, *labels): h for labels, h in stats.timings.items()})
        yield calls
        yield histograms(
            "kvcm_call_seconds",
            "Duration of calls by RPC, outcome (ok, refused, failed) and number of keys.",
            ("api", "outcome", "keys"),
            timings,
        )
