"""The audit finds what is wrong, and nothing where all is well."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvcm.core.types import TrimStrategy
from kvcm.metaindex import bits, records
from kvcm.metaindex.ids import extent_name, home_shard
from kvcm.metaindex.ledger import Delta, to_counters
from kvcm.metaindex.records import Extent, Phase, State, Trash
from kvcm.metaindex.shards import shard_of
from kvcm.metaindex.store import Fence, Mutation, ShardCommit, ShardId, Table, Write
from kvcm.metaindex.stores.rocksdb import RocksStore
from kvcm.testing.audit import AuditReport, StoredInstance, audit, read_instance
from tests.cache.harness import Harness


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    """A manager with blocks in every state: served, being written, failed, removed, trimmed."""
    made = await Harness("rocksdb", root=tmp_path).open()
    await made.register()
    await made.put([900, 901])
    await made.trim(TrimStrategy.REMOVE_ALL_CACHE)
    await made.round()
    await made.put(range(10))
    await made.remove([3, 4, 5, 6])
    grant = await made.start(range(20, 25))
    made.fill(grant)
    await made.finish(grant, [True, False, True, False, True])
    made.fill(await made.start(range(30, 33)))
    yield made
    await made.store.close()


class Stopped:
    """What a stopped manager left, to be damaged and audited."""

    def __init__(self, harness: Harness, store: RocksStore, stored: StoredInstance) -> None:
        self.harness = harness
        self.store = store
        self.stored = stored
        self.uid = stored.uid

    @classmethod
    async def of(cls, harness: Harness) -> Stopped:
        instance = harness.index().instance
        await harness.close()
        store = RocksStore(harness.root / "index")
        await store.open()
        return cls(harness, store, await read_instance(store, instance.uid, 16))

    def settled(self) -> tuple[Extent, State]:
        """The extent of blocks 0 to 9 without 3 to 6."""
        return next(
            (e, s)
            for e, s in self.stored.extents.values()
            if s.phase is Phase.SETTLED and e.count == 10
        )

    async def write(
        self, number: int, *writes: Write, delta: Delta = Delta(), space: bytes = b""
    ) -> None:
        """Commit behind the manager's back."""
        # Above the manager's claims, below the audit's epoch.
        fence = Fence(self.harness.manager.shared.epoch, 1 << 32)
        shard = ShardId(space or self.uid.encode(), number)
        await self.store.claim([shard], fence)
        mutation = Mutation(writes, counters=to_counters("nfs_01", delta))
        (result,) = await self.store.commit([ShardCommit(shard, fence, [mutation])])
        assert result.error is None

    async def audit(self) -> AuditReport:
        url = f"sqlite:///{self.harness.root}/registry.db"
        try:
            return await audit(url, self.store, clock=self.harness.clock)
        finally:
            await self.store.close()


async def test_blocks_in_every_state_are_no_problem(harness: Harness) -> None:
    report = await (await Stopped.of(harness)).audit()
    assert report.problems == []
    assert report.instances == 1
    assert report.serving_blocks == 6 + 3
    assert (report.open, report.settled, report.overdue) == (1, 2, 0)
    assert report.trash >= 2
    assert report.rows == 2 + 10 + 5 + 3
    assert report.stale_hints == 2 + 4 + 2
    assert report.files


async def test_an_open_extent_past_its_time_out_is_counted(harness: Harness) -> None:
    stopped = await Stopped.of(harness)
    harness.clock.advance(31)
    report = await stopped.audit()
    assert (report.open, report.overdue) == (1, 1)


async def test_a_killed_manager_may_have_left_an_open_extent_without_rows(harness: Harness) -> None:
    stopped = await Stopped.of(harness)
    await stopped.write(shard_of(30, 16), Write(Table.ROWS, raw(30), None))
    url = f"sqlite:///{harness.root}/registry.db"
    try:
        after_crash = await audit(url, stopped.store, clock=harness.clock, after_crash=True)
        stopped_well = await audit(url, stopped.store, clock=harness.clock)
    finally:
        await stopped.store.close()
    assert not any("no row" in p for p in after_crash.problems)
    assert any("(OPEN): no row names its positions [0]" in p for p in stopped_well.problems)


def raw(key: int) -> bytes:
    return key.to_bytes(8, "little", signed=True)


def file_of(stopped: Stopped, file: str) -> Path:
    """A file of the settled extent."""
    name = f"{extent_name(stopped.settled()[0].extent_id)}_{file}"
    return next(p for p in map(Path, stopped.harness.files()) if p.name == name)


async def delete_file(stopped: Stopped) -> None:
    file_of(stopped, "tp0_0").unlink()


