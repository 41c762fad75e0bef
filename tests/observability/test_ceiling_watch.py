"""Why blocks are missed, told by the events of a real cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kvcm.core.errors import CapacityReached, NoStorage
from kvcm.core.mask import BlockMask
from kvcm.core.types import QueryType, StorageConfig, StorageType
from kvcm.observability.ceiling import Ceilings
from kvcm.observability.ceiling_report import WindowReport
from kvcm.observability.ceiling_watch import CeilingWatcher, capacities
from kvcm.observability.windows import DAY
from tests.cache.harness import SLOT, UNLIMITED, Harness, group

BLOCK = 2 * SLOT


class Watched:
    """A cache whose lookups and writes are counted."""

    def __init__(self, harness: Harness) -> None:
        self.cache = harness
        self.ceilings = Ceilings(harness.clock)
        view = harness.registry.view
        self.ceilings.follow(
            view.cluster_uid,
            {i.uid: (i.instance_id, i.instance_group) for i in view.instances.values()},
            capacities(view.groups.values(), view.storages),
        )
        harness.manager.watchers.append(CeilingWatcher(self.ceilings))

    async def window(self) -> WindowReport:
        report = await self.ceilings.refresh()
        found = next(s for s in report.scopes if s.instance == "i1")
        return next(w for w in found.windows if w.window == DAY)

    async def missed(self, keys: Sequence[int]) -> dict[str, int]:
        """The causes of what one more lookup does not find."""
        before = await self.window()
        await self.cache.hits(keys)
        after = await self.window()
        assert after.is_exact
        causes = {c: n - before.misses[c] for c, n in after.misses.items()}
        return {cause: count for cause, count in causes.items() if count}


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    # Ten blocks, five of them below the mark.
    groups = (group(capacity=10 * BLOCK, percentage=0.55),)
    harness = await Harness(root=tmp_path, groups=groups, grace_s=0, timeout_max_s=60).open()
    await harness.register()
    made = Watched(harness)
    await harness.hits([1000])
    yield made
    await harness.close()


async def test_what_was_asked_for_and_found_is_counted_as_the_client_saw_it(
    watched: Watched,
) -> None:
    cache = watched.cache
    await cache.put([1, 2, 3])
    assert len(await cache.lookup([1, 2, 3, 4], packed=True)) == 3
    assert len(await cache.lookup([1, 2, 3, 4], mask=BlockMask(offset=2))) == 1
    assert len(await cache.lookup([1, 2, 3], mask=BlockMask(values=(True, False, True)))) == 0 + 1
    # No prefix lookups: they tell of parts of prompts.
    await cache.lookup([1, 2, 9], query=QueryType.BATCH_GET)
    await cache.lookup([1, 2, 3], query=QueryType.REVERSE_ROLL_SW_MATCH, sw=1)
    found = await watched.window()
    assert (found.requests, found.blocks, found.hits) == (1 + 3, 1 + 4 + 2 + 1, 3 + 1 + 1)
    assert found.misses["new"] == 2
    assert found.misses["never_written"] == 1


async def test_each_cause_is_told(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = watched.cache
    assert await watched.missed([1, 2]) == {"new": 2}
    assert await watched.missed([1, 2]) == {"never_written": 2}
    grant = await cache.start([1, 2])
    assert await watched.missed([1, 2]) == {"unfinished": 2}
    cache.fill(grant)
    await cache.finish(grant, [True, False])
    assert await watched.missed([1, 2]) == {"unfinished": 1}
    await cache.put([1, 2])
    assert await watched.missed([1, 2]) == {}
    with monkeypatch.context() as patched:
        patched.setattr(cache.backends, "available", lambda name: False)
        assert await watched.missed([1, 2]) == {"storage_unavailable": 2}
    await cache.remove([1])
    assert await watched.missed([1, 2]) == {"removed": 1, "unreachable": 1}
    await cache.put([1])
    assert await watched.missed([1, 2]) == {}
    await cache.wait(2)
    await cache.trim()
    assert await watched.missed([1, 2]) == {"removed": 2}


async def test_a_session_that_runs_into_its_time_out_leaves_unfinished_blocks(
    watched: Watched,
) -> None:
    await watched.cache.start([1, 2], timeout=5)
    await watched.cache.wait(30)
    assert await watched.missed([1, 2]) == {"unfinished": 2}


async def test_evicted_blocks_tell_how_much_space_would_have_kept_them(watched: Watched) -> None:
    cache = watched.cache
    for first in (1, 3, 5, 7):
        await cache.put([first, first + 1])
        await cache.wait(1)
    await cache.rounds()
    assert await cache.hits([1, 2]) == 0
    assert await watched.missed([1, 2]) == {"evicted": 2}
    found = await watched.window()
    assert found.evicted_ages["1m"] == found.misses["evicted"] == found.space[-1].hits


async def test_refusals_tell_what_refused(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = watched.cache
    held = await cache.start(list(range(1, 9)))
    grant = await cache.start([20, 21, 22, 23])
    assert len(grant.granted) == 2
    assert await watched.missed([20, 21, 22, 23]) == {"unfinished": 2, "refused_quota": 2}
    with pytest.raises(CapacityReached):
        await cache.start([30])
    assert await watched.missed([30]) == {"refused_quota": 1}
    monkeypatch.setattr(cache.backends, "writable", lambda name: False)
    with pytest.raises(NoStorage):
        await cache.start([40])
    assert await watched.missed([40]) == {"storage_unavailable": 1}
    await cache.finish(held)


def test_a_group_may_hold_what_its_quota_and_its_storages_allow() -> None:
    storage = StorageConfig(
        global_unique_name="s", type=StorageType.NFS, capacity_bytes=70, spec={"root_path": "/s"}
    )
    groups = [
        group("quota", capacity=50, storages=["s"]),
        group("storage", storages=["s"]),
        group("larger", storages=["s", "unlimited"]),
        group("none").model_copy(update={"quota": None}),
    ]
    assert capacities(groups, {"s": storage}) == {
        "quota": 50,
        "storage": 70,
        "larger": UNLIMITED,
        "none": None,
    }
