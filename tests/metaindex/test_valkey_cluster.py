"""A ValkeyStore on a cluster and behind sentinels: moves, failures, replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager

import pytest

from kvcm.core.clock import SystemClock
from kvcm.core.errors import KvcmError, OutcomeUnknown, Unavailable
from kvcm.metaindex.store import (
    Claim,
    CommitResult,
    Compare,
    Fence,
    Outcome,
    ShardCommit,
    ShardId,
    Table,
)
from kvcm.metaindex.stores.valkey import ValkeyStore
from kvcm.metaindex.stores.valkey_scripts import shard_tag
from kvcm.testing.contracts.kvstore import apply, claim, commit, get, numbered, puts
from kvcm.testing.eventually import eventually
from kvcm.testing.servers_valkey import (
    ValkeyCluster,
    ValkeyServer,
    slot_of,
    valkey_cluster,
    valkey_server,
)

FENCE = Fence(3, 5)
QUICK = "?timeout_ms=400&connect_timeout_ms=400"


@pytest.fixture
def cluster() -> Iterator[ValkeyCluster]:
    """Three servers of this test alone."""
    with valkey_cluster(3, "appendonly yes", "appendfsync always") as cluster:
        yield cluster


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[ValkeyStore]:
    store = ValkeyStore(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def some_shards(count: int = 24) -> list[ShardId]:
    name = SystemClock().random_bytes(12)
    return [ShardId(name, number) for number in range(count)]


def by_holder(
    cluster: ValkeyCluster, shards: Sequence[ShardId]
) -> dict[ValkeyServer, list[ShardId]]:
    held: dict[ValkeyServer, list[ShardId]] = {}
    for shard in shards:
        held.setdefault(cluster.holder(slot_of(shard_tag(shard))), []).append(shard)
    assert len(held) == len(cluster.servers), "shards are on all servers"
    return held


async def put_all(
    store: ValkeyStore, shards: Sequence[ShardId], value: bytes
) -> list[CommitResult]:
    return await store.commit([ShardCommit(s, FENCE, [puts({b"k": value})]) for s in shards])


async def read_all(store: ValkeyStore, shards: Sequence[ShardId]) -> list[bytes | KvcmError | None]:
    answers = await store.get_many([(shard, [b"k"]) for shard in shards], Table.ROWS)
    return [a if isinstance(a, KvcmError) else a[0] for a in answers]


# A slot moves


async def test_commits_follow_a_slot_that_moves(cluster: ValkeyCluster) -> None:
    """Compare-and-set increments go on while the slot goes back and forth; none is lost or done
    twice."""
    shard = some_shards(1)[0]
    slot = slot_of(shard_tag(shard))
    stop = asyncio.Event()

    async def count(store: ValkeyStore) -> int:
        done = 0
        while not stop.is_set():
            old = b"%d" % done if done else None
            new = puts({b"n": b"%d" % (done + 1)}, Compare(Table.ROWS, b"n", old, whole=True))
            (result,) = await store.commit([ShardCommit(shard, FENCE, [new])])
            assert result.error is None, result.error
            assert list(result.outcomes) == [Outcome.APPLIED]
            done += 1
        return done

    async with opened(cluster.url) as store:
        await claim(store, shard)
        await apply(store, shard, puts({b"r%d" % i: b"" for i in range(100)}))
        counting = asyncio.ensure_future(count(store))
        try:
            for at in range(6):
                target = next(s for s in cluster.servers if s is not cluster.holder(slot))
                holder = await asyncio.to_thread(cluster.begin_move, slot, target)
                while await asyncio.to_thread(cluster.move_keys, slot, holder, target):
                    await get(store, shard, b"n")
                # A new claim while the slot is between two servers, too.
                assert at or not counting.done()
                await asyncio.to_thread(cluster.end_move, slot, holder, target)
                if counting.done():
                    break
        finally:
            stop.set()
            done = await counting
        assert done > 10
        assert await get(store, shard, b"n") == [b"%d" % done]
        claimed = await claim(store, shard, Fence(3, 6))
        assert claimed.commit_number == done + 1


async def test_a_claim_of_a_shard_that_never_was_succeeds_while_its_slot_moves(
    cluster: ValkeyCluster,
) -> None:
    shard = some_shards(1)[0]
    slot = slot_of(shard_tag(shard))
    async with opened(cluster.url) as store:
        target = next(s for s in cluster.servers if s is not cluster.holder(slot))
        holder = cluster.begin_move(slot, target)
        assert await claim(store, shard) == Claim(0, {})
        assert await get(store, shard, b"k") == [None]
        cluster.end_move(slot, holder, target)
        assert await apply(store, shard, puts({b"k": b"1"})) == [Outcome.APPLIED]


# A server is lost


async def test_a_killed_server_takes_only_its_shards_along(cluster: ValkeyCluster) -> None:
    shards = some_shards()
    held = by_holder(cluster, shards)
    async with opened(cluster.url + QUICK) as store:
        await store.claim(shards, FENCE)
        await put_all(store, shards, b"1")
        victim = cluster.servers[0]
        victim.kill()
        results = await put_all(store, shards, b"2")
        answers = await read_all(store, shards)
        for shard, result, answer in zip(shards, results, answers, strict=True):
            if shard in held[victim]:
                assert isinstance(result.error, Unavailable | OutcomeUnknown)
                assert isinstance(answer, Unavailable)
            else:
                assert result.error is None
                assert answer == b"2"
        claims = await store.claim(shards, Fence(3, 6))
        kinds = {shard for shard, c in zip(shards, claims, strict=True) if isinstance(c, Claim)}
        assert kinds == set(shards) - set(held[victim])
        victim.start()
        cluster.wait_until_whole()

        async def all_answer() -> bool:
            return await read_all(store, shards) == [
                b"1" if shard in held[victim] else b"2" for shard in shards
            ]

        await eventually(all_answer)


async def test_a_paused_server_holds_up_nobody_for_long(cluster: ValkeyCluster) -> None:
    shards = some_shards()
    held = by_holder(cluster, shards)
    async with opened(cluster.url + QUICK) as store:
        await store.claim(shards, FENCE)
        await put_all(store, shards, b"1")
        victim = cluster.servers[1]
        victim.pause()
        try:
            started = time.perf_counter()
            results = await put_all(store, shards, b"2")
            unknown = {
                shard
                for shard, result in zip(shards, results, strict=True)
                if isinstance(result.error, OutcomeUnknown)
            }
            assert unknown == set(held[victim])
            assert time.perf_counter() - started < 3
            started = time.perf_counter()
            for _ in range(20):
                answers = await read_all(store, shards)
            assert time.perf_counter() - started < 3
            assert sum(answer == b"2" for answer in answers) == len(shards) - len(held[victim])
        finally:
            victim.resume()

        async def all_answer() -> bool:
            return not any(isinstance(a, KvcmError) for a in await read_all(store, shards))

        await eventually(all_answer)


async def test_a_store_opens_by_any_seed_and_not_without(cluster: ValkeyCluster) -> None:
    cluster.servers[0].kill()
    async with opened(cluster.url + QUICK) as store:
        claims = await store.claim(some_shards(), FENCE)
        assert any(isinstance(answer, Claim) for answer in claims)
    for server in cluster.servers:
        server.kill()
    with pytest.raises(Unavailable):
        async with opened(cluster.url + QUICK):
            pass


# Replicas


def replica_of(server: ValkeyServer) -> tuple[str, ...]:
    return (f"replicaof 127.0.0.1 {server.port}",)


def is_linked(replica: ValkeyServer) -> bool:
    return b"master_link_status:up" in replica.call("INFO", "replication")


async def test_commits_are_acknowledged_when_the_replica_has_them() -> None:
    shard = some_shards(1)[0]
    with ExitStack() as stack:
        primary = stack.enter_context(valkey_server())
        replica = stack.enter_context(valkey_server(*replica_of(primary)))
        await eventually(lambda: is_linked(replica))
        url = f"{primary.url}?wait_replicas=1&wait_timeout_ms=200"
        async with opened(url) as store:
            await claim(store, shard)
            result = await commit(store, shard, puts({b"k": b"1"}))
            assert await store.acknowledged([shard]) == [result.commit_number]
            replica.pause()
            try:
                await commit(store, shard, puts({b"k": b"2"}))
                (answer,) = await store.acknowledged([shard])
                assert isinstance(answer, Unavailable)
                assert "0 of 1 replicas" in str(answer)
            finally:
                replica.resume()

            async def acknowledged() -> bool:
                return await store.acknowledged([shard]) == [result.commit_number + 1]

            await eventually(acknowledged)


async def test_sentinels_lead_to_the_server_that_took_over() -> None:
    shard = some_shards(1)[0]
    with ExitStack() as stack:
        primary = stack.enter_context(valkey_server())
        replica = stack.enter_context(valkey_server(*replica_of(primary)))
        await eventually(lambda: is_linked(replica))
        sentinel = stack.enter_context(
            valkey_server(
                f"sentinel monitor main 127.0.0.1 {primary.port} 1",
                "sentinel down-after-milliseconds main 300",
                "sentinel failover-timeout main 2000",
                is_sentinel=True,
            )
        )
        await eventually(
            lambda: (
                f":{replica.port},".encode() in sentinel.call("INFO", "sentinel")
                or b"slaves=1" in sentinel.call("INFO", "sentinel")
            )
        )
        url = f"valkey+sentinel://127.0.0.1:{sentinel.port}/main{QUICK}"
        async with opened(url) as store:
            await claim(store, shard)
            await commit(store, shard, puts(numbered(50)))
            primary.call("WAIT", 1, 1_000)
            primary.kill()

            async def commits() -> bool:
                (result,) = await store.commit([ShardCommit(shard, FENCE, [puts({b"k": b"2"})])])
                assert result.error is None or isinstance(
                    result.error, Unavailable | OutcomeUnknown
                )
                return result.error is None

            await eventually(commits, timeout=30)
            assert await store.count(shard, Table.ROWS) == 51
            assert replica.call("ROLE")[0] == b"master"
        with pytest.raises(Unavailable, match="no sentinel names the master"):
            async with opened(url.replace("/main", "/other")):
                pass
