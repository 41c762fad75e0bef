"""A ValkeyStore while its server suffers; what it costs; how it connects."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvcm.core.clock import SystemClock
from kvcm.core.errors import ConfigError, CorruptRecord, OutcomeUnknown, StaleFence, Unavailable
from kvcm.metaindex.store import (
    Claim,
    Compare,
    Fence,
    Mutation,
    Outcome,
    ShardCommit,
    ShardId,
    Table,
    Write,
)
from kvcm.metaindex.stores.valkey import ValkeyStore
from kvcm.testing.contracts.kvstore import apply, claim, commit, get, numbered, puts
from kvcm.testing.eventually import eventually
from kvcm.testing.proxy import proxy
from kvcm.testing.servers_valkey import ValkeyServer, valkey_server

FENCE = Fence(3, 5)
SHARD = ShardId(b"space", 7)
QUICK = "?timeout_ms=250&connect_timeout_ms=250"
AOF = ("appendonly yes", "appendfsync always")


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    """A server of this test alone, with an append-only file."""
    with valkey_server(*AOF) as server:
        yield server


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[ValkeyStore]:
    store = ValkeyStore(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def answers(store: ValkeyStore) -> bool:
    try:
        await get(store, SHARD, b"k")
    except Unavailable:
        return False
    return True


def space() -> bytes:
    return SystemClock().random_bytes(12)


# The server suffers


async def test_a_stopped_server_is_unavailable_and_found_again(server: ValkeyServer) -> None:
    async with opened(server.url + QUICK) as store:
        await claim(store, SHARD)
        first = await commit(store, SHARD, puts({b"k": b"1"}, counters={b"n": 2}))
        server.stop()
        await eventually(lambda: server.pid == 0)
        with pytest.raises(Unavailable):
            await get(store, SHARD, b"k")
        (result,) = await store.commit([ShardCommit(SHARD, FENCE, [puts({b"k": b"2"})])])
        assert type(result.error) is Unavailable
        (answer,) = await store.claim([SHARD], Fence(3, 6))
        assert type(answer) is Unavailable
        server.start()
        await eventually(lambda: answers(store))
        assert await get(store, SHARD, b"k") == [b"1"]
        assert await apply(store, SHARD, puts({b"k": b"3"})) == [Outcome.APPLIED], "still claimed"
        claimed = await claim(store, SHARD, Fence(3, 6))
        assert claimed == Claim(first.commit_number + 1, {b"n": 2})


async def test_a_killed_server_keeps_what_its_log_has(server: ValkeyServer) -> None:
    async with opened(server.url) as store:
        await claim(store, SHARD)
        for i in range(20):
            await commit(store, SHARD, puts({b"%d" % i: b"v"}, counters={b"n": 1}))
        server.kill()
        server.start()
        await eventually(lambda: answers(store))
        claimed = await claim(store, SHARD, Fence(4, 1))
        assert claimed == Claim(20, {b"n": 20})
        assert await store.count(SHARD, Table.ROWS) == 20


async def test_a_server_that_starts_empty_knows_no_fence(server: ValkeyServer) -> None:
    async with opened(server.url) as store:
        await claim(store, SHARD)
        await commit(store, SHARD, puts({b"k": b"1"}))
        server.kill()
        server.forget()
        server.start()
        await eventually(lambda: answers(store))
        (result,) = await store.commit([ShardCommit(SHARD, FENCE, [puts({b"k": b"2"})])])
        assert isinstance(result.error, StaleFence)
        assert result.error.epoch == 0
        assert await store.acknowledged([SHARD]) == [0]
        assert await claim(store, SHARD) == Claim(0, {})


async def test_a_paused_server_never_makes_a_call_hang(server: ValkeyServer) -> None:
    async with opened(server.url + QUICK) as store:
        await claim(store, SHARD)
        server.pause()
        try:
            started = time.perf_counter()
            (result,) = await store.commit([ShardCommit(SHARD, FENCE, [puts({b"k": b"1"})])])
            assert type(result.error) is OutcomeUnknown
            assert time.perf_counter() - started < 2
            started = time.perf_counter()
            for _ in range(100):
                with pytest.raises(Unavailable):
                    await get(store, SHARD, b"k")
            assert time.perf_counter() - started < 1, "a server known to be away is waited for"
        finally:
            server.resume()
        await eventually(lambda: answers(store))
        claimed = await claim(store, SHARD, Fence(3, 6))
        # It waited in the server's socket: it ran before the claim or never.
        (value,) = await get(store, SHARD, b"k")
        assert claimed.commit_number == (value is not None)
        again = await claim(store, SHARD, Fence(3, 7))
        assert again.commit_number == claimed.commit_number


async def test_of_a_cut_connection_commits_are_unknown_and_reads_are_repeated(
    server: ValkeyServer,
) -> None:
    with proxy(server.port) as between:
        async with opened(f"valkey://127.0.0.1:{between.port}") as store:
            await claim(store, SHARD)
            between.swallow_replies = True
            shards = [SHARD, SHARD, ShardId(b"space", 8)]
            results = await store.commit(
                [ShardCommit(s, FENCE, [puts({b"k": b"1"})]) for s in shards]
            )
            kinds = [type(result.error) for result in results]
            assert kinds == [OutcomeUnknown, Unavailable, OutcomeUnknown], "the second was not sent"
            between.swallow_replies = False
            await eventually(lambda: answers(store))
            assert await get(store, SHARD, b"k") == [b"1"], "it did happen"
            between.cut()
            assert await get(store, SHARD, b"k") == [b"1"]


async def test_a_full_server_refuses_grants_and_takes_what_frees() -> None:
    with valkey_server("maxmemory-policy noeviction") as server:
        async with opened(server.url) as store:
            await claim(store, SHARD)
            grant = Mutation(
                [Write(Table.EXTENTS, b"e", b"x" * 1_000), Write(Table.STATES, b"e", b"s" * 20)],
                counters={b"open": 1},
            )
            assert await apply(store, SHARD, grant) == [Outcome.APPLIED]
            server.call("CONFIG", "SET", "maxmemory", 100_000)
            before = await claim(store, SHARD, Fence(3, 6)), await get(store, SHARD, b"k")
            for mutation in (grant, puts({b"k": b"v"})):
                (result,) = await store.commit([ShardCommit(SHARD, Fence(3, 6), [mutation])])
                assert type(result.error) is Unavailable
                assert result.error.reason == "STORE_FULL"
            after = await claim(store, SHARD, Fence(3, 7)), await get(store, SHARD, b"k")
            assert before == after, "nothing half-written"
            retire = Mutation(
                [Write(Table.STATES, b"e", b"r" * 20), Write(Table.TRASH, b"e", b"t" * 30)],
                [Compare(Table.STATES, b"e", b"s" * 8)],
                {b"open": -1, b"trash": 1},
            )
            fence = Fence(3, 7)
            assert await apply(store, SHARD, retire, fence=fence) == [Outcome.APPLIED]
            forget = [Write(table, b"e", None) for table in (Table.EXTENTS, Table.STATES)]
            assert await apply(store, SHARD, Mutation(forget), fence=fence) == [Outcome.APPLIED]
            server.call("CONFIG", "SET", "maxmemory", 0)
            assert await apply(store, SHARD, grant, fence=fence) == [Outcome.APPLIED]


@pytest.mark.parametrize("table", [Table.EXTENTS, Table.STATES, Table.TRASH])
async def test_a_table_that_the_server_dropped_is_noticed(
    shared_valkey: ValkeyServer, table: Table
) -> None:
    async with opened(shared_valkey.url) as store:
        shard = ShardId(space(), 0)
        await claim(store, shard)
        put = Mutation([Write(table, b"a", b"1"), Write(table, b"b", b"1")], counters={b"n": 2})
        await apply(store, shard, put, puts({b"k": b"1"}))
        (key,) = keys_of(shared_valkey, shard, table)
        shared_valkey.call("DEL", key)
        again = Mutation([Write(table, b"a", b"2")], counters={b"n": 1})
        (result,) = await store.commit([ShardCommit(shard, FENCE, [again])])
        assert isinstance(result.error, CorruptRecord)
        assert table.name in str(result.error)
        (answer,) = await store.claim([shard], Fence(3, 6))
        assert isinstance(answer, CorruptRecord)
        await store.drop(shard)
        assert await claim(store, shard, Fence(3, 7)) == Claim(0, {})


async def test_rows_that_the_server_dropped_are_only_missing(shared_valkey: ValkeyServer) -> None:
    async with opened(shared_valkey.url) as store:
        shard = ShardId(space(), 0)
        await claim(store, shard)
        await apply(store, shard, puts({b"k": b"1"}, counters={b"n": 1}))
        shared_valkey.call("DEL", *keys_of(shared_valkey, shard, Table.ROWS))
        assert await get(store, shard, b"k") == [None]
        assert await apply(store, shard, puts({b"k": b"2"})) == [Outcome.APPLIED]
        assert (await claim(store, shard, Fence(3, 6))).counters == {b"n": 1}


@pytest.mark.parametrize("key", ["m", "1"])
async def test_keys_of_another_type_are_corrupt(shared_valkey: ValkeyServer, key: str) -> None:
    async with opened(shared_valkey.url) as store:
        shard = ShardId(space().hex()[:20].encode(), 0)
        await claim(store, shard)
        name = f"kvcm{{{shard.space.decode()}:0}}{key}"
        shared_valkey.call("SET", name, "text")
        if key == "m":
            (answer,) = await store.claim([shard], Fence(9, 9))
            assert isinstance(answer, CorruptRecord)
            (result,) = await store.commit([ShardCommit(shard, FENCE, [puts({b"k": b"1"})])])
            assert isinstance(result.error, CorruptRecord)
        else:
            with pytest.raises(CorruptRecord):
                await get(store, shard, b"k")


def keys_of(server: ValkeyServer, shard: ShardId, table: Table) -> list[bytes]:
    suffix = b"%%%b:%d}%d" % (shard.space.hex().encode(), shard.number, table)
    return [key for key in server.call("KEYS", "*") if key.endswith(suffix)]


async def test_a_server_that_forgot_the_scripts_is_told_them_again(
    shared_valkey: ValkeyServer,
) -> None:
    async with opened(shared_valkey.url) as store:
        shard = ShardId(space(), 0)
        await claim(store, shard)
        shared_valkey.call("SCRIPT", "FLUSH")
        results = await store.commit(
            [
                ShardCommit(shard, FENCE, [puts({b"k": b"1"}, Compare(Table.ROWS, b"k", None))]),
                ShardCommit(shard, FENCE, [puts({b"k": b"2"}, Compare(Table.ROWS, b"k", b"1"))]),
            ]
        )
        assert [list(result.outcomes) for result in results] == [[Outcome.APPLIED]] * 2


async def test_a_call_given_up_disturbs_no_other(shared_valkey: ValkeyServer) -> None:
    async with opened(shared_valkey.url + "?connections_max=2") as store:
        shard = ShardId(space(), 0)
        await claim(store, shard)
        await apply(store, shard, puts(numbered(500)))
        for turns in range(6):
            task = asyncio.ensure_future(get(store, shard, *numbered(500)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
        many = [get(store, shard, b"key-%06d" % i) for i in range(200)]
        assert await asyncio.gather(*many) == [[b"value %d" % i] for i in range(200)]
        clients = shared_valkey.call("CLIENT", "LIST").decode()
        assert clients.count("cmd=hmget") <= 2, "more connections than allowed"


# What it costs


async def test_a_call_is_one_round_trip_whatever_its_size(server: ValkeyServer) -> None:
    with proxy(server.port) as between:
        async with opened(f"valkey://127.0.0.1:{between.port}") as store:
            name = space()
            shards = [ShardId(name, number) for number in range(64)]
            keys = list(numbered(4_400))

            async def trips(work: Awaitable[object]) -> int:
                before = between.round_trips
                await work
                return between.round_trips - before

            assert await trips(store.claim(shards, FENCE)) == 1
            rows = [puts(dict.fromkeys(keys[i::64], b"v")) for i in range(64)]
            commits = [ShardCommit(s, FENCE, [m]) for s, m in zip(shards, rows, strict=True)]
            assert await trips(store.commit(commits)) == 1
            asked = [(s, keys[i::64]) for i, s in enumerate(shards)]
            assert await trips(store.get_many(asked, Table.ROWS)) == 1
            assert await trips(store.acknowledged(shards)) == 1
            assert await trips(store.drop(shards[0])) == 3
            assert await trips(store.spaces()) == 2


async def test_only_the_shard_s_own_keys_are_touched(server: ValkeyServer) -> None:
    async with opened(server.url) as store:
        await claim(store, SHARD)
        await apply(store, SHARD, puts(numbered(10)))
        server.call("CONFIG", "RESETSTAT")
        await store.drop(SHARD)
        async for _ in store.scan(SHARD, Table.ROWS):
            pass
        await store.spaces()
        stats = server.call("INFO", "commandstats").decode()
        used = {line.split(":")[0].removeprefix("cmdstat_") for line in stats.splitlines()[1:]}
        assert used <= {"unlink", "srem", "hscan", "sscan", "exists", "config|resetstat"}, used


# How it connects


async def test_a_unix_socket_serves_too(server: ValkeyServer) -> None:
    async with opened(f"unix://{server.socket}?db=3") as store:
        await claim(store, SHARD)
        await apply(store, SHARD, puts({b"k": b"1"}))
        assert await get(store, SHARD, b"k") == [b"1"]
        assert "db3" in server.call("INFO", "keyspace").decode()


async def test_a_password_is_asked_for_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    secret = "p@ss:/#%?é"
    coded = "p%40ss%3A%2F%23%25%3F%C3%A9"
    with valkey_server(f'user alice on ">{secret}" ~* +@all') as server:
        with caplog.at_level(logging.DEBUG):
            address = f"127.0.0.1:{server.port}"
            async with opened(f"valkey://alice:{coded}@{address}") as store:
                await claim(store, SHARD)
            for wrong in (f"alice:{coded}x@", f"bob:{coded}@"):
                with pytest.raises(ConfigError, match="WRONGPASS") as caught:
                    async with opened(f"valkey://{wrong}{address}{QUICK}"):
                        pass
                assert "p@ss" not in str(caught.value)
        assert "p@ss" not in caplog.text
        assert "p%40ss" not in caplog.text


async def test_tls_is_spoken_and_the_server_verified(
    shared_valkey: ValkeyServer, tmp_path: Path
) -> None:
    certificate, key = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with proxy(shared_valkey.port, context) as between:
        url = f"valkeys://localhost:{between.port}{QUICK}"
        shard = ShardId(space(), 0)
        for options in (f"&ssl_ca_certs={certificate}", "&ssl_cert_reqs=none"):
            async with opened(url + options) as store:
                await claim(store, shard, Fence(1, 1) if "ca" in options else Fence(2, 1))
        with pytest.raises(ConfigError, match=r"(?i)certificate"):
            async with opened(url):
                pass
        with pytest.raises(ConfigError, match="is no file"):
            ValkeyStore(f"{url}&ssl_ca_certs=/nowhere")
        with pytest.raises(ConfigError, match="TLS files"):
            ValkeyStore(f"{url}&ssl_ca_certs={key}")


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """Self-signed, for localhost, by the openssl command."""
    certificate, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        f"-subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout {key} "
        f"-out {certificate}".split(),
        check=True,
        capture_output=True,
    )
    return certificate, key


async def test_nobody_there_is_said_clearly() -> None:
    with valkey_server() as server:
        port = server.port
    for url in (
        f"valkey://127.0.0.1:{port}",
        "unix:///nowhere/s",
        f"valkey+cluster://[::1]:{port}",
    ):
        with pytest.raises(Unavailable, match=r"cannot connect|No such file"):
            async with opened(url + QUICK):
                pass


async def test_a_server_that_may_drop_records_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with valkey_server("maxmemory 100mb", "maxmemory-policy allkeys-lru") as server:
        async with opened(server.url):
            assert "maxmemory-policy is allkeys-lru" in caplog.text
            assert "appendonly is off" in caplog.text
    caplog.clear()
    with valkey_server(*AOF) as server:
        with caplog.at_level(logging.INFO):
            async with opened(server.url):
                assert "append-only file" in caplog.text
    assert [r for r in caplog.records if r.levelno > logging.INFO] == []


async def test_another_program_at_the_port_is_told_from_valkey() -> None:
    talking: set[object] = set()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talking.add(writer)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        # The client hangs up first.
        await reader.read()
        writer.close()
        await writer.wait_closed()
        talking.discard(writer)

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ConfigError, match="not the protocol"):
        async with opened(f"valkey://127.0.0.1:{port}{QUICK}"):
            pass
    server.close()
    await server.wait_closed()
    # That does not wait for what was accepted.
    await eventually(lambda: not talking)
