"""What RocksStore promises beyond the contract: its directory, its format, kill -9, its turns."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import rocksdict
from hypothesis import given
from hypothesis import strategies as st

from kvcm.core.errors import ConfigError, CorruptRecord, InvalidArgument, OutcomeUnknown
from kvcm.metaindex.store import Claim, Fence, Mutation, ShardCommit, ShardId, Table, Write
from kvcm.metaindex.stores import rocksdb_layout as layout
from kvcm.metaindex.stores.rocksdb import RocksStore
from kvcm.testing.contracts.kvstore import FENCE, apply, claim, get, numbered, puts, scanned

SHARD = ShardId(b"space", 3)
WRITER = Path(__file__).parent / "rocks_writer.py"


def make(path: Path, *, sync: bool = False) -> RocksStore:
    return RocksStore(path, sync=sync, cache_bytes=8 << 20, write_buffer_bytes=4 << 20)


def raw(path: Path) -> rocksdict.Rdict:
    return rocksdict.Rdict(str(path), rocksdict.Options(raw_mode=True))


# The directory


async def test_a_directory_has_one_holder_and_the_refusal_names_it(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a" / "index"), make(tmp_path / "a" / "index")
    await first.open()
    await first.open()
    with pytest.raises(ConfigError, match=f"{tmp_path}/a/index: another process"):
        await second.open()
    await first.close()
    await second.open()
    await second.close()


async def test_the_lock_is_released_even_while_a_scan_is_unfinished(tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    await first.open()
    await claim(first, SHARD)
    await apply(first, SHARD, puts(numbered(100)))
    pages = first.scan(SHARD, Table.ROWS, page=10)
    await anext(pages)
    await first.close()
    await second.open()
    assert await second.count(SHARD, Table.ROWS) == 100
    await second.close()


async def test_a_path_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no directory")
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match=str(path)):
            await make(path).open()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_directory_without_permission_is_refused_by_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="no permission"):
        await make(tmp_path).open()


async def test_a_newer_format_and_foreign_data_are_refused(tmp_path: Path) -> None:
    newer, foreign, same = tmp_path / "newer", tmp_path / "foreign", tmp_path / "same"
    for path, key, value in [
        (newer, layout.FORMAT_KEY, b"%d" % (layout.FORMAT + 1)),
        (foreign, b"k", b"v"),
        (same, layout.FORMAT_KEY, b"%d" % layout.FORMAT),
    ]:
        db = raw(path)
        db.put(key, value)
        db.close()
    with pytest.raises(ConfigError, match=f"{newer}: has format"):
        await make(newer).open()
    with pytest.raises(ConfigError, match=f"{foreign}: holds another program's data"):
        await make(foreign).open()
    store = make(same)
    await store.open()
    await store.close()


# Records


async def test_a_shard_whose_meta_record_is_corrupt_hinders_no_other(tmp_path: Path) -> None:
    store, other = make(tmp_path), ShardId(b"space", 4)
    await store.open()
    await store.claim([SHARD, other], FENCE)
    await store.close()
    db = raw(tmp_path)
    db.put(layout.table_prefix(SHARD, layout.META_TABLE), b"\xffnonsense")
    db.close()
    await store.open()
    commits = [ShardCommit(shard, FENCE, [puts({b"k": b"1"})]) for shard in (SHARD, other)]
    results = await store.commit(commits)
    assert [type(result.error) for result in results] == [CorruptRecord, type(None)]
    (answer,) = await store.claim([SHARD], Fence(9, 9))
    assert isinstance(answer, CorruptRecord)
    await store.drop(SHARD)
    assert await claim(store, SHARD) == Claim(0, {})
    await store.close()


async def test_a_counter_beyond_64_bits_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    store = make(tmp_path)
    await store.open()
    await claim(store, SHARD)
    await apply(store, SHARD, puts({}, counters={b"n": (1 << 63) - 1}))
    commit = ShardCommit(SHARD, FENCE, [puts({b"k": b"1"}, counters={b"n": 1})])
    (result,) = await store.commit([commit])
    assert isinstance(result.error, InvalidArgument)
    assert await scanned(store, SHARD) == {}
    assert (await claim(store, SHARD, Fence(9, 9))).counters == {b"n": (1 << 63) - 1}
    await store.close()


async def test_a_failed_write_is_an_unknown_outcome_and_is_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path, sync=True)
    await store.open()
    await claim(store, SHARD)
    real: Any = store._db

    class Broken:
        """Writes, then reports that it did not."""

        get = real.get

        def write(self, *args: object) -> None:
            real.write(*args)
            raise Exception("IO error: no space left on device")

    monkeypatch.setattr(store, "_db", Broken())
    commit = ShardCommit(SHARD, FENCE, [puts({b"k": b"1"}, counters={b"n": 1})])
    (result,) = await store.commit([commit])
    assert isinstance(result.error, OutcomeUnknown)
    assert "no space left" in str(result.error)
    monkeypatch.setattr(store, "_db", real)
    assert await get(store, SHARD, b"k") == [b"1"]
    assert await claim(store, SHARD, Fence(9, 9)) == Claim(1, {b"n": 1})
    await store.close()


shard_ids = st.builds(ShardId, st.binary(min_size=1, max_size=32), st.integers(0, 1_023))


@given(shard_ids, shard_ids, st.sampled_from(Table), st.sampled_from(Table), st.binary())
def test_no_key_of_one_table_lies_among_those_of_another(
    a: ShardId, b: ShardId, of_a: Table, of_b: Table, key: bytes
) -> None:
    prefix_a, prefix_b = layout.table_prefix(a, of_a), layout.table_prefix(b, of_b)
    full = prefix_a + key
    assert full.startswith(prefix_b) == ((a, of_a) == (b, of_b))
    within = layout.shard_prefix(b) <= full < layout.after(layout.shard_prefix(b))
    assert within == (a == b)
    assert layout.FORMAT_KEY < layout.FIRST_SPACE <= full


@given(
    st.dictionaries(st.binary(max_size=20), st.integers(-(1 << 63), (1 << 63) - 1)),
    st.tuples(*[st.integers(0, (1 << 64) - 1)] * 3),
)
def test_the_meta_record_comes_back_as_it_was(
    counters: dict[bytes, int], numbers: tuple[int, ...]
) -> None:
    epoch, n, number = numbers
    prefixes = layout.table_prefixes(SHARD)
    meta = layout.Meta(prefixes, Fence(epoch, n), number, counters)
    encoded = meta.encode()
    assert layout.decode_meta(prefixes, encoded) == meta
    for broken in (encoded[:-1], encoded + b"\0", b"\x02" + encoded[1:]):
        with pytest.raises(CorruptRecord):
            layout.decode_meta(prefixes, broken)


# Other tasks get their turn


async def test_large_calls_let_other_tasks_run(tmp_path: Path) -> None:
    store = make(tmp_path)
    await store.open()
    shards = [ShardId(b"space", number) for number in range(64)]
    await store.claim(shards, FENCE)
    records = numbered(500)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def turns_during(call: object) -> int:
        before = turns
        await call  # type: ignore[misc]
        return turns - before

    task = asyncio.create_task(count_turns())
    commits = [ShardCommit(shard, FENCE, [puts(records)]) for shard in shards]
    assert await turns_during(store.commit(commits)) > 5
    wanted = [(shard, list(records)) for shard in shards]
    assert await turns_during(store.get_many(wanted, Table.ROWS)) > 5
    assert await turns_during(scanned(store, shards[0])) > 0
    task.cancel()
    await store.close()


async def test_concurrent_commits_to_one_shard_stay_whole(tmp_path: Path) -> None:
    store = make(tmp_path)
    await store.open()
    shards = [ShardId(b"space", number) for number in range(8)]
    await store.claim(shards, FENCE)

    async def write(value: bytes) -> None:
        mutation = Mutation(
            [Write(Table.ROWS, b"%d" % i, value) for i in range(200)], counters={b"n": 1}
        )
        await store.commit([ShardCommit(shard, FENCE, [mutation]) for shard in shards])

    await asyncio.gather(*(write(b"%d" % i) for i in range(10)))
    for shard in shards:
        assert len(set((await scanned(store, shard)).values())) == 1
        assert await claim(store, shard, Fence(9, 9)) == Claim(10, {b"n": 10})
    await store.close()


# Kill -9


@pytest.mark.parametrize("sync", [False, True])
async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, sync: bool) -> None:
    writer = subprocess.Popen(
        [sys.executable, str(WRITER), str(tmp_path), str(int(sync))],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    try:
        acknowledged = 0
        # It goes on writing at full speed while it is killed.
        end = time.perf_counter() + 0.5
        for line in writer.stdout:
            acknowledged = int(line)
            if acknowledged >= 20 and time.perf_counter() > end:
                break
        with pytest.raises(ConfigError, match="another process"):
            await make(tmp_path).open()
        writer.send_signal(signal.SIGKILL)
        acknowledged = max([acknowledged, *(int(line) for line in writer.stdout if line.strip())])
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    assert writer.returncode == -signal.SIGKILL
    assert acknowledged >= 20

    store = make(tmp_path)
    await store.open()
    numbers = set()
    for number in range(4):
        shard = ShardId(b"space", number)
        records = await scanned(store, shard)
        claimed = await claim(store, shard, Fence(FENCE.epoch + 1, 0))
        numbers.add(claimed.commit_number)
        # Commit i puts ten records into each shard and counts them.
        assert claimed.counters == {b"records": len(records)}
        assert len(records) == 10 * claimed.commit_number
        assert records == {
            b"%d-%d" % (i, j): b"%d" % i
            for i in range(1, claimed.commit_number + 1)
            for j in range(10)
        }
    assert acknowledged <= min(numbers) <= max(numbers) <= min(numbers) + 1
    await store.close()
