"""Time and chance, passed in. Nothing else in kvcm reads a clock or draws random bytes."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Protocol


class Clock(Protocol):
    """What the code knows of time and randomness."""

    def now(self) -> float:
        """Wall clock, seconds since the epoch. Only orders work and is shown to people."""

    def monotonic(self) -> float:
        """Seconds on a clock that never jumps; all time-outs and graces use it."""

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task."""

    def random_bytes(self, count: int) -> bytes:
        """``count`` unpredictable bytes."""


class SystemClock:
    """The machine's clock and entropy."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)
