"""Counts and durations of calls, per RPC; plain numbers, read by GetMetrics and Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvcm.core.errors import ErrorCode

BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


@dataclass(slots=True)
class ApiStats:
    """Of one RPC, both transports and services together."""

    calls: int = 0
    seconds: float = 0.0
    codes: dict[int, int] = field(default_factory=dict)
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    """Calls by duration: up to and with each bound of ``BUCKETS_S``, then the rest."""

    @property
    def mean_us(self) -> float:
        """Mean duration in microseconds."""
        return self.seconds / self.calls * 1e6 if self.calls else 0.0


class CallStats:
    """Statistics by RPC name."""

    def __init__(self) -> None:
        self._apis: dict[str, ApiStats] = {}

    def record(self, api: str, code: ErrorCode, seconds: float) -> None:
        """One call that ended."""
        stats = self._apis.get(api)
        if stats is None:
            stats = self._apis[api] = ApiStats()
        stats.calls += 1
        stats.seconds += seconds
        stats.codes[code] = stats.codes.get(code, 0) + 1
        stats.buckets[bisect_left(BUCKETS_S, seconds)] += 1

    def items(self) -> Iterator[tuple[str, ApiStats]]:
        """RPCs called so far, by name."""
        return iter(sorted(self._apis.items()))
