"""The manager is started, or goes on, while the servers that it keeps its data in are away."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import grpc
import pytest
from e2e_harness import PATIENCE_S, Site
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvcm.client import AdminClient, Client
from kvcm.client.file_sdk import FileSdk
from kvcm.client.retry import RetryPolicy
from kvcm.core.errors import NotReady
from kvcm.testing.eventually import eventually_sync
from kvcm.testing.servers_postgres import PostgresServer, postgres_server
from kvcm.testing.servers_valkey import ValkeyServer, valkey_cluster, valkey_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

QUICK = "?timeout_ms=500&connect_timeout_ms=500"
ONCE = RetryPolicy(rounds_max=1)
AOF = ("appendonly yes", "appendfsync always")


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with valkey_server(*AOF) as server:
        yield server


def put(client: Client, keys: range) -> int:
    with client.write("i", keys) as session:
        session.put(FileSdk(), {i: bytes(16) for i, _ in session})
        return len(session)


def grpc_health(site: Site) -> int:
    with grpc.insecure_channel(f"127.0.0.1:{site.ready['rpc_port']}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=PATIENCE_S)
        return int(answer.status)


def says_not_ready(client: Client) -> float:
    """Lookups and grants are refused; the longest it took."""
    slowest = 0.0
    for call in (
        lambda: client.get_cache_location("i", range(100, 110)),
        lambda: client.start_write_cache("i", range(100, 110)),
    ):
        began = time.monotonic()
        with pytest.raises(NotReady):
            call()
        slowest = max(slowest, time.monotonic() - began)
    return slowest


def test_a_manager_started_before_its_index_listens_and_becomes_ready(
    site: Site, server: ValkeyServer
) -> None:
    server.stop()
    site.index_url = server.url + QUICK
    site.launch()
    site.wait_listening()
    assert not site.is_ready()
    assert grpc_health(site) == health_pb2.HealthCheckResponse.NOT_SERVING
    with AdminClient(f"127.0.0.1:{site.ready['admin_rpc_port']}") as admin:
        assert not admin.check_health().is_health
    assert not site.ready_file.exists()
    with site.client(retry=ONCE) as client:
        # The registry is there.
        client.register_instance("default", "i", 4, {"tp0": 16})
        assert says_not_ready(client) < 5
        server.start()
        site.wait_ready()
        eventually_sync(site.is_ready, timeout=PATIENCE_S)
        assert grpc_health(site) == health_pb2.HealthCheckResponse.SERVING
        with site.client() as patient:
            assert put(patient, range(100, 110)) == 10
        assert len(client.get_cache_location("i", range(100, 110))) == 10
    assert site.stop() == 0
    log = site.log.read_text()
    assert log.count("the index store cannot be opened yet") in (1, 2), "a line now and then"
    assert "kvcm waits for its index store" in log
    assert "Traceback" not in log
    assert site.audit().problems == []


def test_a_manager_that_waits_for_its_index_stops_by_a_signal(
    site: Site, server: ValkeyServer
) -> None:
    server.stop()
    site.index_url = server.url
    site.launch()
    site.wait_listening()
    assert site.stop() == 0


def error_line(site: Site) -> str:
    (line,) = [x for x in site.log.read_text().splitlines() if x.startswith("error:")]
    return line


SECRET = "p@ss:/#%?é"
CODED = "p%40ss%3A%2F%23%25%3F%C3%A9"


def test_an_index_that_refuses_the_password_ends_the_start_at_once(site: Site) -> None:
    with valkey_server(f'user alice on ">{SECRET}" ~* +@all', "requirepass other") as server:
        for user in (f"alice:{CODED}x@", "alice@", ""):
            site.log.write_text("")
            site.index_url = f"valkey://{user}127.0.0.1:{server.port}"
            site.launch()
            assert site.ended() == 1
            assert "WRONGPASS" in error_line(site) or "NOAUTH" in error_line(site)
        site.log.write_text("")
        site.index_url = f"valkey://alice:{CODED}@127.0.0.1:{server.port}"
        site.start()
        assert site.stop() == 0
        log = site.log.read_text()
        assert "p@ss" not in log
        assert "p%40ss" not in log


def test_an_index_of_another_kind_than_the_url_says_ends_the_start_at_once(
    site: Site, server: ValkeyServer
) -> None:
    at = f"127.0.0.1:{server.port}"
    with valkey_cluster(1) as cluster:
        member = f"127.0.0.1:{cluster.servers[0].port}"
        for url, says in (
            (f"valkeys://{at}?ssl_cert_reqs=none", "without TLS"),
            (f"valkey+cluster://{at}", "cluster support disabled"),
            (f"valkey+sentinel://{at}/main", "unknown command"),
            (f"valkey://{member}", "valkey+cluster://"),
        ):
            site.log.write_text("")
            site.index_url = url
            site.launch()
            assert site.ended() == 1, url
            assert says in error_line(site)


def test_an_index_that_comes_and_refuses_ends_the_wait(site: Site, server: ValkeyServer) -> None:
    server.stop()
    site.index_url = server.url
    site.launch()
    site.wait_listening()
    server.reconfigure(*AOF, "requirepass secret")
    server.start()
    assert site.ended() == 1
    assert "NOAUTH" in error_line(site)


@pytest.mark.parametrize(
    "seconds", [4, pytest.param(30, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
)
@pytest.mark.parametrize("how", ["killed", "paused"])
def test_r52_an_outage_of_the_index_is_survived_not_ready_and_live(
    site: Site, server: ValkeyServer, how: str, seconds: int
) -> None:
    site.index_url = server.url + QUICK
    site.start()
    with site.client() as client:
        client.register_instance("default", "i", 4, {"tp0": 16})
        assert put(client, range(10)) == 10
        assert len(client.get_cache_location("i", range(10))) == 10
    assert site.is_ready()
    if how == "killed":
        server.kill()
    else:
        server.pause()
    gone = time.monotonic()
    eventually_sync(lambda: not site.is_ready(), timeout=10)
    assert grpc_health(site) == health_pb2.HealthCheckResponse.NOT_SERVING
    with site.client(retry=ONCE) as client:
        while time.monotonic() < gone + seconds:
            assert site.process is not None
            assert site.process.poll() is None
            assert says_not_ready(client) < 5
            # What is in memory is answered all the same.
            assert len(client.get_cache_location("i", range(10))) == 10
            assert not site.is_ready()
        if how == "killed":
            server.start()
        else:
            server.resume()
        back = time.monotonic()
        eventually_sync(site.is_ready, timeout=PATIENCE_S)
        with site.client() as patient:
            assert put(patient, range(100, 110)) == 10
        assert time.monotonic() - back < 10
        assert len(client.get_cache_location("i", range(10))) == 10
    assert "Traceback" not in site.log.read_text()
    assert site.stop() == 0


# ---- the registry --------------------------------------------------------------------------------


@pytest.fixture
def database() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


def test_a_registry_that_is_away_is_waited_for_and_no_longer_than_asked(
    site: Site, database: PostgresServer
) -> None:
    database.stop()
    url = f"--registry-url={database.url()}"
    site.launch(url, "--set=registry_wait_s=1")
    assert site.ended() == 1
    assert "waited" in error_line(site)
    site.launch(url)
    # Two tries at least.
    eventually_sync(lambda: site.log.read_text().count("s more") > 2, timeout=PATIENCE_S)
    database.start()
    site.wait_ready()
    with site.client() as client:
        client.register_instance("default", "i", 4, {"tp0": 16})
        assert put(client, range(10)) == 10
    assert site.stop() == 0
    assert "Traceback" not in site.log.read_text()


def test_a_manager_that_waits_for_its_registry_stops_by_a_signal(
    site: Site, database: PostgresServer
) -> None:
    database.stop()
    site.launch(f"--registry-url={database.url()}")
    eventually_sync(lambda: "s more" in site.log.read_text(), timeout=PATIENCE_S)
    assert site.process is not None
    site.process.send_signal(signal.SIGTERM)
    assert site.ended() == 0


def test_a_registry_that_refuses_ends_the_start_at_once(
    site: Site, database: PostgresServer
) -> None:
    began = time.monotonic()
    site.launch(f"--registry-url={database.url(password='wrong')}", "--set=registry_wait_s=600")
    assert site.ended() == 1
    assert "password authentication failed" in error_line(site)
    assert "s more" not in site.log.read_text()
    assert time.monotonic() - began < PATIENCE_S
