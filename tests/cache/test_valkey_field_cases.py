"""Field cases of an index in Valkey: a cluster in parts, slots that move, TLS, foreign keys."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from kvcm.core.errors import NotReady
from kvcm.core.types import InstanceGroup, QueryType, TriggerStrategy
from kvcm.metaindex.stores.valkey import ValkeyStore
from kvcm.metaindex.stores.valkey_scripts import shard_tag
from kvcm.testing.eventually import eventually
from kvcm.testing.proxy import proxy
from kvcm.testing.servers_valkey import (
    ValkeyCluster,
    ValkeyServer,
    slot_of,
    valkey_cluster,
    valkey_server,
)
from tests.cache.harness import SLOT, Harness, group

KEYS = list(range(1, 61))
QUICK = "?timeout_ms=400&connect_timeout_ms=400"
AOF = ("appendonly yes", "appendfsync always")


@pytest.fixture
def cluster() -> Iterator[ValkeyCluster]:
    with valkey_cluster(3, *AOF) as cluster:
        yield cluster


@asynccontextmanager
async def running(url: str, root: Path, *groups: InstanceGroup) -> AsyncIterator[Harness]:
    harness = await Harness(root=root, store=ValkeyStore(url), groups=groups).open()
    await harness.register()
    try:
        yield harness
    finally:
        await harness.close()


async def found(harness: Harness, keys: list[int]) -> set[int]:
    locations = await harness.lookup(keys, query=QueryType.BATCH_GET)
    return {key for key, location in zip(keys, locations, strict=True) if location.hit}


def marked(group: InstanceGroup, percentage: float) -> InstanceGroup:
    """The group with another watermark."""
    cache = group.cache_config
    assert cache is not None
    assert cache.reclaim_strategy is not None
    trigger = TriggerStrategy(used_percentage=percentage)
    strategy = cache.reclaim_strategy.model_copy(update={"trigger_strategy": trigger})
    return group.model_copy(
        update={"cache_config": cache.model_copy(update={"reclaim_strategy": strategy})}
    )


async def test_an_instance_that_cannot_be_loaded_whole_serves_what_can_be_reached(
    cluster: ValkeyCluster, tmp_path: Path
) -> None:
    """Its writes wait, and nothing of it is evicted, though it is far above its mark."""
    limits = group(capacity=4 * len(KEYS) * 2 * SLOT)
    async with running(cluster.url + QUICK, tmp_path, limits) as harness:
        for key in KEYS:
            await harness.put([key])
        flying = [await harness.start([1_000 + n], timeout=500) for n in range(12)]
        for grant in flying:
            harness.fill(grant)
        await harness.change_group(lambda g: marked(g, 0.05))
        cluster.servers[0].kill()
        await harness.crash()
        index = harness.index()
        assert not index.loaded
        began = time.monotonic()
        there = await found(harness, KEYS)
        assert 0 < len(there) < len(KEYS)
        with pytest.raises(NotReady):
            await harness.start([2_000])
        assert time.monotonic() - began < 5
        # Sessions of before are one record each: those that can be reached are finished.
        finished = []
        for grant in flying:
            try:
                await harness.finish(grant)
                finished.append(grant)
            except NotReady:
                continue
        assert 0 < len(finished) < len(flying)
        for _ in range(5):
            await harness.wait(1.0)
        assert not index.loaded
        assert await found(harness, KEYS) == there

        cluster.servers[0].start()
        cluster.wait_until_whole()
        await harness.change_group(lambda g: marked(g, 2.0))

        async def is_whole() -> bool:
            await harness.wait(1.0)
            return index.loaded and not index.shards.doubted

        await eventually(is_whole, timeout=20)
        assert await found(harness, KEYS) == set(KEYS)
        for grant in flying:
            await harness.finish(grant)
        assert len(await found(harness, [1_000 + n for n in range(12)])) == len(flying)
        await harness.change_group(lambda g: marked(g, 0.05))
        await harness.rounds(3)
        assert harness.manager.shared.ledger.group("default").counted <= limits.quota.capacity // 20
        await harness.drain()
        await harness.check_rest()


async def test_r75_the_service_goes_on_while_slots_move(
    cluster: ValkeyCluster, tmp_path: Path
) -> None:
    async with running(cluster.url, tmp_path) as harness:
        index = harness.index()
        await index.shards.ensure(range(index.shard_count))
        moves = 0
        done = asyncio.Event()

        async def move() -> None:
            nonlocal moves
            for number in range(index.shard_count):
                slot = slot_of(shard_tag(index.shards.id(number)))
                holder = cluster.holder(slot)
                to = cluster.servers[(cluster.servers.index(holder) + 1) % 3]
                cluster.begin_move(slot, to)
                # A key at a time: some of the shard's tables are here, some there.
                await eventually(lambda s=slot, h=holder, t=to: not cluster.move_keys(s, h, t))
                cluster.end_move(slot, holder, to)
                moves += 1
                await asyncio.sleep(0.002)
            done.set()

        moving = asyncio.ensure_future(move())
        written: list[int] = []
        first = 1
        while not done.is_set():
            keys = list(range(first, first + 20))
            grant = await harness.start(keys)
            assert grant.granted == keys
            harness.fill(grant)
            await harness.finish(grant)
            assert await harness.hits(keys) == len(keys)
            written += keys
            first += 20
        await moving
        assert moves == index.shard_count
        assert not index.shards.doubted
        await harness.crash()
        assert await found(harness, written) == set(written)
        await harness.drain()
        await harness.check_rest()


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """Self-signed, for 127.0.0.1, by the openssl command."""
    certificate, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=kvcm -addext subjectAltName=IP:127.0.0.1 -keyout {key} "
        f"-out {certificate}".split(),
        check=True,
        capture_output=True,
    )
    return certificate, key


async def test_r75_a_cluster_that_requires_tls_is_used_with_tls_alone(
    cluster: ValkeyCluster, tmp_path: Path
) -> None:
    """The bundled server has no TLS: each server tells the port of a TLS proxy as its own."""
    certificate, key = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with ExitStack() as stack:
        between = [stack.enter_context(proxy(s.port, context)) for s in cluster.servers]
        for server, door in zip(cluster.servers, between, strict=True):
            server.call("CONFIG", "SET", "cluster-announce-port", door.port)

        def told() -> set[int]:
            return {
                int(holder[1])
                for s in cluster.servers
                for _, _, holder, *_ in s.call("CLUSTER", "SLOTS")
            }

        await eventually(lambda: told() == {door.port for door in between}, timeout=20)
        url = f"valkeys+cluster://127.0.0.1:{between[0].port}?ssl_ca_certs={certificate}"
        async with running(url, tmp_path) as harness:
            grant = await harness.put(KEYS)
            assert await harness.lookup(KEYS) == grant.locations
            await harness.crash()
            assert await harness.lookup(KEYS) == grant.locations
            await harness.check_counters()
        assert all(door.to_server for door in between), "every server was reached, by TLS"


async def test_r74_an_index_at_an_ipv6_address(tmp_path: Path) -> None:
    with valkey_server("bind 127.0.0.1 ::1") as server:
        async with running(f"redis://[::1]:{server.port}", tmp_path) as harness:
            assert f"[::1]:{server.port}" in repr(harness.inner)
            await harness.put(KEYS)
            assert await harness.hits(KEYS) == len(KEYS)
            server.kill()
            with pytest.raises(NotReady, match=r"\[::1\]:\d+"):
                await harness.start([1_000])
            server.start()


# ---- removing beside many foreign keys -----------------------------------------------------------

FOREIGN = 300_000


class Watched:
    """What a server was asked to do: (command, all its arguments as one text)."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, str]] = []


