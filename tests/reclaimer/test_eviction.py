"""Watermarks, eviction order, hard limits: what goes, when, and what never does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcm.core.errors import CapacityReached, NoStorage
from kvcm.core.types import InstanceGroup, StorageType, TriggerStrategy
from tests.cache.harness import SLOT, Grant, Harness, group

BLOCK = 2 * SLOT


async def made(tmp_path: Path, **limits: Any) -> Harness:
    h = await Harness(root=tmp_path, groups=[group(**limits)]).open()
    await h.register()
    return h


def trigger(percentage: float) -> Any:
    """A change of a group's watermark."""

    def change(old: InstanceGroup) -> InstanceGroup:
        assert old.cache_config is not None
        assert old.cache_config.reclaim_strategy is not None
        reclaim = old.cache_config.reclaim_strategy.model_copy(
            update={"trigger_strategy": TriggerStrategy(used_percentage=percentage)}
        )
        config = old.cache_config.model_copy(update={"reclaim_strategy": reclaim})
        return old.model_copy(update={"cache_config": config})

    return change


async def serving(h: Harness, grants: list[Grant]) -> list[bool]:
    """Which of some one-extent writes still serve their last block."""
    index = h.index()
    out = []
    for grant in grants:
        extent_id = index.sessions.read(grant.session).extent_id
        assert extent_id is not None
        entry = index.book.entries.get(extent_id)
        out.append(entry is not None and entry.phase.name == "SETTLED")
    return out


async def test_the_coldest_go_first_and_only_as_many_as_needed(tmp_path: Path) -> None:
    h = await made(tmp_path, capacity=100 * BLOCK, percentage=0.8)
    grants = []
    for i in range(80):
        grants.append(await h.put([i]))
        h.clock.advance(1)
    await h.round()
    assert all(await serving(h, grants))  # exactly at the mark
    await h.lookup([3])
    grants.append(await h.put([80]))
    await h.round()
    # Over the mark: down to 5 points below it, 3 stays because it was read.
    gone = [i for i, alive in enumerate(await serving(h, grants)) if not alive]
    assert gone == [0, 1, 2, 4, 5, 6]
    await h.rounds(3)
    assert sum(await serving(h, grants)) == 75
    await h.check_counters()
    await h.close()


async def test_the_deepest_go_first_within_one_use(tmp_path: Path) -> None:
    h = await made(tmp_path, capacity=20 * BLOCK, percentage=2.0)
    chain: list[Grant] = []
    for depth in range(1, 11):
        chain.append(await h.put(list(range(depth))))
        h.clock.advance(1)
    assert await h.hits(list(range(10))) == 10
    await h.change_group(trigger(0.3))
    await h.round()
    alive = await serving(h, chain)
    assert alive == sorted(alive, reverse=True)
    assert 0 < sum(alive) <= 6
    assert await h.hits(list(range(10))) == sum(alive)
    await h.close()


