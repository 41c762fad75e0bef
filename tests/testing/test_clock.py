"""SimClock stands still until it is moved."""

from __future__ import annotations

import asyncio

import pytest

from kvcm.testing.clock import SimClock


async def test_sleepers_wake_when_their_time_has_come_and_not_before() -> None:
    clock = SimClock()
    woken: list[float] = []

    async def sleeper(seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(seconds)

    async with asyncio.TaskGroup() as tasks:
        for seconds in (3.0, 1.0, 2.0, 0.0, -1.0):
            tasks.create_task(sleeper(seconds))
        await clock.settle()
        assert woken == [0.0, -1.0]
        clock.advance(0.999)
        await clock.settle()
        assert woken == [0.0, -1.0]
        clock.advance(1.001)
        await clock.settle()
        assert woken == [0.0, -1.0, 1.0, 2.0]
        clock.advance(1.0)
    assert woken[-1] == 3.0


async def test_run_passes_through_every_deadline() -> None:
    clock = SimClock(monotonic=0.0)
    ticks: list[float] = []

    async def loop() -> None:
        while True:
            await clock.sleep(0.1)
            ticks.append(clock.monotonic())

    task = asyncio.create_task(loop())
    await clock.run(1.05)
    assert ticks == pytest.approx([i / 10 for i in range(1, 11)])
    assert clock.monotonic() == 1.05
    task.cancel()


async def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock = SimClock()
    task = asyncio.create_task(clock.sleep(1.0))
    await clock.settle()
    assert clock.next_deadline() == clock.monotonic() + 1.0
    task.cancel()
    await clock.settle()
    assert clock.next_deadline() is None
    clock.advance(2.0)


async def test_the_wall_clock_jumps_without_the_monotonic_one() -> None:
    clock = SimClock(now=100.0, monotonic=5.0)
    task = asyncio.create_task(clock.sleep(1.0))
    await clock.settle()
    clock.jump(-50.0)
    clock.jump(10.0)
    await clock.settle()
    assert (clock.now(), clock.monotonic(), task.done()) == (60.0, 5.0, False)
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1.0)
    clock.advance(1.0)
    await task
    assert (clock.now(), clock.monotonic()) == (61.0, 6.0)


def test_random_bytes_repeat_with_their_seed() -> None:
    first, again, other = SimClock(seed=1), SimClock(seed=1), SimClock(seed=2)
    drawn = [first.random_bytes(8), first.random_bytes(8)]
    assert drawn == [again.random_bytes(8), again.random_bytes(8)]
    assert drawn[0] != drawn[1]
    assert drawn[0] != other.random_bytes(8)
