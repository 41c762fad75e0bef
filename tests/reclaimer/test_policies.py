"""Policies and whole prefixes through the real service: no surviving block behind a hole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcm.core.types import (
    CacheReclaimStrategy,
    InstanceGroup,
    ReclaimPolicy,
    TriggerStrategy,
    TtlSince,
)
from tests.cache.harness import SLOT, Grant, Harness, group

BLOCK = 2 * SLOT
POLICIES = [ReclaimPolicy.LRU, ReclaimPolicy.LFU, ReclaimPolicy.TTL]


def reclaim(percentage: float = 2.0, **changes: Any) -> Any:
    """A change of a group's reclaim strategy."""

    def change(old: InstanceGroup) -> InstanceGroup:
        assert old.cache_config is not None
        strategy = old.cache_config.reclaim_strategy or CacheReclaimStrategy()
        trigger = TriggerStrategy(used_percentage=percentage)
        changed = strategy.model_copy(update={"trigger_strategy": trigger, **changes})
        config = old.cache_config.model_copy(update={"reclaim_strategy": changed})
        return old.model_copy(update={"cache_config": config})

    return change


async def made(tmp_path: Path, policy: ReclaimPolicy, **changes: Any) -> Harness:
    h = await Harness(root=tmp_path, groups=[group(capacity=100 * BLOCK)]).open()
    await h.register()
    await h.change_group(reclaim(reclaim_policy=policy, **changes))
    await h.round()
    return h


async def survivors(h: Harness, chain: Sequence[int]) -> int:
    """How many blocks of a chain are left; they are its first ones."""
    present = [s != "NOT_FOUND" for s in await h.statuses(list(chain))]
    assert present == sorted(present, reverse=True), (chain, present)
    return sum(present)


