"""Locks key by key: StartWrites that overlap wait for each other, all others pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager


class KeyLocks:
    """The keys of one instance that are being granted. They only cut contention: correctness lies
    in the extent's compare-and-set, the claim and the fence."""

    def __init__(self) -> None:
        self._held: set[int] = set()
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def hold(self, keys: Collection[int]) -> AsyncIterator[None]:
        """Wait until none of ``keys`` is held, hold them, and let go at the end."""
        mine = set(keys)
        while not self._held.isdisjoint(mine):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter
        self._held |= mine
        try:
            yield
        finally:
            self._held -= mine
            waiting, self._waiting = self._waiting, []
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)
