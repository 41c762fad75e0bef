"""Graces, deletes that fail, and what a restart does to both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcm.core.errors import StorageError
from kvcm.core.types import QueryType
from kvcm.testing.faults import Fault, Op, no_faults, script
from tests.cache.harness import GRACE_S, Grant, Harness, group, read_slot


def there(grant: Grant) -> bool:
    """Whether all, or none (False), of a write's files are there."""
    found = {read_slot(u) is not None for x in grant.locations for u in x.uris.values()}
    assert len(found) == 1
    return found.pop()


class Deletes:
    """Watches and breaks a storage's deletes."""

    def __init__(self, h: Harness, storage: str) -> None:
        backend = h.backends.get(storage)
        assert backend is not None
        self.first: float | None = None
        self.calls = 0
        self.failing: set[str] = set()
        self.hang: asyncio.Event | None = None
        self._h = h
        self._delete = backend.delete
        backend.delete = self  # type: ignore[method-assign, assignment]

    async def __call__(self, names: Sequence[str]) -> list[Exception | None]:
        self.calls += 1
        if self.first is None:
            self.first = self._h.clock.monotonic()
        if self.hang is not None:
            await self.hang.wait()
        good = [n for n in names if not any(f in n for f in self.failing)]
        done = dict(zip(good, await self._delete(good), strict=True))
        return [done[n] if n in done else StorageError("disk on fire") for n in names]


@pytest.mark.parametrize(("delay_ms", "grace"), [(3000, GRACE_S), (25_000, 25.0), (0, GRACE_S)])
@pytest.mark.parametrize("crashed", [False, True])
async def test_no_byte_is_deleted_before_its_grace(
    tmp_path: Path, delay_ms: int, grace: float, crashed: bool
) -> None:
    """R09: the longer of the group's delay and the floor, also across a restart; then once."""
    h = await Harness(root=tmp_path, groups=[group(delay_ms=delay_ms)]).open()
    await h.register()
    grant = await h.put([1, 2, 3])
    await h.remove([1, 2, 3])
    retired = h.clock.monotonic()
    if crashed:
        await h.wait(2)
        await h.crash()
    deletes = Deletes(h, "nfs_01")
    while h.clock.monotonic() < retired + grace + 5:
        assert there(grant) or h.clock.monotonic() >= retired + grace
        await h.wait(0.25)
    assert not there(grant)
    assert deletes.first is not None
    assert deletes.first >= retired + grace
    await h.drain()
    assert deletes.calls == 1
    await h.check_rest()
    await h.close()


async def test_bytes_of_an_abandoned_write_are_deleted_again_for_a_late_writer(
    tmp_path: Path,
) -> None:
    h = await Harness(root=tmp_path, timeout_max_s=60).open()
    await h.register()
    grant = await h.start([1, 2], timeout=5)
    await h.wait(6)
    await h.wait(GRACE_S + 1)
    h.fill(grant)  # the writer wakes up after its files were deleted
    assert there(grant)
    await h.crash()
    await h.wait(50)
    assert there(grant)
    await h.wait(61 + GRACE_S)
    await h.rounds(2)
    assert not there(grant)
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_a_failing_delete_backs_off_and_holds_up_nothing_else(tmp_path: Path) -> None:
    h = await Harness(root=tmp_path, storages=("nfs_01", "nfs_02")).open()
    await h.register()
    bad = await h.put([1])
    good = [await h.put([10 + i]) for i in range(20)]
    deletes = Deletes(h, "nfs_01")
    deletes.failing = {uri.split("?")[0].rsplit("/", 1)[1][:20] for uri in _uris(bad)}
    await h.remove([1, *range(10, 30)])
    # The key is free at once, whatever becomes of the bytes.
    assert (await h.start([1])).granted == [1]
    await h.wait(GRACE_S + 1)
    assert not any(there(g) for g in good)
    assert there(bad)
    calls = deletes.calls
    await h.wait(60, step=0.5)
    assert 3 <= deletes.calls - calls <= 8  # 2, 4, 8, 16, 32 … seconds, not every round
    deletes.failing = set()
    await h.wait(600)
    assert not there(bad)
    await h.drain()
    await h.check_rest()
    await h.close()


def _uris(grant: Grant) -> list[str]:
    return [u for x in grant.locations for u in x.uris.values()]