async def shrink(h: Harness, policy: ReclaimPolicy, chains: Sequence[Sequence[int]]) -> None:
    """Evict down to nothing in small steps; every chain keeps a prefix all the way."""
    left = h.manager.usage().groups["default"].counted_bytes // BLOCK
    while left > 0:
        left -= 1
        await h.change_group(
            reclaim(
                max(left, 0.5) / 100, reclaim_policy=policy, low_percentage=max(left, 0.5) / 100
            )
        )
        await h.round()
        for chain in chains:
            length = await survivors(h, chain)
            if length:
                assert await h.hits(list(chain)) == length
        left = min(left, h.manager.usage().groups["default"].counted_bytes // BLOCK)
    for chain in chains:
        assert await survivors(h, chain) == 0
    await h.check_counters()


async def branching(h: Harness) -> list[list[int]]:
    chains = [[1, 2, 3, 4], [1, 2, 30, 40, 50], [1, 20, 21], [1, 2, 3, 99]]
    for chain in chains:
        await h.put(chain)
        h.clock.advance(1)
    for _ in range(3):
        await h.lookup([1, 20, 21])
    return chains


async def refilled_gap(h: Harness) -> list[list[int]]:
    """Block 2 is removed and written again, by a request that lists what follows it."""
    await h.put([1])
    await h.put([1, 2])
    await h.put([1, 2, 3, 4])
    for _ in range(5):
        await h.lookup([1, 2, 3, 4])
    await h.remove([2])
    assert (await h.put([1, 2, 3, 4])).granted == [2]
    return [[1, 2, 3, 4]]


async def refilled_by_a_shorter_request(h: Harness) -> list[list[int]]:
    """Nobody has listed what follows the new block 2."""
    await h.put([1])
    await h.put([1, 2])
    await h.put([1, 2, 3, 4])
    for _ in range(5):
        await h.lookup([1, 2, 3, 4])
    await h.remove([2])
    h.clock.advance(1)
    assert (await h.put([1, 2])).granted == [2]
    return [[1, 2, 3, 4]]


async def refilled_inside_an_extent(h: Harness) -> list[list[int]]:
    """One extent holds 1, 2 and 3; block 2 is removed and written again by a shorter request."""
    await h.put([1, 2, 3])
    await h.put([1, 2, 3, 4])
    for _ in range(5):
        await h.lookup([1, 2, 3, 4])
    await h.remove([2])
    assert (await h.put([1, 2])).granted == [2]
    return [[1, 2, 3, 4]]


async def interleaved(h: Harness) -> list[list[int]]:
    """A holds blocks 0 and 2, B holds 1 and 3."""
    chain = [10, 11, 12, 13]
    await h.put(chain[:1])
    await h.put(chain[:2])
    await h.remove(chain[:1])
    assert (await h.put(chain[:3])).granted == [10, 12]
    await h.remove([11])
    assert (await h.put(chain)).granted == [11, 13]
    await h.put([*chain, 14])
    for _ in range(4):
        await h.lookup([*chain, 14])
    return [[*chain, 14]]


async def many_requests(h: Harness) -> list[list[int]]:
    for length in range(1, 12):
        await h.put(list(range(length)))
        h.clock.advance(1)
    return [list(range(11))]


async def masked_prefixes(h: Harness) -> list[list[int]]:
    """The engine masks what it has: only the tail is looked up, again and again."""
    from kvcm.core.mask import BlockMask

    chain = list(range(8))
    for length in (2, 4, 6, 8):
        await h.put(chain[:length])
    await h.put([100])
    for _ in range(5):
        h.clock.advance(1)
        await h.lookup(chain, mask=BlockMask(offset=6))
    return [chain, [100]]


SHAPES = [
    branching,
    refilled_gap,
    refilled_by_a_shorter_request,
    refilled_inside_an_extent,
    interleaved,
    many_requests,
    masked_prefixes,
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.__name__)
async def test_eviction_keeps_prefixes_whole(
    tmp_path: Path, shape: Any, policy: ReclaimPolicy, restarted: bool
) -> None:
    h = await made(tmp_path, policy)
    chains = await shape(h)
    await h.rounds(2)
    if restarted:
        await h.crash()
    await shrink(h, policy, chains)
    await h.close()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
async def test_an_open_session_holds_what_it_extends(tmp_path: Path, policy: ReclaimPolicy) -> None:
    h = await made(tmp_path, policy)
    await h.put([1])
    await h.put([1, 2])
    await h.put([7])
    flying = await h.start([1, 2, 3])
    await h.change_group(reclaim(0.0001, reclaim_policy=policy))
    await h.rounds(2)
    assert await h.hits([1, 2]) == 2
    assert await h.hits([7]) == 0
    h.fill(flying)
    await h.finish(flying)
    assert await h.hits([1, 2, 3]) == 3
    await h.rounds(3)
    assert await survivors(h, [1, 2, 3]) == 0
    await h.close()


async def test_what_is_read_often_stays_under_lfu_also_after_a_restart(tmp_path: Path) -> None:
    h = await made(tmp_path, ReclaimPolicy.LFU)
    await h.put([1])
    await h.put([2])
    for _ in range(6):
        await h.lookup([1])
    h.clock.advance(5)
    await h.lookup([2])
    await h.rounds(2)
    await h.crash()
    await h.change_group(reclaim(0.01, reclaim_policy=ReclaimPolicy.LFU, low_percentage=0.01))
    await h.rounds(2)
    assert (await h.hits([1]), await h.hits([2])) == (1, 0)
    await h.close()


@pytest.mark.parametrize(("since", "left"), [(TtlSince.USE, 1), (TtlSince.FINISH, 0)])
async def test_ttl_expires_by_itself_below_every_mark(
    tmp_path: Path, since: TtlSince, left: int
) -> None:
    h = await made(tmp_path, ReclaimPolicy.TTL, ttl_seconds=60, ttl_since=since)
    await h.put([1])
    await h.put([2, 3])
    await h.put([2, 3, 4])
    await h.wait(59)
    assert await h.hits([2, 3, 4]) == 3
    await h.wait(2, step=1)
    assert await survivors(h, [1]) == 0
    assert await survivors(h, [2, 3, 4]) == 3 * left
    await h.wait(60, step=5)
    assert await survivors(h, [2, 3, 4]) == 0
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_ttl_waits_for_what_builds_on_the_old(tmp_path: Path) -> None:
    h = await made(tmp_path, ReclaimPolicy.TTL, ttl_seconds=60, ttl_since=TtlSince.FINISH)
    await h.put([1])
    h.clock.advance(40)
    await h.put([1, 2])
    await h.wait(30, step=5)
    assert await survivors(h, [1, 2]) == 2
    await h.wait(31, step=1)
    assert await survivors(h, [1, 2]) == 0
    await h.close()


async def test_another_policy_takes_over_without_a_restart(tmp_path: Path) -> None:
    h = await made(tmp_path, ReclaimPolicy.LRU)
    grants: list[Grant] = []
    for key in range(4):
        grants.append(await h.put([key]))
        h.clock.advance(1)
    await h.change_group(reclaim(reclaim_policy=ReclaimPolicy.LFU))
    await h.round()
    for _ in range(3):
        await h.lookup([1])
    h.clock.advance(1)
    await h.lookup([0])
    await h.change_group(reclaim(0.01, reclaim_policy=ReclaimPolicy.LFU, low_percentage=0.01))
    await h.round()
    assert [await h.hits([key]) for key in range(4)] == [0, 1, 0, 0]
    await h.close()
