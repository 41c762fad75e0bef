"""``kvcm serve`` as a process: stop, kill, refuse, survive damage and full disks."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import rocksdict
from e2e_harness import ANY_PORTS, PATIENCE_S, Site, run
from typer.testing import CliRunner

from kvcm.cli.main import build_app
from kvcm.client import Client
from kvcm.client.file_sdk import FileSdk
from kvcm.core.errors import InstanceNotExist, KvcmError, NoStorage, NotReady, SessionNotExist
from kvcm.core.types import QueryType
from kvcm.metaindex.store import Table
from kvcm.metaindex.stores.rocksdb_layout import META_TABLE
from kvcm.testing.eventually import eventually_sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZE = 16


def register(client: Client, *instances: str) -> None:
    for instance in instances:
        client.register_instance("default", instance, 4, {"tp0": SIZE})


def content(key: int) -> bytes:
    return key.to_bytes(SIZE, "little")


def put(client: Client, instance: str, keys: Sequence[int]) -> int:
    """Write blocks with their bytes; how many were granted and written."""
    with client.write(instance, keys) as session:
        for index, location in session:
            (error,) = FileSdk().put_many([(location.specs["tp0"], content(keys[index]))])
            assert error is None
            session.done(index)
        return len(session)


def right(client: Client, instance: str, keys: Sequence[int]) -> list[bool]:
    """For each key whether it is answered; what is answered must have the right bytes."""
    found = client.get_cache_location(instance, keys, query=QueryType.BATCH_GET).locations
    uris = [location.specs["tp0"] for location in found]
    answers = iter(FileSdk().get_many([(uri, None) for uri in uris if uri]))
    for key, uri in zip(keys, uris, strict=True):
        if uri:
            assert next(answers) == content(key), f"block {key} at {uri}"
    return [bool(uri) for uri in uris]


# ---- stopping and killing ------------------------------------------------------------------------


def test_sigterm_lets_calls_under_way_finish_and_exits_0(site: Site) -> None:
    site.start()
    with site.client() as client, ThreadPoolExecutor(4) as pool:
        register(client, "i")
        written: list[int] = []

        def write_until_refused(worker: int) -> KvcmError:
            """Whole sessions, one after the other; what ended it."""
            with site.client(timeout=2.0) as mine:
                first = worker << 32
                while True:
                    keys = range(first, first + 64)
                    try:
                        grant = mine.start_write_cache("i", keys)
                        mine.finish_write_cache("i", grant.session_id, len(keys))
                    except KvcmError as error:
                        return error
                    written.extend(keys)
                    first += 64

        busy = [pool.submit(write_until_refused, worker) for worker in range(4)]
        eventually_sync(lambda: len(written) > 2_000, timeout=PATIENCE_S)
        # So that there are windows of it, which a library keeps.
        client.get_cache_location("i", written[:64])
        assert site.stop() == 0
        for end in busy:
            assert isinstance(end.result(), NotReady), end.result()
    log = site.log.read_text()
    assert "Traceback" not in log
    assert log.endswith("kvcm has stopped\n")
    report = site.audit()
    # No file was written here, so all of them are missing.
    assert [p for p in report.problems if not p.startswith("published bytes")] == []
    assert report.serving_blocks >= len(written)


def test_kill_9_loses_none_of_10_000_acknowledged_keys(site: Site) -> None:
    site.start()
    with site.client() as client:
        register(client, "i")
        for first in range(0, 10_000, 500):
            assert put(client, "i", range(first, first + 500)) == 500
        used = site.usage()
        lost = client.start_write_cache("i", [20_000, 20_001], write_timeout_s=3)
    site.kill()
    assert site.audit(after_crash=True).problems == []
    site.start()
    with site.client() as client:
        assert len(client.get_cache_location("i", range(10_001))) == 10_000
        assert all(right(client, "i", range(10_000)))
        after = site.usage()
        assert {k: v for k, v in after.items() if k.startswith("serving")} == {
            k: v for k, v in used.items() if k.startswith("serving")
        }
        # A session of before the kill may still be finished; one that is not ends by itself.
        assert site.settle()["serving_blocks"] == 10_000
        with pytest.raises(SessionNotExist):
            client.finish_write_cache("i", lost.session_id, 2)
        assert put(client, "i", [20_000, 20_001]) == 2
    report = site.audit_at_rest()
    assert report.problems == []
    assert report.serving_blocks == 10_002


def test_a_session_outlives_the_manager_that_opened_it(site: Site) -> None:
    site.start(settings=["cache.write_timeout_s_max=600"])
    with site.client() as client:
        register(client, "i")
        grant = client.start_write_cache("i", range(100), write_timeout_s=600)
        site.kill()
        site.start(settings=["cache.write_timeout_s_max=600"])
        items = [(uri, content(k)) for k, uri in enumerate(grant.locations.uris("tp0"))]
        assert FileSdk().put_many(items) == [None] * 100
        client.finish_write_cache("i", grant.session_id, 100)
        client.finish_write_cache("i", grant.session_id, 100)
        assert all(right(client, "i", range(100)))
    assert site.stop() == 0
    assert site.audit().problems == []


# ---- refusing to start ---------------------------------------------------------------------------


def test_a_second_manager_on_the_folder_is_refused_and_the_first_goes_on(site: Site) -> None:
    site.start()
    with site.client() as client:
        register(client, "i")
        put(client, "i", range(8))
        second = run("serve", *ANY_PORTS, f"--data-dir={site.data_dir}")
        assert second.returncode == 1
        assert second.stderr.count("\n") == 1
        assert str(site.data_dir) in second.stderr
        assert site.process is not None
        assert f"pid {site.process.pid}" in second.stderr
        # By the index alone, as somebody who shares it between two data folders would.
        third = run(
            "serve",
            *ANY_PORTS,
            f"--data-dir={site.folder / 'other'}",
            f"--index-url=rocksdb:{site.data_dir / 'index'}",
        )
        assert third.returncode == 1
        # The log may say what was opened before.
        (refusal,) = [x for x in third.stderr.splitlines() if x.startswith("error: ")]
        assert str(site.data_dir / "index") in refusal
        assert all(right(client, "i", range(8)))
        assert put(client, "i", range(8, 16)) == 8
    assert site.stop() == 0
    assert site.audit().problems == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rpc-port=70000"], "--rpc-port"),
        (["--nonsense=1"], "--nonsense"),
        (["--set", "cache.nonsense=1"], "cache.nonsense"),
        (["--config={folder}/none.toml"], "none.toml"),
        (["--config={folder}/bad.toml"], "bad.toml"),
        (["--index-url=nonsense:x"], "index-url"),
        (["--registry-url=nonsense"], "registry"),
        (["--bootstrap={folder}/none.json"], "none.json"),
        (["--bootstrap={folder}/bad.json"], "bad.json"),
        (["--bootstrap={folder}/unknown.json"], "root_pth"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_setting_is_one_line_exit_2_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], says: str
) -> None:
    (tmp_path / "bad.toml").write_text("host = \n")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "unknown.json").write_text(
        '{"storages":[{"global_unique_name":"s","nfs":{"root_pth":"/x"}}]}'
    )
    data = tmp_path / "data"
    given = [a.format(folder=tmp_path) for a in arguments]
    ended = CliRunner().invoke(build_app(), ["serve", *ANY_PORTS, f"--data-dir={data}", *given])
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.exit_code == 2, ended.stderr
    # An unknown flag shows the usage, as every command does.
    if given != ["--nonsense=1"]:
        assert ended.stderr.count("\n") == 1, ended.stderr
    assert not data.exists()


# ---- damage --------------------------------------------------------------------------------------


def damage(site: Site, chance: random.Random, tables: Sequence[int], count: int) -> None:
    """Overwrite records of the n-th instance's n-th table with random bytes."""
    index = rocksdict.Rdict(str(site.data_dir / "index"), rocksdict.Options(raw_mode=True))
    try:
        # Length of the space, the space, two bytes of shard, the table (stores/rocksdb_layout.py).
        keys = [k for k in index.keys() if isinstance(k, bytes) and k[0]]  # noqa: SIM118
        spaces = sorted({k[: 1 + k[0]] for k in keys})
        assert len(spaces) == len(tables)
        for space, table in zip(spaces, tables, strict=True):
            mine = [k for k in keys if k.startswith(space) and k[len(space) + 2] == table]
            for key in chance.sample(mine, count):
                # Never whole references: those would read as a row of extents that are gone.
                index[key] = chance.randbytes(14 * chance.randrange(4) + chance.randrange(1, 14))
        index.flush()
    finally:
        index.close()