async def test_no_surviving_block_becomes_unreachable_by_eviction(tmp_path: Path) -> None:
    """Invariant 6, for many chains that share heads, listed from their first key."""
    h = await made(tmp_path, capacity=60 * BLOCK, percentage=0.7)
    chains: list[list[int]] = []
    for i in range(60):
        head = [1000 + i % 3, 1010 + i % 6]
        chain = head + [5000 + i * 100 + n for n in range(1 + i % 5)]
        chains.append(chain)
        h.clock.advance(1)
        await h.put(chain)
        if i % 4 == 0:
            await h.lookup(chains[i // 2])
        await h.round()
        for known in chains:
            present = [s == "SERVING" for s in await h.statuses(known)]
            assert present == sorted(present, reverse=True), known
        if i == 30:
            await h.restart()
    used = h.manager.usage().groups["default"].counted_bytes
    assert used <= 60 * BLOCK * 0.7
    await h.check_counters()
    await h.close()


async def test_what_a_session_builds_on_is_pinned_until_it_ends(tmp_path: Path) -> None:
    h = await made(tmp_path, capacity=100 * BLOCK)
    mother, child, other = await h.put([1]), await h.put([1, 2]), await h.put([50])
    writer = await h.start([1, 2, 3])
    await h.change_group(trigger(0.0001))
    await h.rounds(3)
    assert await serving(h, [mother, child, other]) == [True, True, False]
    h.fill(writer)
    await h.finish(writer)
    assert await h.hits([1, 2, 3]) == 3
    await h.rounds(3)
    assert await h.hits([1, 2, 3]) == 0
    await h.close()


async def test_pins_end_with_an_expired_session(tmp_path: Path) -> None:
    h = await made(tmp_path, capacity=100 * BLOCK)
    mother = await h.put([1])
    await h.start([1, 2], timeout=5)
    await h.change_group(trigger(0.0001))
    await h.rounds(2)
    assert await serving(h, [mother]) == [True]
    await h.wait(6)
    await h.rounds(2)
    assert await serving(h, [mother]) == [False]
    await h.close()


async def test_blocks_being_written_are_never_evicted(tmp_path: Path) -> None:
    h = await made(tmp_path, capacity=100 * BLOCK)
    writer = await h.start(list(range(50)))
    await h.change_group(trigger(0.0001))
    await h.rounds(5)
    h.fill(writer)
    await h.finish(writer)
    assert await h.hits(list(range(50))) == 50
    await h.close()


async def test_dead_bytes_are_counted_and_never_credit(tmp_path: Path) -> None:
    h = await made(tmp_path, capacity=30 * BLOCK, percentage=0.5)
    for i in range(5):
        await h.put([3 * i, 3 * i + 1, 3 * i + 2])
    # One slot of each three-slot file keeps the whole file.
    await h.remove([k for k in range(15) if k % 3])
    usage = h.manager.usage().groups["default"]
    assert (usage.serving_bytes, usage.dead_bytes) == (5 * BLOCK, 10 * BLOCK)
    await h.put([100])
    await h.rounds(3)
    usage = h.manager.usage().groups["default"]
    assert usage.counted_bytes <= 15 * BLOCK
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_one_excess_is_evicted_once(tmp_path: Path) -> None:
    """The group's mark and its type's mark are crossed by the same bytes."""
    limits = {"capacity": 100 * BLOCK, "types": [(StorageType.NFS, 100 * BLOCK)]}
    h = await made(tmp_path, percentage=0.5, **limits)
    for i in range(51):
        await h.put([i])
    await h.round()
    assert h.manager.usage().groups["default"].serving_blocks == 45
    await h.close()


async def test_the_type_mark_takes_from_its_type(tmp_path: Path) -> None:
    h = await made(
        tmp_path, capacity=1000 * BLOCK, types=[(StorageType.NFS, 10 * BLOCK)], percentage=0.8
    )
    for i in range(9):
        await h.put([i])
    await h.round()
    assert h.manager.usage().groups["default"].serving_blocks == 7
    await h.close()


async def test_the_key_mark_takes_from_the_instance_that_exceeds(tmp_path: Path) -> None:
    h = await made(tmp_path, max_keys=10, percentage=0.5)
    await h.register("i2")
    for i in range(5):
        await h.put([i], "i2")
    for i in range(6):
        await h.put([i])
    await h.round()
    assert await h.statuses(list(range(6))) == ["NOT_FOUND"] * 2 + ["SERVING"] * 4
    assert await h.statuses(list(range(5)), "i2") == ["SERVING"] * 5
    await h.close()


async def test_it_takes_from_the_group_that_exceeds(tmp_path: Path) -> None:
    groups = [group(capacity=10 * BLOCK, percentage=0.5), group("other", capacity=10 * BLOCK)]
    h = await Harness(root=tmp_path, groups=groups).open()
    await h.register()
    await h.register("o1", group_name="other")
    for i in range(5):
        await h.put([i], "o1")
    for i in range(6):
        await h.put([i])
    await h.rounds(3)
    assert h.manager.usage().groups["other"].serving_blocks == 5
    assert h.manager.usage().groups["default"].serving_blocks <= 5
    await h.close()


async def test_usage_returns_below_the_mark_under_any_read_load(tmp_path: Path) -> None:
    """Invariant 7."""
    h = await made(tmp_path, capacity=100 * BLOCK)
    for i in range(50):
        await h.put([i])
    await h.change_group(trigger(0.2))
    for _ in range(5):
        for i in range(50):
            await h.lookup([i])
        await h.round()
    assert h.manager.usage().groups["default"].counted_bytes <= 20 * BLOCK
    await h.close()


@pytest.mark.parametrize("percentage", [1.01, 2.0, 100.0])
async def test_a_percentage_above_one_never_triggers(tmp_path: Path, percentage: float) -> None:
    h = await made(tmp_path, capacity=10 * BLOCK, percentage=percentage, max_keys=10)
    grants = [await h.put([i]) for i in range(10)]
    await h.rounds(3)
    assert all(await serving(h, grants))
    await h.close()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"capacity": 10 * BLOCK}, "QUOTA_GROUP"),
        ({"types": [(StorageType.NFS, 10 * BLOCK)]}, "QUOTA_TYPE"),
        ({"max_keys": 10}, "MAX_KEY_COUNT"),
    ],
)
async def test_a_refused_write_succeeds_soon_after_the_trigger_is_lowered(
    tmp_path: Path, limits: dict[str, Any], reason: str
) -> None:
    h = await made(tmp_path, **limits)
    await h.put(list(range(5)))
    await h.put(list(range(10)))
    with pytest.raises(CapacityReached) as refused:
        await h.start([100])
    assert refused.value.reason == reason
    await h.change_group(trigger(0.5))
    began = h.clock.monotonic()
    while True:
        await h.wait(0.2)
        try:
            grant = await h.start([100])
            break
        except CapacityReached:
            assert h.clock.monotonic() - began < 2
    assert grant.granted == [100]
    assert h.clock.monotonic() - began < 2
    await h.close()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"capacity": 10 * BLOCK}, "QUOTA_GROUP"),
        ({"capacity": 11 * BLOCK - 1}, "QUOTA_GROUP"),
        ({"types": [(StorageType.NFS, 10 * BLOCK)]}, "QUOTA_TYPE"),
        ({"types": [(StorageType.NFS, 11 * BLOCK - 1)]}, "QUOTA_TYPE"),
        ({"max_keys": 10}, "MAX_KEY_COUNT"),
    ],
)
async def test_hard_limits_at_n_and_one_more(
    tmp_path: Path, limits: dict[str, Any], reason: str
) -> None:
    h = await made(tmp_path, **limits)
    exact = await h.put(list(range(9)))
    assert (len(exact.granted), exact.reason) == (9, "")
    cut = await h.start([100, 101, 102])
    assert (cut.granted, cut.reason) == ([100], reason)
    with pytest.raises(CapacityReached) as refused:
        await h.start([103])
    assert refused.value.reason == reason
    assert not isinstance(refused.value, NoStorage)
    await h.finish(cut, [False])  # room is back at once, whoever deletes the bytes when
    assert (await h.start([103])).granted == [103]
    await h.close()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"capacity": 0}, "QUOTA_GROUP"),
        ({"types": [(StorageType.NFS, 0)]}, "QUOTA_TYPE"),
    ],
)
async def test_a_quota_of_nothing_refuses_everything(
    tmp_path: Path, limits: dict[str, Any], reason: str
) -> None:
    h = await made(tmp_path, percentage=0.8, **limits)
    with pytest.raises(CapacityReached) as refused:
        await h.start([1])
    assert refused.value.reason == reason
    assert (await h.start([])).granted == []
    await h.close()


