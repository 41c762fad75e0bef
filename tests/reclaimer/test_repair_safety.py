"""What repair must never do: touch another's files, take a live block's bytes, make a wrong hit."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from kvcm.core.errors import ConfigError, KvcmError, NotReady
from kvcm.core.limits import SCRUB_PER_SECOND_MAX
from kvcm.metaindex.ledger import Delta, to_counters
from kvcm.metaindex.store import Mutation
from kvcm.reclaimer.repair import RepairRun, ScrubLoop
from kvcm.reclaimer.repair_report import RepairOptions
from kvcm.server.settings import load
from kvcm.storage_backends import posix_survey
from kvcm.testing.faults import Fault, Op, no_faults, script
from tests.cache.harness import GRACE_S, Grant, Harness, payload, read_slot
from tests.reclaimer import repair_damage as damage
from tests.reclaimer.repair_damage import fixed, kinds, run

AGE_S = 86_400.0


@pytest.fixture(autouse=True)
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    real = posix_survey.file_system_time
    monkeypatch.setattr(
        posix_survey, "file_system_time", lambda root, name: real(root, name) + AGE_S
    )


@pytest.fixture
async def h(tmp_path: Path) -> AsyncIterator[Harness]:
    made = await Harness(root=tmp_path).open()
    await made.register()
    yield made
    await made.close()


def make_young(path: Path) -> None:
    """As young as can be, by the file system's shifted clock."""
    now = path.stat().st_mtime
    os.utime(path, (now, now + AGE_S))


def stray(h: Harness, cluster: str, uid: str, name: str = "") -> Path:
    """A file of an extent that nobody knows."""
    folder = h.root / "nfs_01" / cluster / uid / "0a"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (name or f"{damage.extent_name(damage.NOBODY)}_tp0_0")
    path.write_bytes(b"x" * 10)
    return path


def uid_of(number: int, tail: str = "zzzz") -> str:
    return f"{number:06d}{tail}"


# ---- whose files they are ------------------------------------------------------------------------


async def test_files_of_others_are_never_touched(h: Harness) -> None:
    await h.put(range(9))
    view = h.registry.view
    ours, uid = view.cluster_uid, h.index().uid
    others = [
        stray(h, "othercl1", uid),
        stray(h, "othercl1", uid_of(1)),
        stray(h, ours, uid_of(view.next_instance_number)),  # yet to be given out
        stray(h, ours, uid_of(999_998)),
        stray(h, ours, uid[:6] + "zzzz"),  # our number, another history's uid
        stray(h, ours, "not-a-uid"),
        stray(h, ours, uid, "README"),
        stray(h, ours, uid, "aaaa_tp0_0"),
        stray(h, ours, uid, f"{damage.extent_name(b'zzzz' + damage.NOBODY[4:])}_tp0_0"),  # later
        h.root / "nfs_01" / "somebody.txt",
    ]
    others[-1].write_bytes(b"x")
    report = await run(h, fix=True, force=True)
    assert report.clean, report.document()
    assert all(path.exists() for path in others)
    assert report.storages["nfs_01"].foreign == 2


async def test_a_link_to_elsewhere_is_not_followed(h: Harness, tmp_path: Path) -> None:
    await h.put(range(9))
    ours = h.registry.view.cluster_uid
    outside = tmp_path / "outside" / "0a"
    outside.mkdir(parents=True)
    victim = outside / f"{damage.extent_name(damage.NOBODY)}_tp0_0"
    victim.write_bytes(b"x")
    view = h.registry.view
    assert view.next_instance_number > 1
    (h.root / "nfs_01" / ours / uid_of(0)).symlink_to(outside.parent)
    assert (await run(h, fix=True, force=True)).clean
    assert victim.exists()


async def test_what_an_instance_left_is_removed_once_it_is_forgotten(h: Harness) -> None:
    await h.put(range(90))
    await h.register("i2")
    uid = h.index("i2").uid
    await h.put(range(3), "i2")
    await h.manager.remove_instance("i2", None)
    await h.drain()
    assert uid not in {i.uid for i in h.registry.view.closing}
    late = stray(h, h.registry.view.cluster_uid, uid)
    make_young(late)
    report = await run(h, fix=True)
    assert report.clean
    assert report.storages["nfs_01"].too_young == 1
    assert late.exists()
    os.utime(late, (0, 0))
    report = await run(h)
    assert kinds(report) == {"gone_instance": 1, "ownerless_file": 1}
    assert late.exists()
    report = await run(h, fix=True)
    assert fixed(report) == {"gone_instance": 1, "ownerless_file": 1}
    assert not late.parent.parent.exists()
    assert (await run(h)).clean