async def cut_file(stopped: Stopped) -> None:
    with file_of(stopped, "tp1_0").open("r+b") as file:
        file.truncate(3 * 64 - 1)


async def plant_file(stopped: Stopped) -> None:
    file_of(stopped, "tp0_0").with_name("aaaa_tp0_0").write_bytes(b"what")


async def delete_row(stopped: Stopped) -> None:
    await stopped.write(shard_of(0, 16), Write(Table.ROWS, raw(0), None))


async def swap_row(stopped: Stopped) -> None:
    extent, _ = stopped.settled()
    row = records.encode_ref(extent.extent_id, 1)
    await stopped.write(shard_of(0, 16), Write(Table.ROWS, raw(0), row))


async def misplace_row(stopped: Stopped) -> None:
    row = records.encode_ref(stopped.settled()[0].extent_id, 0)
    await stopped.write((shard_of(0, 16) + 1) % 16, Write(Table.ROWS, raw(0), row))


async def garble_row(stopped: Stopped) -> None:
    await stopped.write(shard_of(0, 16), Write(Table.ROWS, raw(0), b"?"))


async def change_counters(stopped: Stopped) -> None:
    await stopped.write(3, delta=Delta(serving_bytes=1))


async def garble_state(stopped: Stopped) -> None:
    extent_id = stopped.settled()[0].extent_id
    await stopped.write(home_shard(extent_id), Write(Table.STATES, extent_id, b"?" * 20))


async def drop_state(stopped: Stopped) -> None:
    extent_id = stopped.settled()[0].extent_id
    await stopped.write(home_shard(extent_id), Write(Table.STATES, extent_id, None))


async def drop_chunk(stopped: Stopped) -> None:
    extent_id = stopped.settled()[0].extent_id
    key = records.chunk_key(extent_id, 0)
    await stopped.write(home_shard(extent_id), Write(Table.EXTENTS, key, None))


async def change_dead(stopped: Stopped) -> None:
    extent, state = stopped.settled()
    changed = records.encode_state(state.next(b"v" * 8, dead=state.dead + 64))
    await stopped.write(
        home_shard(extent.extent_id),
        Write(Table.STATES, extent.extent_id, changed),
        delta=Delta(dead_bytes=64),
    )


async def throw_away_what_lives(stopped: Stopped) -> None:
    extent, _ = stopped.settled()
    trash = Trash(extent.extent_id, b"s" * 8, "nfs_01", 1, 3 * 64, late_writer=False)
    await stopped.write(
        home_shard(extent.extent_id),
        Write(Table.TRASH, trash.key, records.encode_trash(trash)),
        delta=Delta(trash_bytes=trash.size),
    )


async def resurrect_a_deleted_block(stopped: Stopped) -> None:
    extent, state = stopped.settled()
    changed = state.next(b"v" * 8, serving=bits.ones(extent.count), dead=0)
    await stopped.write(
        home_shard(extent.extent_id),
        Write(Table.STATES, extent.extent_id, records.encode_state(changed)),
    )


async def trash_of_nobody(stopped: Stopped) -> None:
    extent_id = b"\0" * 7 + b"\3" + b"\0" * 4
    trash = Trash(extent_id, b"s" * 8, "nfs_01", 1, 0, late_writer=False)
    await stopped.write(3, Write(Table.TRASH, trash.key, records.encode_trash(trash)))


async def another_space(stopped: Stopped) -> None:
    await stopped.write(0, Write(Table.ROWS, raw(0), b"x"), space=b"nobody")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (delete_file, "tp0_0 is not there"),
        (cut_file, "tp1_0 has 191 of 192 bytes"),
        (plant_file, "file without an owner: "),
        (delete_row, "(SETTLED): no row names its positions [0]"),
        (swap_row, "row of block 0 names another block"),
        (misplace_row, "does not belong here"),
        (garble_row, "row of block 0: row of 1 bytes"),
        (change_counters, "shard 3: counters say {'nfs_01': Delta("),
        (garble_state, "state of extent "),
        (drop_state, "has no state"),
        (drop_chunk, ": format b''"),
        (change_dead, "dead bytes recorded"),
        (throw_away_what_lives, "an object in the trash still holds a live block"),
        (resurrect_a_deleted_block, "an object in the trash still holds a live block"),
        (trash_of_nobody, "trash of an unknown extent"),
        (another_space, "records of an unknown instance b'nobody'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_damage_is_found(
    harness: Harness, damage: Callable[[Stopped], object], problem: str
) -> None:
    stopped = await Stopped.of(harness)
    await damage(stopped)  # type: ignore[misc]
    report = await stopped.audit()
    assert any(problem in found for found in report.problems), report.problems
