"""An index store whose calls are timed. It changes nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from typing import TypeVar

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvcm.core.clock import Clock
from kvcm.core.errors import KvcmError
from kvcm.metaindex.store import (
    Claim,
    CommitResult,
    Fence,
    KVStore,
    ShardCommit,
    ShardId,
    Table,
    Values,
)
from kvcm.observability.histogram import Timings, histograms

T = TypeVar("T")


class InstrumentedStore(Collector):
    """A ``KVStore`` over another one; as a collector it tells how long its calls took.

    A call that answers with an error for some of its shards has failed. What is cancelled is not
    counted. Of a scan each page counts.
    """

    def __init__(self, store: KVStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._timings = Timings()
        self.read_ahead = store.read_ahead

    def collect(self) -> Iterable[Metric]:
        yield histograms(
            "kvcm_store_call_seconds",
            "Duration of calls of the index store by operation and outcome (ok, failed).",
            ("operation", "outcome"),
            self._timings,
        )

    async def _timed(self, operation: str, call: Awaitable[T]) -> T:
        started = self._clock.monotonic()
        try:
            answer = await call
        except Exception:
            # Only to be counted; it goes on to whoever asked.
            self._record(operation, started, failed=True)
            raise
        self._record(operation, started, failed=_has_failed(answer))
        return answer

    def _record(self, operation: str, started: float, *, failed: bool) -> None:
        outcome = "failed" if failed else "ok"
        self._timings[operation, outcome].observe(self._clock.monotonic() - started)

    async def get_many(
        self, shard_keys: Sequence[tuple[ShardId, Sequence[bytes]]], table: Table
    ) -> list[Values | KvcmError]:
        return await self._timed("get_many", self._store.get_many(shard_keys, table))

    async def commit(self, commits: Sequence[ShardCommit]) -> list[CommitResult]:
        return await self._timed("commit", self._store.commit(commits))

    async def claim(self, shards: Sequence[ShardId], fence: Fence) -> list[Claim | Exception]:
        return await self._timed("claim", self._store.claim(shards, fence))

    async def acknowledged(self, shards: Sequence[ShardId]) -> list[int | KvcmError]:
        return await self._timed("acknowledged", self._store.acknowledged(shards))

    async def scan(
        self, shard: ShardId, table: Table, *, page: int = 1024
    ) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        pages = aiter(self._store.scan(shard, table, page=page))
        while (found := await self._timed("scan", anext(pages, None))) is not None:
            yield found

    async def sample(self, shard: ShardId, table: Table, count: int) -> list[tuple[bytes, bytes]]:
        return await self._timed("sample", self._store.sample(shard, table, count))

    async def count(self, shard: ShardId, table: Table) -> int:
        return await self._timed("count", self._store.count(shard, table))

    async def drop(self, shard: ShardId) -> None:
        await self._timed("drop", self._store.drop(shard))

    async def spaces(self) -> list[bytes]:
        return await self._timed("spaces", self._store.spaces())

    async def open(self) -> None:
        await self._store.open()
        self.read_ahead = self._store.read_ahead

    async def close(self) -> None:
        await self._store.close()


def _has_failed(answer: object) -> bool:
    """Whether one of a batch's answers is an error: one look a shard, never one a record."""
    if not isinstance(answer, list):
        return False
    return any(
        part.error is not None if isinstance(part, CommitResult) else isinstance(part, Exception)
        for part in answer
    )