async def test_one_folder_under_two_names_is_no_stranger_to_itself(tmp_path: Path) -> None:
    """Two storages, two mounts, one place: a path that no record names may be a record's file."""
    h = Harness(root=tmp_path, storages=("nfs_01", "nfs_02"))
    (tmp_path / "nfs_01").mkdir()
    (tmp_path / "nfs_02").symlink_to(tmp_path / "nfs_01")
    await h.open()
    await h.register()
    grants = [await h.put(range(at, at + 9)) for at in range(0, 90, 9)]
    report = await run(h, fix=True, force=True)
    assert report.clean, report.document()
    for at in range(0, 90, 9):
        assert await h.hits(range(at, at + 9)) == 9
    check_bytes(grants)
    await h.close()


def check_bytes(grants: list[Grant]) -> None:
    for grant in grants:
        for key, location in grant.by_key.items():
            for spec, uri in location.uris.items():
                assert read_slot(uri) == payload(grant.session, key, spec, 64)


# ---- how much ------------------------------------------------------------------------------------


async def test_above_five_percent_a_human_decides(h: Harness) -> None:
    """N and N + 1: 2 of 40 files may go, 3 of 41 may not."""
    await h.put(range(57))
    assert len(h.files()) == 38
    ours, uid = h.registry.view.cluster_uid, h.index().uid
    tail = [bytes([i]) * 4 for i in range(3)]
    name = f"{damage.extent_name(damage.NOBODY[:8] + tail[0])}_tp0_0"
    stray(h, ours, uid, name)
    stray(h, ours, uid, name.replace("tp0", "tp1"))
    report = await run(h, fix=True)
    assert fixed(report) == {"ownerless_file": 2}
    for i in range(3):
        stray(h, ours, uid, f"{damage.extent_name(damage.NOBODY[:8] + tail[i])}_tp0_0")
    report = await run(h, fix=True)
    assert kinds(report) == {"ownerless_file": 3}
    assert not fixed(report)
    assert report.storages["nfs_01"].stopped == ["3 of 41 files have no owner"]
    assert len(h.files()) == 41
    assert fixed(await run(h, fix=True, force=True)) == {"ownerless_file": 3}
    assert len(h.files()) == 38


async def test_few_files_of_many_bytes_are_much_too(h: Harness) -> None:
    await h.put(range(90))
    big = stray(h, h.registry.view.cluster_uid, h.index().uid)
    big.write_bytes(bytes(100_000))
    report = await run(h, fix=True)
    assert not fixed(report)
    assert "bytes have no owner" in report.storages["nfs_01"].stopped[0]
    assert big.exists()


async def test_a_storage_that_lost_everything_is_left_to_a_human(h: Harness) -> None:
    await h.put(range(90))
    root = h.root / "nfs_01" / h.registry.view.cluster_uid
    root.rename(h.root / "away")
    root.mkdir()
    report = await run(h, fix=True)
    assert kinds(report) == {"missing_file": 60}
    assert not fixed(report)
    assert report.storages["nfs_01"].stopped == ["60 of 60 needed files are missing"]
    shutil.rmtree(root)
    (h.root / "away").rename(root)
    assert (await run(h)).clean
    assert await h.hits(range(90)) == 90


async def test_a_storage_whose_mount_is_away_is_left_alone(h: Harness) -> None:
    await h.put(range(90))
    root = h.root / "nfs_01"
    root.rename(h.root / "away")
    root.mkdir()
    report = await run(h, fix=True)
    assert not fixed(report)
    assert not kinds(report)
    assert report.errors
    assert all("has no file '.kvcm-storage'" in error for error in report.errors)
    assert list(root.iterdir()) == []
    root.rmdir()
    (h.root / "away").rename(root)
    assert (await run(h)).clean
    assert await h.hits(range(90)) == 90


# ---- what a reader may still hold ----------------------------------------------------------------


