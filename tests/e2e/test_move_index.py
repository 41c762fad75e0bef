"""``kvcm index copy`` between a manager's stop and its next start."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import Site, run

from kvcm.client import Client
from kvcm.client.file_sdk import FileSdk
from kvcm.core.clock import SystemClock
from kvcm.core.errors import NotReady
from kvcm.core.types import QueryType
from kvcm.server import wiring
from kvcm.server.settings import load
from kvcm.testing.audit import AuditReport, audit
from kvcm.testing.servers_postgres import PASSWORD, PostgresServer
from kvcm.testing.servers_valkey import valkey_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

INSTANCES = ("i", "j")
KEYS = range(1, 301)
SIZE = 16


def content(key: int) -> bytes:
    return key.to_bytes(SIZE, "little")


def put(client: Client, instance: str, keys: Sequence[int]) -> int:
    """Write blocks with their bytes; how many were granted."""
    with client.write(instance, keys) as session:
        for index, location in session:
            (error,) = FileSdk().put_many([(location.specs["tp0"], content(keys[index]))])
            assert error is None
            session.done(index)
        return len(session)


def hits(client: Client, instance: str, keys: Sequence[int]) -> int:
    """How many are answered, with the right bytes."""
    found = client.get_cache_location(instance, keys, query=QueryType.BATCH_GET).locations
    uris = [location.specs.get("tp0") for location in found]
    answered = [(key, uri) for key, uri in zip(keys, uris, strict=True) if uri]
    values = FileSdk().get_many([(uri, None) for _, uri in answered])
    assert list(values) == [content(key) for key, _ in answered]
    return len(answered)


def fill(site: Site) -> None:
    with site.client() as client:
        for instance in INSTANCES:
            client.register_instance("default", instance, 4, {"tp0": SIZE})
            for first in range(0, len(KEYS), 50):
                assert put(client, instance, KEYS[first : first + 50]) == 50


@pytest.fixture(params=["rocksdb", "valkey"])
def other_index(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty index."""
    if request.param == "rocksdb":
        yield f"rocksdb:{tmp_path}/other"
        return
    with valkey_server("appendonly yes") as server:
        yield server.url


def audited(registry_url: str, index_url: str) -> AuditReport:
    async def look() -> AuditReport:
        store = wiring.build_store(load({"index_url": index_url}, environ={}), SystemClock())
        await store.open()
        try:
            return await audit(registry_url, store)
        finally:
            await store.close()

    return asyncio.run(look())


