"""ReportCacheError: what a reader says takes out exactly what is so (field cases R05, R11, R56)."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcm.core import limits
from kvcm.core.errors import InstanceNotExist, InvalidArgument, NotReady, StorageError
from kvcm.core.types import QueryType, ReportKind, ReportOutcome
from kvcm.metaindex.stores.valkey import ValkeyStore
from kvcm.storage_backends.base import Capability, DataStorageBackend, ProbeResult
from kvcm.testing.faults import Fault, Op, no_faults, script
from kvcm.testing.servers_valkey import valkey_server
from tests.cache.harness import (
    GRACE_S,
    SLOT,
    Grant,
    Harness,
    Location,
    file_of,
    group,
    payload,
    read_slot,
)

MISSING, CORRUPT, UNREACHABLE = ReportKind.MISSING, ReportKind.CORRUPT, ReportKind.UNREACHABLE
ACCEPTED, STALE = ReportOutcome.ACCEPTED, ReportOutcome.STALE
NOT_VERIFIED, UNCHECKED = ReportOutcome.NOT_VERIFIED, ReportOutcome.UNCHECKED
LIMITED, NOTHING = ReportOutcome.LIMITED, ReportOutcome.NOTHING

KEYS = [11, 12, 13, 14, 15, 16, 17]
"""Three files a spec: slots 0-2, 3-5, 6."""


def uris(locations: Sequence[Location]) -> list[dict[str, str]]:
    return [location.uris for location in locations]


def unlink(location: Location, spec: str = "tp0") -> None:
    file_of(location.uris[spec])[0].unlink(missing_ok=True)


class Moody:
    """A storage whose looks and probes can be made to fail, and are counted."""

    def __init__(self, backend: DataStorageBackend) -> None:
        self._backend = backend
        self.capabilities = backend.capabilities
        self.probes_well = True
        self.error: Exception | None = None
        self.hangs = False
        self.asked: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def exists(self, names: Sequence[str], sizes: Sequence[int]) -> list[bool]:
        self.asked.append(len(names))
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return await self._backend.exists(names, sizes)

    async def probe(self) -> ProbeResult:
        return ProbeResult(self.probes_well, "" if self.probes_well else "not mounted")


@asynccontextmanager
async def moody(root: Path, **options: Any) -> AsyncIterator[tuple[Harness, Moody]]:
    made: list[Moody] = []

    def wrap(backend: DataStorageBackend) -> Any:
        made.append(Moody(backend))
        return made[-1]

    h = await Harness(root=root, wrap=wrap, **options).open()
    await h.register()
    try:
        yield h, made[-1]
    finally:
        await h.close()


@pytest.fixture(params=["memory", "rocksdb", "valkey"])
async def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    with ExitStack() as stack:
        if request.param == "valkey":
            server = stack.enter_context(valkey_server())
            made = Harness(root=tmp_path, store=ValkeyStore(server.url))
        else:
            made = Harness(request.param, root=tmp_path)
        await made.open()
        await made.register()
        yield made
        await made.close()


async def test_a_lost_file_is_a_miss_after_one_report_and_is_written_again(
    any_store: Harness,
) -> None:
    h = any_store
    await h.put(KEYS)
    found = await h.lookup(KEYS)
    # The second file of tp0: blocks 3 to 5. Their tp1 is all there.
    unlink(found[3])
    assert await h.hits(KEYS) == 7, "nobody has noticed yet"
    assert await h.report(KEYS, uris(found)) == [NOT_VERIFIED] * 3 + [ACCEPTED] * 3 + [NOT_VERIFIED]
    assert await h.hits(KEYS) == 3
    assert await h.statuses(KEYS[3:]) == ["NOT_FOUND"] * 3 + ["SERVING"]
    used = h.manager.usage().instances["i1"]
    # Both files of the three are in the trash: what is left of them is freed like any other.
    assert used.serving_bytes == 4 * 2 * SLOT
    assert used.trash_bytes == 3 * 2 * SLOT
    await h.check_counters()

    again = await h.put(KEYS)
    assert again.granted == KEYS[3:6]
    assert not {u for x in again.locations for u in x.uris.values()} & {
        u for x in found for u in x.uris.values()
    }
    assert await h.hits(KEYS) == 7
    for key, location in zip(KEYS[3:6], (await h.lookup(KEYS))[3:6], strict=True):
        for spec, uri in location.uris.items():
            assert read_slot(uri) == payload(again.session, key, spec, SLOT)
    await h.drain()
    await h.check_rest()
    assert h.manager.usage().instances["i1"].trash_bytes == 0


async def test_the_bytes_that_are_left_stay_for_the_grace_of_readers(harness: Harness) -> None:
    await harness.put(KEYS[:3])
    found = await harness.lookup(KEYS)
    unlink(found[0], "tp0")
    assert await harness.report(KEYS[:3], uris(found)) == [ACCEPTED] * 3
    await harness.wait(GRACE_S - 1)
    assert read_slot(found[0].uris["tp1"]) is not None
    await harness.wait(2)
    assert read_slot(found[0].uris["tp1"]) is None


async def test_a_file_cut_short_loses_only_the_blocks_behind_the_cut(harness: Harness) -> None:
    await harness.put(KEYS[:3])
    found = await harness.lookup(KEYS)
    path = file_of(found[0].uris["tp1"])[0]
    os.truncate(path, 2 * SLOT - 1)
    outcomes = await harness.report(KEYS[:3], uris(found))
    assert outcomes == [NOT_VERIFIED, ACCEPTED, ACCEPTED]
    assert await harness.hits(KEYS) == 1
    await harness.check_counters()


async def test_a_short_file_whose_last_blocks_were_never_written_is_whole(
    harness: Harness,
) -> None:
    grant = await harness.start(KEYS[:3])
    harness.fill(grant, KEYS[:2])
    await harness.finish(grant, [True, True, False])
    found = await harness.lookup(KEYS)
    assert await harness.report(KEYS[:2], uris(found)) == [NOT_VERIFIED] * 2
    assert await harness.hits(KEYS) == 2


async def test_only_the_specs_that_are_named_are_looked_for(harness: Harness) -> None:
    await harness.put(KEYS[:3])
    found = await harness.lookup(KEYS)
    unlink(found[0], "tp1")
    tp0 = [{"tp0": location.uris["tp0"]} for location in found]
    tp1 = [{"tp0": "", "tp1": location.uris["tp1"]} for location in found]
    assert await harness.report(KEYS[:3], tp0) == [NOT_VERIFIED] * 3
    assert await harness.report(KEYS[:3], tp1) == [ACCEPTED] * 3
    assert await harness.hits(KEYS) == 0


async def test_blocks_that_carry_some_of_the_specs_are_found_in_their_own_slots(
    tmp_path: Path,
) -> None:
    h = await Harness(root=tmp_path).open()
    await h.register(groups=(("all", ("tp0", "tp1")), ("one", ("tp1",))))
    await h.put(KEYS, names=["all", "one", "all", "one", "one", "all", "one"])
    found = await h.lookup(KEYS, query=QueryType.BATCH_GET)
    assert await h.report(KEYS, uris(found)) == [NOT_VERIFIED] * 7
    # The only file of tp0 holds the first, third and sixth block.
    unlink(found[0], "tp0")
    outcomes = await h.report(KEYS, uris(found))
    assert [k for k, o in zip(KEYS, outcomes, strict=True) if o is ACCEPTED] == [11, 13, 16]
    assert (await h.report([12], [{"tp0": found[0].uris["tp0"]}])) == [STALE]
    await h.check_counters()
    await h.drain()
    await h.check_rest()
    await h.close()


# ---- what must not be touched ----------------------------------------------------------------


async def _evicted_and_written_again(h: Harness) -> None:
    await h.remove(KEYS)
    await h.put(KEYS)


async def _trimmed_and_written_again(h: Harness) -> None:
    await h.trim()
    await h.put(KEYS)


async def _registered_anew(h: Harness) -> None:
    await h.manager.remove_instance("i1", None)
    await h.register()
    await h.put(KEYS)


@pytest.mark.parametrize(
    "renew", [_evicted_and_written_again, _trimmed_and_written_again, _registered_anew]
)
@pytest.mark.parametrize("kind", [MISSING, CORRUPT, UNREACHABLE])
async def test_a_late_report_never_kills_a_fresh_copy(
    harness: Harness, renew: Callable[[Harness], Awaitable[None]], kind: ReportKind
) -> None:
    await harness.put(KEYS)
    old = await harness.lookup(KEYS)
    await renew(harness)
    for location in old:
        unlink(location)
    assert await harness.report(KEYS, uris(old), kind) == [STALE] * 7
    assert await harness.hits(KEYS) == 7
    assert harness.manager.usage().error_reports == {(kind.name.lower(), "stale"): 7}


@pytest.mark.parametrize("kind", list(ReportKind)[1:])
async def test_a_block_that_is_being_written_is_not_cancelled(
    harness: Harness, kind: ReportKind
) -> None:
    grant = await harness.start(KEYS)
    assert await harness.report(KEYS, uris(grant.locations), kind) == [STALE] * 7
    harness.fill(grant)
    await harness.finish(grant)
    assert await harness.hits(KEYS) == 7


@pytest.mark.parametrize("kind", list(ReportKind)[1:])
async def test_a_location_of_another_instance_or_key_is_ignored(
    harness: Harness, kind: ReportKind
) -> None:
    await harness.register("i2")
    await harness.put(KEYS)
    await harness.put(KEYS, "i2")
    mine, theirs = await harness.lookup(KEYS), await harness.lookup(KEYS, "i2")
    for location in theirs:
        unlink(location)
    assert await harness.report(KEYS, uris(theirs), kind) == [STALE] * 7
    shifted = uris([*mine[1:], mine[0]])
    assert await harness.report(KEYS, shifted, kind) == [STALE] * 7
    mixed = [
        {"tp0": a.uris["tp0"], "tp1": b.uris["tp1"]} for a, b in zip(mine, theirs, strict=True)
    ]
    assert await harness.report(KEYS, mixed, kind) == [STALE] * 7
    assert await harness.hits(KEYS) == await harness.hits(KEYS, "i2") == 7


async def test_what_is_there_stays_and_each_position_has_its_own_outcome(
    harness: Harness,
) -> None:
    await harness.put(KEYS[:3])
    (a, b, c) = uris(await harness.lookup(KEYS))
    asked = [11, 12, 99, 12, 13, 13]
    said = [a, {}, a, {"tp0": "", "tp1": ""}, c, b]
    assert await harness.report(asked, said) == [
        *(NOT_VERIFIED, NOTHING, STALE, NOTHING, NOT_VERIFIED, STALE)
    ]
    unlink(Location(4, 2, c))
    # The same block twice, and of two kinds.
    outcomes = await harness.report([13, 13, 13], [c, c, c], MISSING, CORRUPT, UNREACHABLE)
    assert outcomes == [ACCEPTED] * 3
    assert await harness.statuses(KEYS[:3]) == ["SERVING", "SERVING", "NOT_FOUND"]
    assert await harness.report([], [], MISSING) == []


# ---- storages that are not well --------------------------------------------------------------


async def test_a_storage_that_lost_its_mount_loses_no_blocks(tmp_path: Path) -> None:
    async with moody(tmp_path) as (h, storage):
        await h.put(KEYS)
        found = await h.lookup(KEYS)
        unlink(found[0])
        storage.probes_well = False
        assert await h.report(KEYS, uris(found)) == [UNCHECKED] * 7
        storage.probes_well, storage.error = True, StorageError("input/output error")
        assert await h.report(KEYS, uris(found)) == [UNCHECKED] * 7
        assert await h.hits(KEYS) == 7
        storage.error = None
        assert (await h.report(KEYS, uris(found)))[0] is ACCEPTED


async def test_a_storage_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REPORT_CHECK_S_MAX", 0.05)
    async with moody(tmp_path) as (h, storage):
        await h.put(KEYS)
        found = await h.lookup(KEYS)
        storage.hangs = True
        assert await h.report(KEYS, uris(found)) == [UNCHECKED] * 7
        assert await h.hits(KEYS) == 7


async def test_an_unavailable_storage_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with moody(tmp_path) as (h, storage):
        await h.put(KEYS)
        found = await h.lookup(KEYS)
        monkeypatch.setattr(h.backends, "available", lambda name: False)
        assert await h.report(KEYS, uris(found)) == [UNCHECKED] * 7
        assert storage.asked == []
        # Wrong bytes are wrong wherever they came from.
        assert await h.report(KEYS, uris(found), CORRUPT) == [ACCEPTED] * 7


async def test_without_a_way_to_look_the_reader_is_believed_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REPORTED_CORRUPT_BLOCKS_PER_MINUTE_MAX", 5)
    async with moody(tmp_path) as (h, storage):
        storage.capabilities &= ~Capability.EXISTS
        await h.put(KEYS)
        found = await h.lookup(KEYS)
        assert await h.report(KEYS, uris(found)) == [ACCEPTED] * 5 + [LIMITED] * 2
        assert storage.asked == []


# ---- limits ----------------------------------------------------------------------------------


async def test_readers_word_takes_out_so_many_blocks_a_minute(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REPORTED_CORRUPT_BLOCKS_PER_MINUTE_MAX", 4)
    await harness.register("i2")
    await harness.put(KEYS)
    await harness.put(KEYS, "i2")
    found, other = uris(await harness.lookup(KEYS)), uris(await harness.lookup(KEYS, "i2"))
    # Stale ones cost nothing; N are taken, the next is not.
    assert await harness.report([99, *KEYS[3:]], [found[0], *found[3:]], CORRUPT) == [
        *(STALE, ACCEPTED, ACCEPTED, ACCEPTED, ACCEPTED)
    ]
    assert await harness.report(KEYS[:1], found[:1], CORRUPT) == [LIMITED]
    assert await harness.report(KEYS[:1], found[:1], UNREACHABLE) == [ACCEPTED]
    assert await harness.hits(KEYS) == 3
    # Each instance has its own, and a minute later there is more.
    assert await harness.report(KEYS[:4], other[:4], CORRUPT, instance_id="i2") == [ACCEPTED] * 4
    await harness.wait(59)
    assert await harness.report(KEYS[:1], found[:1], CORRUPT) == [LIMITED]
    await harness.wait(1)
    assert await harness.report(KEYS[:1], found[:1], CORRUPT) == [ACCEPTED]
    await harness.drain()
    await harness.check_rest()


async def test_false_alarms_are_looked_into_so_often_a_minute_and_true_ones_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REPORTED_UNCONFIRMED_BLOCKS_PER_MINUTE_MAX", 6)
    async with moody(tmp_path) as (h, storage):
        await h.put(KEYS)
        found = await h.lookup(KEYS)
        unlink(found[3])
        assert await h.report(KEYS[3:6], uris(found[3:6])) == [ACCEPTED] * 3
        left, there = [KEYS[0], KEYS[1], KEYS[2], KEYS[6]], uris([*found[:3], found[6]])
        assert await h.report(left, there) == [NOT_VERIFIED] * 4
        assert await h.report(left, there) == [NOT_VERIFIED] * 2 + [LIMITED] * 2
        asked = list(storage.asked)
        assert await h.report(left, there) == [LIMITED] * 4
        assert storage.asked == asked
        await h.wait(60)
        assert await h.report(left, there) == [NOT_VERIFIED] * 4
        assert await h.hits(KEYS) == 3


async def test_a_report_names_so_many_keys_at_most(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REPORTED_BLOCKS_PER_REQUEST_MAX", 7)
    await harness.put(KEYS)
    found = uris(await harness.lookup(KEYS))
    assert await harness.report(KEYS, found, UNREACHABLE) == [ACCEPTED] * 7
    with pytest.raises(InvalidArgument, match="8 keys in one report, the limit is 7"):
        await harness.report([*KEYS, 99], [*found, {}], UNREACHABLE)


async def test_a_readers_name_has_so_many_bytes_at_most(harness: Harness) -> None:
    await harness.put(KEYS)
    found = uris(await harness.lookup(KEYS))
    name = "é" * (limits.READER_BYTES_MAX // 2)
    assert await harness.report(KEYS, found, UNREACHABLE, reader=name) == [ACCEPTED] * 7
    with pytest.raises(InvalidArgument, match="reader: 257 bytes, the limit is 256"):
        await harness.report(KEYS, found, UNREACHABLE, reader=name + "x")


@pytest.mark.parametrize("kind", [UNREACHABLE, CORRUPT, MISSING])
async def test_a_storage_that_several_readers_cannot_read_rests_and_comes_back(
    harness: Harness, kind: ReportKind
) -> None:
    await harness.put(KEYS)
    found = uris(await harness.lookup(KEYS))
    for _ in range(5):
        # One host whose own mount is gone, however many blocks it reports.
        await harness.report(KEYS[:1], found[:1], UNREACHABLE, reader="one")
    assert await harness.hits(KEYS) == 7
    await harness.report(KEYS[5:6], found[5:6], kind, reader="two")
    await harness.report(KEYS[6:], found[6:], kind, reader="three")
    assert await harness.hits(KEYS) == 0
    await harness.wait(limits.BREAKER_OPEN_S)
    await harness.backends.run_once(0)
    assert await harness.hits(KEYS) == (5 if kind is CORRUPT else 7)


async def test_blocks_that_are_really_missing_condemn_no_storage(harness: Harness) -> None:
    await harness.put(KEYS)
    found = await harness.lookup(KEYS)
    for at, reader in ((6, "one"), (3, "two"), (0, "three")):
        unlink(found[at])
        await harness.report([KEYS[at]], uris([found[at]]), MISSING, reader=reader)
    assert [status.breaker_open for status in harness.backends.statuses()] == [False]
    assert await harness.hits(KEYS) == 0


FOREIGN = "file://elsewhere/x?size=1"


@pytest.mark.parametrize(
    ("keys", "locations", "kinds", "message"),
    [
        (KEYS, 6, [MISSING], "locations: 6 of them for 7 block_keys"),
        (KEYS, 7, [MISSING] * 6, "kinds: 6 of them for 7 block_keys"),
        (KEYS, 7, [0], r"kinds\[0\]: 0 is not"),
        (KEYS, 7, [MISSING] * 6 + [77], r"kinds\[6\]: 77 is not"),
        (KEYS, {2: {"tp0": FOREIGN}}, [CORRUPT], r"locations\[2\]: uri .*elsewhere.* no storage"),
        (KEYS, {6: {"tp0": "nfs_01"}}, [CORRUPT], r"locations\[6\]: uri 'nfs_01' names no"),
        (KEYS, {6: {"tp0": "file://["}}, [CORRUPT], r"locations\[6\]: uri "),
        (KEYS, {0: {"tp9": "file://nfs_01/x"}}, [CORRUPT], r"locations\[0\]: .*spec 'tp9'"),
    ],
)
async def test_what_cannot_have_been_answered_is_refused_as_a_whole(
    harness: Harness, keys: list[int], locations: Any, kinds: list[Any], message: str
) -> None:
    await harness.put(KEYS)
    found = uris(await harness.lookup(KEYS))
    said = found[:locations] if isinstance(locations, int) else list(found)
    if not isinstance(locations, int):
        for at, location in locations.items():
            said[at] = location
    with pytest.raises(InvalidArgument, match=message):
        await harness.report(keys, said, *kinds)
    assert await harness.hits(KEYS) == 7


async def test_an_unknown_instance_is_named(harness: Harness) -> None:
    with pytest.raises(InstanceNotExist, match="nobody"):
        await harness.report([1], [{}], instance_id="nobody")


# ---- at the same time ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [MISSING, CORRUPT])
@pytest.mark.parametrize("turns", range(0, 12, 3))
async def test_a_report_beside_an_eviction_frees_everything_once(
    tmp_path: Path, kind: ReportKind, turns: int
) -> None:
    h = await Harness(root=tmp_path, turns=2).open()
    await h.register()
    await h.put(KEYS)
    found = await h.lookup(KEYS)
    for location in found[:3]:
        unlink(location)

    async def evict() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await h.remove(KEYS[1:])

    await asyncio.gather(
        h.report(KEYS, uris(found), kind),
        evict(),
        h.report(KEYS[:4], uris(found[:4]), kind),
        h.put(KEYS),
    )
    await h.check_counters()
    again = await h.put(KEYS)
    assert await h.hits(KEYS) == 7
    assert set(again.granted) <= set(KEYS)
    await h.drain()
    await h.check_rest()
    await h.close()


@pytest.mark.parametrize("turns", range(0, 24, 4))
async def test_a_report_beside_the_evicting_loop_leaves_exact_counters(
    tmp_path: Path, turns: int
) -> None:
    size = 2 * SLOT
    full = group(capacity=100 * size, percentage=0.9, low=0.2)
    h = await Harness(root=tmp_path, groups=[full], turns=2).open()
    await h.register()
    keys = list(range(98))
    for first in range(0, 98, 7):
        await h.put(keys[first : first + 7])
    found = [x for f in range(0, 98, 7) for x in await h.lookup(keys[f : f + 7])]
    for location in found:
        unlink(location)

    async def evict() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        await h.rounds(3)

    outcomes, _ = await asyncio.gather(h.report(keys, uris(found)), evict())
    assert set(outcomes) <= {ACCEPTED, STALE}
    assert [await h.hits([key]) for key in keys] == [0] * 98
    await h.check_counters()
    await h.drain()
    await h.check_rest()
    await h.close()


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.UNKNOWN_LOST])
async def test_a_report_whose_commit_fails_can_be_repeated(harness: Harness, fault: Fault) -> None:
    await harness.put(KEYS)
    found = uris(await harness.lookup(KEYS))
    commits = harness.store.calls[Op.COMMIT]
    harness.store.plan = script([(Op.COMMIT, commits + n, fault) for n in range(1, 40)])
    with pytest.raises(NotReady):
        await harness.report(KEYS, found, CORRUPT)
    harness.store.plan = no_faults
    assert await harness.report(KEYS, found, CORRUPT) == [ACCEPTED] * 7
    assert await harness.hits(KEYS) == 0
    await harness.drain()
    await harness.check_rest()


async def test_a_commit_whose_answer_was_lost_counts_as_done(harness: Harness) -> None:
    await harness.put(KEYS)
    found = uris(await harness.lookup(KEYS))
    commits = harness.store.calls[Op.COMMIT]
    harness.store.plan = script([(Op.COMMIT, commits + 1, Fault.UNKNOWN_DONE)])
    assert await harness.report(KEYS, found, CORRUPT) == [ACCEPTED] * 7
    assert await harness.report(KEYS, found, CORRUPT) == [STALE] * 7
    await harness.drain()
    await harness.check_rest()


# ---- numbers ---------------------------------------------------------------------------------


async def test_reports_are_counted_by_kind_and_outcome_and_those_that_hold_logged_by_storage(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvcm.cache.report")
    await harness.put(KEYS)
    found = await harness.lookup(KEYS)
    unlink(found[0])
    kinds = [MISSING, MISSING, CORRUPT, MISSING, CORRUPT, UNREACHABLE, UNREACHABLE]
    said = uris(found)
    said[4] = {}
    await harness.report(KEYS, said, *kinds)
    await harness.report([99], said[:1], UNREACHABLE)
    assert harness.manager.usage().error_reports == {
        ("missing", "accepted"): 2,
        ("missing", "not_verified"): 1,
        ("corrupt", "accepted"): 1,
        ("unreachable", "accepted"): 2,
        ("unreachable", "stale"): 1,
    }
    uid = harness.index().uid
    assert sorted(caplog.messages) == [
        f"instance {uid}: {count} blocks on storage 'nfs_01' are reported {kind}"
        for count, kind in [(1, "corrupt"), (2, "missing"), (2, "unreachable")]
    ]


async def test_thousands_of_keys_take_one_commit_an_extent_and_few_reads(
    tmp_path: Path,
) -> None:
    h = await Harness(root=tmp_path, keys_per_file=64).open()
    await h.register()
    grants: list[Grant] = []
    for first in range(0, 4_400, 440):
        grants.append(await h.start(range(first, first + 440)))
        await h.finish(grants[-1])
    keys = list(range(4_400))
    found = [location.uris for grant in grants for location in grant.locations]
    commits, reads = h.store.calls[Op.COMMIT], h.store.calls[Op.READ]
    assert await h.report(keys, found) == [ACCEPTED] * 4_400
    assert h.store.calls[Op.COMMIT] - commits <= 10
    assert h.store.calls[Op.READ] - reads <= 60
    assert await h.hits(keys) == 0
    await h.check_counters()
    await h.close()
