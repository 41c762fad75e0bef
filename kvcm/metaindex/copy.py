"""Moving an index from one store to another, through the KVStore contract alone.

The manager is stopped. Both sides are claimed with a fence above all that any manager had, so one
that runs all the same is refused by its store, and the next one claims with an epoch above ours.
Every pass writes what differs and takes away what is too much, so a copy that was cut off is
repeated, not repaired: records that arrived are read and compared, not written again.

Commit numbers are not copied. They tell a leader that remembers them that its store went back in
time, and no leader outlives the stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from kvcm.core.errors import CorruptRecord
from kvcm.core.limits import COPY_COMMIT_BYTES_MAX, COPY_COMMIT_RECORDS_MAX, COPY_SHARDS_AT_ONCE
from kvcm.metaindex.store import (
    Claim,
    Fence,
    KVStore,
    Mutation,
    ShardCommit,
    ShardId,
    Table,
    Write,
    values_of,
)

T = TypeVar("T")
Records = list[tuple[bytes, bytes]]

_PAGE = 256


class Space(NamedTuple):
    """An instance's part of the index: its uid and how many shards it has."""

    name: bytes
    shards: int


class Progress(NamedTuple):
    """After a step: shards done and in all, records looked at so far."""

    shards_done: int
    shards: int
    records: int


@dataclass(slots=True)
class CopyReport:
    """What a copy did. ``problems`` is empty when both sides agree in every count and counter."""

    spaces: int = 0
    shards: int = 0
    records: dict[str, int] = field(default_factory=lambda: {t.name.lower(): 0 for t in Table})
    """Of the source, by table; the target has the same number."""
    written: int = 0
    removed: int = 0
    """Records that only the target had."""
    counters: int = 0
    damaged: list[str] = field(default_factory=list)
    """Shards whose own record does not parse at the source; a manager starts them afresh too."""
    problems: list[str] = field(default_factory=list)


