"""Some shards cannot be reached, or the store went back in time: what the service makes of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kvcm.core.errors import KvcmError, NotReady, Unavailable
from kvcm.core.types import QueryType
from kvcm.metaindex.ids import home_shard
from kvcm.metaindex.records import Phase
from kvcm.metaindex.shards import shard_of
from kvcm.metaindex.store import Claim, CommitResult, Fence, ShardCommit, ShardId, Table, Values
from kvcm.metaindex.stores.memory import MemoryStore
from tests.cache.harness import GRACE_S, Harness, group

KEYS = list(range(1, 41))
EVERYWHERE = set(range(64))


class PartlyAway(MemoryStore):
    """A cluster one of whose servers may be away: the shards in ``away`` do not answer. What is in
    ``lagging`` is not acknowledged by its replicas."""

    read_ahead = 64

    def __init__(self) -> None:
        super().__init__()
        self.away: set[int] = set()
        self.lagging = False

    def is_away(self, shard: ShardId) -> bool:
        return shard.number in self.away

    async def get_many(
        self, shard_keys: Sequence[tuple[ShardId, Sequence[bytes]]], table: Table
    ) -> list[Values | KvcmError]:
        if self.away == EVERYWHERE:
            raise Unavailable("away")
        found = await super().get_many(shard_keys, table)
        return [
            Unavailable("away") if self.is_away(shard) else values
            for (shard, _), values in zip(shard_keys, found, strict=True)
        ]

    async def commit(self, commits: Sequence[ShardCommit]) -> list[CommitResult]:
        results = []
        for commit in commits:
            if self.is_away(commit.shard):
                results.append(CommitResult(error=Unavailable("away")))
            else:
                results += await super().commit([commit])
        return results

    async def claim(self, shards: Sequence[ShardId], fence: Fence) -> list[Claim | Exception]:
        answers: list[Claim | Exception] = []
        for shard in shards:
            if self.is_away(shard):
                answers.append(Unavailable("away"))
            else:
                answers += await super().claim([shard], fence)
        return answers

    async def acknowledged(self, shards: Sequence[ShardId]) -> list[int | KvcmError]:
        if self.lagging:
            return [Unavailable("0 of 1 replicas") for _ in shards]
        return await super().acknowledged(shards)


@pytest.fixture
def store() -> PartlyAway:
    return PartlyAway()


@pytest.fixture
async def harness(tmp_path: Path, store: PartlyAway) -> AsyncIterator[Harness]:
    made = await Harness(root=tmp_path, store=store).open()
    await made.register()
    yield made
    store.away = set()
    store.lagging = False
    await made.close()


def cold(harness: Harness) -> None:
    """Nothing is cached, so that every row is read."""
    index = harness.index()
    index.shared.cache.clear_instance(index.rows)
    index.row_generation += 1


def row_shard(harness: Harness, key: int) -> int:
    return shard_of(key, harness.index().shard_count)


async def test_an_unreachable_row_is_a_miss_and_the_prefix_before_it_a_hit(
    harness: Harness, store: PartlyAway
) -> None:
    # One extent a key, so that every key's row and its extent are needed.
    extent_of: dict[int, bytes] = {}
    for key in KEYS:
        before = set(harness.index().book.entries)
        await harness.put([key])
        (extent_of[key],) = set(harness.index().book.entries) - before
    cold(harness)
    store.away = {row_shard(harness, KEYS[7])}
    reachable = [
        key
        for key in KEYS
        if not store.away & {row_shard(harness, key), home_shard(extent_of[key])}
    ]
    expected = next(i for i, key in enumerate(KEYS) if key not in reachable)
    assert await harness.hits(KEYS) == expected
    found = await harness.lookup(KEYS, query=QueryType.BATCH_GET)
    assert [key for key, f in zip(KEYS, found, strict=True) if f.hit] == reachable
    store.away = set()
    assert await harness.hits(KEYS) == len(KEYS), "nothing was remembered as a miss"


async def test_when_nothing_can_be_reached_a_lookup_says_so(
    harness: Harness, store: PartlyAway
) -> None:
    await harness.put(KEYS)
    cold(harness)
    store.away = EVERYWHERE
    with pytest.raises(NotReady):
        await harness.lookup(KEYS)


async def test_a_write_that_needs_an_unreachable_shard_is_refused_and_leaves_nothing(
    harness: Harness, store: PartlyAway
) -> None:
    store.away = {row_shard(harness, KEYS[0])}
    with pytest.raises(NotReady):
        await harness.start(KEYS)
    other = [k for k in range(100, 400) if row_shard(harness, k) not in store.away]
    done = 0
    for key in other[:20]:
        try:
            await harness.put([key])
            done += 1
        except NotReady:
            continue
    assert done, "writes that need other shards go on"
    store.away = set()
    await harness.put(KEYS)
    await harness.drain()
    await harness.check_rest()


async def test_eviction_passes_over_what_cannot_be_reached(tmp_path: Path) -> None:
    store = PartlyAway()
    capacity = 2 * 64 * 40
    limits = group(capacity=capacity, percentage=0.5)
    harness = await Harness(root=tmp_path, store=store, groups=[limits]).open()
    try:
        await harness.register()
        for key in KEYS[:18]:
            await harness.put([key])
        first = harness.index().shared.order_of("default").coldest(1)[0]
        store.away = {home_shard(first.extent_id)}
        harness.index().shards._fences.pop(home_shard(first.extent_id))
        for key in range(100, 110):
            try:
                await harness.put([key])
            except NotReady:
                continue
        await harness.rounds(3)
        ledger = harness.manager.shared.ledger
        assert ledger.group("default").counted <= capacity // 2
        assert first.phase is Phase.SETTLED
        store.away = set()
        await harness.rounds(2)
    finally:
        store.away = set()
        await harness.close()


async def test_bytes_stay_until_the_replica_knows_that_they_may_go(
    harness: Harness, store: PartlyAway
) -> None:
    await harness.put(KEYS)
    files = harness.files()
    assert files
    store.lagging = True
    await harness.remove(KEYS)
    for _ in range(5):
        await harness.wait(GRACE_S + 1)
    assert harness.files() == files
    assert await harness.hits(KEYS) == 0
    store.lagging = False
    await harness.drain()
    assert harness.files() == set()
    await harness.check_rest()


async def test_a_replica_that_took_over_without_the_retiring_commit_keeps_the_bytes(
    harness: Harness, store: PartlyAway
) -> None:
    grant = await harness.put(KEYS)
    behind = store.snapshot()
    await harness.remove(KEYS)
    store.restore(behind)
    await harness.drain()
    assert harness.index().lost_writes > 0
    locations = await harness.lookup(KEYS)
    assert len(locations) == len(KEYS)
    assert len(harness.files()) > 0
    assert {u for loc in locations for u in loc.uris.values()} == {
        u for loc in grant.locations for u in loc.uris.values()
    }
    await harness.check_counters()


async def test_a_commit_tells_that_the_store_went_back(harness: Harness, store: PartlyAway) -> None:
    await harness.put(KEYS)
    behind = store.snapshot()
    await harness.put([1_000])
    await harness.put([1_001, 1_002])
    store.restore(behind)
    # More commits than were lost: the number alone, looked at later, would tell nothing.
    for key in range(2_000, 2_200):
        await harness.put([key])
    await harness.rounds(3)
    assert harness.index().lost_writes > 0
    await harness.drain()
    await harness.check_counters()
