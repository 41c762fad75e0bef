"""How the manager itself is doing: rounds of its loops, and the lag of its event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvcm.core.clock import Clock
from kvcm.observability.histogram import ROUND_BOUNDS_S, Timings, histograms


class Rounds(Collector):
    """Durations of the rounds of background loops."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timings = Timings(ROUND_BOUNDS_S)
        self._ended: dict[str, float] = {}

    def record(self, loop: str, seconds: float, *, failed: bool) -> None:
        """A round has ended."""
        self._timings[loop, "failed" if failed else "ok"].observe(seconds)
        self._ended[loop] = self._clock.now()

    def collect(self) -> Iterable[Metric]:
        yield histograms(
            "kvcm_loop_round_seconds",
            "Duration of rounds of background loops by outcome (ok, failed). Moves when idle, too.",
            ("loop", "outcome"),
            self._timings,
        )
        ended = GaugeMetricFamily(
            "kvcm_loop_last_round_timestamp_seconds",
            "When the latest round of a background loop ended, since 1970.",
            labels=["loop"],
        )
        for loop, when in sorted(self._ended.items()):
            ended.add_metric([loop], when)
        yield ended


class LoopLag(Collector):
    """A background loop that does nothing but see how late it is called."""

    name = "lag"
    period_s = 0.25
    window_s = 60.0

    def __init__(self) -> None:
        self._due: float | None = None
        self._lags: deque[tuple[float, float]] = deque()
        """(when, lag), each larger than all later ones: the first is the window's largest."""
        self._latest = 0.0

    async def run_once(self, now: float) -> None:
        """``now`` is when it was due, but for what held the event loop."""
        if self._due is not None:
            self._latest = max(0.0, now - self._due)
            while self._lags and self._lags[-1][1] <= self._latest:
                self._lags.pop()
            self._lags.append((now, self._latest))
            while self._lags[0][0] < now - self.window_s:
                self._lags.popleft()
        self._due = now + self.period_s

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "kvcm_event_loop_lag_seconds",
            "How late the event loop was when it was looked at last, four times a second.",
            self._latest,
        )
        yield GaugeMetricFamily(
            "kvcm_event_loop_lag_max_seconds",
            "The largest lag of the last minute.",
            self._lags[0][1] if self._lags else 0.0,
        )