async def test_a_type_without_an_entry_is_bound_by_the_group_only(tmp_path: Path) -> None:
    h = await made(tmp_path, capacity=5 * BLOCK, types=[(StorageType.HF3FS, 0)])
    assert len((await h.put(list(range(7)))).granted) == 5
    await h.close()


async def test_writers_side_by_side_use_the_whole_quota_and_never_more(tmp_path: Path) -> None:
    import asyncio

    h = await Harness(root=tmp_path, groups=[group(capacity=40 * BLOCK)], turns=3).open()
    await h.register()

    async def write(number: int) -> int:
        try:
            return len((await h.start([number * 100 + n for n in range(10)])).granted)
        except CapacityReached:
            return 0

    granted = await asyncio.gather(*(write(n) for n in range(8)))
    assert sum(granted) == 40
    assert h.manager.usage().groups["default"].open_bytes == 40 * BLOCK
    await h.check_counters()
    await h.close()


async def test_without_storage_writes_fail_and_nothing_is_evicted(tmp_path: Path) -> None:
    """R33."""
    h = await made(tmp_path, capacity=100 * BLOCK, percentage=0.5)
    grants = [await h.put([i]) for i in range(50)]
    await h.registry.set_storage_enabled("nfs_01", False)
    h.backends.follow(h.registry.view)
    for i in range(1000):
        with pytest.raises(NoStorage) as refused:
            await h.start([1000 + i])
        assert refused.value.reason == "NO_STORAGE"
        if i % 100 == 0:
            await h.wait(1)
    assert await h.hits([1]) == 0  # not readable now
    assert all(await serving(h, grants))
    await h.registry.set_storage_enabled("nfs_01", True)
    h.backends.follow(h.registry.view)
    assert await h.hits([1]) == 1
    await h.check_counters()
    await h.close()


