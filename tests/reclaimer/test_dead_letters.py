"""Deletes that fail for long, storages that hang, and what operators see of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcm.core.errors import StorageError
from kvcm.reclaimer.base import DeleteOptions
from kvcm.reclaimer.lanes import NAMES_PER_BATCH, StorageTrash
from kvcm.server.wiring import Manager
from kvcm.testing.eventually import eventually
from kvcm.testing.faults import Fault, Op
from tests.cache.harness import GRACE_S, SLOT, Grant, Harness, file_of, group, read_slot

TRIES = 3


@pytest.fixture(autouse=True)
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    options = DeleteOptions(tries_max=TRIES, dead_letter_retry_s=3600.0)
    monkeypatch.setattr(Manager, "deletes", options)


class Calls:
    """Records a storage's delete calls; ``bad`` names fail, ``hang`` holds them all."""

    def __init__(self, h: Harness, storage: str = "nfs_01") -> None:
        backend = h.backends.get(storage)
        assert backend is not None
        self.names: list[list[str]] = []
        self.times: list[float] = []
        self.bad: set[str] = set()
        self.hang: asyncio.Event | None = None
        self.under_way = self.most = 0
        self._clock = h.clock
        self._delete = backend.delete
        backend.delete = self  # type: ignore[method-assign, assignment]

    async def __call__(self, names: Sequence[str]) -> list[Exception | None]:
        self.names.append(list(names))
        self.times.append(self._clock.monotonic())
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if self.hang is not None:
                await self.hang.wait()
            answers = await self._delete([n for n in names if n not in self.bad])
        finally:
            self.under_way -= 1
        done = iter(answers)
        return [StorageError(f"{n}: stuck") if n in self.bad else next(done) for n in names]


def files_of(grant: Grant) -> set[Path]:
    return {file_of(u)[0] for x in grant.locations for u in x.uris.values()}


def is_there(grant: Grant) -> bool:
    return any(read_slot(u) is not None for x in grant.locations for u in x.uris.values())


def trash_of(h: Harness, storage: str = "nfs_01") -> StorageTrash:
    assert h.manager.space is not None
    (found,) = [x for x in h.manager.space.trash() if x.storage == storage]
    return found