def test_damaged_records_are_misses_and_stop_nothing(site: Site) -> None:
    """R67: random bytes in the store; the manager starts, serves the rest and says what it met."""
    tables = {"meta": META_TABLE, **{t.name.lower(): int(t) for t in Table}}
    site.start(settings=["cache.grace_s_min=600"])
    with site.client() as client:
        for name in tables:
            register(client, name)
            for first in range(0, 400, 20):
                put(client, name, range(first, first + 20))
            client.remove_cache(name, range(40))
    assert site.stop() == 0
    damage(site, random.Random(67), list(tables.values()), 2)

    site.start()
    with site.client() as client:
        register(client, "new")
        assert put(client, "new", range(8)) == 8
        for name, table in tables.items():
            served = eventually_sync(lambda name=name: served_of(client, name), timeout=PATIENCE_S)  # type: ignore[misc]
            # Lookups walk extents and may never meet a damaged row; this call reads every row.
            client.get_cache_meta(name, range(400))
            # A shard that lost its own record begins empty: two of sixteen, rows and extents.
            lost_max = {META_TABLE: 200, Table.ROWS: 2, Table.DUE: 0, Table.TRASH: 0}.get(table, 40)
            assert sum(served) >= 360 - lost_max, name
            missing = [key for key, is_right in enumerate(served) if not is_right]
            assert put(client, name, missing) == len(missing), name
            assert all(right(client, name, range(400))), name
        assert all(right(client, "new", range(8)))
        # Two each of meta, extents, states and trash at load; rows as they are met. A lost stamp
        # only ages an extent.
        assert site.usage()["quarantined"] >= 10
    log = site.log.read_text()
    assert site.stop() == 0
    assert log.count("a record does not parse") >= 10
    assert "Traceback" not in log


