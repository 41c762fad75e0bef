"""FaultyStore fails as planned, and only so."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcm.core.errors import OutcomeUnknown, StaleFence, Unavailable
from kvcm.metaindex.store import Fence, KVStore, ShardCommit, ShardId, Table
from kvcm.metaindex.stores.memory import MemoryStore
from kvcm.testing.contracts.kvstore import FENCE, KVStoreContract, claim, get, puts
from kvcm.testing.faults import Crash, Fault, FaultyStore, Op, at_random, script

SHARDS = [ShardId(b"space", number) for number in range(3)]
COMMITS = [ShardCommit(shard, FENCE, [puts({b"k": b"1"})]) for shard in SHARDS]


class TestFaultyStoreWithoutFaults(KVStoreContract):
    persistent = False

    def make_store(self, directory: Path) -> KVStore:
        return FaultyStore(MemoryStore(), turns=2)


async def faulty(*faults: tuple[Op, int, Fault]) -> FaultyStore:
    store = FaultyStore(MemoryStore(), script(faults))
    await store.store.claim(SHARDS, FENCE)
    return store


async def written(store: FaultyStore) -> list[bool]:
    got = await store.store.get_many([(shard, [b"k"]) for shard in SHARDS], Table.ROWS)
    return [values == [b"1"] for values in got]


@pytest.mark.parametrize(
    "fault, error, is_done",
    [
        (Fault.UNAVAILABLE, Unavailable, False),
        (Fault.UNKNOWN_LOST, OutcomeUnknown, False),
        (Fault.UNKNOWN_DONE, OutcomeUnknown, True),
        (Fault.STALE, StaleFence, False),
    ],
)
async def test_a_fault_strikes_one_shard_of_a_commit(
    fault: Fault, error: type[Exception], is_done: bool
) -> None:
    store = await faulty((Op.COMMIT, 2, fault))
    results = await store.commit(COMMITS)
    assert [type(result.error) for result in results] == [type(None), error, type(None)]
    assert await written(store) == [True, is_done, True]
    assert store.injected == [(Op.COMMIT, 2, fault)]
    assert store.calls[Op.COMMIT] == 3


@pytest.mark.parametrize("fault, is_done", [(Fault.CRASH_BEFORE, False), (Fault.CRASH_AFTER, True)])
async def test_a_crash_stops_everything_until_the_restart(fault: Fault, is_done: bool) -> None:
    store = await faulty((Op.COMMIT, 2, fault))
    with pytest.raises(Crash):
        await store.commit(COMMITS)
    with pytest.raises(Crash):
        await get(store, SHARDS[0], b"k")
    assert await written(store) == [True, is_done, False]
    store.restart()
    assert await get(store, SHARDS[0], b"k") == [b"1"]


async def test_a_claim_with_unknown_outcome_may_hold() -> None:
    store = await faulty((Op.CLAIM, 1, Fault.UNKNOWN_DONE), (Op.CLAIM, 2, Fault.UNKNOWN_LOST))
    higher = Fence(FENCE.epoch, FENCE.n + 1)
    answers = await store.claim(SHARDS[:2], higher)
    assert [type(answer) for answer in answers] == [OutcomeUnknown] * 2
    (first,) = await store.claim(SHARDS[:1], higher)
    assert isinstance(first, StaleFence)
    await claim(store, SHARDS[1], higher)


async def test_failed_reads_and_drops_raise() -> None:
    store = await faulty(
        (Op.READ, 1, Fault.UNKNOWN_DONE),
        (Op.READ, 3, Fault.UNAVAILABLE),
        (Op.DROP, 1, Fault.UNKNOWN_DONE),
    )
    await store.commit(COMMITS)
    with pytest.raises(Unavailable):
        await get(store, SHARDS[0], b"k")
    pages = store.scan(SHARDS[0], Table.ROWS)
    assert await anext(pages) == [(b"k", b"1")]
    with pytest.raises(Unavailable):
        await anext(pages)
    with pytest.raises(OutcomeUnknown):
        await store.drop(SHARDS[0])
    assert await written(store) == [False, True, True]


def test_random_plans_repeat_with_their_seed_and_keep_their_rate() -> None:
    plans = [at_random(7, 0.25), at_random(7, 0.25), at_random(8, 0.25)]
    first, again, other = ([plan(Op.COMMIT, i) for i in range(2_000)] for plan in plans)
    assert first == again != other
    assert 400 < 2_000 - first.count(None) < 600
    assert not any(at_random(1, 0.0)(Op.READ, i) for i in range(100))
