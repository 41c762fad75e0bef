"""Every kind of damage: a dry run reports exactly it, a run mends it, and then all is well."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvcm.metaindex.stores.rocksdb import RocksStore
from kvcm.storage_backends import posix_survey
from kvcm.testing.audit import audit
from tests.cache.harness import Harness
from tests.reclaimer import repair_damage as damage
from tests.reclaimer.repair_damage import Damage, contents, fixed, kinds, run


@pytest.fixture(autouse=True)
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are a day old as soon as they are written."""
    real = posix_survey.file_system_time
    monkeypatch.setattr(
        posix_survey, "file_system_time", lambda root, name: real(root, name) + 86_400
    )


@pytest.fixture(params=["memory", "rocksdb"])
async def h(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    made = await Harness(request.param, root=tmp_path).open()
    await made.register()
    await made.put(range(120))
    grant = await made.start(range(200, 210))
    made.fill(grant)
    await made.finish(grant, [True] * 5 + [False] * 5)
    await made.put(range(300, 310))
    await made.remove(range(303, 309))
    yield made
    await made.close()


async def check_all(h: Harness) -> None:
    """A second run is clean, and so is the offline audit."""
    again = await run(h, fix=True)
    assert again.clean, again.document()
    await h.wait(3600)
    await h.drain()
    await h.check_rest()
    if isinstance(h.inner, RocksStore):
        await h._end(graceful=True)
        await h.inner.close()
        store = RocksStore(h.root / "index")
        await store.open()
        report = await audit(f"sqlite:///{h.root}/registry.db", store, clock=h.clock)
        await store.close()
        await h.inner.open()
        await h._start()
        assert report.problems == []


async def test_where_nothing_is_wrong_nothing_is_found(h: Harness) -> None:
    await h.start(range(400, 410))
    before = await contents(h)
    report = await run(h)
    assert report.clean, report.document()
    assert report.instances == 1
    assert report.storages["nfs_01"].objects
    assert await contents(h) == before
    assert (await run(h, fix=True)).clean
    assert await contents(h) == before


@pytest.mark.parametrize("harm", damage.ALL, ids=lambda d: d.__name__)
async def test_damage_is_reported_then_mended(h: Harness, harm: Damage) -> None:
    expected = await harm(h)
    before = await contents(h)
    force = "lose_a_chunk" in harm.__name__ or "state" in harm.__name__
    report = await run(h)
    assert kinds(report) == expected, report.document()
    assert not report.errors
    assert not fixed(report)
    assert await contents(h) == before
    report = await run(h, fix=True, force=force)
    assert kinds(report) == expected
    assert fixed(report) == expected, report.document()
    await check_all(h)