async def test_bytes_outlive_a_trim_of_the_records_by_the_grace(h: Harness) -> None:
    await h.put(range(90))
    await h.register("i2")
    grant = await h.put(range(3), "i2")
    await h.trim(damage.TrimStrategy.REMOVE_ALL_META, "i2")
    await h.wait(700)  # its records are forgotten
    run_ = RepairRun(h.manager.repair._ports, RepairOptions(fix=True))
    waited = 0
    async with aclosing(run_.steps()) as steps:
        async for count in steps:
            if not count:
                check_bytes([grant])
                h.clock.advance(1)
                waited += 1
    assert waited >= GRACE_S
    assert fixed(run_.report) == {"ownerless_file": 2}


async def test_lost_files_become_misses_and_their_keys_can_be_written_again(h: Harness) -> None:
    await h.put(range(90))
    assert await h.hits(range(90)) == 90
    (await damage.file_of(h, "tp0_1")).unlink()
    used = h.manager.usage().groups["default"].counted_bytes
    assert fixed(await run(h, fix=True)) == {"missing_file": 1}
    assert await h.hits(range(90)) == 3
    # Two specs of three blocks are gone: one file of each.
    assert h.manager.usage().groups["default"].counted_bytes == used - 6 * 64
    again = await h.put(range(90))
    assert again.granted == [3, 4, 5]
    assert await h.hits(range(90)) == 90
    await h.wait(GRACE_S + 1)
    check_bytes([again])
    await h.drain()
    await h.check_rest()


# ---- at the same time ----------------------------------------------------------------------------


async def test_commits_wait_while_a_shard_is_counted_and_are_counted_right(h: Harness) -> None:
    await h.put(range(30))
    index = h.index()
    number = next(iter({damage.home_shard(e) for e in index.book.entries}))
    async with index.shards.alone(number) as counters:
        other = Mutation(counters=to_counters("nfs_01", Delta(trash_bytes=1)))
        waiting = asyncio.ensure_future(index.shards.commit([(number, [other])]))
        await h.clock.settle()
        assert not waiting.done()
        assert counters == await h.counters(index.shards.id(number))
        back = Mutation(counters=to_counters("nfs_01", Delta(trash_bytes=-1)))
        await index.shards.commit_alone(number, back)
    await waiting
    await h.check_counters()


@pytest.mark.parametrize("fault", [Fault.UNKNOWN_DONE, Fault.UNKNOWN_LOST, Fault.UNAVAILABLE])
async def test_a_claim_of_repair_that_fails_costs_no_write_an_error(
    h: Harness, fault: Fault
) -> None:
    """Repair claims shards that are claimed already, to see their counters as stored."""
    index = h.index()
    for number in range(16):
        h.store.plan = script([(Op.CLAIM, h.store.calls[Op.CLAIM] + 1, fault)])
        with pytest.raises(NotReady):
            async with index.shards.alone(number):
                pass
    h.store.plan = no_faults
    for key in range(40):
        await h.put([key])
        assert await h.hits([key]) == 1
    await h.check_counters()


@pytest.mark.parametrize("seed", range(3))
async def test_a_manager_at_work_is_repaired_without_a_wrong_hit_or_a_lost_byte(
    tmp_path: Path, seed: int
) -> None:
    """Writers, readers, removals, damage and repair, all at once and at random."""
    chance = random.Random(seed)
    h = await Harness(root=tmp_path, turns=2).open()
    await h.register()
    written: dict[str, tuple[str, int, str]] = {}

    async def write() -> None:
        first = chance.randrange(200)
        grant = await h.start(range(first, first + chance.randrange(1, 12)))
        for key, location in grant.by_key.items():
            for spec, uri in location.uris.items():
                written[uri] = grant.session, key, spec
        h.fill(grant)
        await asyncio.sleep(0)
        flags = [chance.random() < 0.9 for _ in grant.granted]
        if chance.random() < 0.9:
            await h.finish(grant, flags)

    async def read() -> None:
        first = chance.randrange(200)
        for key, location in enumerate(await h.lookup(range(first, first + 10)), first):
            for spec, uri in location.uris.items():
                session, of, name = written[uri]
                assert (of, name) == (key, spec)
                assert read_slot(uri) == payload(session, key, spec, 64), "a wrong hit"

    async def remove() -> None:
        first = chance.randrange(200)
        await h.remove(range(first, first + 5))

    async def work() -> None:
        for _ in range(60):
            try:
                await chance.choice([write, write, read, read, remove])()
            except KvcmError:
                pass
            if chance.random() < 0.3:
                h.clock.advance(0.2)
                await h.round()

    async def repair() -> None:
        while not done.is_set():
            report = await run(h, fix=True, force=True)
            assert not report.errors, report.errors
            # Nothing was damaged: whatever it sees is the work of others.
            assert report.clean, report.document()
            await asyncio.sleep(0)

    done = asyncio.Event()
    repairing = asyncio.ensure_future(repair())
    await asyncio.gather(*(work() for _ in range(3)))
    done.set()
    await repairing
    await h.drain()
    await h.check_rest()
    for _ in range(200):
        await read()
    assert (await run(h)).clean
    await h.close()


