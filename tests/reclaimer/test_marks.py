"""Limits and marks through the whole service, with exact numbers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcm.core.errors import CapacityReached, NoStorage
from kvcm.core.types import InstanceGroup, StorageType
from tests.cache.harness import SLOT, Harness, group

BLOCK = 2 * SLOT


async def opened(tmp_path: Path, *groups: InstanceGroup, **options: Any) -> Harness:
    """A harness with one instance a group, named after it."""
    h = await Harness(root=tmp_path, groups=groups, **options).open()
    for of in groups:
        await h.register(of.name, group_name=of.name)
    return h


def blocks(h: Harness, name: str) -> int:
    """Blocks that a group holds."""
    return h.manager.usage().groups[name].counted_bytes // BLOCK


async def fill(h: Harness, count: int, name: str = "default", first: int = 0) -> None:
    """Blocks of one extent each; a second apart, so that their order is certain."""
    for i in range(first, first + count):
        await h.put([i], name)
        h.clock.advance(1)


async def hits(h: Harness, keys: range, name: str = "default") -> int:
    """How many of keys that are chains of their own are found."""
    return sum([await h.hits([key], name) for key in keys])


async def refused(h: Harness, keys: list[int], name: str = "default") -> str:
    """The reason for which a write is refused."""
    with pytest.raises(CapacityReached) as error:
        await h.start(keys, name)
    return error.value.reason


# ---- whose blocks go ---------------------------------------------------------------------------


async def test_two_groups_at_their_limits_side_by_side(tmp_path: Path) -> None:
    """Each gives back its own excess, down to its own low mark, and nothing of the other's."""
    a = group("a", capacity=100 * BLOCK, percentage=0.8)
    b = group("b", capacity=50 * BLOCK, percentage=0.9, low=0.5)
    h = await opened(tmp_path, a, b)
    await fill(h, 80, "a")
    await fill(h, 45, "b")
    await h.rounds()
    assert (blocks(h, "a"), blocks(h, "b")) == (80, 45)
    await h.put([80], "a")
    await h.rounds()
    assert (blocks(h, "a"), blocks(h, "b")) == (75, 45)
    await h.put([45], "b")
    await h.rounds()
    assert (blocks(h, "a"), blocks(h, "b")) == (75, 25)
    assert await hits(h, range(6), "a") == 0
    assert await hits(h, range(6, 81), "a") == 75
    assert await hits(h, range(21, 46), "b") == 25
    await h.check_counters()
    await h.close()


async def test_a_small_hot_instance_beside_a_large_cold_one_loses_nothing(tmp_path: Path) -> None:
    """R30: 5 % of the group, all hot; the 95 % beside it are cold."""
    h = await Harness(root=tmp_path, groups=[group(capacity=200 * BLOCK, percentage=0.5)]).open()
    await h.register("cold")
    await h.register("hot")
    for i in range(95):
        await h.put([i], "cold")
    for i in range(5):
        await h.put([i], "hot")
    h.clock.advance(60)
    for i in range(5):
        await h.lookup([i], "hot")
    await h.put([1000], "cold")
    await h.rounds()
    usage = h.manager.usage()
    assert usage.groups["default"].serving_blocks == 90
    assert usage.instances["hot"].serving_blocks == 5
    assert usage.instances["cold"].serving_blocks == 85
    await h.close()


