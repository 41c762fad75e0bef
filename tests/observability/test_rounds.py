"""Rounds of background loops and the lag of the event loop."""

from __future__ import annotations

from prometheus_client.core import Metric

from kvcm.observability.rounds import LoopLag, Rounds
from kvcm.testing.clock import SimClock


def values(metrics: list[Metric]) -> dict[str, float]:
    return {m.name: m.samples[0].value for m in metrics}


async def test_the_largest_lag_of_a_minute_is_kept_and_no_longer() -> None:
    lag = LoopLag()
    now = 0.0
    await lag.run_once(now)
    for late in (0.5, 0.1):
        now += lag.period_s + late
        await lag.run_once(now)
    shown = values(list(lag.collect()))
    assert round(shown["kvcm_event_loop_lag_seconds"], 6) == 0.1
    assert round(shown["kvcm_event_loop_lag_max_seconds"], 6) == 0.5
    for _ in range(int(lag.window_s / lag.period_s) + 1):
        now += lag.period_s
        await lag.run_once(now)
    assert values(list(lag.collect()))["kvcm_event_loop_lag_max_seconds"] < 0.01


def test_rounds_are_told_by_loop_and_outcome() -> None:
    clock = SimClock()
    rounds = Rounds(clock)
    rounds.record("trash", 0.01, failed=False)
    rounds.record("trash", 0.5, failed=True)
    seconds, ended = rounds.collect()
    counts = {s.labels["outcome"]: s.value for s in seconds.samples if s.name.endswith("_count")}
    assert counts == {"ok": 1, "failed": 1}
    assert [(s.labels["loop"], s.value) for s in ended.samples] == [("trash", clock.now())]
