"""What watchers are told: exactly what happened, once each."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcm.core.errors import CapacityReached, KvcmError
from kvcm.core.keys import KeyBatch, array_of
from kvcm.core.mask import BlockMask
from kvcm.core.types import QueryType, ReclaimPolicy, TrimStrategy
from kvcm.metaindex.events import (
    BlocksRemoved,
    Cleared,
    Event,
    LookedUp,
    Reason,
    WriteFinished,
    WriteRefused,
    WriteStarted,
)
from kvcm.testing.faults import Fault, at_random, no_faults
from tests.cache.harness import SLOT, Harness, group

BLOCK = 2 * SLOT


def watched(harness: Harness) -> list[Event]:
    """Everything that happens from now on."""
    seen: list[Event] = []
    harness.manager.watchers.append(seen.append)
    return seen


def ints(raw: bytes) -> list[int]:
    return array_of(raw).tolist()


def wanted(event: LookedUp) -> list[int]:
    return array_of(KeyBatch(event.wanted.form, event.wanted.data[event.at :]).raw()).tolist()


def of(seen: Sequence[Event], kind: type[Event]) -> list[Event]:
    return [event for event in seen if isinstance(event, kind)]


@pytest.mark.parametrize("packed", [False, True])
async def test_a_prefix_lookup_tells_what_the_client_lacked_and_what_of_it_was_found(
    harness: Harness, packed: bool
) -> None:
    await harness.put([1, 2, 3])
    seen = watched(harness)
    await harness.lookup([1, 2, 3, 4], packed=packed)
    await harness.lookup([1, 2, 3, 4], packed=packed, mask=BlockMask(offset=1))
    await harness.lookup([1, 9, 2, 4], packed=packed, mask=BlockMask(values=[False, True]))
    told = [event for event in seen if isinstance(event, LookedUp)]
    assert [(wanted(e), e.blocks, e.hits) for e in told] == [
        ([1, 2, 3, 4], 4, 3),
        ([2, 3, 4], 3, 2),
        ([1, 2, 4], 3, 2),
    ]
    assert [ints(e.batch.raw()) for e in told] == [[1, 2, 3, 4], [1, 2, 3, 4], [1, 9, 2, 4]]
    assert len(seen) == 3


async def test_other_lookups_count_the_keys_that_were_answered(harness: Harness) -> None:
    await harness.put([1, 2, 3])
    seen = watched(harness)
    await harness.lookup([1, 7, 3], query=QueryType.BATCH_GET)
    await harness.lookup([1, 2, 3, 7], query=QueryType.REVERSE_ROLL_SW_MATCH, sw=2)
    assert [(e.query, e.blocks, e.hits, e.sw_size) for e in seen if isinstance(e, LookedUp)] == [
        (QueryType.BATCH_GET, 3, 2, 0),
        (QueryType.REVERSE_ROLL_SW_MATCH, 4, 2, 2),
    ]


async def test_a_prefix_that_ends_at_a_storage_that_is_away_is_told_from_a_miss(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.put([1, 2])
    seen = watched(harness)
    await harness.hits([1, 2])
    await harness.hits([1, 2, 3])
    await harness.hits([3])
    monkeypatch.setattr(harness.backends, "available", lambda name: False)
    await harness.hits([1, 2, 3])
    await harness.hits([3])
    told = [(e.hits, e.unreadable) for e in seen if isinstance(e, LookedUp)]
    assert told == [(2, False), (2, False), (0, False), (0, True), (0, False)]


async def test_a_session_is_told_from_its_start_to_its_end(harness: Harness) -> None:
    seen = watched(harness)
    await harness.put([1, 2])
    grant = await harness.start([1, 2, 3, 4, 5])
    await harness.finish(grant, [True, False, True])
    await harness.finish(grant, [True, False, True])
    nothing = await harness.start([1, 2])
    await harness.finish(nothing)
    _, _, start, end, empty = seen
    assert isinstance(start, WriteStarted)
    assert (ints(start.asked), ints(start.granted)) == ([1, 2, 3, 4, 5], [3, 4, 5])
    assert (start.size, start.mask, start.storage) == (3 * BLOCK, BlockMask(offset=2), "nfs_01")
    assert isinstance(end, WriteFinished)
    assert (end.session_id, end.how) == (grant.session, Reason.FINISHED)
    assert start.session_id == grant.session
    assert (ints(end.keys), end.success, end.published) == ([3, 4, 5], 0b101, 0b101)
    assert (end.size, end.published_size, end.failed_size) == (3 * BLOCK, 2 * BLOCK, BLOCK)
    assert isinstance(empty, WriteStarted)
    assert (empty.granted, empty.size, empty.session_id) == (b"", 0, nothing.session)


async def test_a_session_that_runs_out_and_one_whose_client_is_gone(harness: Harness) -> None:
    seen = watched(harness)
    await harness.start([1], timeout=5)
    grant = await harness.start([2], timeout=500)
    await harness.manager.abandon("i1", grant.session)
    await harness.wait(6)
    ends = [e for e in seen if isinstance(e, WriteFinished)]
    assert [(ints(e.keys), e.how, e.failed_size) for e in ends] == [
        ([2], Reason.ABANDONED, BLOCK),
        ([1], Reason.EXPIRED, BLOCK),
    ]


async def test_a_finish_that_comes_too_late_is_an_expiry(harness: Harness) -> None:
    seen = watched(harness)
    grant = await harness.start([1], timeout=5)
    harness.clock.advance(6)
    with pytest.raises(KvcmError):
        await harness.finish(grant)
    assert [e.how for e in seen if isinstance(e, WriteFinished)] == [Reason.EXPIRED]


async def test_what_a_quota_cuts_is_told_with_its_keys(tmp_path: Path) -> None:
    h = await Harness(root=tmp_path, groups=[group(capacity=2 * BLOCK)]).open()
    await h.register()
    seen = watched(h)
    await h.put([1, 2, 3])
    with pytest.raises(CapacityReached):
        await h.start([1, 4, 5])
    told = [e for e in seen if isinstance(e, WriteRefused)]
    assert [(e.reason, ints(e.keys), e.whole) for e in told] == [
        ("QUOTA_GROUP", [3], False),
        ("QUOTA_GROUP", [4, 5], True),
    ]
    assert len(of(seen, WriteStarted)) == 1
    await h.close()


async def test_an_eviction_names_its_keys_and_the_policy(tmp_path: Path) -> None:
    low = group(capacity=4 * BLOCK, percentage=0.75, low=0.5)
    h = await Harness(root=tmp_path, groups=[low]).open()
    await h.register()
    await h.put([1, 2])
    h.clock.advance(1)
    await h.put([3])
    seen = watched(h)
    h.clock.advance(1)
    await h.put([4])
    await h.rounds()
    (gone,) = of(seen, BlocksRemoved)
    assert isinstance(gone, BlocksRemoved)
    assert (gone.reason, ints(gone.keys), gone.blocks) == (Reason.EVICTED, [1, 2], 2)
    assert (gone.size, gone.policy, gone.storage) == (2 * BLOCK, ReclaimPolicy.LRU, "nfs_01")
    await h.close()


async def test_removing_takes_out_of_what_serves_and_of_what_is_written(harness: Harness) -> None:
    await harness.put([1, 2, 3])
    grant = await harness.start([7, 8])
    seen = watched(harness)
    await harness.remove([2, 7, 99])
    await harness.finish(grant)
    first, second = sorted(
        (e for e in seen if isinstance(e, BlocksRemoved)), key=lambda e: e.was_open
    )
    assert (ints(first.keys), first.was_open, first.reason) == ([2], False, Reason.REMOVED)
    assert (ints(second.keys), second.was_open, second.size) == ([7], True, BLOCK)
    (end,) = of(seen, WriteFinished)
    assert isinstance(end, WriteFinished)
    assert (end.held, end.success, end.published, end.size) == (0b10, 0b11, 0b10, BLOCK)
    assert end.failed_size == 0


async def test_a_trim_is_told_at_once_and_its_blocks_when_they_are_freed(harness: Harness) -> None:
    await harness.put([1, 2])
    seen = watched(harness)
    await harness.trim(TrimStrategy.REMOVE_ALL_CACHE)
    assert [type(e) for e in seen] == [Cleared]
    await harness.rounds()
    gone = seen[1]
    assert isinstance(gone, BlocksRemoved)
    assert (gone.reason, ints(gone.keys), len(seen)) == (Reason.TRIMMED, [1, 2], 2)


async def test_a_removed_instance_is_told_once(harness: Harness) -> None:
    await harness.put([1])
    seen = watched(harness)
    await harness.manager.remove_instance("i1", None)
    await harness.wait(30, step=5)
    cleared, gone = seen
    assert isinstance(cleared, Cleared)
    assert isinstance(gone, BlocksRemoved)
    assert (cleared.reason, gone.reason) == (Reason.INSTANCE, Reason.INSTANCE)
    assert cleared.instance.instance_id == "i1"


async def test_a_watcher_that_fails_does_not_fail_the_call(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("broken")

    harness.manager.watchers.append(broken)
    seen = watched(harness)
    await harness.put([1])
    assert await harness.hits([1]) == 1
    assert len(seen) == 3
    assert "a watcher failed" in caplog.text


@pytest.mark.parametrize("seed", range(3))
async def test_with_a_store_of_unknown_outcomes_every_byte_is_told_once(
    tmp_path: Path, seed: int
) -> None:
    """What was published and removed adds up to what serves, whatever the store answers."""
    h = await Harness(root=tmp_path, groups=[group(capacity=60 * BLOCK, percentage=0.5)]).open()
    await h.register()
    seen = watched(h)
    chance = random.Random(seed)
    h.store.plan = at_random(seed, 0.08, [Fault.UNKNOWN_DONE, Fault.UNKNOWN_LOST])
    for _ in range(40):
        start = chance.randrange(200)
        try:
            grant = await h.start(range(start, start + chance.randrange(1, 9)), timeout=60)
            if chance.random() < 0.8:
                await h.finish(grant, [chance.random() < 0.9 for _ in grant.granted])
            if chance.random() < 0.2:
                await h.remove(range(start, start + 2))
        except KvcmError:
            pass
        await h.wait(chance.random() * 20)
    h.store.plan = no_faults
    await h.drain()
    serving = 0
    started, ended = Counter[str](), Counter[str]()
    for event in seen:
        if isinstance(event, WriteStarted) and event.granted:
            started[event.session_id] += 1
        elif isinstance(event, WriteFinished):
            ended[event.session_id] += 1
            serving += event.published_size
        elif isinstance(event, BlocksRemoved) and not event.was_open:
            serving -= event.size
    assert serving == h.manager.shared.ledger.group("default").serving_bytes
    assert set((started | ended).values()) == {1}
    # A start whose client got an error, because nobody knew whether it happened, may end all the
    # same.
    assert started <= ended
    assert len(of(seen, BlocksRemoved)) > 5
    await h.close()
