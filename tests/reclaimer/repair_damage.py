"""Damage, made by hand in a running manager's store and files, and runs of repair."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

from kvcm.core.types import TrimStrategy
from kvcm.metaindex import records
from kvcm.metaindex.ids import EXTENT_ID_BYTES, extent_name, home_shard
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.ledger import Delta, to_counters
from kvcm.metaindex.records import Extent, Phase, State, Trash
from kvcm.metaindex.shards import shard_of
from kvcm.metaindex.store import Mutation, ShardCommit, Table, Write
from kvcm.reclaimer.repair import RepairRun
from kvcm.reclaimer.repair_report import RepairOptions, RepairReport
from kvcm.testing.audit import read_instance
from tests.cache.harness import Harness

NOBODY = b"\0\0\0\1" + b"\0\0\0\x07" + b"abcd"
"""An extent id that was never granted; its home is shard 7."""


def raw(key: int) -> bytes:
    return key.to_bytes(8, "little", signed=True)


async def run(h: Harness, **options: bool | str) -> RepairReport:
    """A whole run; time passes only where it waits for it."""
    assert h.manager.repair is not None
    ports = h.manager.repair._ports
    one = RepairRun(ports, RepairOptions(**options))  # type: ignore[arg-type]
    async with aclosing(one.steps()) as steps:
        async for count in steps:
            if not count:
                h.clock.advance(1)
    return one.report


def kinds(report: RepairReport) -> dict[str, int]:
    """What was found, by kind."""
    return {str(k): c.found for k, c in report.kinds.items() if c.found}


def fixed(report: RepairReport) -> dict[str, int]:
    return {str(k): c.fixed for k, c in report.kinds.items() if c.fixed}


async def write(
    h: Harness, number: int, *writes: Write, counters: dict[bytes, int] | None = None
) -> None:
    """Commit to a shard of ``i1`` past the manager."""
    index = h.index()
    await index.shards.ensure((number,))
    mutation = Mutation(writes, counters=counters or {})
    fence = index.shards._fences[number]
    (result,) = await h.inner.commit([ShardCommit(index.shards.id(number), fence, [mutation])])
    assert result.error is None


async def settled(h: Harness) -> tuple[Extent, State]:
    """The extent of the blocks from 0 on."""
    return next(
        (e, s)
        for e, s in (await h.extents(h.index())).values()
        if s.phase is Phase.SETTLED and e.keys[:8] == raw(0)
    )


async def file_of(h: Harness, file: str) -> Path:
    name = f"{extent_name((await settled(h))[0].extent_id)}_{file}"
    return next(p for p in map(Path, h.files()) if p.name == name)


async def contents(h: Harness) -> object:
    """Everything there is: records and files."""
    index: InstanceIndex = h.index()
    stored = await read_instance(h.inner, index.uid, index.shard_count)
    counters = [await h.counters(index.shards.id(n)) for n in range(index.shard_count)]
    files = {f: os.stat(f).st_size for f in h.files()}
    return stored, counters, files


# ---- each kind of damage; returns what a dry run must find -------------------------------------

Damage = Callable[[Harness], Awaitable[dict[str, int]]]


async def lose_a_file(h: Harness) -> dict[str, int]:
    (await file_of(h, "tp0_0")).unlink()
    return {"missing_file": 1}


async def cut_a_file(h: Harness) -> dict[str, int]:
    with (await file_of(h, "tp1_0")).open("r+b") as file:
        file.truncate(3 * 64 - 1)
    return {"missing_file": 1}


async def plant_a_file(h: Harness) -> dict[str, int]:
    path = await file_of(h, "tp0_0")
    path.with_name(f"{extent_name(NOBODY)}_tp0_0").write_bytes(b"what")
    return {"ownerless_file": 1}


async def recreate_a_freed_file(h: Harness) -> dict[str, int]:
    """A late writer makes a file again whose blocks were removed, and deleted, long ago."""
    path = await file_of(h, "tp0_1")
    await h.remove([3, 4, 5])
    await h.drain()
    assert not path.exists()
    path.write_bytes(b"late")
    return {"ownerless_file": 1}


async def leave_a_probe(h: Harness) -> dict[str, int]:
    (h.root / "nfs_01" / f".kvcm-probe-{'0' * 24}").write_bytes(b"probe")
    return {"probe_leftover": 1}


async def drift_counters(h: Harness) -> dict[str, int]:
    await write(h, 3, counters=to_counters("nfs_01", Delta(serving_bytes=-64, serving_blocks=1)))
    return {"counter_drift": 1}


async def count_another_storage(h: Harness) -> dict[str, int]:
    await write(h, 5, counters=to_counters("gone", Delta(trash_bytes=640)))
    return {"counter_drift": 1}


async def name_nobody(h: Harness) -> dict[str, int]:
    row = records.encode_ref(NOBODY, 3)
    await write(h, shard_of(777, 16), Write(Table.ROWS, raw(777), row))
    return {"stale_row": 1}


async def name_nobody_beside_somebody(h: Harness) -> dict[str, int]:
    extent, _ = await settled(h)
    row = records.encode_ref(NOBODY, 3) + records.encode_ref(extent.extent_id, 1)
    await write(h, shard_of(1, 16), Write(Table.ROWS, raw(1), row))
    return {"stale_row": 1}


async def name_another_block(h: Harness) -> dict[str, int]:
    extent, _ = await settled(h)
    row = records.encode_ref(extent.extent_id, 1)
    await write(h, shard_of(0, 16), Write(Table.ROWS, raw(0), row))
    return {"stale_row": 1, "missing_row": 1}


async def lose_a_row(h: Harness) -> dict[str, int]:
    await write(h, shard_of(0, 16), Write(Table.ROWS, raw(0), None))
    return {"missing_row": 1}


async def garble_a_row(h: Harness) -> dict[str, int]:
    await write(h, shard_of(0, 16), Write(Table.ROWS, raw(0), b"x" * 13))
    return {"unreadable_row": 1, "missing_row": 1}


async def misplace_a_row(h: Harness) -> dict[str, int]:
    extent, _ = await settled(h)
    row = records.encode_ref(extent.extent_id, 0)
    await write(h, (shard_of(0, 16) + 1) % 16, Write(Table.ROWS, raw(0), row))
    return {"unreadable_row": 1}


async def garble_a_state(h: Harness) -> dict[str, int]:
    extent_id = (await h.put([800, 801]), await _of(h, 800))[1]
    await write(h, home_shard(extent_id), Write(Table.STATES, extent_id, b"?" * 20))
    return {"unreadable_extent": 1, "counter_drift": 1, "stale_row": 2, "ownerless_file": 2}


async def lose_a_state(h: Harness) -> dict[str, int]:
    extent_id = (await h.put([800, 801]), await _of(h, 800))[1]
    await write(h, home_shard(extent_id), Write(Table.STATES, extent_id, None))
    return {"orphan_record": 1, "counter_drift": 1, "stale_row": 2, "ownerless_file": 2}


async def lose_a_chunk(h: Harness) -> dict[str, int]:
    extent_id = (await h.put(range(800, 1400)), await _of(h, 800))[1]
    key = records.chunk_key(extent_id, 1)
    await write(h, home_shard(extent_id), Write(Table.EXTENTS, key, None))
    return {
        "unreadable_extent": 1,
        "counter_drift": 1,
        "stale_row": 600,
        "ownerless_file": 400,
    }


async def leave_a_stamp(h: Harness) -> dict[str, int]:
    await write(h, 7, Write(Table.DUE, NOBODY, b"\0" * 8))
    return {"orphan_record": 1}


async def miscount_dead_bytes(h: Harness) -> dict[str, int]:
    extent, state = await settled(h)
    changed = records.encode_state(state.next(b"v" * 8, dead=state.dead + 64))
    await write(
        h,
        home_shard(extent.extent_id),
        Write(Table.STATES, extent.extent_id, changed),
        counters=to_counters("nfs_01", Delta(dead_bytes=64)),
    )
    return {"dead_bytes": 1}


async def leave_trash(h: Harness) -> dict[str, int]:
    trash = Trash(NOBODY, b"s" * 8, "nfs_01", 1, 192, late_writer=False)
    counters = to_counters("nfs_01", Delta(trash_bytes=192))
    await write(h, 7, Write(Table.TRASH, trash.key, records.encode_trash(trash)), counters=counters)
    return {"lost_trash": 1}


async def garble_trash(h: Harness) -> dict[str, int]:
    await write(h, 7, Write(Table.TRASH, NOBODY + b"s" * 8, b"?" * 9))
    return {"unreadable_trash": 1}


async def trim_the_records_only(h: Harness) -> dict[str, int]:
    """What TS_REMOVE_ALL_META leaves behind."""
    await h.register("i2")
    await h.put(range(2), "i2")
    await h.trim(TrimStrategy.REMOVE_ALL_META, "i2")
    await h.drain()
    return {"ownerless_file": 2}


async def _of(h: Harness, key: int) -> bytes:
    (row,) = await h.index().rows_of([key])
    extent_id = row[0][0]
    assert len(extent_id) == EXTENT_ID_BYTES
    return extent_id


ALL: tuple[Damage, ...] = (
    lose_a_file,
    cut_a_file,
    plant_a_file,
    recreate_a_freed_file,
    leave_a_probe,
    drift_counters,
    count_another_storage,
    name_nobody,
    name_nobody_beside_somebody,
    name_another_block,
    lose_a_row,
    garble_a_row,
    misplace_a_row,
    garble_a_state,
    lose_a_state,
    lose_a_chunk,
    leave_a_stamp,
    miscount_dead_bytes,
    leave_trash,
    garble_trash,
    trim_the_records_only,
)