async def test_a_quota_below_the_usage_refuses_and_drains(tmp_path: Path) -> None:
    h = await made(tmp_path, capacity=100 * BLOCK, percentage=0.9)
    for i in range(50):
        await h.put([i])
    await h.change_group(
        lambda g: g.model_copy(
            update={"quota": g.quota.model_copy(update={"capacity": 20 * BLOCK})}  # type: ignore[union-attr]
        )
    )
    with pytest.raises(CapacityReached):
        await h.start([100])
    await h.wait(0.2)
    assert h.manager.usage().groups["default"].counted_bytes <= 18 * BLOCK
    assert (await h.start([100])).granted == [100]
    await h.close()


async def test_the_order_survives_a_restart(tmp_path: Path) -> None:
    h = await made(tmp_path, capacity=100 * BLOCK)
    grants = []
    for i in range(20):
        grants.append(await h.put([i]))
        h.clock.advance(1)
    await h.lookup([0])
    await h.rounds(1)
    await h.crash()
    await h.change_group(trigger(0.15))
    await h.rounds(2)
    assert await serving(h, grants) == [True] + [False] * 10 + [True] * 9
    await h.close()


async def test_an_extent_whose_record_is_lost_does_not_stop_eviction(tmp_path: Path) -> None:
    from kvcm.metaindex.ids import home_shard
    from kvcm.metaindex.store import Table

    h = await made(tmp_path, capacity=10 * BLOCK)
    grants = [await h.put([i]) for i in range(10)]
    index = h.index()
    extent_id = index.sessions.read(grants[0].session).extent_id
    assert extent_id is not None
    shard = index.shards.id(home_shard(extent_id))
    h.inner._shards[shard].tables[Table.STATES][extent_id] = b"rubbish"  # type: ignore[attr-defined]
    await h.change_group(trigger(0.5))
    await h.rounds(2)
    assert h.manager.usage().groups["default"].counted_bytes <= 5 * BLOCK
    assert await h.hits([9]) == 1
    await h.close()
