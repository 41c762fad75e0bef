"""Trims and removals: quick answers, work in the background, reports, restarts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvcm.core.errors import SessionNotExist
from kvcm.core.types import QueryType, TrimStrategy
from kvcm.metaindex.records import Phase
from kvcm.metaindex.store import Table
from kvcm.reclaimer.base import PER_ROUND
from kvcm.reclaimer.trim import Removal
from kvcm.testing.faults import Crash, Fault, Op, no_faults, script
from tests.cache.harness import GRACE_S, SLOT, Harness

Act = Callable[[Harness], Awaitable[None]]


def removals(h: Harness) -> list[Removal]:
    assert h.manager.space is not None
    return h.manager.space.removals()


async def remove_instance(h: Harness) -> None:
    await h.manager.remove_instance("i1", None)


async def trim(h: Harness) -> None:
    await h.trim()


async def _put_nothing(h: Harness, keys: list[int]) -> None:
    await h.finish(await h.start(keys))


async def filled(root: Path, extents: int = 5, **options: int) -> Harness:
    """An instance with extents of three keys, and one of another that must stay."""
    h = await Harness(root=root, timeout_max_s=60, **options).open()
    await h.register()
    await h.register("other")
    for i in range(extents):
        keys = list(range(10 * i, 10 * i + 3))
        # Thousands of files only slow things down.
        await (h.put(keys) if extents < PER_ROUND else _put_nothing(h, keys))
    await h.put([1, 2, 3], "other")
    return h


async def test_a_trim_reports_what_is_left_until_it_is_done(tmp_path: Path) -> None:
    h = await filled(tmp_path, PER_ROUND + 88)
    assert removals(h) == []
    since = h.clock.now()
    await h.trim()
    (found,) = removals(h)
    assert (found.what, found.instance, found.is_counted) == ("trim", "i1", False)
    h.clock.advance(1)
    await h.round()
    (found,) = removals(h)
    assert found == Removal("trim", "i1", h.index().uid, since, True, 88, 88 * 3, 88 * 3 * 2 * SLOT)
    assert h.manager.usage().instances["i1"].serving_blocks == 88 * 3
    await h.round()
    assert removals(h) == []
    assert h.manager.usage().instances["i1"].serving_blocks == 0
    assert await h.hits([1, 2, 3], "other") == 3
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_a_removed_instance_reports_until_its_last_byte_is_deleted(tmp_path: Path) -> None:
    h = await filled(tmp_path)
    uid = h.index().uid
    await remove_instance(h)
    since = h.clock.now()
    size = 5 * 3 * 2 * SLOT
    assert removals(h) == [Removal("instance", "i1", uid, since, True, 5, 15, size, 0, 0)]
    await h.round()
    assert removals(h) == [Removal("instance", "i1", uid, since, True, 0, 0, 0, 5, size)]
    # Its name is free meanwhile; the report tells both apart.
    again = await h.register()
    await h.put([0])
    assert [r.uid for r in removals(h)] == [uid]
    assert again.uid != uid
    await h.wait(GRACE_S - 1)
    assert len(removals(h)) == 1
    await h.wait(1)
    assert removals(h) == []
    assert uid.encode() not in await h.inner.spaces()
    assert await h.hits([0]) == 1
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_a_removal_goes_on_after_a_restart(tmp_path: Path) -> None:
    h = await filled(tmp_path)
    uid = h.index().uid
    open_one = await h.start([100, 101])
    h.fill(open_one)
    await remove_instance(h)
    await h.crash()  # two rounds ran in the new manager
    (found,) = removals(h)
    assert (found.uid, found.extents, found.trash) == (uid, 0, 6)
    await h.drain()
    assert removals(h) == []
    assert uid.encode() not in await h.inner.spaces()
    assert {p for p in h.files() if f"/{uid}/" in p} == set()
    await h.check_rest()
    await h.close()


@pytest.mark.parametrize("act", [trim, remove_instance])
@pytest.mark.parametrize("fault", [Fault.CRASH_BEFORE, Fault.CRASH_AFTER])
async def test_a_crash_at_any_commit_of_the_background_part_loses_nothing(
    tmp_path: Path, act: Act, fault: Fault
) -> None:
    number = 0
    crashed = True
    while crashed:
        number += 1
        h = await filled(tmp_path / str(number), 2)
        uid = h.index().uid
        pending = await h.start([200, 201], timeout=40)
        await act(h)
        first = h.store.calls[Op.COMMIT]
        h.store.plan = script([(Op.COMMIT, first + number, fault)])
        crashed = False
        try:
            await h.rounds(2)
            await h.wait(GRACE_S)
            await h.wait(61)
            await h.round()
        except Crash:
            crashed = True
            await h.crash()
        h.store.plan = no_faults
        await check_gone(h, uid, act)
        if act is trim:
            with contextlib.suppress(SessionNotExist):
                await h.finish(pending)
            assert await h.hits([200, 201]) == 0
        await h.drain()
        await check_gone(h, uid, act)
        assert {p for p in h.files() if f"/{uid}/" in p} == set()
        await h.check_rest()
        await h.close()
    # Retired, deleted, deleted once more for the late writer, and forgotten.
    assert number > (9 if act is trim else 6)


@pytest.mark.parametrize("fault", [Fault.CRASH_BEFORE, Fault.CRASH_AFTER])
async def test_a_crash_at_any_drop_of_a_removed_instance_is_made_good(
    tmp_path: Path, fault: Fault
) -> None:
    for number in (1, 9, 16):
        h = await filled(tmp_path / str(number))
        uid = h.index().uid
        await remove_instance(h)
        h.store.plan = script([(Op.DROP, number, fault)])
        with pytest.raises(Crash):
            await h.wait(2 * GRACE_S, step=GRACE_S)
        await h.crash()
        assert [r.uid for r in removals(h)] in ([uid], [])
        await h.drain()
        assert removals(h) == []
        assert uid.encode() not in await h.inner.spaces()
        await h.check_rest()
        await h.close()


async def check_gone(h: Harness, uid: str, act: Act) -> None:
    """Nothing granted before is served after; the other instance is untouched."""
    assert await h.hits([1, 2, 3], "other") == 3
    if act is remove_instance:
        assert "i1" not in h.manager.index.by_id
        return
    keys = [10 * i + j for i in range(5) for j in range(3)]
    found = await h.lookup(keys, query=QueryType.BATCH_GET)
    assert not any(x.hit for x in found)
    assert h.index().uid == uid


@pytest.mark.parametrize("crashed", [False, True])
async def test_a_session_open_during_a_trim_publishes_nothing(
    tmp_path: Path, crashed: bool
) -> None:
    h = await filled(tmp_path)
    before = await h.start([300, 301])
    h.fill(before)
    await h.trim()
    after = await h.start([302])
    h.fill(after)
    if crashed:
        await h.crash()
    await h.finish(before)
    await h.finish(after)
    assert await h.hits([300, 301]) == 0
    assert await h.hits([302]) == 1
    await h.drain()
    assert await h.hits([302]) == 1
    await h.check_rest()
    await h.close()


async def test_shards_that_fail_are_trimmed_later_and_the_others_now(tmp_path: Path) -> None:
    h = await filled(tmp_path, 64)
    await h.trim()
    failed = h.store.calls[Op.COMMIT] + 1
    h.store.plan = lambda op, n: Fault.UNAVAILABLE if op is Op.COMMIT and n == failed else None
    await h.round()
    (found,) = removals(h)
    assert 1 <= found.extents <= 3
    await h.wait(1)
    assert removals(h) == []
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_a_span_is_trimmed_before_the_answer_and_in_few_commits(tmp_path: Path) -> None:
    h = await filled(tmp_path, 64)
    second = int(h.clock.now())
    h.clock.advance(5)
    late = await h.put([900])
    commits = h.store.calls[Op.COMMIT]
    await h.trim(TrimStrategy.TIMESTAMP, begin=second, end=second + 5)
    assert h.store.calls[Op.COMMIT] - commits == 16
    keys = [10 * i + j for i in range(64) for j in range(3)]
    assert not any(x.hit for x in await h.lookup(keys, query=QueryType.BATCH_GET))
    assert await h.hits([900]) == 1
    await h.crash()
    assert not any(x.hit for x in await h.lookup(keys, query=QueryType.BATCH_GET))
    assert await h.lookup([900]) == late.locations
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_a_trim_of_the_records_keeps_every_file_though_the_loops_run(tmp_path: Path) -> None:
    h = await filled(tmp_path, 150)
    files = h.files()
    task = asyncio.ensure_future(h.trim(TrimStrategy.REMOVE_ALL_META))
    while not task.done():
        await h.round()
        await asyncio.sleep(0)
    await task
    await h.drain()
    assert h.files() == files
    assert (await h.extents(h.index())) == {}
    await h.check_counters()
    await h.close()


async def test_a_trim_whose_caller_left_goes_on_to_its_end(tmp_path: Path) -> None:
    h = await filled(tmp_path, 150)
    for strategy in (TrimStrategy.TIMESTAMP, TrimStrategy.REMOVE_ALL_META):
        await h.put([7000])
        task = asyncio.ensure_future(h.trim(strategy, begin=1, end=int(h.clock.now()) + 1))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await h.manager._removal.settled()
        assert h.manager.usage().instances["i1"].serving_blocks == 0
    await h.drain()
    await h.check_counters()
    await h.close()


async def test_keys_are_removed_in_few_commits_and_others_stay(tmp_path: Path) -> None:
    h = await filled(tmp_path, 64)
    commits = h.store.calls[Op.COMMIT]
    await h.remove([10 * i for i in range(64)])
    assert h.store.calls[Op.COMMIT] - commits == 16
    statuses = await h.statuses([0, 1, 2, 630, 631])
    assert statuses == ["NOT_FOUND", "SERVING", "SERVING", "NOT_FOUND", "SERVING"]
    assert await h.hits([1, 2, 3], "other") == 3
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_ten_thousand_lookups_without_a_follow_up_leave_everything_evictable(
    tmp_path: Path,
) -> None:
    """R37."""
    h = await Harness(root=tmp_path).open()
    await h.register()
    for i in range(20):
        await h.put([10 * i, 10 * i + 1])
    for n in range(10_000):
        assert await h.hits([10 * (n % 20), 10 * (n % 20) + 1]) == 2
    entries = list(h.index().book.entries.values())
    assert len(entries) == 20
    assert all(e.phase is Phase.SETTLED and not e.pins and not e.leaving for e in entries)
    await h.trim()
    await h.rounds(2)
    assert h.manager.usage().groups["default"].counted_bytes == 0
    await h.wait(GRACE_S)
    assert not h.files()
    await h.drain()
    await h.check_rest()
    await h.close()


@pytest.mark.parametrize("act", [trim, remove_instance])
async def test_trims_and_removals_read_nothing_of_other_instances(tmp_path: Path, act: Act) -> None:
    """R86."""
    h = await filled(tmp_path, 20)
    other = h.index("other").uid.encode()
    touched: set[bytes] = set()
    real_scan, real_get, real_commit = h.inner.scan, h.inner.get_many, h.inner.commit

    def scan(shard, table: Table, *, page: int = 1024):  # type: ignore[no-untyped-def]
        touched.add(shard.space)
        return real_scan(shard, table, page=page)

    async def get_many(asked, table):  # type: ignore[no-untyped-def]
        touched.update(shard.space for shard, _ in asked)
        return await real_get(asked, table)

    async def commit(commits):  # type: ignore[no-untyped-def]
        touched.update(c.shard.space for c in commits)
        return await real_commit(commits)

    h.inner.scan, h.inner.get_many, h.inner.commit = (  # type: ignore[method-assign]
        scan,
        get_many,
        commit,
    )
    h.manager.loops = [x for x in h.manager.loops if x.name != "stamps"]
    await act(h)
    await h.rounds(2)
    await h.wait(GRACE_S)
    await h.wait(61)
    await h.rounds(2)
    assert touched
    assert other not in touched
    h.inner.scan, h.inner.get_many, h.inner.commit = (  # type: ignore[method-assign]
        real_scan,
        real_get,
        real_commit,
    )
    await h.check_rest()
    await h.close()


async def test_a_round_of_forgetting_costs_what_is_due_not_what_there_is(tmp_path: Path) -> None:
    """Ended extents wait in a queue; a round looks at those whose time has come."""
    h = await filled(tmp_path, 40)
    await h.remove([10 * i + j for i in range(40) for j in range(3)])
    await h.rounds(2)
    (forget,) = (x for x in h.manager.loops if x.name == "forget")
    looked = 0
    real = h.index().trash.of_extent

    def of_extent(extent_id: bytes) -> bool:
        nonlocal looked
        looked += 1
        return real(extent_id)

    h.index().trash.of_extent = of_extent  # type: ignore[method-assign]
    for _ in range(10):
        await forget.run_once(h.clock.monotonic())
    assert looked == 0
    h.clock.advance(61)
    for _ in range(10):
        await forget.run_once(h.clock.monotonic())
    assert looked == 40  # once each: their trash is not deleted yet
    await h.drain()
    assert await h.extents(h.index()) == {}
    await h.check_rest()
    await h.close()