async def test_the_trash_of_a_storage_is_deleted_in_few_calls(tmp_path: Path) -> None:
    h = await Harness(root=tmp_path).open()
    await h.register()
    for i in range(300):
        await h.finish(await h.start([i]))
    calls = Calls(h)
    await h.remove(list(range(300)))
    assert trash_of(h).objects == 600
    assert trash_of(h).size == 600 * SLOT
    commits = h.store.calls[Op.COMMIT]
    await h.wait(GRACE_S)
    assert sorted(len(names) for names in calls.names) == [88, *[128] * 4]
    assert h.store.calls[Op.COMMIT] - commits <= 5 * 16
    assert h.manager.usage().storages["nfs_01"].trash_bytes == 0
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_one_call_names_a_bounded_number_of_files(tmp_path: Path) -> None:
    h = await Harness(root=tmp_path, keys_per_file=1).open()
    await h.register()
    # Two files a block; the last entry alone has more than fit.
    sizes = [25, 25, 25, 100]
    at = 0
    for size in sizes:
        keys = list(range(at, at + size))
        await h.finish(await h.start(keys))
        await h.remove(keys)
        at += size
    calls = Calls(h)
    await h.wait(GRACE_S)
    assert sorted(len(n) for n in calls.names) == [50, 100, 200]
    assert NAMES_PER_BATCH == 128
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_grace_of_five_seconds_with_a_period_of_one(tmp_path: Path) -> None:
    """Retired at 0: deleted in the round at 5, not at 4, whatever else the rounds do."""
    h = await Harness(root=tmp_path, grace_s=0.0, groups=[group(delay_ms=5000)]).open()
    await h.register()
    grants = [await h.put([i]) for i in range(4)]
    calls = Calls(h)
    began = h.clock.monotonic()
    seen: list[tuple[int, int]] = []
    for second in range(10):
        if second < 4:
            await h.remove([second])
        await h.round()
        there = sum(is_there(g) for g in grants)
        seen.append((there, h.manager.usage().storages["nfs_01"].trash_bytes // SLOT))
        h.clock.advance(1)
    # Bytes are free only once they are deleted: serving + trash fall together.
    assert seen == [
        *((4, 2), (4, 4), (4, 6), (4, 8), (4, 8)),
        *((3, 6), (2, 4), (1, 2), (0, 0), (0, 0)),
    ]
    assert [t - began for t in calls.times] == [5, 6, 7, 8]
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_a_directory_in_place_of_a_file_becomes_a_dead_letter_and_blocks_nothing(
    tmp_path: Path,
) -> None:
    """Not even root deletes it; it stands at the head of the queue."""
    h = await Harness(root=tmp_path).open()
    await h.register()
    bad = await h.put([1])
    good = [await h.put([10 + i]) for i in range(20)]
    for path in files_of(bad):
        path.unlink()
        path.mkdir()
    await h.remove([1])
    await h.remove(list(range(10, 30)))
    assert (await h.put([1])).granted == [1]  # the key is free all the same
    await h.wait(GRACE_S)
    assert not any(is_there(g) for g in good)
    assert all(path.is_dir() for path in files_of(bad))
    trash = trash_of(h)
    assert (trash.entries, trash.failing, trash.dead_letters) == (1, 1, 0)
    assert trash.size == 2 * SLOT
    await h.wait(60, step=1)
    trash = trash_of(h)
    assert (trash.entries, trash.failing, trash.dead_letters, trash.tries) == (1, 0, 1, TRIES)
    assert trash.dead_letter_size == 2 * SLOT
    (letter,) = trash.letters
    assert letter.instance == "i1"
    assert letter.objects == 2
    assert "irectory" in letter.error
    assert letter.error == trash.error
    assert letter.since == trash.since > 0
    # Its bytes are not free, and the group does not pay for them.
    usage = h.manager.usage()
    assert usage.storages["nfs_01"].trash_bytes == 2 * SLOT
    for path in files_of(bad):
        path.rmdir()
    assert h.manager.space is not None
    assert h.manager.space.retry("nfs_02") == 0
    assert h.manager.space.retry("nfs_01") == 1
    await h.round()
    assert h.manager.space.trash() == []
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_a_dead_letter_is_tried_slowly_and_survives_a_restart(tmp_path: Path) -> None:
    h = await Harness(root=tmp_path).open()
    await h.register()
    grant = await h.put([1])
    calls = Calls(h)
    calls.bad = {str(path) for path in files_of(grant)}
    await h.remove([1])
    await h.wait(GRACE_S)
    await h.wait(30, step=0.5)
    assert len(calls.times) == TRIES
    # Back-off of 2 and 4 seconds, by chance up to half of it less (and a round every 0.5 s).
    first, second = (b - a for a, b in zip(calls.times, calls.times[1:], strict=False))
    assert 1 <= first <= 2.5
    assert 2 <= second <= 4.5
    await h.wait(1700, step=10)
    assert len(calls.times) == TRIES
    await h.wait(1900, step=10)
    assert len(calls.times) == TRIES + 1
    await h.crash()
    assert trash_of(h).entries == 1
    assert trash_of(h).dead_letters == 0  # tries are not stored
    assert is_there(grant)
    await h.wait(GRACE_S)
    assert not is_there(grant)
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_what_failed_together_is_not_tried_together_for_ever(tmp_path: Path) -> None:
    h = await Harness(root=tmp_path).open()
    await h.register()
    grants = [await h.put([i]) for i in range(40)]
    calls = Calls(h)
    calls.bad = {str(path) for grant in grants for path in files_of(grant)}
    await h.remove(list(range(40)))
    await h.wait(GRACE_S)
    assert len(calls.names) == 1
    await h.wait(8, step=0.1)
    assert len(calls.names) >= 10
    calls.bad.clear()
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_once_a_storage_deletes_again_its_dead_letters_need_not_wait(tmp_path: Path) -> None:
    h = await Harness(root=tmp_path).open()
    await h.register()
    grants = [await h.put([i]) for i in range(30)]
    calls = Calls(h)
    calls.bad = {str(path) for grant in grants for path in files_of(grant)}
    await h.remove(list(range(30)))
    await h.wait(GRACE_S)
    await h.wait(60, step=1)
    assert trash_of(h).dead_letters == 30
    calls.bad.clear()
    # The first that comes up by itself takes the others along.
    waited = 0
    while any(is_there(g) for g in grants):
        there = sum(is_there(g) for g in grants)
        assert there in (30, 29), "they went one by one"
        await h.wait(10)
        waited += 10
        assert waited < 3600
        if there == 30 and not all(is_there(g) for g in grants):
            await h.rounds(2)
            break
    assert not any(is_there(g) for g in grants)
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_storages_that_hang_hold_up_no_other_and_take_bounded_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcm.reclaimer.trash._LATE_S", 0.3)
    monkeypatch.setattr("kvcm.reclaimer.lanes.ENTRIES_PER_BATCH", 4)
    options = DeleteOptions(tries_max=TRIES, at_once=3, per_storage=2)
    monkeypatch.setattr(Manager, "deletes", options)
    names = ["nfs_01", "nfs_02", "nfs_03", "nfs_04"]
    h = await Harness(
        root=tmp_path,
        storages=names,
        groups=[group(f"g{n}", storages=[name]) for n, name in enumerate(names)],
    ).open()
    grants: dict[str, list[Grant]] = {}
    for n, name in enumerate(names):
        await h.register(f"i{n}", group_name=f"g{n}")
        grants[name] = [await h.put([i], f"i{n}") for i in range(10)]
    calls = {name: Calls(h, name) for name in names}
    gate = asyncio.Event()
    for name in names[:3]:
        calls[name].hang = gate
    for n in range(4):
        await h.remove(list(range(10)), f"i{n}")
    await h.wait(GRACE_S)
    await h.rounds(3)
    assert not any(map(is_there, grants["nfs_04"]))
    for name in names[:3]:
        assert all(map(is_there, grants[name]))
        assert calls[name].under_way == calls[name].most == 2
        assert trash_of(h, name).late_calls == 2
    gate.set()
    await eventually(lambda: not any(c.under_way for c in calls.values()))
    await h.drain()
    assert not h.files()
    assert max(c.most for c in calls.values()) <= 2
    await h.check_rest()
    await h.close()


async def test_what_awaits_its_second_delete_is_shown_and_counts_as_free(tmp_path: Path) -> None:
    h = await Harness(root=tmp_path, timeout_max_s=60).open()
    await h.register()
    grant = await h.start([1, 2, 3, 4], timeout=5)
    h.fill(grant)
    await h.wait(5)
    assert trash_of(h).objects == 4
    assert h.manager.usage().storages["nfs_01"].trash_bytes == 8 * SLOT
    await h.wait(GRACE_S)
    for _ in range(2):
        trash = trash_of(h)
        assert (trash.objects, trash.size) == (0, 0)
        assert (trash.again_objects, trash.again_size) == (4, 8 * SLOT)
        assert h.manager.usage().storages["nfs_01"].trash_bytes == 0
        await h.check_counters()
        await h.crash()
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_an_index_store_that_fails_is_no_failed_delete(tmp_path: Path) -> None:
    h = await Harness(root=tmp_path).open()
    await h.register()
    grants = [await h.put([i]) for i in range(20)]
    await h.remove(list(range(20)))
    h.store.plan = lambda op, _n: Fault.UNAVAILABLE if op is Op.COMMIT else None
    await h.wait(GRACE_S)
    await h.wait(30, step=0.5)
    assert not any(is_there(g) for g in grants)
    trash = trash_of(h)
    assert (trash.entries, trash.failing, trash.dead_letters) == (20, 0, 0)
    h.store.plan = lambda _op, _n: None
    await h.wait(2)
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_a_backend_with_a_fault_of_its_own_stops_nobody(tmp_path: Path) -> None:
    names = ["nfs_01", "nfs_02"]
    h = await Harness(
        root=tmp_path,
        storages=names,
        groups=[group(f"g{n}", storages=[name]) for n, name in enumerate(names)],
    ).open()
    grants = []
    for n in range(2):
        await h.register(f"i{n}", group_name=f"g{n}")
        grants.append(await h.put([1], f"i{n}"))
    calls = Calls(h, "nfs_01")
    real = calls._delete

    async def broken(_names: Sequence[str]) -> list[Exception | None]:
        raise ZeroDivisionError

    calls._delete = broken
    for n in range(2):
        await h.remove([1], f"i{n}")
    await h.wait(GRACE_S)
    assert is_there(grants[0])
    assert not is_there(grants[1])
    calls._delete = real
    await h.drain()
    await h.check_rest()
    await h.close()


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.UNKNOWN_DONE, Fault.UNKNOWN_LOST])
async def test_one_shard_that_fails_holds_up_no_other(tmp_path: Path, fault: Fault) -> None:
    h = await Harness(root=tmp_path).open()
    await h.register()
    for i in range(32):
        await h.put([i])
    await h.remove(list(range(32)))
    failed = h.store.calls[Op.COMMIT] + 1
    h.store.plan = lambda op, n: fault if op is Op.COMMIT and n == failed else None
    await h.wait(GRACE_S)
    assert not h.files()
    assert h.store.injected == [(Op.COMMIT, failed, fault)]
    assert trash_of(h).entries == 2  # of the 32, those in the shard that failed
    h.store.plan = lambda _op, _n: None
    await h.drain()
    await h.check_rest()
    await h.close()
