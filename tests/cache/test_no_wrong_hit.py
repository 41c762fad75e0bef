"""No location may ever be read as another block's bytes.

Each scenario runs twice: as the code is, where every answer must be a miss or the right bytes; and
with its guard taken out, where the wrong hit must show. So no scenario passes because it cannot
fail.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcm.cache.write import Writes
from kvcm.core.errors import CorruptRecord, KvcmError, SessionNotExist
from kvcm.core.types import QueryType
from kvcm.metaindex import bits, readcache, records
from kvcm.metaindex.ids import home_shard
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.readcache import ReadCache, View
from kvcm.metaindex.records import Extent, Phase, State
from kvcm.metaindex.shards import Shards, shard_of
from kvcm.metaindex.store import ShardId, Table
from kvcm.reclaimer.base import Surroundings
from kvcm.storage_backends import posix_names
from tests.cache.harness import Grant, Harness, file_of, payload, read_slot, write_slot

Patch = pytest.MonkeyPatch
GOOD = {"miss", "right"}


async def judge(
    h: Harness,
    key: int,
    right: Sequence[Grant],
    instance_id: str = "i1",
    *,
    after: Sequence[int] = (),
    packed: bool = False,
) -> str:
    """``miss``, ``right`` or ``WRONG``: what a reader of ``key`` gets, by every kind of query.

    ``right`` are the writes whose bytes it may get. ``after``: keys that go before it in a prefix.
    """
    verdicts = set()
    for query in (QueryType.PREFIX_MATCH, QueryType.BATCH_GET, QueryType.REVERSE_ROLL_SW_MATCH):
        keys = [*after, key]
        found = await h.lookup(keys, instance_id, query=query, packed=packed, sw=1)
        if len(found) < len(keys) or not found[-1].hit:
            verdicts.add("miss")
            continue
        place = found[-1]
        got = {s: read_slot(u) for s, u in place.uris.items()}
        wanted = [
            {s: payload(g.session, key, s, file_of(u)[2]) for s, u in place.uris.items()}
            for g in right
        ]
        verdicts.add("right" if got in wanted else "WRONG")
    return "WRONG" if "WRONG" in verdicts else verdicts.pop()


# ---- scenarios and their guards ----------------------------------------------------------------


async def late_writer_after_expiry(h: Harness) -> str:
    """A writer that was given up writes on while another has written the key anew."""
    old = await h.start([1, 2], timeout=5)
    await h.wait(6)
    new = await h.put([1, 2])
    h.fill(old)
    return await judge(h, 1, [new])


def addresses_without_the_extent(patch: Patch) -> None:
    real = posix_names._file_parts

    def parts(layout: Any, extent: Any, spec: str) -> Any:
        same = type(extent)(extent.cluster_uid, extent.instance_uid, "same")
        return real(layout, same, spec)

    patch.setattr(posix_names, "_file_parts", parts)


async def late_finish_after_expiry(h: Harness) -> str:
    """The session is over and its files are deleted when its finish arrives."""
    old = await h.start([1, 2], timeout=5)
    h.fill(old)
    await h.wait(6)
    await h.wait(11)
    try:
        await h.finish(old)
    except SessionNotExist:
        pass
    # The record decides: this manager would not follow one that goes back.
    await h.crash()
    return await judge(h, 1, [old])


def finish_without_looking_at_the_phase(patch: Patch) -> None:
    def finished(
        self: Writes, index: InstanceIndex, extent: Extent, state: State, _success: object
    ) -> State:
        everything = bits.ones(extent.count)
        return state.next(
            index.new_version(), phase=Phase.SETTLED, serving=everything, finished=everything
        )

    patch.setattr(Writes, "_finished", finished)


async def registered_again(h: Harness) -> str:
    """Another model takes the id of one that was removed."""
    await h.put([1, 2])
    # Before anything of the old one is freed.
    h.manager.loops = [x for x in h.manager.loops if x.name == "load"]
    await h.manager.remove_instance("i1", None)
    await h.register("i1")
    return await judge(h, 1, [])


async def another_instance(h: Harness) -> str:
    """Two models, equal keys."""
    await h.put([1, 2])
    await h.register("i2")
    return await judge(h, 1, [], "i2")


def spaces_without_the_uid(patch: Patch) -> None:
    patch.setattr(Shards, "id", lambda _self, number: ShardId(b"all", number))


async def lookup_after_trim(h: Harness) -> str:
    """Everything granted before a trim is dead at once, cached or not."""
    await h.put([1, 2])
    await h.lookup([1, 2])
    await h.trim()
    return await judge(h, 1, [])


async def lookup_after_trim_and_crash(h: Harness) -> str:
    """The trim holds before anything was freed, also for the next manager."""
    await h.put([1, 2])
    await h.trim()
    for loop in h.manager.loops:
        if loop.name == "load":
            h.manager.loops = [loop]
    real, h.rounds = h.rounds, _nothing  # type: ignore[method-assign, assignment]
    await h.crash()
    h.rounds = real  # type: ignore[method-assign]
    return await judge(h, 1, [])


async def _nothing(_count: int = 0) -> None:
    return None


def trims_not_compared(patch: Patch) -> None:
    patch.setattr(InstanceIndex, "raise_trim", lambda _self, _trim: None)
    patch.setattr(
        InstanceIndex, "usable", lambda _s, _e, state: state.phase in (Phase.OPEN, Phase.SETTLED)
    )


async def failed_block(h: Harness) -> str:
    """A block that its writer reported as failed lies as a hole between two good ones."""
    grant = await h.start([1, 2, 3])
    h.fill(grant, [1, 3])
    await h.finish(grant, [True, False, True])
    alone = await judge(h, 2, [grant])
    behind = await judge(h, 2, [grant], after=[1])
    return "WRONG" if "WRONG" in (alone, behind) else alone


async def block_being_written(h: Harness) -> str:
    """Nothing is read before its session finished."""
    await h.start([1, 2, 3])
    return await judge(h, 2, [])


def every_block_serves(patch: Patch) -> None:
    real = View.__init__

    def init(self: View, extent: Extent, *rest: Any) -> None:
        real(self, extent, *rest)
        self.serving = bits.ones(extent.count)

    patch.setattr(View, "__init__", init)


async def removed_from_the_middle_of_a_file(h: Harness) -> str:
    """Its neighbours go on serving from the same file; after its grace it must not be read."""
    grant = await h.put([1, 2, 3])
    await h.lookup([1, 2, 3])
    await h.remove([2])
    assert await judge(h, 1, [grant]) == await judge(h, 3, [grant]) == "right"
    return await judge(h, 2, [])


async def cached_answer_of_deleted_files(h: Harness) -> str:
    """Answers are cached; a reader must not be sent to files that are gone."""
    grant = await h.put([1, 2, 3])
    await h.lookup([1, 2, 3])
    await h.remove([1, 2, 3])
    await h.wait(11)
    await h.wait(1)
    return await judge(h, 1, [grant])


def cache_never_invalidated(patch: Patch) -> None:
    patch.setattr(ReadCache, "invalidate", lambda _self, _extent_id: None)


async def reader_within_its_grace(h: Harness) -> str:
    """A reader is still loading when its block is evicted."""
    grant = await h.put([1])
    (place,) = await h.lookup([1])
    await h.remove([1])
    await h.wait(9)
    right = {payload(grant.session, 1, s, file_of(u)[2]) for s, u in place.uris.items()}
    return "right" if {read_slot(u) for u in place.uris.values()} == right else "WRONG"


def no_grace(patch: Patch) -> None:
    real = Surroundings.__init__

    def init(self: Surroundings, **given: Any) -> None:
        real(self, **(given | {"grace_s": lambda _group: 0.0}))

    patch.setattr(Surroundings, "__init__", init)


async def row_of_a_wrong_position(h: Harness) -> str:
    """A damaged row names a position where another key's block lies."""
    grant = await h.put([1, 2, 3])
    index = h.index()
    extent_id = index.sessions.read(grant.session).extent_id
    assert extent_id is not None
    await h.crash()
    index = h.index()
    set_record(h, index, shard_of(2, index.shard_count), Table.ROWS, raw(2), extent_id + b"\0\0")
    return await judge(h, 2, [grant])