@pytest.mark.parametrize("crash_at", [1, 20, 45, 60, 75, 90, 110])
async def test_a_crash_in_the_middle_leaves_the_rest_to_the_next_run(
    tmp_path: Path, crash_at: int
) -> None:
    h = await Harness("rocksdb", root=tmp_path).open()
    await h.register()
    await h.put(range(120))
    for harm in (
        damage.drift_counters,
        damage.name_nobody,
        damage.lose_a_row,
        damage.plant_a_file,
        damage.leave_trash,
        damage.lose_a_file,
    ):
        await harm(h)
    one = RepairRun(h.manager.repair._ports, RepairOptions(fix=True))
    steps = one.steps()
    for _ in range(crash_at):
        if await anext(steps, None) == 0:
            h.clock.advance(1)
    await steps.aclose()
    await h.crash()
    await run(h, fix=True)
    assert (await run(h)).clean
    await h.drain()
    await h.check_rest()
    assert await h.hits(range(120)) in (0, 120)
    await h.close()


# ---- in the background ---------------------------------------------------------------------------


async def test_the_scrubber_keeps_its_pace_and_mends(h: Harness) -> None:
    await h.put(range(90))
    await damage.lose_a_row(h)
    await damage.plant_a_file(h)
    scrub = ScrubLoop(h.manager.repair, 50)
    rounds, done = 0, 0
    repair = h.manager.repair
    assert repair is not None
    while not repair.totals.runs:
        report = await scrub.run_once(h.clock.monotonic())
        done += report.done
        h.clock.advance(1)
        rounds += 1
        assert rounds < 100
    assert done / rounds <= 50 + 1
    assert repair.totals.fixed == {"missing_row": 1, "ownerless_file": 1}
    assert await h.hits(range(90)) == 90
    # It rests, then begins anew.
    assert (await scrub.run_once(h.clock.monotonic())).done == 0
    h.clock.advance(3601)
    assert (await scrub.run_once(h.clock.monotonic())).done > 0


async def test_the_scrubber_leaves_what_does_not_parse_to_a_human(h: Harness) -> None:
    await h.put(range(90))
    expected = await damage.garble_trash(h)
    scrub = ScrubLoop(h.manager.repair, 10_000)
    repair = h.manager.repair
    assert repair is not None
    while not repair.totals.runs:
        await scrub.run_once(h.clock.monotonic())
        h.clock.advance(1)
    assert repair.totals.found == expected
    assert not any(repair.totals.fixed.values())


async def test_the_scrubber_can_be_off_and_gives_way(h: Harness) -> None:
    await h.put(range(90))
    assert (await ScrubLoop(h.manager.repair, 0).run_once(0.0)).done == 0
    repair = h.manager.repair
    assert repair is not None
    scrub = ScrubLoop(repair, 5)
    assert (await scrub.run_once(0.0)).done > 0
    repair.start(RepairOptions())
    assert (await scrub.run_once(1.0)).done == 0
    with pytest.raises(KvcmError, match="under way"):
        repair.start(RepairOptions())
    await repair.stop()
    assert repair.last is not None
    assert repair.last.phase == "stopped"
    assert (await scrub.run_once(2.0)).done > 0


def test_the_pace_has_a_limit() -> None:
    for pace in (0, SCRUB_PER_SECOND_MAX):
        settings = load({"repair.scrub_per_second": pace}, environ={})
        assert settings.repair.scrub_per_second == pace
    for pace in (-1, SCRUB_PER_SECOND_MAX + 1):
        with pytest.raises(ConfigError, match="scrub_per_second"):
            load({"repair.scrub_per_second": pace}, environ={})
