from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest
from registry_samples import OpenRegistry, group, instance

from kvcm.registry import database
from kvcm.registry.registry import Registry

HERE = Path(__file__).parent


async def start(url: str, prefix: str, count: int) -> Process:
    env = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}"}
    script = str(HERE / "registry_changes.py")
    arguments = [sys.executable, script, url, prefix, str(count)]
    return await asyncio.create_subprocess_exec(*arguments, stdout=PIPE, env=env)


async def lines(process: Process, count: int | None = None) -> list[list[str]]:
    """What it acknowledged: (name, uid, epoch) each; all of it when no count is given."""
    assert process.stdout is not None
    found: list[list[str]] = []
    while count is None or len(found) < count:
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            break
        if line != b"open\n":
            found.append(line.decode().split())
    return found


@pytest.mark.parametrize("acknowledged", [1, 7, 20])
async def test_kill_9_loses_nothing_acknowledged(
    db_url: str, open_registry: OpenRegistry, acknowledged: int
) -> None:
    process = await start(db_url, "i", 1_000_000)
    seen = await lines(process, acknowledged)
    process.kill()
    seen += await lines(process)
    await process.wait()
    registry = await open_registry()
    for name, uid, _ in seen:
        assert registry.view.instances[name].uid == uid
        assert name in registry.view.storages
    # At most the change in flight was done and not acknowledged.
    assert len(registry.view.instances) - len(seen) in (0, 1)
    assert len(registry.view.instances) - len(registry.view.storages) in (0, 1)
    assert await registry.next_epoch() > int(seen[-1][2])
    await registry.register_instance(instance("after"))


async def test_two_processes_share_one_file(db_url: str, open_registry: OpenRegistry) -> None:
    processes = [await start(db_url, prefix, 25) for prefix in "ab"]
    seen = await asyncio.gather(*(lines(process) for process in processes))
    assert [await process.wait() for process in processes] == [0, 0]
    registry = await open_registry()
    acknowledged = {name: uid for part in seen for name, uid, _ in part}
    assert len(acknowledged) == 50
    assert {n: i.uid for n, i in registry.view.instances.items()} == acknowledged
    assert len(set(acknowledged.values())) == 50
    epochs = [int(epoch) for part in seen for _, _, epoch in part]
    assert sorted(epochs) == list(range(1, 51))
    # Every change, and the one that made the group, counted once.
    assert registry.view.revision == 1 + 1 + 100


async def test_changes_of_another_manager_count_and_show(
    registry: Registry, open_registry: OpenRegistry
) -> None:
    other = await open_registry()
    theirs = await other.register_instance(instance("theirs"))
    assert "theirs" not in registry.view.instances
    assert await registry.register_instance(instance("theirs")) == theirs
    assert registry.view.instances == {"theirs": theirs}
    await other.create_group(group("new"))
    await registry.register_instance(instance("ours", instance_group="new"))
    assert set(registry.view.groups) == {"team", "new"}
    assert "ours" in (await other.refresh()).instances
    assert other.view.revision == registry.view.revision


@pytest.mark.parametrize("attempt", range(5))
async def test_managers_may_open_an_empty_database_at_once(
    open_registry: OpenRegistry, attempt: int
) -> None:
    opened = await asyncio.gather(*(open_registry() for _ in range(4)))
    assert len({registry.view.secret for registry in opened}) == 1
    assert len({registry.view.cluster_uid for registry in opened}) == 1


async def test_opening_a_file_again_does_not_drop_the_locks_held_on_it(
    sqlite_url: str, open_registry: OpenRegistry
) -> None:
    db_url = sqlite_url
    await open_registry(db_url)
    writer = sqlite3.connect(db_url.removeprefix("sqlite:///"), isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    database.open_engine(db_url).dispose()
    probe = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)"
    script = f"{probe}\nc.execute('BEGIN IMMEDIATE')"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, db_url.removeprefix("sqlite:///"), stderr=PIPE
    )
    _, errors = await process.communicate()
    assert b"database is locked" in errors
    writer.rollback()
    writer.close()
