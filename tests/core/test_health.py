"""The states of a storage's health, probe by probe: g = good, b = bad, h = hung."""

from __future__ import annotations

import pytest

from kvcm.core.health import AVAILABLE, UNAVAILABLE, Health, failed, succeeded


def after(health: Health, probes: str) -> str:
    states = ""
    for probe in probes:
        health = succeeded(health) if probe == "g" else failed(health, hung=probe == "h")
        states += health.state.name[0]
    return states


@pytest.mark.parametrize(
    ("start", "probes", "states"),
    [
        (AVAILABLE, "ggg", "AAA"),
        (AVAILABLE, "bg", "SA"),
        (AVAILABLE, "bgbg", "SASA"),
        (AVAILABLE, "bbb", "SUU"),
        (AVAILABLE, "h", "U"),
        (AVAILABLE, "bh", "SU"),
        (UNAVAILABLE, "gg", "UA"),
        (UNAVAILABLE, "gbgbg", "UUUUU"),
        (UNAVAILABLE, "ghgg", "UUUA"),
        (AVAILABLE, "bbggb", "SUUAS"),
    ],
)
def test_a_storage_goes_after_two_bad_probes_and_returns_after_two_good_ones(
    start: Health, probes: str, states: str
) -> None:
    assert after(start, probes) == states


def test_only_an_unavailable_storage_is_not_used() -> None:
    assert AVAILABLE.usable
    assert failed(AVAILABLE).usable
    assert not failed(AVAILABLE, hung=True).usable
