"""Commits of shards that somebody wants to look at while nothing changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from kvcm.metaindex.store import Mutation, Table


class Turnstile:
    """Lets commits pass, and holds those of one shard back while somebody is alone with it."""

    def __init__(self) -> None:
        self._under_way: dict[int, int] = {}
        self._alone: set[int] = set()
        self._watched: dict[int, list[set[tuple[Table, bytes]]]] = {}
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def passing(self, parts: Sequence[tuple[int, Sequence[Mutation]]]) -> AsyncIterator[None]:
        """Commit ``parts`` inside; waits while somebody is alone with one of their shards."""
        numbers = {number for number, _ in parts}
        while not self._alone.isdisjoint(numbers):
            await self._changed()
        for number in numbers:
            self._under_way[number] = self._under_way.get(number, 0) + 1
        if self._watched:
            for number, mutations in parts:
                for seen in self._watched.get(number, ()):
                    seen.update((w[0], w[1]) for m in mutations for w in m.writes)
        try:
            yield
        finally:
            for number in numbers:
                self._under_way[number] -= 1
                if not self._under_way[number]:
                    del self._under_way[number]
            if self._waiting:
                self._wake()

    @asynccontextmanager
    async def alone(self, number: int) -> AsyncIterator[None]:
        """No commit of the shard is under way inside, and none begins. Keep it short."""
        while number in self._alone:
            await self._changed()
        self._alone.add(number)
        try:
            while number in self._under_way:
                await self._changed()
            yield
        finally:
            self._alone.discard(number)
            self._wake()

    @contextmanager
    def watch(self, number: int) -> Iterator[set[tuple[Table, bytes]]]:
        """The records of a shard that commits touch from now on."""
        seen: set[tuple[Table, bytes]] = set()
        self._watched.setdefault(number, []).append(seen)
        try:
            yield seen
        finally:
            left = [other for other in self._watched[number] if other is not seen]
            if left:
                self._watched[number] = left
            else:
                del self._watched[number]

    async def _changed(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
