"""MemoryStore: the whole KVStore contract in dictionaries, for tests, replay and trial runs."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvcm.core.clock import Clock, SystemClock
from kvcm.core.errors import InvalidArgument, KvcmError, Unavailable
from kvcm.metaindex.store import (
    Claim,
    CommitResult,
    Fence,
    Mutation,
    Outcome,
    ShardCommit,
    ShardId,
    Table,
    Values,
)
from kvcm.metaindex.stores.common import add_counters, check_shard, matches, pick, stale


def _empty_tables() -> list[dict[bytes, bytes]]:
    return [{} for _ in range(max(Table) + 1)]


@dataclass(slots=True)
class _Shard:
    fence: Fence
    number: int = 0
    counters: dict[bytes, int] = field(default_factory=dict)
    # Indexed by table: hashing an enum member costs a Python call.
    tables: list[dict[bytes, bytes]] = field(default_factory=_empty_tables)

    def apply(self, mutation: Mutation) -> Outcome:
        tables = self.tables
        for table, key, expected, whole in mutation.compare:
            if not matches(tables[table].get(key), expected, whole):
                return Outcome.CONFLICT
        for table, key, value in mutation.writes:
            if value is None:
                tables[table].pop(key, None)
            else:
                # bytes() copies what a careless caller could still change.
                tables[table][bytes(key)] = bytes(value)
        add_counters(self.counters, mutation.counters)
        return Outcome.APPLIED


class Snapshot:
    """What a MemoryStore held at one moment; opaque."""

    __slots__ = ("_shards",)

    def __init__(self, shards: dict[ShardId, _Shard]) -> None:
        self._shards = copy.deepcopy(shards)


class MemoryStore:
    """A faithful KVStore in memory: fences, compares, counters and commit numbers as in the others.

    Every call gives way to other tasks once before it acts, as a store behind a network would, so
    that a race of its callers shows. Managers that share one object share one store. Contents
    outlive ``close`` and a later ``open``, but not the object.
    """

    read_ahead: int = 1

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._shards: dict[ShardId, _Shard] = {}
        self._closed = False

    def snapshot(self) -> Snapshot:
        """Everything the store holds now."""
        return Snapshot(self._shards)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot, as a store that lost its latest writes does."""
        self._shards = Snapshot(snapshot._shards)._shards

    async def get_many(
        self, shard_keys: Sequence[tuple[ShardId, Sequence[bytes]]], table: Table
    ) -> list[Values | KvcmError]:
        await self._turn()
        return [list(map(self._table(shard, table).get, keys)) for shard, keys in shard_keys]

    async def commit(self, commits: Sequence[ShardCommit]) -> list[CommitResult]:
        await self._turn()
        return [self._commit(commit) for commit in commits]

    async def claim(self, shards: Sequence[ShardId], fence: Fence) -> list[Claim | Exception]:
        await self._turn()
        return [self._claim(shard, fence) for shard in shards]

    async def acknowledged(self, shards: Sequence[ShardId]) -> list[int | KvcmError]:
        await self._turn()
        held = map(self._shards.get, shards)
        return [0 if shard is None else shard.number for shard in held]

    async def scan(
        self, shard: ShardId, table: Table, *, page: int = 1024
    ) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        await self._turn()
        keys = iter(list(self._table(shard, table)))
        while batch := list(islice(keys, max(page, 1))):
            records = self._table(shard, table)
            if found := [(key, records[key]) for key in batch if key in records]:
                yield found
            await self._turn()

    async def sample(self, shard: ShardId, table: Table, count: int) -> list[tuple[bytes, bytes]]:
        await self._turn()
        return pick(list(self._table(shard, table).items()), count, self._clock)

    async def count(self, shard: ShardId, table: Table) -> int:
        await self._turn()
        return len(self._table(shard, table))

    async def drop(self, shard: ShardId) -> None:
        await self._turn()
        self._shards.pop(shard, None)

    async def spaces(self) -> list[bytes]:
        await self._turn()
        return sorted({shard.space for shard in self._shards})

    async def open(self) -> None:
        self._closed = False

    async def close(self) -> None:
        self._closed = True

    async def _turn(self) -> None:
        await asyncio.sleep(0)
        if self._closed:
            raise Unavailable("the memory store is closed")

    def _table(self, shard: ShardId, table: Table) -> dict[bytes, bytes]:
        held = self._shards.get(shard)
        return held.tables[table] if held is not None else {}

    def _commit(self, commit: ShardCommit) -> CommitResult:
        shard = self._shards.get(commit.shard)
        if shard is None or shard.fence != commit.fence:
            return CommitResult(
                error=stale(commit.shard, commit.fence, None if shard is None else shard.fence)
            )
        outcomes = [shard.apply(mutation) for mutation in commit.mutations]
        if Outcome.APPLIED in outcomes:
            shard.number += 1
        return CommitResult(outcomes, shard.number)

    def _claim(self, shard_id: ShardId, fence: Fence) -> Claim | Exception:
        try:
            check_shard(shard_id)
        except InvalidArgument as error:
            return error
        shard = self._shards.get(shard_id)
        if shard is None:
            shard = self._shards[shard_id] = _Shard(fence)
        elif fence <= shard.fence:
            return stale(shard_id, fence, shard.fence)
        shard.fence = fence
        return Claim(shard.number, dict(shard.counters))