async def row_of_another_extent(h: Harness) -> str:
    """A damaged row names an extent that never held the key."""
    other = await h.put([7, 8, 9])
    grant = await h.put([1, 2, 3])
    index = h.index()
    extent_id = index.sessions.read(other.session).extent_id
    assert extent_id is not None
    await h.crash()
    index = h.index()
    set_record(h, index, shard_of(2, index.shard_count), Table.ROWS, raw(2), extent_id + b"\0\1")
    return await judge(h, 2, [grant])


def keys_not_compared(patch: Patch) -> None:
    patch.setattr(View, "match", lambda *_args: 1)


async def chunk_cut_short(h: Harness) -> str:
    """The second chunk of an extent's keys lost its first: all positions behind are shifted."""
    keys = list(range(1000, 1600))
    grant = await h.put(keys)
    await h.crash()
    index = h.index()
    extent_id = index.sessions.read(grant.session).extent_id
    assert extent_id is not None
    at = (h, index, home_shard(extent_id), Table.EXTENTS, records.chunk_key(extent_id, 1))
    value = get_record(*at)
    set_record(*at, value[:5] + value[13:])
    return await judge(h, keys[513], [grant], after=[keys[511]])


def chunks_joined_unchecked(patch: Patch) -> None:
    def join(extent: Extent, _count: int, rest: Sequence[bytes | None]) -> Extent:
        return replace(extent, keys=extent.keys + b"".join(c[5:] for c in rest if c))

    patch.setattr(records, "join_chunks", join)