async def test_a_storage_that_hangs_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcm.reclaimer.trash._LATE_S", 0.05)
    h = await Harness(root=tmp_path, storages=("nfs_01", "nfs_02")).open()
    await h.register()
    grants = [await h.put([i]) for i in range(8)]
    by_storage: dict[bool, list[Grant]] = {True: [], False: []}
    for grant in grants:
        by_storage["nfs_01" in _uris(grant)[0]].append(grant)
    assert all(by_storage.values()), "writes spread over the storages"
    deletes = Deletes(h, "nfs_01")
    deletes.hang = asyncio.Event()
    await h.remove(list(range(8)))
    await h.wait(GRACE_S + 1)
    await h.wait(1)
    assert all(there(g) for g in by_storage[True])
    assert not any(there(g) for g in by_storage[False])
    assert deletes.calls == 1
    deletes.hang.set()
    deletes.hang = None
    (trash,) = (x for x in h.manager.loops if x.name == "trash")
    await asyncio.wait(list(trash._lanes["nfs_01"].running))  # type: ignore[attr-defined]
    monkeypatch.undo()
    await h.drain()
    assert not any(there(g) for g in grants)
    await h.check_rest()
    await h.close()


async def test_a_delete_whose_bytes_were_gone_already_is_fine(tmp_path: Path) -> None:
    h = await Harness(root=tmp_path).open()
    await h.register()
    grant = await h.start([1, 2])
    await h.finish(grant)  # nothing was ever written
    await h.remove([1, 2])
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_a_read_just_before_eviction_keeps_its_bytes_for_the_grace(tmp_path: Path) -> None:
    """R08, for each kind of query."""
    h = await Harness(root=tmp_path).open()
    await h.register()
    for query in (QueryType.PREFIX_MATCH, QueryType.BATCH_GET, QueryType.REVERSE_ROLL_SW_MATCH):
        key = 100 + query
        grant = await h.put([key])
        assert len(await h.lookup([key], query=query, sw=1)) == 1
        await h.remove([key])
        new = await h.put([key])
        assert not set(_uris(new)) & set(_uris(grant))
        await h.wait(GRACE_S - 0.1, step=1)
        assert there(grant)
        await h.wait(1)
        assert not there(grant)
    await h.close()


@pytest.mark.parametrize("way", ["remove", "trim", "instance", "fail", "partial"])
async def test_every_way_out_frees_every_byte(tmp_path: Path, way: str) -> None:
    h = await Harness(root=tmp_path, timeout_max_s=60).open()
    await h.register()
    grant = await h.start(list(range(10)))
    h.fill(grant)
    await h.finish(grant, [way != "fail"] * 10)
    actions: dict[str, Any] = {
        "remove": lambda: h.remove(list(range(10))),
        "trim": h.trim,
        "instance": lambda: h.manager.remove_instance("i1", None),
        "fail": lambda: h.round(),
        "partial": lambda: h.remove([0, 1, 2, 4, 9]),
    }
    await actions[way]()
    await h.drain()
    await h.check_rest()
    left = h.files()
    if way == "partial":
        # Files of three slots: [0 1 2] and [9] are gone, [3 4 5] keeps its dead slot.
        assert len(left) == 4
        assert h.manager.usage().groups["default"].dead_bytes == 2 * 64
    else:
        assert not left
    await h.close()


@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_an_extent_is_not_forgotten_while_its_trash_is_being_read_again(
    tmp_path: Path, turns: int
) -> None:
    """It went by a commit of unknown outcome; that it is over shows when its shard is read again,
    and so does its trash."""
    h = await Harness(root=tmp_path, turns=turns).open()
    await h.register()
    await h.put([1])
    await h.wait(h.settings.write_timeout_s_max + 1)
    (forget,) = (loop for loop in h.manager.loops if loop.name == "forget")
    h.store.plan = script([(Op.COMMIT, h.store.calls[Op.COMMIT] + 1, Fault.UNKNOWN_DONE)])
    removal = asyncio.ensure_future(h.remove([1]))
    while not removal.done():
        await forget.run_once(h.clock.monotonic())
        await asyncio.sleep(0)
    await removal
    h.store.plan = no_faults
    stored = await h.stored(h.index())
    assert [trash.extent_id in stored.extents for trash in stored.trash] == [True]
    await h.drain()
    await h.check_rest()
    assert h.files() == set()
    await h.close()
