"""Runs the background loops. A loop that fails is logged and tried again, later each time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from kvcm.core.clock import Clock
from kvcm.observability.rounds import Rounds

log = logging.getLogger(__name__)

BACK_OFF_S_MAX = 60.0


class Loop(Protocol):
    """Background work in small steps."""

    @property
    def name(self) -> str:
        """For logs."""

    @property
    def period_s(self) -> float:
        """Seconds between the end of a run and the next."""

    async def run_once(self, now: float) -> Any:
        """One step; ``now`` is the monotonic clock."""


@runtime_checkable
class Waking(Protocol):
    """A loop that need not wait for its period when there is something to do."""

    @property
    def wakeup(self) -> asyncio.Event:
        """Set when the next run is wanted at once; the run clears it."""


class Supervisor:
    """Owns one task per loop."""

    def __init__(self, clock: Clock, rounds: Rounds | None = None) -> None:
        self._clock = clock
        self._rounds = rounds
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, loops: Iterable[Loop]) -> None:
        """Run the loops until `stop`."""
        self._tasks += [asyncio.create_task(self._run(loop), name=loop.name) for loop in loops]

    async def stop(self) -> None:
        """Cancel all loops and wait for them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _run(self, loop: Loop) -> None:
        failures = 0
        while True:
            began = self._clock.monotonic()
            try:
                await loop.run_once(began)
                failures = 0
            except Exception:
                # A faulty round ends neither its loop nor the others; it is tried again later.
                failures += 1
                log.exception("background loop %r failed (%d in a row)", loop.name, failures)
            if self._rounds is not None:
                seconds = self._clock.monotonic() - began
                self._rounds.record(loop.name, seconds, failed=failures > 0)
            await self._pause(loop, back_off(loop.period_s, failures), failures)

    async def _pause(self, loop: Loop, seconds: float, failures: int) -> None:
        if failures or not isinstance(loop, Waking):
            await self._clock.sleep(seconds)
            return
        pauses = [
            asyncio.ensure_future(self._clock.sleep(seconds)),
            asyncio.ensure_future(loop.wakeup.wait()),
        ]
        try:
            await asyncio.wait(pauses, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pause in pauses:
                pause.cancel()


def back_off(period_s: float, failures: int) -> float:
    """Seconds to wait: the period, doubled for each failure in a row, up to a minute."""
    if not failures:
        return period_s
    return max(period_s, min(period_s * 2.0 ** min(failures, 32), BACK_OFF_S_MAX))