async def key_that_begins_like_another(h: Harness) -> str:
    """As varints, 300 is AC 02 and 33,068 is AC 82 02: equal in their first byte."""
    grant = await h.put([1, 300, 5])
    assert await judge(h, 300, [grant], after=[1], packed=True) == "right"
    return await judge(h, 33_068, [], after=[1], packed=True)


def half_keys_count(patch: Patch) -> None:
    real = readcache._whole_keys

    def keys(offsets: Sequence[int], end: int) -> int:
        whole = real(offsets, end)
        return whole + (offsets[whole] < end)

    patch.setattr(readcache, "_whole_keys", keys)


async def two_clusters_on_one_mount(h: Harness) -> str:
    """Another manager with a registry of its own, whose chance was the same, uses the same root."""
    h.manager.shared.cluster_uid = "first000"
    grant = await h.put([1, 2])
    other = Harness(root=h.root / "other")
    other.storages = h.storages
    await other.open()
    try:
        await other.register()
        other.manager.shared.cluster_uid = "second00"
        assert other.index().uid == h.index().uid
        theirs = await other.start([1, 2])
        for key, place in theirs.by_key.items():
            for spec, uri in place.uris.items():
                write_slot(uri, payload("theirs", key, spec, file_of(uri)[2]))
        await other.finish(theirs)
        return await judge(h, 1, [grant])
    finally:
        await other.close()


def paths_without_the_cluster(patch: Patch) -> None:
    real = posix_names._file_parts

    def parts(layout: Any, extent: Any, spec: str) -> Any:
        return real(layout, type(extent)("any", extent.instance_uid, extent.extent), spec)

    patch.setattr(posix_names, "_file_parts", parts)


SCENARIOS: list[tuple[Callable[[Harness], Awaitable[str]], Callable[[Patch], None]]] = [
    (late_writer_after_expiry, addresses_without_the_extent),
    (late_finish_after_expiry, finish_without_looking_at_the_phase),
    (registered_again, spaces_without_the_uid),
    (another_instance, spaces_without_the_uid),
    (lookup_after_trim, trims_not_compared),
    (lookup_after_trim_and_crash, trims_not_compared),
    (failed_block, every_block_serves),
    (block_being_written, every_block_serves),
    (removed_from_the_middle_of_a_file, every_block_serves),
    (cached_answer_of_deleted_files, cache_never_invalidated),
    (reader_within_its_grace, no_grace),
    (row_of_a_wrong_position, keys_not_compared),
    (row_of_another_extent, keys_not_compared),
    (chunk_cut_short, chunks_joined_unchecked),
    (key_that_begins_like_another, half_keys_count),
    (two_clusters_on_one_mount, paths_without_the_cluster),
]
_NAMES = [scenario.__name__ for scenario, _ in SCENARIOS]


@pytest.mark.parametrize(("scenario", "without"), SCENARIOS, ids=_NAMES)
async def test_no_wrong_hit(
    harness: Harness, scenario: Callable[[Harness], Awaitable[str]], without: object
) -> None:
    assert await scenario(harness) in GOOD


@pytest.mark.parametrize(("scenario", "without"), SCENARIOS, ids=_NAMES)
async def test_the_wrong_hit_shows_without_its_guard(
    tmp_path: Path,
    monkeypatch: Patch,
    scenario: Callable[[Harness], Awaitable[str]],
    without: Callable[[Patch], None],
) -> None:
    without(monkeypatch)
    h = await Harness(root=tmp_path).open()
    try:
        await h.register()
        assert await scenario(h) == "WRONG"
    finally:
        monkeypatch.undo()
        await h.close()