@pytest.mark.parametrize("others", [0, 49, 50])
@pytest.mark.parametrize("percentage", [0.0, 0.5, 1.0, 1.01])
@pytest.mark.parametrize("used", [10, 20, 21, 40])
async def test_every_cell_of_quota_watermark_and_others_usage(
    tmp_path: Path, others: int, percentage: float, used: int
) -> None:
    """A group of 40 blocks beside one that uses none, nearly all or all of its 50: what is left
    after a round, and what one more write meets, never depends on the others."""
    mine = group("mine", capacity=40 * BLOCK, percentage=percentage)
    h = await opened(tmp_path, mine, group("others", capacity=50 * BLOCK))
    for i in range(others):
        await h.put([i], "others")
    await h.put(list(range(used // 2)), "mine")
    for i in range(used // 2, used):
        await h.put([i], "mine")
    await h.rounds()
    left = 18 if percentage == 0.5 and used > 20 else used
    if left < used:
        # The first extent is the coldest, and goes whole where only that reaches the mark.
        assert blocks(h, "mine") <= left
        left = blocks(h, "mine")
    assert (blocks(h, "mine"), blocks(h, "others")) == (left, others)
    if left < 40:
        assert (await h.start([1000], "mine")).granted == [1000]
    elif percentage == 1.0:
        # Refused now; the refusal makes room, to the low mark: 38 of 40.
        assert await refused(h, [1000], "mine") == "QUOTA_GROUP"
        await h.rounds()
        assert (await h.start([1000], "mine")).granted == [1000]
    else:
        assert await refused(h, [1000], "mine") == "QUOTA_GROUP"
        await h.rounds()
        assert await refused(h, [1000], "mine") == "QUOTA_GROUP"
        assert blocks(h, "mine") == 40
    assert blocks(h, "others") == others
    await h.close()


async def test_no_amount_of_reading_keeps_a_group_above_its_mark(tmp_path: Path) -> None:
    """Invariant 7: every key is read between any two rounds."""
    h = await opened(tmp_path, group(capacity=100 * BLOCK, percentage=0.5))
    await fill(h, 50)
    for i in range(50, 120):
        for key in range(i):
            await h.lookup([key], "default")
        await h.put([i], "default")
        await h.round()
        assert blocks(h, "default") <= 50
    await h.close()


async def test_instances_do_not_pay_for_one_that_is_still_being_loaded(tmp_path: Path) -> None:
    h = await opened(tmp_path, group("a", capacity=100 * BLOCK, percentage=0.8))
    await h.register("a2", group_name="a")
    await fill(h, 40, "a2")
    await fill(h, 40, "a")
    await h.put([1000], "a")
    h.index("a2").loaded = False
    (eviction,) = (loop for loop in h.manager.loops if loop.name == "eviction")
    await eviction.run_once(h.clock.monotonic())
    assert blocks(h, "a") == 81
    h.index("a2").loaded = True
    await eviction.run_once(h.clock.monotonic())
    usage = h.manager.usage()
    assert usage.groups["a"].serving_blocks == 75
    assert usage.instances["a"].serving_blocks == 41
    await h.close()


# ---- how much, how often -----------------------------------------------------------------------


async def test_one_excess_is_evicted_once_however_slow_deletes_are(tmp_path: Path) -> None:
    """A grace of 5 s and a period of 1 s: the bytes lie in the trash over several rounds."""
    of = group(capacity=100 * BLOCK, percentage=0.8, delay_ms=5000, trigger_period_seconds=1)
    h = await opened(tmp_path, of, grace_s=5.0)
    await fill(h, 81)
    await h.round()
    for _ in range(4):
        assert blocks(h, "default") == 75
        await h.wait(1)
    await h.wait(5)
    assert blocks(h, "default") == 75
    assert len(h.files()) == 75 * 2
    await h.close()


async def test_a_period_spaces_rounds_out(tmp_path: Path) -> None:
    of = group(capacity=100 * BLOCK, percentage=0.8, trigger_period_seconds=10)
    h = await opened(tmp_path, of)
    for i in range(81):
        await h.put([i], "default")
    await h.round()
    assert blocks(h, "default") == 75
    for i in range(100, 110):
        await h.put([i], "default")
    await h.wait(9)
    assert blocks(h, "default") == 85
    await h.wait(1)
    assert blocks(h, "default") == 75
    await h.close()


@pytest.mark.parametrize(
    "bound",
    [
        {"reclaim_step_size": 2 * BLOCK},
        {"reclaim_step_percentage": 2},
        {"reclaim_step_size": 2 * BLOCK, "reclaim_step_percentage": 50},
        {"reclaim_step_size": 50 * BLOCK, "reclaim_step_percentage": 2},
    ],
)
async def test_a_step_bounds_each_round(tmp_path: Path, bound: dict[str, int]) -> None:
    of = group(capacity=100 * BLOCK, percentage=0.8, trigger_period_seconds=1, **bound)
    h = await opened(tmp_path, of)
    for i in range(85):
        await h.put([i], "default")
    left = []
    for _ in range(6):
        await h.round()
        left.append(blocks(h, "default"))
        await h.wait(0.999)
        assert blocks(h, "default") == left[-1]
        h.clock.advance(0.001)
    # It stops below the mark, wherever that is: nothing is over it any more.
    assert left == [83, 81, 79, 79, 79, 79]
    await h.close()


async def test_a_lower_mark_of_its_own(tmp_path: Path) -> None:
    h = await opened(tmp_path, group(capacity=100 * BLOCK, percentage=0.8, low=0.2))
    await fill(h, 81)
    await h.rounds()
    assert blocks(h, "default") == 20
    await h.close()


async def test_a_size_is_a_mark_of_the_group(tmp_path: Path) -> None:
    h = await opened(tmp_path, group(capacity=100 * BLOCK, percentage=0.0, size=40 * BLOCK))
    await fill(h, 40)
    await h.rounds()
    assert blocks(h, "default") == 40
    await fill(h, 1, first=40)
    await h.rounds()
    assert blocks(h, "default") == 38
    await h.close()


# ---- refused writes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"capacity": 100 * BLOCK}, "QUOTA_GROUP"),
        ({"types": [(StorageType.NFS, 100 * BLOCK)]}, "QUOTA_TYPE"),
        ({"max_keys": 100}, "MAX_KEY_COUNT"),
    ],
)
@pytest.mark.parametrize(("wanted", "left"), [(1, 95), (5, 95), (30, 70), (100, 0), (101, 95)])
async def test_a_refused_write_makes_room_for_what_it_wanted(
    tmp_path: Path, limits: dict[str, Any], reason: str, wanted: int, left: int
) -> None:
    """The mark itself, at 100 %, is not crossed: only the refusal asks for room."""
    h = await opened(tmp_path, group(percentage=1.0, **limits))
    for i in range(100):
        await h.put([i], "default")
    await h.rounds()
    assert blocks(h, "default") == 100
    keys = list(range(1000, 1000 + wanted))
    assert await refused(h, keys) == reason
    await h.round()
    assert blocks(h, "default") == left
    grant = await h.start(keys, "default")
    assert len(grant.granted) == min(wanted, 100 - left)
    await h.check_counters()
    await h.close()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"capacity": 10 * BLOCK}, "QUOTA_GROUP"),
        ({"types": [(StorageType.NFS, 10 * BLOCK)]}, "QUOTA_TYPE"),
        ({"max_keys": 10}, "MAX_KEY_COUNT"),
    ],
)
@pytest.mark.parametrize("percentage", [0.0, 1.01])
async def test_without_a_trigger_a_full_limit_refuses_and_nothing_goes(
    tmp_path: Path, limits: dict[str, Any], reason: str, percentage: float
) -> None:
    h = await opened(tmp_path, group(percentage=percentage, **limits))
    await fill(h, 10)
    for i in range(50):
        assert await refused(h, [100 + i]) == reason
        await h.wait(0.2)
    assert await hits(h, range(10)) == 10
    usage = h.manager.usage()
    assert usage.refused == {("default", reason): 50}
    assert usage.instances["default"].refusals == {reason: 50}
    assert usage.storages["nfs_01"].refusals == {reason: 50}
    assert usage.group_types["default", "file"].refusals == {reason: 50}
    await h.close()


