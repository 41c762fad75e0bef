from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kvcm.core import limits
from kvcm.core.errors import StaleFence, Unavailable
from kvcm.metaindex.copy import CopyReport, Progress, Space, clear_index, copy_index
from kvcm.metaindex.store import (
    CommitResult,
    Fence,
    KVStore,
    Mutation,
    ShardCommit,
    ShardId,
    Table,
    Write,
)
from kvcm.metaindex.stores.memory import MemoryStore
from kvcm.metaindex.stores.rocksdb import RocksStore
from kvcm.metaindex.stores.rocksdb_layout import META_TABLE, table_prefix
from kvcm.metaindex.stores.valkey import ValkeyStore
from kvcm.metaindex.stores.valkey_url import parse_url
from kvcm.testing.servers_valkey import ValkeyServer

SPACE = Space(b"i1uid", 16)
OTHER = Space(b"other", 16)
MANAGER = Fence(3, 7)


class Recorder(MemoryStore):
    """Keeps the size of every commit, and fails from one on."""

    def __init__(self, fail_at: int = 1 << 30) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []
        self.fail_at = fail_at

    async def commit(self, commits: Sequence[ShardCommit]) -> list[CommitResult]:
        if len(self.sizes) >= self.fail_at:
            return [CommitResult(error=Unavailable("gone")) for _ in commits]
        for commit in commits:
            writes = [w for mutation in commit.mutations for w in mutation.writes]
            size = sum(len(key) + len(value or b"") for _, key, value in writes)
            self.sizes.append((len(writes), size))
        return await super().commit(commits)


