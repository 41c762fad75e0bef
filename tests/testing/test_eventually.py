"""The eventually helpers wait for a claim and say what they saw last."""

from __future__ import annotations

import pytest

from kvcm.testing.eventually import eventually, eventually_sync


class Countdown:
    """Becomes true at the third call."""

    def __init__(self) -> None:
        self.calls = 0

    def probe(self) -> str:
        self.calls += 1
        assert self.calls != 2, "not at the second"
        return "done" if self.calls > 2 else ""

    async def async_probe(self) -> str:
        return self.probe()


async def test_it_returns_the_first_true_answer() -> None:
    assert await eventually(Countdown().probe, interval=0) == "done"
    assert await eventually(Countdown().async_probe, interval=0) == "done"
    assert eventually_sync(Countdown().probe, interval=0) == "done"


async def test_giving_up_shows_the_message_and_the_last_answer() -> None:
    with pytest.raises(AssertionError, match=r"the light is on \(waited 0.01 s; last: \[\]\)"):
        await eventually(list, timeout=0.01, interval=0.001, message="the light is on")
    with pytest.raises(AssertionError, match="last: 0"):
        eventually_sync(lambda: 0, timeout=0.01, interval=0.001)


async def test_other_errors_are_raised_at_once() -> None:
    def broken() -> bool:
        raise KeyError("k")

    with pytest.raises(KeyError):
        await eventually(broken)
    with pytest.raises(KeyError):
        eventually_sync(broken)