# ---- damaged records (R67) ---------------------------------------------------------------------


def raw(key: int) -> bytes:
    """A row's key in the store."""
    return key.to_bytes(8, "little", signed=True)


def _table(h: Harness, index: InstanceIndex, number: int, table: Table) -> dict[bytes, bytes]:
    shard = ShardId(index.uid.encode(), number)
    found: dict[bytes, bytes] = h.inner._shards[shard].tables[table]  # type: ignore[attr-defined]
    return found


def set_record(
    h: Harness, index: InstanceIndex, number: int, table: Table, key: bytes, value: bytes
) -> None:
    """Change a record behind the manager's back."""
    _table(h, index, number, table)[key] = value


def get_record(h: Harness, index: InstanceIndex, number: int, table: Table, key: bytes) -> bytes:
    """A record as stored."""
    return _table(h, index, number, table)[key]


def damage(chance: random.Random, value: bytes) -> bytes:
    """A damaged copy: other bytes, cut, grown, or with a good head and rubbish behind."""
    match chance.randrange(5):
        case 0:
            return chance.randbytes(chance.randrange(0, 80))
        case 1:
            return value[: chance.randrange(len(value) + 1)]
        case 2:
            return value + chance.randbytes(chance.randrange(1, 30))
        case 3:
            head = chance.randrange(len(value) + 1)
            return value[:head] + chance.randbytes(len(value) - head)
        case _:
            return b"\x01" + chance.randbytes(len(value))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("warm", [False, True])
async def test_damaged_records_are_misses_and_stop_nothing(
    harness: Harness, seed: int, warm: bool
) -> None:
    h, chance = harness, random.Random(seed)
    grants = [await h.put([100 * i + n for n in range(1 + 2 * i)]) for i in range(8)]
    big = await h.put(list(range(5000, 5600)))
    await h.remove([300, 5003])
    await h.start([9000, 9001], timeout=20)
    index = h.index()
    if warm:
        await h.lookup(big.keys)
    for number in range(index.shard_count):
        for table in Table:
            records_of = _table(h, index, number, table)
            for key in list(records_of):
                if chance.random() < 0.4:
                    records_of[key] = damage(chance, records_of[key])
    if not warm:
        await h.crash()
    for grant in [*grants, big]:
        for keys in (grant.keys, grant.keys[len(grant.keys) // 2 :]):
            for key, place in zip(keys, await h.lookup(keys), strict=False):
                for spec, uri in place.uris.items():
                    expected = payload(grant.session, key, spec, file_of(uri)[2])
                    assert read_slot(uri) == expected
        await h.meta(grant.keys, detail=1)
        await h.remove(grant.keys[:1])
    await h.rounds(3)
    # The instance goes on: what is unreadable can be written again.
    for grant in [*grants, big]:
        again = await h.start(grant.keys)
        h.fill(again)
        await h.finish(again)
        assert await h.hits(grant.keys) == len(grant.keys)
    await h.drain()
    for grant in [*grants, big]:
        assert await h.hits(grant.keys) == len(grant.keys)


@pytest.mark.parametrize("seed", range(4))
def test_no_bytes_at_all_make_a_decoder_fail_in_another_way(seed: int) -> None:
    chance = random.Random(seed)
    extent_id = bytes(12)
    sample = records.encode_extent(
        Extent(
            extent_id,
            raw(1) * 3,
            "nfs_01",
            4,
            b"d",
            (("tp0", 64),),
            (1,),
            b"",
            0,
            (records.Run(0, 0, None, 0),),
            1,
            30,
        )
    )[0][1]
    state = records.encode_state(State(b"v" * 8, Phase.OPEN, 5))
    trash = records.encode_trash(records.Trash(extent_id, b"s", "nfs_01", 3, 9, True))
    for _ in range(3000):
        for call in (
            lambda: records.decode_header(extent_id, damage(chance, sample)),
            lambda: records.decode_state(extent_id, damage(chance, state)),
            lambda: records.decode_trash(extent_id + b"s", damage(chance, trash)),
            lambda: records.decode_row(damage(chance, extent_id + b"\0\0")),
        ):
            try:
                call()
            except CorruptRecord:
                pass
            except KvcmError as error:
                pytest.fail(f"{error!r}")