@contextmanager
def monitor(server: ValkeyServer) -> Iterator[Watched]:
    """Every command that the server runs, those of scripts included."""
    watched = Watched()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b"MONITOR\r\n")
    lines = connection.makefile("rb")
    assert lines.readline() == b"+OK\r\n"

    def read() -> None:
        for line in lines:
            if line == b"+OK\r\n":
                return
            # +TIME [DB CLIENT] "COMMAND" "ARGUMENT"…
            _, _, text = line.decode(errors="replace").partition('] "')
            command, _, arguments = text.rstrip().partition('"')
            watched.commands.append((command.upper(), arguments))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield watched
    finally:
        connection.sendall(b"QUIT\r\n")
        reader.join()
        lines.close()
        connection.close()


async def test_r86_an_instance_is_cleared_and_removed_without_a_look_at_foreign_keys(
    tmp_path: Path,
) -> None:
    with valkey_server("enable-debug-command yes") as server:
        async with running(server.url, tmp_path) as harness:
            await harness.register("neighbour")
            await harness.put(KEYS, "neighbour")
            for start in range(0, 1_000, 50):
                await harness.put(list(range(start, start + 50)))
            server.call("DEBUG", "POPULATE", FOREIGN)
            mine = harness.index().uid
            other = harness.index("neighbour").uid
            with monitor(server) as watched:
                began = time.monotonic()
                await harness.trim()
                await harness.manager.remove_instance("i1", None)
                answered = time.monotonic() - began
                while mine in harness.manager.index.by_uid:
                    await harness.wait(30.0)
                took = time.monotonic() - began
                assert await harness.hits(KEYS, "neighbour") == len(KEYS)
            assert answered < 1
            assert took < 10
            used = {command for command, _ in watched.commands}
            assert used.isdisjoint({"KEYS", "SCAN", "RANDOMKEY", "FLUSHALL", "FLUSHDB", "DEL"})
            # Nothing is named but the instance's own shards, the neighbour's and the list of them.
            named = [a for c, a in watched.commands if c not in ("MONITOR", "QUIT", "SCRIPT")]
            strangers = [a for a in named if mine not in a and other not in a and "kvcm:" not in a]
            assert strangers == []
            # Some records an extent and some keys a shard, however much lies beside them.
            assert len(watched.commands) < 4_000, len(watched.commands)
            left = [k for k in server.call("KEYS", "kvcm*") if mine.encode() in k]
            assert left == []
            assert server.call("DBSIZE") >= FOREIGN
