"""What is read or given up before an index is loaded, or its storage open, does no lasting harm."""

from __future__ import annotations

from typing import Any

import pytest

from kvcm.cache.scan import Scan
from kvcm.core.health import HealthState
from kvcm.reclaimer.base import retire_with
from tests.cache.harness import Harness


async def unloaded(h: Harness) -> None:
    """Start another manager whose loops have not run yet."""

    async def no_rounds(_count: int = 0) -> None:
        return None

    real, h.rounds = h.rounds, no_rounds  # type: ignore[method-assign, assignment]
    await h.crash()
    h.rounds = real  # type: ignore[method-assign]
    assert not h.index().loaded


async def test_what_was_looked_up_before_loading_counts_as_written(harness: Harness) -> None:
    h = harness
    grant = await h.put([1, 2, 3])
    await unloaded(h)
    assert await h.lookup([1, 2, 3]) == grant.locations
    await h.rounds()
    assert (await h.start([1, 2, 3, 4])).granted == [4]
    assert await h.lookup([1, 2, 3]) == grant.locations


async def test_what_was_looked_up_before_loading_is_stamped_by_later_reads(
    harness: Harness,
) -> None:
    h = harness
    first, second = await h.put([1]), await h.put([2])
    await unloaded(h)
    await h.lookup([1])
    await h.rounds()
    h.clock.advance(5)
    await h.lookup([1])
    index = h.index()
    order = [e.extent_id for e in index.book.order.coldest(10)]
    expected = [index.sessions.read(g.session).extent_id for g in (second, first)]
    assert order == expected


async def test_finishing_and_removing_before_loading_is_known_after_it(harness: Harness) -> None:
    h = harness
    await h.put([1, 2])
    flying = await h.start([3])
    h.fill(flying)
    await unloaded(h)
    await h.finish(flying)
    await h.remove([1])
    await h.rounds()
    await h.check_counters()
    assert await h.statuses([1, 2, 3]) == ["NOT_FOUND", "SERVING", "SERVING"]
    await h.drain()
    await h.check_rest()


def take_storage_away(h: Harness) -> Any:
    """As if its open had not succeeded yet; returns what brings it back."""
    slot = h.backends._slots["nfs_01"]
    backend, slot.backend, slot.state = slot.backend, None, HealthState.UNAVAILABLE

    def back() -> None:
        slot.backend, slot.state = backend, HealthState.AVAILABLE

    return back


async def test_blocks_are_found_once_their_storage_opens(harness: Harness) -> None:
    h = harness
    grant = await h.put([1, 2, 3])
    await h.crash()
    back = take_storage_away(h)
    assert await h.hits([1, 2, 3]) == 0
    await h.statuses([1])
    back()
    assert await h.lookup([1, 2, 3]) == grant.locations
    assert (await h.start([1, 2, 3])).granted == []


@pytest.mark.parametrize("cold", [False, True])
async def test_blocks_given_up_while_their_storage_is_not_open_leak_nothing(
    harness: Harness, cold: bool
) -> None:
    h = harness
    await h.put([1, 2, 3, 4])
    await h.put([10])
    flying = await h.start([20, 21], timeout=5)
    h.fill(flying)
    if cold:
        await h.crash()
    back = take_storage_away(h)
    await h.trim()
    await h.wait(6)
    await h.wait(30)
    back()
    await h.drain()
    await h.check_rest()
    assert not h.files()


async def test_a_block_evicted_while_a_start_looks_is_granted(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the new blocks would follow a hole, for ever unreachable."""
    h = harness
    await h.put([1, 2])
    index = h.index()
    real = Scan.run

    async def run(self: Scan, *args: Any) -> None:
        await real(self, *args)
        for entry in list(index.book.entries.values()):
            await index.change(entry.extent_id, retire_with(index))

    monkeypatch.setattr(Scan, "run", run)
    grant = await h.start([1, 2, 3])
    assert grant.granted == [1, 2, 3]
    h.fill(grant)
    await h.finish(grant)
    assert await h.hits([1, 2, 3]) == 3


async def test_a_cache_smaller_than_one_answer_still_finds_everything(harness: Harness) -> None:
    h = harness
    h.settings = type(h.settings)(read_cache_bytes=1000, grace_s_min=h.settings.grace_s_min)
    await h.restart()
    for start in range(0, 100, 10):
        await h.put(list(range(start + 10)))
    keys = list(range(100))
    assert await h.hits(keys) == 100
    assert len(await h.lookup(keys, query=1)) == 100
    assert (await h.start(keys)).granted == []
