"""The whole service with its index in Valkey: round trips, outages, losses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcm.core.errors import KvcmError, NotReady
from kvcm.metaindex.store import Table
from kvcm.metaindex.stores.valkey import ValkeyStore
from kvcm.testing.eventually import eventually
from kvcm.testing.proxy import proxy
from kvcm.testing.servers_valkey import ValkeyServer, valkey_cluster, valkey_server
from tests.cache.harness import Harness

KEYS = list(range(1, 301))
QUICK = "?timeout_ms=400&connect_timeout_ms=400"


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with valkey_server("appendonly yes", "appendfsync always") as server:
        yield server


@asynccontextmanager
async def running(url: str, root: Path) -> AsyncIterator[Harness]:
    harness = await Harness(root=root, store=ValkeyStore(url)).open()
    await harness.register()
    try:
        yield harness
    finally:
        await harness.close()


def cold(harness: Harness) -> None:
    index = harness.index()
    index.shared.cache.clear_instance(index.rows)
    index.row_generation += 1


async def recovers(harness: Harness) -> bool:
    """Rounds of the loops, until the store answers and no shard is in doubt."""
    await harness.wait(1.0)
    try:
        await harness.lookup(KEYS)
    except KvcmError:
        return False
    return harness.index().loaded and not harness.index().shards.doubted


async def test_a_life_in_valkey_leaves_exact_counters(server: ValkeyServer, tmp_path: Path) -> None:
    async with running(server.url, tmp_path) as harness:
        await harness.put(KEYS)
        await harness.put(KEYS[:100] + list(range(1_000, 1_100)))
        grant = await harness.start(list(range(2_000, 2_050)))
        harness.fill(grant)
        await harness.finish(grant, [True] * 25 + [False] * 25)
        assert await harness.hits(KEYS) == len(KEYS)
        await harness.restart()
        assert await harness.hits(KEYS) == len(KEYS)
        await harness.crash()
        assert await harness.hits(KEYS) == len(KEYS)
        await harness.remove(KEYS[:10])
        await harness.drain()
        await harness.check_rest()


async def test_round_trips_do_not_grow_with_the_keys(server: ValkeyServer, tmp_path: Path) -> None:
    with proxy(server.port) as between:
        async with running(f"valkey://127.0.0.1:{between.port}", tmp_path) as harness:
            # All shards are claimed and a connection is open, as after some seconds of work.
            await harness.index().shards.ensure(range(harness.index().shard_count))
            await harness.put(KEYS)
            cold(harness)
            await harness.hits(KEYS)

            async def trips(call: Awaitable[Any]) -> tuple[int, Any]:
                before = between.round_trips
                answer = await call
                return between.round_trips - before, answer

            costs = []
            for count, base in ((64, 10_000), (2_000, 20_000)):
                keys = list(range(base, base + count))
                started, grant = await trips(harness.start(keys))
                finished, _ = await trips(harness.finish(grant))
                cold(harness)
                looked_up, hits = await trips(harness.hits(keys))
                assert hits == count
                costs.append((started, finished, looked_up))
            for started, finished, looked_up in costs:
                # Rows of the first keys, of the others; the extent; its rows.
                assert started <= 4
                assert finished == 1
                # The first rows; state and head of their extent, side by side; its other chunks.
                assert looked_up <= 4


async def test_a_finish_writes_a_handful_of_records(server: ValkeyServer, tmp_path: Path) -> None:
    async with running(server.url, tmp_path) as harness:
        grant = await harness.start(list(range(1, 2_001)))
        before = await rows(harness)
        server.call("CONFIG", "RESETSTAT")
        await harness.finish(grant)
        stats = server.call("INFO", "commandstats").decode()
        calls = sum(
            int(line.split("calls=")[1].split(",")[0])
            for line in stats.splitlines()
            if line.startswith(("cmdstat_hset", "cmdstat_hincrby", "cmdstat_hdel", "cmdstat_eval"))
        )
        assert calls <= 10, stats
        assert await rows(harness) == before == 2_000


async def rows(harness: Harness) -> int:
    index = harness.index()
    numbers = range(index.shard_count)
    return sum([await harness.inner.count(index.shards.id(n), Table.ROWS) for n in numbers])


async def test_an_outage_is_answered_and_survived(server: ValkeyServer, tmp_path: Path) -> None:
    async with running(server.url + QUICK, tmp_path) as harness:
        await harness.put(KEYS)
        opened = await harness.start(list(range(5_000, 5_020)))
        harness.fill(opened)
        cold(harness)
        server.kill()
        for call in (harness.lookup(KEYS), harness.start([9_000]), harness.finish(opened)):
            with pytest.raises(NotReady):
                await call
        server.start()
        await eventually(lambda: recovers(harness))
        assert await harness.hits(KEYS) == len(KEYS)
        await harness.finish(opened)
        assert await harness.hits(opened.keys) == len(opened.keys)
        await harness.drain()
        await harness.check_rest()


async def test_a_pause_never_makes_a_call_hang(server: ValkeyServer, tmp_path: Path) -> None:
    async with running(server.url + QUICK, tmp_path) as harness:
        await harness.put(KEYS)
        opened = await harness.start(list(range(5_000, 5_020)))
        harness.fill(opened)
        cold(harness)
        server.pause()
        try:
            started = time.perf_counter()
            calls = [harness.lookup(KEYS), harness.finish(opened), harness.start([9_000])]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert [isinstance(answer, NotReady) for answer in answers] == [True] * 3
            assert time.perf_counter() - started < 5
        finally:
            server.resume()
        await eventually(lambda: recovers(harness))
        await harness.finish(opened)
        assert await harness.hits(opened.keys) == len(opened.keys)
        await harness.drain()
        await harness.check_rest()


async def test_an_empty_restart_is_noticed_and_the_cache_fills_again(
    server: ValkeyServer, tmp_path: Path
) -> None:
    async with running(server.url + QUICK, tmp_path) as harness:
        await harness.put(KEYS)
        server.kill()
        server.forget()
        server.start()
        await eventually(lambda: recovers(harness))
        with pytest.raises(KvcmError):
            await harness.put(list(range(7_000, 7_400)))
        await eventually(lambda: recovers(harness))
        with_loss = await harness.put(list(range(7_000, 7_400)))
        assert harness.index().lost_writes > 0
        assert await harness.hits(with_loss.keys) == len(with_loss.keys)
        assert await harness.hits(KEYS) == 0
        await harness.drain()
        await harness.check_counters()


async def test_a_full_store_refuses_writes_and_still_frees(
    server: ValkeyServer, tmp_path: Path
) -> None:
    async with running(server.url, tmp_path) as harness:
        await harness.put(KEYS)
        opened = await harness.start([9_000, 9_001])
        harness.fill(opened)
        server.call("CONFIG", "SET", "maxmemory", 100_000)
        with pytest.raises(NotReady) as caught:
            await harness.start([9_100])
        assert caught.value.reason == "STORE_FULL"
        await harness.finish(opened)
        assert await harness.hits(opened.keys) == 2
        assert await harness.hits(KEYS) == len(KEYS)
        await harness.remove(KEYS)
        await harness.drain()
        server.call("CONFIG", "SET", "maxmemory", 0)
        await harness.put([9_100])
        await harness.drain()
        await harness.check_rest()


@pytest.mark.parametrize("table", [Table.STATES, Table.EXTENTS])
async def test_counters_do_not_drift_when_the_server_dropped_records(
    server: ValkeyServer, tmp_path: Path, table: Table
) -> None:
    async with running(server.url, tmp_path) as harness:
        for key in KEYS[:40]:
            await harness.put([key])
        names = [k for k in server.call("KEYS", "*") if k.endswith(b"}%d" % table)]
        server.call("DEL", *names[::2])
        for key in range(1_000, 1_040):
            try:
                await harness.put([key])
            except KvcmError:
                continue
        await harness.rounds(5)
        for key in range(2_000, 2_040):
            await harness.put([key])
        await harness.drain()
        await harness.check_counters()


async def test_a_lost_server_of_a_cluster_takes_only_its_part(tmp_path: Path) -> None:
    with valkey_cluster(3, "appendonly yes", "appendfsync always") as cluster:
        async with running(cluster.url + QUICK, tmp_path) as harness:
            for key in KEYS[:60]:
                await harness.put([key])
            cold(harness)
            cluster.servers[0].kill()
            with pytest.raises(NotReady):
                await harness.start(list(range(10_000, 10_300)))
            hits = await harness.hits(KEYS[:60])
            assert hits < 60
            # Some single keys and writes go on, on what is left.
            found = 0
            for key in KEYS[:60]:
                try:
                    found += await harness.hits([key])
                except NotReady:
                    continue
            assert 0 < found < 60
            cluster.servers[0].start()
            cluster.wait_until_whole()

            async def is_whole() -> bool:
                cold(harness)
                return await recovers(harness) and await harness.hits(KEYS[:60]) == 60

            await eventually(is_whole, timeout=20)
            await harness.drain()
            await harness.check_rest()