def copy(*arguments: object) -> dict[str, Any]:
    done = run("index", "copy", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def refused(*arguments: object) -> str:
    done = run("index", "copy", *arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_manager_on_the_copy_hits_everything_and_goes_on(site: Site, other_index: str) -> None:
    where = (f"--data-dir={site.data_dir}", f"--to={other_index}")
    site.start()
    fill(site)
    assert "in use by another manager" in refused(*where)
    assert site.stop() == 0

    report = copy(*where)
    assert report["spaces"] == len(INSTANCES)
    assert report["records"]["rows"] == len(INSTANCES) * len(KEYS)
    assert report["problems"] == report["damaged"] == report["unknown_instances"] == []
    assert "--resume" in refused(*where)
    assert copy(*where, "--resume")["written"] == 0
    assert copy(*where, "--force")["written"] == report["written"]

    site.start(f"--index-url={other_index}")
    with site.client() as client:
        for instance in INSTANCES:
            assert hits(client, instance, KEYS) == len(KEYS)
            # All there already.
            assert put(client, instance, KEYS) == 0
            assert put(client, instance, range(1001, 1051)) == 50
        client.remove_cache("i", KEYS[:100])
    assert site.settle()["serving_blocks"] == 2 * (len(KEYS) + 50) - 100
    log = site.log.read_text()
    assert "lost writes" not in log
    assert site.stop() == 0
    report_after = audited(f"sqlite:///{site.data_dir}/registry.db", other_index)
    assert report_after.problems == []
    assert report_after.serving_blocks == 2 * (len(KEYS) + 50) - 100

    # And back: the old index is out of date, so it is made anew.
    back = (f"--data-dir={site.data_dir}", f"--from={other_index}")
    home = f"--to=rocksdb:{site.data_dir}/index"
    assert "not empty" in refused(*back, home)
    copy(*back, home, "--force")
    site.start()
    with site.client() as client:
        assert hits(client, "i", KEYS) == len(KEYS) - 100
        assert hits(client, "j", range(1001, 1051)) == 50
    assert site.stop() == 0
    assert site.audit().problems == []


def test_what_cannot_be_copied_is_refused_and_nothing_is_made(site: Site, tmp_path: Path) -> None:
    new = tmp_path / "new"
    to = f"--to=rocksdb:{new}"
    at = f"--data-dir={site.data_dir}"
    assert "there is no index" in refused(at, to)
    (site.data_dir / "index").mkdir(parents=True)
    assert "is empty" in refused(at, to)
    assert "are both" in refused(at, f"--to=rocksdb:{site.data_dir}/index")
    assert "give one" in refused(at, to, "--resume", "--force")
    assert "memory:" in refused(at, "--to=memory:")
    assert not (site.data_dir / "registry.db").exists()
    assert not new.exists()


def test_a_manager_keeps_its_registry_in_postgresql(
    site: Site, tmp_path: Path, postgres: PostgresServer
) -> None:
    database = postgres.take_database()
    secret = tmp_path / "password"
    secret.write_text(f"{PASSWORD}\n")
    flags = (
        f"--registry-url={postgres.url(database, password=None)}",
        f"--set=registry_password_file={secret}",
    )
    assert run("registry", "status", *flags).returncode == 1
    site.start(*flags)
    fill(site)
    assert run("registry", "status", *flags).returncode == 0
    site.kill()
    site.start(*flags)
    with site.client() as client:
        assert hits(client, "i", KEYS) == len(KEYS)
        # Every change needs the database, lookups do not.
        postgres.stop()
        assert hits(client, "j", KEYS) == len(KEYS)
        assert put(client, "j", range(2001, 2011)) == 10
        with site.client(timeout=2) as hasty, pytest.raises(NotReady, match="registry database"):
            hasty.register_instance("default", "late", 4, {"tp0": SIZE})
        postgres.start()
        client.register_instance("default", "late", 4, {"tp0": SIZE})
        assert put(client, "late", KEYS[:50]) == 50
    assert site.stop() == 0
    everything = site.log.read_text()
    assert PASSWORD not in everything
    new = tmp_path / "new"
    copy(f"--data-dir={site.data_dir}", *flags, f"--to=rocksdb:{new}")
    report = audited(postgres.url(database), f"rocksdb:{new}")
    assert report.problems == []
    assert report.serving_blocks == 2 * len(KEYS) + 10 + 50
    postgres.give_back(database)


def test_registry_and_index_move_to_servers_with_the_warm_cache(
    site: Site, postgres: PostgresServer
) -> None:
    database = postgres.take_database()
    url = postgres.url(database)
    move = ("registry", "copy", f"--data-dir={site.data_dir}", f"--to={url}")
    site.start()
    fill(site)
    assert run(*move).returncode == 2
    assert site.stop() == 0
    done = run(*move, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]["instances"] == len(INSTANCES)
    assert PASSWORD not in done.stdout
    again = run(*move)
    assert (again.returncode, "already" in again.stderr) == (2, True)
    with valkey_server("appendonly yes") as server:
        new = (f"--registry-url={url}", f"--index-url={server.url}")
        copy(f"--data-dir={site.data_dir}", new[0], f"--to={server.url}")
        site.start(*new)
        with site.client() as client:
            assert hits(client, "i", KEYS) == len(KEYS)
            assert put(client, "j", range(1001, 1051)) == 50
        assert site.stop() == 0
        assert audited(url, server.url).problems == []
    postgres.give_back(database)
