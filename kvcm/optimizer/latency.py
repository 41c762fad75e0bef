"""Latencies in bounded memory, mergeable across processes."""

from __future__ import annotations

import math

import msgspec

_PER_E_FOLD = 50
"""Buckets per factor e: a quantile is right within 2 %."""
_UNIT_S = 1e-6


class LatencyHistogram(msgspec.Struct):
    """Counts in logarithmic buckets; ``max_s`` and ``total_s`` are exact."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    buckets: dict[int, int] = msgspec.field(default_factory=dict)

    def add(self, seconds: float) -> None:
        """Record one duration."""
        index = math.ceil(math.log(max(seconds, _UNIT_S) / _UNIT_S) * _PER_E_FOLD)
        self.buckets[index] = self.buckets.get(index, 0) + 1
        self.count += 1
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)

    def merge(self, other: LatencyHistogram) -> None:
        """Add what ``other`` recorded."""
        for index, count in other.buckets.items():
            self.buckets[index] = self.buckets.get(index, 0) + count
        self.count += other.count
        self.total_s += other.total_s
        self.max_s = max(self.max_s, other.max_s)

    def quantile(self, q: float) -> float:
        """Seconds that a share ``q`` (0 to 1) of the durations does not exceed; 0.0 when empty."""
        rank = max(1, math.ceil(q * self.count))
        passed = 0
        for index in sorted(self.buckets):
            passed += self.buckets[index]
            if passed >= rank:
                return min(self.max_s, _UNIT_S * math.exp(index / _PER_E_FOLD))
        return 0.0

    def summary_ms(self) -> dict[str, float]:
        """``count``, and ``p50``, ``p99``, ``max``, ``mean`` in milliseconds."""
        return {
            "count": self.count,
            "p50": round(self.quantile(0.5) * 1e3, 4),
            "p99": round(self.quantile(0.99) * 1e3, 4),
            "max": round(self.max_s * 1e3, 4),
            "mean": round(self.total_s / self.count * 1e3, 4) if self.count else 0.0,
        }