def served_of(client: Client, instance: str) -> list[bool] | None:
    """``right`` of its keys, once it is loaded."""
    try:
        return right(client, instance, range(400))
    except NotReady:
        return None


def test_a_data_folder_that_vanished_is_a_new_one_and_old_files_are_nobodys(site: Site) -> None:
    site.start()
    with site.client() as client:
        register(client, "i")
        put(client, "i", range(40))
        shutil.rmtree(site.data_dir)
        # Whatever it can still do now: no wrong bytes, no crash.
        try:
            put(client, "i", range(40, 60))
            right(client, "i", range(60))
        except NotReady:
            pass
        assert site.process is not None
        assert site.process.poll() is None
    site.kill()
    old = files_below(site.root)

    site.start()
    with site.client() as client:
        with pytest.raises(InstanceNotExist):
            client.get_cache_location("i", range(40))
        register(client, "i")
        assert not any(right(client, "i", range(40)))
        assert put(client, "i", range(40)) == 40
        assert all(right(client, "i", range(40)))
    assert old < files_below(site.root), "bytes of another registry are not ours to touch"
    assert site.stop() == 0
    assert site.audit().problems == []


def test_a_storage_whose_root_vanished_is_misses_until_it_is_back(site: Site) -> None:
    site.start("--set", "probe_period_s=0.1")
    away = site.root.with_name("away")
    with site.client() as client:
        register(client, "i")
        put(client, "i", range(40))
        site.root.rename(away)
        eventually_sync(
            lambda: not client.get_cache_location("i", range(40)).hits, timeout=PATIENCE_S
        )
        with pytest.raises(NoStorage):
            client.start_write_cache("i", [100])
        assert not site.root.exists(), "made anew below a mount that is away, it would hide it"
        away.rename(site.root)
        eventually_sync(
            lambda: client.get_cache_location("i", range(40)).hits == 40, timeout=PATIENCE_S
        )
        assert all(right(client, "i", range(40)))
        assert put(client, "i", [100]) == 1
    report = site.audit_at_rest()
    assert report.problems == []
    assert report.serving_blocks == 41


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "kvcm-test", str(folder)]
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("mounting needs root")
    if (refused := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no tmpfs here: {refused.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """A file that takes all that is free."""
    try:
        with path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
    except OSError:
        pass


def test_a_full_index_disk_refuses_writes_loses_nothing_and_recovers(
    tmp_path: Path, small_disk: Path
) -> None:
    site = Site(tmp_path)
    site.data_dir = small_disk / "data"
    try:
        site.start()
        with site.client(timeout=5.0) as client:
            register(client, "i")
            put(client, "i", range(1_000))
            fill(small_disk / "ballast")
            written = write_until_refused(client, 1_000)
            try:
                assert all(right(client, "i", range(1_000)))
            except NotReady:
                pass  # A shard whose last commit is in doubt is claimed anew first: a write.
            (small_disk / "ballast").unlink()
            eventually_sync(lambda: can_write(client, 1 << 40), timeout=PATIENCE_S, interval=0.5)
            assert all(right(client, "i", [*range(1_000), *written]))
        site.kill()
        site.start()
        with site.client() as client:
            assert all(right(client, "i", [*range(1_000), *written, 1 << 40]))
        assert site.audit_at_rest().problems == []
    finally:
        site.kill()


def write_until_refused(client: Client, first: int) -> list[int]:
    """Keys of the acknowledged writes before the one that a full disk refuses."""
    written: list[int] = []
    while True:
        keys = range(first, first + 500)
        try:
            put(client, "i", keys)
        except NotReady:
            return written
        written += keys
        first += 500


def can_write(client: Client, key: int) -> bool:
    try:
        put(client, "i", [key])
    except (NotReady, SessionNotExist):
        return False
    return right(client, "i", [key]) == [True]


def test_a_full_storage_publishes_nothing_that_was_not_written(
    tmp_path: Path, small_disk: Path
) -> None:
    site = Site(tmp_path, root=small_disk / "blocks")
    size = 1 << 20
    try:
        site.start("--set", "probe_period_s=600")
        with site.client() as client:
            client.register_instance("default", "i", 4, {"tp0": size})
            failed = 0
            for first in range(0, 96, 8):
                with client.write("i", range(first, first + 8)) as session:
                    blocks = [bytes([first + i]) * size for i in range(8)]
                    failed += len(session.put(FileSdk(), blocks))
            assert 0 < failed < 96
            found = client.get_cache_location("i", range(96), query=QueryType.BATCH_GET)
            assert found.hits == 96 - failed
            for key, location in enumerate(found.locations):
                if location.found:
                    (data,) = FileSdk().get_many([(location.specs["tp0"], None)])
                    assert data == bytes([key]) * size
        report = site.audit_at_rest()
        assert report.problems == []
        assert report.serving_blocks == 96 - failed
    finally:
        site.kill()


def files_below(root: Path) -> set[str]:
    return {str(p) for p in root.rglob("*") if p.is_file()}
