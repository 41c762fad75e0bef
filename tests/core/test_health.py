"""States of a storage, by table; the breaker that readers open."""

from __future__ import annotations

import pytest

from kvcm.core import health, limits
from kvcm.core.health import Breaker, Health, HealthState


@pytest.mark.parametrize(
    ("before", "probe", "state"),
    [
        (health.AVAILABLE, "good", HealthState.AVAILABLE),
        (health.AVAILABLE, "bad", HealthState.SUSPECT),
        (health.AVAILABLE, "hung", HealthState.UNAVAILABLE),
        (Health(HealthState.SUSPECT, 1), "good", HealthState.AVAILABLE),
        (Health(HealthState.SUSPECT, 1), "bad", HealthState.UNAVAILABLE),
        (health.UNAVAILABLE, "good", HealthState.UNAVAILABLE),
        (Health(HealthState.UNAVAILABLE, 1), "good", HealthState.AVAILABLE),
        (Health(HealthState.UNAVAILABLE, 1), "bad", HealthState.UNAVAILABLE),
        (health.OPENED, "good", HealthState.AVAILABLE),
        (health.OPENED, "bad", HealthState.UNAVAILABLE),
    ],
)
def test_a_probe_moves_the_state(before: Health, probe: str, state: HealthState) -> None:
    after = (
        health.succeeded(before) if probe == "good" else health.failed(before, hung=probe == "hung")
    )
    assert after.state is state
    assert after.usable == (state is not HealthState.UNAVAILABLE)


def test_a_bad_probe_in_between_starts_the_count_of_good_ones_again() -> None:
    assert health.failed(health.succeeded(health.UNAVAILABLE)) == health.UNAVAILABLE


def complain(breaker: Breaker, now: float, readers: int = limits.BREAKER_READERS) -> bool:
    return [breaker.complain(f"reader-{i}", now) for i in range(readers)][-1]


def test_one_reader_opens_nothing_however_often_it_complains() -> None:
    breaker = Breaker()
    assert not any(breaker.complain("a", float(i % 7)) for i in range(1000))
    assert not breaker.is_open(0.0)


def test_enough_readers_open_it_for_a_while() -> None:
    breaker = Breaker()
    assert not complain(breaker, 100.0, limits.BREAKER_READERS - 1)
    assert complain(breaker, 100.0)
    assert breaker.is_open(100.0 + limits.BREAKER_OPEN_S - 0.1)
    assert not breaker.is_open(100.0 + limits.BREAKER_OPEN_S)


def test_complaints_count_for_one_window() -> None:
    breaker = Breaker()
    complain(breaker, 0.0, limits.BREAKER_READERS - 1)
    assert not breaker.complain("late", limits.BREAKER_WINDOW_S + 0.1)
    other = Breaker()
    complain(other, 0.0, limits.BREAKER_READERS - 1)
    assert other.complain("in time", limits.BREAKER_WINDOW_S)


def test_it_stays_open_twice_as_long_each_time_until_it_was_closed_for_long() -> None:
    breaker, now, held = Breaker(), 0.0, []
    for _ in range(6):
        assert complain(breaker, now)
        held.append(breaker.open_until - now)
        now = breaker.open_until
    assert held == [30, 60, 120, 240, 480, 480]
    assert complain(breaker, now + limits.BREAKER_OPEN_S_MAX + 0.1)
    assert breaker.open_until - now - limits.BREAKER_OPEN_S_MAX == pytest.approx(30.1)


def test_complaints_while_it_is_open_do_not_count() -> None:
    breaker = Breaker()
    complain(breaker, 0.0)
    until = breaker.open_until
    assert not complain(breaker, until - 0.1)
    assert breaker.open_until == until
    assert not breaker.complain("one", until)