async def test_a_group_without_reclaim_strategy_is_refused_when_full_and_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R36."""
    made = group(capacity=10 * BLOCK)
    assert made.cache_config is not None
    bare = made.model_copy(
        update={"cache_config": made.cache_config.model_copy(update={"reclaim_strategy": None})}
    )
    with caplog.at_level(logging.WARNING, "kvcm.cache.manager"):
        h = await opened(tmp_path, bare)
        await fill(h, 9)
        cut = await h.put([100, 101, 102], "default")
        assert (cut.granted, cut.reason) == ([100], "QUOTA_GROUP")
        for i in range(20):
            assert await refused(h, [200 + i]) == "QUOTA_GROUP"
            await h.wait(1)
        assert blocks(h, "default") == 10
        await h.change_group(lambda g: g.model_copy(update={"user_data": "x"}))
    warned = [r.message for r in caplog.records if "no watermark" in r.message]
    assert len(warned) == 1
    assert "'default'" in warned[0]
    await h.close()


async def test_a_hundred_keys_where_sixty_fit_grants_sixty(tmp_path: Path) -> None:
    """R32: a leading part; the rest is masked, and usage is exactly what was granted."""
    h = await opened(tmp_path, group(capacity=100 * BLOCK))
    await h.put(list(range(1000, 1040)), "default")
    cut = await h.start(list(range(100)), "default")
    assert cut.granted == list(range(60))
    assert cut.existing == [False] * 60 + [True] * 40
    assert cut.reason == "QUOTA_GROUP"
    assert h.manager.usage().groups["default"].counted_bytes == 100 * BLOCK
    assert h.manager.usage().cut == {("default", "QUOTA_GROUP"): 1}
    assert h.manager.usage().refused == {}
    await h.close()


async def test_mixed_block_sizes_share_a_group(tmp_path: Path) -> None:
    """R32: 64 KB beside 16 MB at 85 %: each block counts with its own size."""
    small, large = 64 << 10, 16 << 20
    of = group(capacity=20 * large, percentage=0.95, low=0.85)
    h = await Harness(root=tmp_path, groups=[of]).open()
    await h.register("small", specs=[("tp0", small)])
    await h.register("large", specs=[("tp0", large)])
    for i in range(256):
        await h.finish(await h.start([i], "small"))
    for i in range(16):
        h.clock.advance(1)
        await h.finish(await h.start([i], "large"))
    h.clock.advance(1)
    await h.rounds()
    assert h.manager.usage().groups["default"].counted_bytes == 17 * large
    # 3 of 4 fit. Room is made for 4: down to 16. The small ones are the coldest and go first.
    grant = await h.start([100, 101, 102, 103], "large")
    assert (len(grant.granted), grant.reason) == (3, "QUOTA_GROUP")
    await h.finish(grant)
    await h.rounds()
    usage = h.manager.usage()
    assert usage.groups["default"].counted_bytes == 16 * large
    assert usage.instances["small"].serving_blocks == 0
    assert usage.instances["large"].serving_blocks == 16
    await h.check_counters()
    await h.close()


async def test_sustained_writes_of_six_times_the_capacity_all_succeed(tmp_path: Path) -> None:
    """R28: eviction runs before a write fails, not because it did."""
    h = await opened(tmp_path, group(capacity=100 * BLOCK, percentage=0.9))
    for i in range(200):
        grant = await h.put([3 * i, 3 * i + 1, 3 * i + 2], "default")
        assert len(grant.granted) == 3
        await h.round()
        assert blocks(h, "default") <= 90
    assert h.manager.usage().refused == {}
    await h.close()


async def test_a_key_count_holds_under_many_small_writes(tmp_path: Path) -> None:
    """R34."""
    h = await opened(tmp_path, group(max_keys=200, percentage=0.9))
    for i in range(500):
        assert len((await h.put([2 * i, 2 * i + 1], "default")).granted) == 2
        if i % 5 == 4:
            await h.round()
        assert h.manager.usage().instances["default"].serving_blocks <= 200
    await h.rounds()
    assert h.manager.usage().instances["default"].serving_blocks <= 180
    assert len(h.index("default").book.entries) <= 600
    await h.close()


async def test_open_writes_do_not_empty_a_cache(tmp_path: Path) -> None:
    """R91: 8 of 10 cannot be reclaimed, 3 can (a quota was lowered under them)."""
    h = await opened(tmp_path, group(capacity=110 * BLOCK))
    await fill(h, 30)
    writer = await h.start(list(range(1000, 1080)), "default")

    def lowered(old: InstanceGroup) -> InstanceGroup:
        return group(capacity=100 * BLOCK, percentage=0.8).model_copy(
            update={"version": old.version}
        )

    await h.change_group(lowered)
    for _ in range(20):
        await h.wait(0.2)
    # Half of what the low mark grants to the 20 that are left: 7.5.
    assert blocks(h, "default") == 80 + 7
    assert await hits(h, range(23, 30)) == 7
    h.fill(writer)
    await h.finish(writer)
    await h.rounds()
    # Now they can be reclaimed as well: the one write of 80 is the newest, and alone too much.
    assert blocks(h, "default") <= 80
    await h.check_counters()
    await h.close()


# ---- storages ----------------------------------------------------------------------------------


async def test_a_storage_holds_its_capacity_over_all_groups_and_trash(tmp_path: Path) -> None:
    """R88: the quotas promise more than there is; near the end it is the storage that refuses."""
    h = await opened(
        tmp_path,
        group("a", capacity=80 * BLOCK),
        group("b", capacity=80 * BLOCK),
        space={"nfs_01": {"capacity_bytes": 100 * BLOCK}},
    )
    await fill(h, 60, "a")
    await fill(h, 39, "b")
    usage = h.manager.usage()
    limits = {n: usage.groups[n].limit for n in ("a", "b")}
    assert [u.effective // BLOCK for u in limits.values() if u and u.effective] == [61, 40]
    cut = await h.start([100, 101], "b")
    assert (cut.granted, cut.reason) == ([100], "STORAGE_FULL")
    assert await refused(h, [200], "a") == "STORAGE_FULL"
    await h.finish(cut, [False])
    # The bytes of the failed block are not deleted yet: that space is free only when they are.
    assert h.manager.usage().storages["nfs_01"].trash_bytes == BLOCK
    assert await refused(h, [200], "a") == "STORAGE_FULL"
    await h.wait(11)
    await h.rounds()
    assert h.manager.usage().storages["nfs_01"].trash_bytes == 0
    assert (await h.start([200], "a")).granted == [200]
    assert h.manager.usage().refused == {("a", "STORAGE_FULL"): 2}
    assert h.manager.usage().cut == {("b", "STORAGE_FULL"): 1}
    await h.check_counters()
    await h.close()


async def test_writers_side_by_side_never_overshoot_a_storage(tmp_path: Path) -> None:
    h = await opened(
        tmp_path,
        group("a"),
        group("b"),
        space={"nfs_01": {"capacity_bytes": 40 * BLOCK}},
        turns=3,
    )

    async def write(number: int) -> int:
        try:
            keys = [number * 100 + n for n in range(10)]
            return len((await h.start(keys, "ab"[number % 2])).granted)
        except CapacityReached:
            return 0

    granted = await asyncio.gather(*(write(n) for n in range(10)))
    assert sum(granted) == 40
    assert h.manager.usage().storages["nfs_01"].open_bytes == 40 * BLOCK
    await h.check_counters()
    await h.close()


async def test_limits_hold_from_the_first_write_after_a_crash(tmp_path: Path) -> None:
    """What other instances hold is counted before anything is granted."""
    h = await opened(
        tmp_path, group("a"), group("b"), space={"nfs_01": {"capacity_bytes": 40 * BLOCK}}
    )
    await h.register("a2", group_name="a")
    await h.put(list(range(20)), "a")
    await h.put(list(range(20)), "b")
    await h._end(graceful=False)
    h.store.restart()
    rounds = h.rounds
    h.rounds = _nothing  # type: ignore[method-assign]
    await h._start()
    h.rounds = rounds  # type: ignore[method-assign]
    assert await refused(h, [100], "a2") == "STORAGE_FULL"
    await h.close()


async def _nothing(count: int = 3) -> None:
    """No loop runs."""


@pytest.mark.parametrize("full", ["type", "storage"])
async def test_what_is_full_diverts_the_next_write(tmp_path: Path, full: str) -> None:
    fs = {
        "type": StorageType.HF3FS,
        "spec": {"mountpoint": str(tmp_path / "hf3fs"), "root_dir": "kv", "key_count_per_file": 3},
    }
    (tmp_path / "hf3fs").mkdir()
    types = [(StorageType.HF3FS, 10 * BLOCK)] if full == "type" else []
    if full == "storage":
        fs["capacity_bytes"] = 10 * BLOCK
    h = await opened(
        tmp_path,
        group(storages=("fs_01", "nfs_01"), types=types),
        storages=("fs_01", "nfs_01"),
        space={"fs_01": fs},
    )
    assert {loc.type for loc in (await h.put(list(range(9)), "default")).locations} == {1}
    diverted = await h.start([100, 101], "default")
    assert ({loc.type for loc in diverted.locations}, diverted.reason) == ({4}, "")
    assert {loc.type for loc in (await h.start([200], "default")).locations} == {1}
    assert {loc.type for loc in (await h.start([300], "default")).locations} == {4}
    assert h.manager.usage().refused == {}
    await h.close()


async def test_a_storage_over_its_mark_takes_from_who_is_above_his_share(tmp_path: Path) -> None:
    """Capacity 100, marks 90 and 80; equal quotas: 40 each may stay."""
    h = await opened(
        tmp_path,
        group("a", capacity=100 * BLOCK),
        group("b", capacity=100 * BLOCK),
        space={
            "nfs_01": {
                "capacity_bytes": 100 * BLOCK,
                "high_percentage": 0.9,
                "low_percentage": 0.8,
            }
        },
    )
    await fill(h, 30, "b")
    await fill(h, 60, "a")
    await h.rounds()
    assert (blocks(h, "a"), blocks(h, "b")) == (60, 30)
    await h.put([500], "b")
    await h.rounds()
    assert (blocks(h, "a"), blocks(h, "b")) == (49, 31)
    # Trash is no reason to evict more, however long it lies there.
    await h.rounds(5)
    assert (blocks(h, "a"), blocks(h, "b")) == (49, 31)
    usage = h.manager.usage().storages["nfs_01"]
    assert (usage.counted_bytes, usage.trash_bytes) == (80 * BLOCK, 11 * BLOCK)
    await h.close()


async def test_a_full_storage_without_a_mark_evicts_nobody(tmp_path: Path) -> None:
    h = await opened(
        tmp_path,
        group("a", percentage=0.9, capacity=100 * BLOCK),
        space={"nfs_01": {"capacity_bytes": 20 * BLOCK}},
    )
    await fill(h, 20, "a")
    for i in range(20):
        assert await refused(h, [100 + i], "a") == "STORAGE_FULL"
        await h.wait(0.2)
    assert blocks(h, "a") == 20
    await h.close()


async def test_no_storage_is_told_apart_and_arms_nothing(tmp_path: Path) -> None:
    """R33: a thousand failing writes evict nothing, at 100 % of a group that would be evicted
    from."""
    h = await opened(tmp_path, group(capacity=50 * BLOCK, percentage=1.0))
    await fill(h, 50)
    await h.registry.set_storage_enabled("nfs_01", False)
    h.backends.follow(h.registry.view)
    for i in range(1000):
        with pytest.raises(NoStorage):
            await h.start([1000 + i], "default")
        if i % 100 == 0:
            await h.wait(1)
    assert blocks(h, "default") == 50
    assert h.manager.usage().refused == {("default", "NO_STORAGE"): 1000}
    await h.close()


async def test_a_lowered_quota_drains_and_refuses_meanwhile(tmp_path: Path) -> None:
    """R90, with bounded rounds so that there is a meanwhile."""
    step = {"reclaim_step_size": 10 * BLOCK, "trigger_period_seconds": 1}
    h = await opened(tmp_path, group(capacity=100 * BLOCK, percentage=0.9, **step))
    await fill(h, 50)

    def lowered(old: InstanceGroup) -> InstanceGroup:
        return group(capacity=20 * BLOCK, percentage=0.9, **step).model_copy(
            update={"version": old.version}
        )

    await h.change_group(lowered)
    seen = []
    for _ in range(6):
        await h.round()
        seen.append(blocks(h, "default"))
        if seen[-1] >= 20:
            with pytest.raises(CapacityReached):
                await h.manager.start_write(_request([1000]))
            h.manager.shared.pressure.take()  # look at the draining alone
        await h.wait(1)
    assert seen[:3] == [40, 30, 20]
    assert seen[-1] <= 18
    assert (await h.start([1000], "default")).granted == [1000]
    await h.close()


def _request(keys: list[int]) -> Any:
    from kvcm.cache.api import StartWriteRequest
    from kvcm.core.keys import KeyBatch

    return StartWriteRequest("default", KeyBatch.from_ints(keys))


# ---- waiting for room --------------------------------------------------------------------------


async def test_a_write_waits_a_moment_for_the_room_it_asked_for(tmp_path: Path) -> None:
    h = Harness(root=tmp_path, groups=[group(capacity=20 * BLOCK, percentage=1.0)])
    h.settings = _waiting(h, 0.05)
    await h.open()
    await h.register("default")
    for i in range(20):
        await h.put([i], "default")
    write = asyncio.ensure_future(h.start([100, 101], "default"))
    await _until(lambda: bool(h.manager.shared.pressure.waiters()))
    assert h.manager.shared.pressure.wakeup.is_set()
    # The key is held by nobody meanwhile.
    other = asyncio.ensure_future(h.start([100], "default"))
    await _until(lambda: len(h.manager.shared.pressure.waiters()) == 2)
    await h.round()
    assert (await write).granted == [100, 101]
    assert (await other).granted == []
    assert h.manager.usage().refused == {}
    assert h.manager.shared.pressure.waiters() == ()
    await h.close()


async def test_a_write_waits_no_longer_than_it_may(tmp_path: Path) -> None:
    h = Harness(root=tmp_path, groups=[group(capacity=20 * BLOCK, percentage=1.0)])
    h.settings = _waiting(h, 0.05)
    await h.open()
    await h.register("default")
    for i in range(20):
        await h.put([i], "default")
    write = asyncio.ensure_future(h.start([100], "default"))
    await _until(lambda: bool(h.manager.shared.pressure.waiters()))
    await asyncio.sleep(0)
    h.clock.advance(0.049)
    await asyncio.sleep(0)
    assert not write.done()
    h.clock.advance(0.002)
    with pytest.raises(CapacityReached):
        await write
    assert h.manager.usage().refused == {("default", "QUOTA_GROUP"): 1}
    await h.close()


def _waiting(h: Harness, seconds: float) -> Any:
    from dataclasses import replace

    return replace(h.settings, room_wait_s=seconds)


async def _until(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


# ---- usage -------------------------------------------------------------------------------------


async def test_usage_shows_limits_marks_and_what_goes_next(tmp_path: Path) -> None:
    of = group(
        capacity=100 * BLOCK, types=[(StorageType.NFS, 50 * BLOCK)], percentage=0.8, max_keys=40
    )
    h = await opened(tmp_path, of, space={"nfs_01": {"capacity_bytes": 60 * BLOCK}})
    await fill(h, 10)
    writer = await h.start([100, 101], "default")
    usage = h.manager.usage(ahead=True)
    total = usage.groups["default"]
    assert total.limit is not None
    limit = total.limit
    assert limit.unit == "bytes"
    assert (limit.capacity, limit.effective) == (100 * BLOCK, 60 * BLOCK)
    assert (limit.high, limit.low) == (80 * BLOCK, 75 * BLOCK)
    assert (total.open_bytes, total.serving_bytes) == (2 * BLOCK, 10 * BLOCK)
    assert total.next_eviction is not None
    # Once the mark is crossed, 5 of 100 go: the coldest.
    ahead = total.next_eviction
    assert (ahead.planned, ahead.bytes, ahead.blocks) == (5 * BLOCK, 5 * BLOCK, 5)
    assert (ahead.complete, ahead.instances) == (True, {"default": 5 * BLOCK})
    of_type = usage.group_types["default", "file"]
    assert of_type.limit is not None
    assert (of_type.limit.high, of_type.limit.low) == (40 * BLOCK, int(37.5 * BLOCK))
    instance = usage.instances["default"]
    assert instance.limit is not None
    assert (instance.limit.unit, instance.limit.capacity) == ("blocks", 40)
    assert (instance.limit.high, instance.limit.low) == (32, 30)
    assert (instance.open_blocks, instance.serving_blocks) == (2, 10)
    storage = usage.storages["nfs_01"]
    assert storage.limit is not None
    assert (storage.limit.capacity, storage.limit.high) == (60 * BLOCK, None)
    assert storage.next_eviction is None
    await h.finish(writer, [False, False])
    # Looking ahead took nothing.
    assert await hits(h, range(10)) == 10
    await h.close()


async def test_an_eviction_takes_what_usage_foretold(tmp_path: Path) -> None:
    h = await opened(tmp_path, group(capacity=100 * BLOCK, percentage=2.0))
    await fill(h, 60)
    old = h.registry.view.groups["default"]
    assert old.cache_config is not None
    await h.change_group(
        lambda g: group(capacity=100 * BLOCK, percentage=0.5).model_copy(
            update={"version": g.version}
        )
    )
    found = h.manager.usage(ahead=True).groups["default"].next_eviction
    assert found is not None
    assert (found.planned, found.bytes, found.extents) == (15 * BLOCK, 15 * BLOCK, 15)
    await h.round()
    assert blocks(h, "default") == 45
    await h.close()