async def copy_index(
    source: KVStore,
    target: KVStore,
    spaces: Sequence[Space],
    epoch: int,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> CopyReport:
    """Make the target's shards equal to the source's, and verify it.

    Args:
        source: open.
        target: open; what it holds in other spaces stays.
        spaces: what to copy.
        epoch: from the registry, so above those of all managers before.

    Raises:
        StaleFence: a store was claimed with a higher epoch: by a manager that started meanwhile,
            or under another registry.
        Unavailable, OutcomeUnknown: a store; run it again.
    """
    copier = _Copier(source, target, epoch, on_progress)
    return await copier.run(spaces)


class _Copier:
    def __init__(
        self,
        source: KVStore,
        target: KVStore,
        epoch: int,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._source = source
        self._target = target
        self._epoch = epoch
        self._on_progress = on_progress
        self._report = CopyReport()
        self._shards = 0
        self._done = 0
        self._seen = 0

    async def run(self, spaces: Sequence[Space]) -> CopyReport:
        report = self._report
        self._shards = sum(space.shards for space in spaces)
        for space in spaces:
            shards = [ShardId(space.name, number) for number in range(space.shards)]
            claims = await self._claim_source(shards)
            for part in _parts(list(claims), COPY_SHARDS_AT_ONCE):
                await self._copy({shard: claims[shard] for shard in part})
            report.spaces += 1
        return report

    async def _claim_source(self, shards: Sequence[ShardId]) -> dict[ShardId, Claim]:
        answers = await self._source.claim(shards, Fence(self._epoch, 1))
        claims: dict[ShardId, Claim] = {}
        for shard, answer in zip(shards, answers, strict=True):
            if isinstance(answer, CorruptRecord):
                self._report.damaged.append(f"{_named(shard)}: {answer}")
                self._step_done()
            elif isinstance(answer, Exception):
                raise answer
            else:
                claims[shard] = answer
        return claims

    async def _copy(self, claims: Mapping[ShardId, Claim]) -> None:
        """A few shards at once; the first failure ends them all."""
        before = await _claim(self._target, list(claims), Fence(self._epoch, 1))
        tasks = [
            asyncio.ensure_future(self._shard(shard, claim, before[shard]))
            for shard, claim in claims.items()
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        after = await _claim(self._target, list(claims), Fence(self._epoch, 2))
        for shard, claim in claims.items():
            await self._verify(shard, claim, after[shard])

    async def _shard(self, shard: ShardId, source: Claim, target: Claim) -> None:
        for table in Table:
            held = await self._target.count(shard, table)
            async for page in self._source.scan(shard, table, page=_PAGE):
                await self._put(shard, table, page, compare=held > 0)
                self._seen += len(page)
                self._report_progress()
            if held:
                await self._take_away(shard, table)
        change = _difference(source.counters, target.counters)
        if change:
            await self._commit(shard, (), change)
        self._report.counters += len(source.counters)

    async def _put(self, shard: ShardId, table: Table, page: Records, *, compare: bool) -> None:
        if compare:
            keys = [key for key, _ in page]
            (found,) = values_of(await self._target.get_many([(shard, keys)], table))
            page = [item for item, old in zip(page, found, strict=True) if item[1] != old]
        for part in _sized(page):
            await self._commit(shard, [Write(table, key, value) for key, value in part])
            self._report.written += len(part)

    async def _take_away(self, shard: ShardId, table: Table) -> None:
        """Records that only the target has: the source changed since an earlier copy."""
        extra: list[bytes] = []
        async for page in self._target.scan(shard, table, page=_PAGE):
            keys = [key for key, _ in page]
            (found,) = values_of(await self._source.get_many([(shard, keys)], table))
            extra += [key for key, value in zip(keys, found, strict=True) if value is None]
        for part in _parts(extra, COPY_COMMIT_RECORDS_MAX):
            await self._commit(shard, [Write(table, key, None) for key in part])
            self._report.removed += len(part)

    async def _commit(
        self, shard: ShardId, writes: Sequence[Write], counters: Mapping[bytes, int] | None = None
    ) -> None:
        mutation = Mutation(writes=writes, counters=counters or {})
        (result,) = await self._target.commit(
            [ShardCommit(shard, Fence(self._epoch, 1), [mutation])]
        )
        if result.error is not None:
            raise result.error

    async def _verify(self, shard: ShardId, source: Claim, target: Claim) -> None:
        report = self._report
        for table in Table:
            wanted = await self._source.count(shard, table)
            found = await self._target.count(shard, table)
            report.records[table.name.lower()] += wanted
            if wanted != found:
                report.problems.append(
                    f"{_named(shard)}: {found} of {wanted} records in {table.name.lower()}"
                )
        if dict(source.counters) != dict(target.counters):
            report.problems.append(f"{_named(shard)}: the counters differ")
        report.shards += 1
        self._step_done()

    def _step_done(self) -> None:
        self._done += 1
        self._report_progress()

    def _report_progress(self) -> None:
        self._on_progress(Progress(self._done, self._shards, self._seen))


async def clear_index(target: KVStore, spaces: Sequence[Space]) -> None:
    """Remove the spaces' shards from a store, fences included; what others have in it stays."""
    for space in spaces:
        for number in range(space.shards):
            await target.drop(ShardId(space.name, number))


async def _claim(store: KVStore, shards: Sequence[ShardId], fence: Fence) -> dict[ShardId, Claim]:
    claims: dict[ShardId, Claim] = {}
    for shard, answer in zip(shards, await store.claim(shards, fence), strict=True):
        if isinstance(answer, Exception):
            raise answer
        claims[shard] = answer
    return claims


def _difference(wanted: Mapping[bytes, int], found: Mapping[bytes, int]) -> dict[bytes, int]:
    names = {**wanted, **found}
    changes = {name: wanted.get(name, 0) - found.get(name, 0) for name in names}
    return {name: change for name, change in changes.items() if change}


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]


def _sized(records: Records) -> Iterator[Records]:
    """Records in commits within the limits; a larger record goes alone."""
    part: Records = []
    size = 0
    for key, value in records:
        length = len(key) + len(value)
        if part and (size + length > COPY_COMMIT_BYTES_MAX or len(part) == COPY_COMMIT_RECORDS_MAX):
            yield part
            part, size = [], 0
        part.append((key, value))
        size += length
    if part:
        yield part


def _named(shard: ShardId) -> str:
    return f"space {shard.space.decode(errors='replace')} shard {shard.number}"
