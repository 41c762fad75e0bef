"""SimClock: a clock that moves only when a test says so."""

from __future__ import annotations

import asyncio
import heapq
import random
from itertools import count

SETTLE_TURNS = 20
"""Turns of the event loop that `SimClock.run` gives to woken tasks before time goes on."""


class SimClock:
    """A `Clock` under the test's control: seeded chance, time that stands still until moved.

    Not thread-safe: advance it in the event loop whose tasks sleep on it.
    """

    def __init__(
        self, *, now: float = 1_700_000_000.0, monotonic: float = 1_000.0, seed: int = 0
    ) -> None:
        self._now = now
        self._monotonic = monotonic
        self._random = random.Random(seed)
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()

    def now(self) -> float:
        """Wall clock, seconds since the epoch; moved by `advance` and by `jump`."""
        return self._now

    def monotonic(self) -> float:
        """Seconds; moved by `advance` only, so never backwards."""
        return self._monotonic

    async def sleep(self, seconds: float) -> None:
        """Return once time has advanced by ``seconds``; at the next turn of the loop when <= 0."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._monotonic + seconds, next(self._order), woken))
        await woken

    def random_bytes(self, count: int) -> bytes:
        """Reproducible bytes from the seed."""
        return self._random.randbytes(count)

    def advance(self, seconds: float) -> None:
        """Move both clocks at once and wake, in order of deadline, everybody who is due.

        Woken tasks run when the caller next awaits. A loop that sleeps again wakes once, however
        far time moved; use `run` to pass through every deadline.
        """
        if seconds < 0:
            raise ValueError(f"time never goes backwards: {seconds}")
        self._now += seconds
        self._monotonic += seconds
        while self._sleepers and self._sleepers[0][0] <= self._monotonic:
            woken = heapq.heappop(self._sleepers)[2]
            if not woken.done():
                woken.set_result(None)

    async def run(self, seconds: float) -> None:
        """Advance from deadline to deadline, letting woken tasks run, until ``seconds`` passed."""
        end = self._monotonic + seconds
        await self.settle()
        while (deadline := self.next_deadline()) is not None and deadline <= end:
            self._advance_to(deadline)
            await self.settle()
        self._advance_to(end)
        await self.settle()

    async def settle(self, turns: int = SETTLE_TURNS) -> None:
        """Give ready tasks ``turns`` turns of the event loop; time stands still."""
        for _ in range(turns):
            await asyncio.sleep(0)

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an operator or NTP does; wakes nobody."""
        self._now += seconds

    def next_deadline(self) -> float | None:
        """Monotonic time at which the next sleeper wakes; None when nobody sleeps."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None

    def _advance_to(self, deadline: float) -> None:
        self.advance(max(deadline - self._monotonic, 0.0))
        # Rounding must not leave a sleeper due at `deadline` asleep.
        if self._monotonic < deadline:
            self._monotonic = deadline
            self.advance(0.0)