@pytest.fixture(params=["memory", "rocksdb", "valkey"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[list[KVStore]]:
    """Two empty stores of a kind."""
    made: list[KVStore] = []
    for i in (1, 2):
        if request.param == "memory":
            made.append(MemoryStore())
        elif request.param == "rocksdb":
            made.append(RocksStore(tmp_path / str(i)))
        else:
            server: ValkeyServer = request.getfixturevalue("shared_valkey")
            # One database each.
            made.append(ValkeyStore(parse_url(f"{server.url}/{i}")))
    for store in made:
        await store.open()
    yield made
    for store in made:
        await clear_index(store, [SPACE, OTHER])
        await store.close()


async def fill(store: KVStore, space: Space = SPACE, records: int = 40) -> None:
    """Records in every table, counters, some shards empty and some never claimed."""
    shards = [ShardId(space.name, number) for number in range(0, space.shards, 2)]
    assert not any(isinstance(c, Exception) for c in await store.claim(shards, MANAGER))
    for shard in shards[:-1]:
        for table in Table:
            writes = [
                Write(table, b"%d-%d" % (shard.number, i), b"\0\0\0\0\0\0\0%c" % table + b"v" * i)
                for i in range(records + shard.number)
            ]
            if table is Table.DUE:
                writes = [w._replace(value=i.to_bytes(8, "big")) for i, w in enumerate(writes)]
            counters = {b"s1\0%d" % table: shard.number - 3, b"b": 1}
            mutation = Mutation(writes=writes, counters=counters)
            (result,) = await store.commit([ShardCommit(shard, MANAGER, [mutation])])
            assert result.error is None


async def contents(store: KVStore, space: Space = SPACE) -> dict[tuple[int, Table], object]:
    found: dict[tuple[int, Table], object] = {}
    for number in range(space.shards):
        for table in Table:
            shard = ShardId(space.name, number)
            pages = [dict(page) async for page in store.scan(shard, table)]
            found[number, table] = {k: v for page in pages for k, v in page.items()}
    return found


async def copied(source: KVStore, target: KVStore, epoch: int = 4) -> CopyReport:
    return await copy_index(source, target, [SPACE], epoch)


async def test_a_copy_has_the_same_records_and_counters(stores: list[KVStore]) -> None:
    source, target = stores
    await fill(source)
    report = await copied(source, target)
    assert report.problems == report.damaged == []
    assert await contents(target) == await contents(source)
    assert (report.spaces, report.shards) == (1, 16)
    total = sum(40 + number for number in range(0, 14, 2))
    assert report.records == {table.name.lower(): total for table in Table}
    assert report.written == total * len(Table)
    shards = [ShardId(SPACE.name, number) for number in range(16)]
    # As the next manager does: its epoch comes from the same registry.
    claims = [await store.claim(shards, Fence(5, 1)) for store in stores]
    for old, new in zip(*claims, strict=True):
        assert not isinstance(old, Exception)
        assert not isinstance(new, Exception)
        assert new.counters == old.counters


async def test_the_manager_of_before_is_fenced_off_on_both_sides(stores: list[KVStore]) -> None:
    source, target = stores
    await fill(source)
    await copied(source, target)
    late = Mutation(writes=[Write(Table.ROWS, b"late", b"x")])
    for store in stores:
        (result,) = await store.commit([ShardCommit(ShardId(SPACE.name, 0), MANAGER, [late])])
        assert isinstance(result.error, StaleFence)


async def test_a_store_that_a_later_leader_claimed_is_refused(stores: list[KVStore]) -> None:
    source, target = stores
    await fill(source)
    for store in stores:
        await store.claim([ShardId(SPACE.name, 4)], Fence(9, 1))
        with pytest.raises(StaleFence):
            await copied(source, target)


async def test_a_second_copy_follows_every_change_of_the_source(stores: list[KVStore]) -> None:
    source, target = stores
    await fill(source)
    await copied(source, target)
    shard = ShardId(SPACE.name, 2)
    assert not isinstance((await source.claim([shard], Fence(5, 1)))[0], Exception)
    change = Mutation(
        writes=[
            Write(Table.STATES, b"2-0", b"changed!"),
            Write(Table.ROWS, b"2-1", None),
            Write(Table.TRASH, b"new", b"trash"),
        ],
        counters={b"b": 5, b"new": -2},
    )
    await source.commit([ShardCommit(shard, Fence(5, 1), [change])])
    report = await copied(source, target, epoch=6)
    assert (report.written, report.removed, report.problems) == (2, 1, [])
    assert await contents(target) == await contents(source)


@pytest.mark.parametrize("commits", [0, 1, 17, 40])
async def test_a_copy_that_was_cut_off_goes_on_where_it_was(commits: int) -> None:
    source, target = MemoryStore(), Recorder(fail_at=commits)
    await fill(source)
    with pytest.raises(Unavailable):
        await copied(source, target)
    arrived = sum(number for number, _ in target.sizes)
    target.fail_at = 1 << 30
    report = await copied(source, target, epoch=5)
    assert report.problems == []
    assert await contents(target) == await contents(source)
    assert report.written + arrived == sum(report.records.values())


async def test_a_cancelled_copy_ends_and_can_be_repeated() -> None:
    source, target = MemoryStore(), MemoryStore()
    await fill(source)
    task = asyncio.ensure_future(copied(source, target))
    for _ in range(50):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await copied(source, target, epoch=5)).problems == []
    assert await contents(target) == await contents(source)


async def test_clearing_leaves_the_instances_of_others(stores: list[KVStore]) -> None:
    _, target = stores
    await fill(target)
    await fill(target, OTHER)
    before = await contents(target, OTHER)
    await clear_index(target, [SPACE])
    assert await target.spaces() == [OTHER.name]
    assert await contents(target, OTHER) == before


async def test_records_that_the_target_loses_are_a_problem() -> None:
    class Forgetful(MemoryStore):
        async def count(self, shard: ShardId, table: Table) -> int:
            return max(await super().count(shard, table) - 1, 0)

    source, target = MemoryStore(), Forgetful()
    await fill(source)
    report = await copied(source, target)
    assert f"space {SPACE.name.decode()} shard 2: 41 of 42 records in rows" in report.problems


async def test_counters_that_differ_are_a_problem() -> None:
    class Drifting(Recorder):
        async def commit(self, commits: Sequence[ShardCommit]) -> list[CommitResult]:
            plain = [
                ShardCommit(c.shard, c.fence, [Mutation(writes=m.writes) for m in c.mutations])
                for c in commits
            ]
            return await super().commit(plain)

    source = MemoryStore()
    await fill(source)
    report = await copied(source, Drifting())
    assert f"space {SPACE.name.decode()} shard 2: the counters differ" in report.problems


async def test_a_damaged_shard_is_left_out_and_named(tmp_path: Path) -> None:
    path = tmp_path / "source"
    source, target = RocksStore(path), MemoryStore()
    await source.open()
    await fill(source)
    db = source._open_db()
    db[table_prefix(ShardId(SPACE.name, 4), META_TABLE)] = b"nonsense"
    await source.close()
    await source.open()
    report = await copied(source, target)
    await source.close()
    assert len(report.damaged) == 1
    assert "shard 4" in report.damaged[0]
    assert report.shards == 15
    assert report.problems == []


@pytest.mark.parametrize("extra", [0, 1])
async def test_commits_keep_to_the_limit_of_records(extra: int) -> None:
    source, target = MemoryStore(), Recorder()
    shard = ShardId(SPACE.name, 0)
    await source.claim([shard], MANAGER)
    count = limits.COPY_COMMIT_RECORDS_MAX + extra
    writes = [Write(Table.ROWS, i.to_bytes(4, "big"), b"v") for i in range(count)]
    await source.commit([ShardCommit(shard, MANAGER, [Mutation(writes=writes)])])
    await copied(source, target)
    assert len(target.sizes) == 1 + extra
    assert max(number for number, _ in target.sizes) == limits.COPY_COMMIT_RECORDS_MAX


@pytest.mark.parametrize("extra", [0, 1])
async def test_commits_keep_to_the_limit_of_bytes(extra: int) -> None:
    source, target = MemoryStore(), Recorder()
    shard = ShardId(SPACE.name, 0)
    await source.claim([shard], MANAGER)
    half = limits.COPY_COMMIT_BYTES_MAX // 2
    writes = [
        Write(Table.EXTENTS, b"a", b"v" * (half - 1)),
        Write(Table.EXTENTS, b"b", b"v" * (half - 1 + extra)),
    ]
    await source.commit([ShardCommit(shard, MANAGER, [Mutation(writes=writes)])])
    await copied(source, target)
    assert len(target.sizes) == 1 + extra


async def test_at_most_so_many_shards_are_copied_at_once() -> None:
    running: set[int] = set()
    most = 0

    class Watched(MemoryStore):
        async def commit(self, commits: Sequence[ShardCommit]) -> list[CommitResult]:
            nonlocal most
            running.update(c.shard.number for c in commits)
            most = max(most, len(running))
            await asyncio.sleep(0)
            results = await super().commit(commits)
            running.difference_update(c.shard.number for c in commits)
            return results

    source = MemoryStore()
    wide = Space(b"wide", 64)
    await fill(source, wide)
    await copy_index(source, Watched(), [wide], 4)
    # Every second shard of the 64 has records.
    assert most == limits.COPY_SHARDS_AT_ONCE // 2


async def test_progress_ends_with_everything_done() -> None:
    source, target = MemoryStore(), MemoryStore()
    await fill(source)
    seen: list[Progress] = []
    report = await copy_index(source, target, [SPACE], 4, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == Progress(16, 16, sum(report.records.values()))
