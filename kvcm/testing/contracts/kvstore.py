"""The KVStore contract as tests: subclass `KVStoreContract`, say how to make a store, run pytest.

Example::

    class TestMyStore(KVStoreContract):
        def make_store(self, directory: Path) -> KVStore:
            return MyStore(directory)

Needs pytest, pytest-asyncio and hypothesis. Spaces are fresh per test, so a store that others use
at the same time, or that holds remains of earlier runs, passes too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from kvcm.core.clock import SystemClock
from kvcm.core.errors import InvalidArgument, StaleFence, Unavailable
from kvcm.core.limits import SHARDS_MAX, SPACE_BYTES_MAX
from kvcm.metaindex.store import (
    VERSION_BYTES,
    Claim,
    CommitResult,
    Compare,
    Fence,
    KVStore,
    Mutation,
    Outcome,
    ShardCommit,
    ShardId,
    Table,
    Write,
    values_of,
)
from kvcm.testing.contracts.kvstore_model import run_against_model

APPLIED, CONFLICT = Outcome.APPLIED, Outcome.CONFLICT
ROWS, STATES = Table.ROWS, Table.STATES
FENCE = Fence(3, 5)
HOSTILE = [b"", b"\0", b"\0\0", b"\x01", b"a", b"a\0", b"aa", b"\xff", b"\xff\xff", b"\xff" * 40]
"""Keys that are prefixes or neighbours of each other or of a store's own separators."""


class KVStoreContract:
    """What every KVStore does; see the module for how to run it."""

    persistent: bool = True
    """Whether two stores made for one directory, one after the other, share their records."""

    pytestmark = pytest.mark.asyncio

    def make_store(self, directory: Path) -> KVStore:
        """A store, not open yet; the same directory names the same records."""
        raise NotImplementedError

    @pytest_asyncio.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[KVStore]:
        store = self.make_store(tmp_path)
        await store.open()
        yield store
        await store.close()

    @pytest.fixture
    def space(self) -> bytes:
        return SystemClock().random_bytes(12)

    @pytest_asyncio.fixture
    async def shard(self, store: KVStore, space: bytes) -> ShardId:
        """A claimed shard."""
        shard = ShardId(space, 7)
        await claim(store, shard)
        return shard

    # Reads

    async def test_batches_answer_position_by_position(self, store: KVStore, space: bytes) -> None:
        shards = [ShardId(space, number) for number in range(5)]
        await store.claim(shards, FENCE)
        await store.commit(
            [ShardCommit(shard, FENCE, [puts({b"k": b"%d" % shard.number})]) for shard in shards]
        )
        asked: list[tuple[ShardId, list[bytes]]] = [
            (shards[3], [b"k", b"absent", b"k"]),
            (shards[0], []),
            (shards[1], [b"absent", b"k"]),
            (ShardId(space, 99), [b"k"]),
            (shards[3], [b"k"]),
        ]
        assert await store.get_many(asked, ROWS) == [
            [b"3", None, b"3"],
            [],
            [None, b"1"],
            [None],
            [b"3"],
        ]
        assert await store.get_many(asked[:1], STATES) == [[None, None, None]]
        assert await store.get_many([], ROWS) == []

    async def test_keys_and_values_are_any_bytes(self, store: KVStore, shard: ShardId) -> None:
        records = {key: b"<" + key for key in HOSTILE} | {
            b"empty": b"",
            b"large": b"\0" * 1_000_000,
        }
        await apply(store, shard, puts(records))
        assert await get(store, shard, *records) == list(records.values())
        for page in (1, 2, 100):
            assert await scanned(store, shard, page=page) == records

    # Compares

    async def test_compare_absent_holds_only_while_there_is_no_record(
        self, store: KVStore, shard: ShardId
    ) -> None:
        create = puts({b"k": b"1"}, Compare(ROWS, b"k", None))
        assert await apply(store, shard, create) == [APPLIED]
        assert await apply(store, shard, create) == [CONFLICT]
        await apply(store, shard, Mutation([Write(ROWS, b"k", None)]))
        assert await apply(store, shard, create) == [APPLIED]

    async def test_compare_looks_at_the_version_or_at_the_whole_value(
        self, store: KVStore, shard: ShardId
    ) -> None:
        version, value = b"v" * VERSION_BYTES, b"v" * VERSION_BYTES + b"body"
        await apply(store, shard, puts({b"k": value}))
        for expected, whole, outcome in [
            (version, False, APPLIED),
            (b"w" * VERSION_BYTES, False, CONFLICT),
            (value + b"more", False, CONFLICT),
            (b"", False, APPLIED),
            (version, True, CONFLICT),
            (value, True, APPLIED),
            (value + b"\0", True, CONFLICT),
            (None, False, CONFLICT),
        ]:
            mutation = puts({b"seen": b"1"}, Compare(ROWS, b"k", expected, whole))
            assert await apply(store, shard, mutation) == [outcome], (expected, whole)
        for expected in (b"", version):
            mutation = puts({b"seen": b"1"}, Compare(ROWS, b"absent", expected))
            assert await apply(store, shard, mutation) == [CONFLICT]

    async def test_a_conflict_contributes_nothing_and_the_others_apply(
        self, store: KVStore, shard: ShardId
    ) -> None:
        await apply(store, shard, puts({b"taken": b"x"}))
        refused = Mutation(
            [Write(ROWS, b"a", b"no"), Write(ROWS, b"taken", None), Write(STATES, b"a", b"no")],
            [Compare(ROWS, b"free", None), Compare(ROWS, b"taken", None)],
            {b"n": 100},
        )
        before, after = puts({b"b": b"1"}, counters={b"n": 1}), puts({b"c": b"1"})
        assert await apply(store, shard, before, refused, after) == [APPLIED, CONFLICT, APPLIED]
        assert await scanned(store, shard) == {b"taken": b"x", b"b": b"1", b"c": b"1"}
        assert await scanned(store, shard, STATES) == {}
        assert await counters_of(store, shard) == {b"n": 1}

    async def test_a_mutation_sees_those_before_it_and_not_its_own_writes(
        self, store: KVStore, shard: ShardId
    ) -> None:
        outcomes = await apply(
            store,
            shard,
            puts({b"k": b"1"}, Compare(ROWS, b"k", None)),
            puts({b"k": b"2"}, Compare(ROWS, b"k", b"1", whole=True)),
            puts({b"k": b"3"}, Compare(ROWS, b"k", b"3", whole=True)),
            Mutation([Write(ROWS, b"k", None)], [Compare(ROWS, b"k", b"2", whole=True)]),
            puts({b"k": b"4"}, Compare(ROWS, b"k", None)),
            puts({b"k": b"5"}, Compare(STATES, b"k", b"")),
        )
        assert outcomes == [APPLIED, APPLIED, CONFLICT, APPLIED, APPLIED, CONFLICT]
        assert await get(store, shard, b"k") == [b"4"]

    async def test_of_two_writes_of_a_record_the_later_counts(
        self, store: KVStore, shard: ShardId
    ) -> None:
        await apply(
            store,
            shard,
            Mutation([Write(ROWS, b"a", b"1"), Write(ROWS, b"a", None), Write(ROWS, b"a", b"2")]),
            Mutation([Write(ROWS, b"b", b"1"), Write(ROWS, b"b", None)]),
        )
        assert await get(store, shard, b"a", b"b") == [b"2", None]

    async def test_a_retry_recognises_its_own_version(self, store: KVStore, shard: ShardId) -> None:
        old, new = b"o" * VERSION_BYTES, b"n" * VERSION_BYTES
        await apply(store, shard, puts({b"k": old + b"body"}))
        swap = puts({b"k": new + b"body"}, Compare(ROWS, b"k", old))
        assert await apply(store, shard, swap) == [APPLIED]
        assert await apply(store, shard, swap) == [CONFLICT]
        (value,) = await get(store, shard, b"k")
        assert value is not None
        assert value.startswith(new)

    async def test_concurrent_compare_and_set_loses_no_update(
        self, store: KVStore, shard: ShardId
    ) -> None:
        async def add() -> None:
            while True:
                (value,) = await get(store, shard, b"sum")
                number = b"%d" % (int(value or b"0") + 1)
                compare = Compare(ROWS, b"sum", value, whole=True)
                if await apply(store, shard, puts({b"sum": number}, compare)) == [APPLIED]:
                    return

        await asyncio.gather(*(add() for _ in range(20)))
        assert await get(store, shard, b"sum") == [b"20"]

    # Fences, commit numbers, counters

    async def test_only_the_claimed_fence_commits(self, store: KVStore, shard: ShardId) -> None:
        for fence in (Fence(2, 9), Fence(3, 4), Fence(3, 6), Fence(4, 0)):
            await refused(store, shard, fence, epoch=FENCE.epoch)
        assert await scanned(store, shard) == {}
        assert await counters_of(store, shard, Fence(3, 6)) == {}
        await refused(store, shard, FENCE, epoch=3)
        assert await apply(store, shard, puts({b"k": b"1"}), fence=Fence(3, 6)) == [APPLIED]
        await claim(store, shard, Fence(4, 0))
        await refused(store, shard, Fence(3, 6), epoch=4)
        assert await get(store, shard, b"k") == [b"1"]

    async def test_a_lower_or_equal_claim_is_refused(self, store: KVStore, shard: ShardId) -> None:
        for fence in (Fence(2, 9), Fence(3, 4), FENCE):
            (answer,) = await store.claim([shard], fence)
            assert isinstance(answer, StaleFence)
            assert answer.epoch == FENCE.epoch
        assert await apply(store, shard, puts({b"k": b"1"})) == [APPLIED]

    async def test_an_unclaimed_shard_refuses_commits(self, store: KVStore, space: bytes) -> None:
        await refused(store, ShardId(space, 0), FENCE, epoch=0)
        await refused(store, ShardId(space, 0), Fence(0, 0), epoch=0)
        assert space not in await store.spaces()

    async def test_a_refused_shard_does_not_hinder_the_others(
        self, store: KVStore, space: bytes
    ) -> None:
        shards = [ShardId(space, number) for number in range(3)]
        answers = await store.claim([shards[0], shards[2], shards[0]], FENCE)
        assert [type(answer) for answer in answers] == [Claim, Claim, StaleFence]
        results = await store.commit(
            [ShardCommit(shard, FENCE, [puts({b"k": b"1"})]) for shard in shards]
        )
        assert [type(result.error) for result in results] == [type(None), StaleFence, type(None)]
        got = await store.get_many([(shard, [b"k"]) for shard in shards], ROWS)
        assert got == [[b"1"], [None], [b"1"]]

    async def test_commit_numbers_grow_with_every_commit_that_applied(
        self, store: KVStore, shard: ShardId
    ) -> None:
        first = await commit(store, shard, puts({b"k": b"1"}))
        second = await commit(store, shard, puts({b"k": b"2"}), puts({b"l": b"2"}))
        assert 0 < first.commit_number < second.commit_number
        conflict = await commit(store, shard, puts({b"k": b"3"}, Compare(ROWS, b"k", None)))
        empty = await commit(store, shard)
        assert conflict.commit_number == empty.commit_number == second.commit_number
        assert list(empty.outcomes) == []
        claimed = await claim(store, shard, Fence(3, 6))
        assert claimed.commit_number == second.commit_number
        third = await commit(store, shard, puts({}, counters={b"n": 1}), fence=Fence(3, 6))
        assert third.commit_number > second.commit_number

    async def test_what_was_committed_is_acknowledged_by_its_number(
        self, store: KVStore, shard: ShardId, space: bytes
    ) -> None:
        empty = ShardId(space, 1)
        await claim(store, empty)
        result = await commit(store, shard, puts({b"k": b"1"}))
        asked = [ShardId(space, 2), shard, empty, shard]
        latest = result.commit_number
        assert await store.acknowledged(asked) == [0, latest, 0, latest]
        assert await store.acknowledged([]) == []
        again = await commit(store, shard, puts({b"k": b"2"}))
        assert await store.acknowledged([shard]) == [again.commit_number]
        assert await apply(store, shard, puts({b"k": b"3"})) == [APPLIED], "the fence holds"

    async def test_commits_of_one_call_to_one_shard_run_in_order(
        self, store: KVStore, shard: ShardId
    ) -> None:
        results = await store.commit(
            [
                ShardCommit(shard, FENCE, [puts({b"k": b"1"}, Compare(ROWS, b"k", None))]),
                ShardCommit(shard, FENCE, [puts({b"k": b"2"}, Compare(ROWS, b"k", b"1"))]),
                ShardCommit(shard, FENCE, [puts({b"k": b"3"}, Compare(ROWS, b"k", b"1"))]),
            ]
        )
        assert [list(result.outcomes) for result in results] == [[APPLIED], [APPLIED], [CONFLICT]]
        assert results[0].commit_number < results[1].commit_number
        assert await get(store, shard, b"k") == [b"2"]

    async def test_counters_sum_up_exactly_and_zero_is_dropped(
        self, store: KVStore, shard: ShardId
    ) -> None:
        large = 1 << 61
        await apply(store, shard, puts({}, counters={b"a": large, b"b": -5, b"": 7, b"z": 0}))
        await apply(
            store,
            shard,
            puts({}, counters={b"a": large - 1, b"b": 2}),
            puts({}, counters={b"": -7, b"c\xff": -1}),
        )
        expected = {b"a": 2 * large - 1, b"b": -3, b"c\xff": -1}
        assert await counters_of(store, shard) == expected
        claimed = await claim(store, shard, Fence(3, 7))
        await apply(store, shard, puts({}, counters={b"b": 3}), fence=Fence(3, 7))
        assert claimed.counters == expected, "the answer to a claim changed afterwards"

    async def test_shards_out_of_bounds_are_refused(self, store: KVStore) -> None:
        longest = SystemClock().random_bytes(SPACE_BYTES_MAX)
        await claim(store, ShardId(longest, SHARDS_MAX - 1))
        bad = [
            ShardId(b"", 0),
            ShardId(longest + b"x", 0),
            ShardId(longest, SHARDS_MAX),
            ShardId(longest, -1),
        ]
        answers = await store.claim(bad, FENCE)
        assert [type(answer) for answer in answers] == [InvalidArgument] * len(bad)

    # Whole tables and shards

    async def test_scan_pages_are_complete(self, store: KVStore, shard: ShardId) -> None:
        records = numbered(1_000)
        await apply(store, shard, puts(records))
        assert await scanned(store, shard, STATES) == {}
        for page in (1, 7, 1_000, 1_001):
            found: list[tuple[bytes, bytes]] = []
            async for part in store.scan(shard, ROWS, page=page):
                assert 1 <= len(part) <= page
                found += part
            assert len(found) == len(records)
            assert dict(found) == records

    async def test_a_scan_meets_every_untouched_record_once_while_others_change(
        self, store: KVStore, shard: ShardId
    ) -> None:
        records = numbered(500)
        await apply(store, shard, puts(records))
        doomed = list(records)[::5]
        seen: list[bytes] = []
        async for part in store.scan(shard, ROWS, page=20):
            seen += [key for key, _ in part]
            if doomed:
                gone = doomed.pop()
                await apply(store, shard, Mutation([Write(ROWS, gone, None)]), puts({b"!": b""}))
        untouched = set(records) - set(list(records)[::5])
        assert untouched <= set(seen)
        assert len(seen) == len(set(seen))

    async def test_samples_are_distinct_records_from_all_over(
        self, store: KVStore, shard: ShardId
    ) -> None:
        assert await store.sample(shard, ROWS, 3) == []
        records = numbered(1_000)
        neighbours = [Write(table, b"", b"") for table in Table if table is not ROWS]
        await apply(store, shard, puts(records), Mutation(neighbours))
        picked = await store.sample(shard, ROWS, 50)
        assert len(dict(picked)) == len(picked) == 50
        assert picked == [(key, records[key]) for key, _ in picked]
        assert dict(await store.sample(shard, ROWS, 2_000)) == records
        assert await store.sample(shard, ROWS, 0) == []
        singles = [await store.sample(shard, ROWS, 1) for _ in range(100)]
        assert len({single[0][0] for single in singles}) > 20

    async def test_count_counts_one_table(self, store: KVStore, shard: ShardId) -> None:
        await apply(store, shard, puts(numbered(300)), Mutation([Write(STATES, b"s", b"")]))
        assert await store.count(shard, ROWS) == 300
        assert await store.count(shard, STATES) == 1
        assert await store.count(shard, Table.TRASH) == 0
        await apply(store, shard, Mutation([Write(STATES, b"s", None)]))
        assert await store.count(shard, STATES) == 0

    async def test_drop_removes_one_shard_and_nothing_else(
        self, store: KVStore, space: bytes
    ) -> None:
        spaces = [space[:8] + tail for tail in (b"", b"\0", b"\0\x07", b"a", b"\xff", b"\xff\xff")]
        shards = [ShardId(name, number) for name in spaces for number in (0, 7, 255, 256, 1_023)]
        await store.claim(shards, FENCE)
        records = dict.fromkeys(HOSTILE, b"v")
        await store.commit(
            [ShardCommit(shard, FENCE, [puts(records, counters={b"n": 1})]) for shard in shards]
        )
        for dropped in shards[1::2]:
            await store.drop(dropped)
            await store.drop(dropped)
        for at, shard in enumerate(shards):
            if at % 2:
                assert await scanned(store, shard) == {}
                await refused(store, shard, FENCE, epoch=0)
                # A fence lower than the dropped one: nothing of it remains.
                assert await claim(store, shard, Fence(1, 1)) == Claim(0, {})
            else:
                assert await scanned(store, shard) == records
                assert await counters_of(store, shard) == {b"n": 1}

    async def test_spaces_are_those_with_a_record_or_a_fence(
        self, store: KVStore, space: bytes
    ) -> None:
        names = [space[:8] + tail for tail in (b"", b"\0", b"\xff", b"\xff" * 24, b"a", b"aa")]
        before = await store.spaces()
        await store.claim([ShardId(name, at) for name in names for at in (0, 255, 1_023)], FENCE)
        assert sorted(await store.spaces()) == sorted([*before, *names])
        for at in (0, 255, 1_023):
            await store.drop(ShardId(names[0], at))
        assert sorted(await store.spaces()) == sorted([*before, *names[1:]])

    async def test_twenty_thousand_writes_in_one_commit(
        self, store: KVStore, shard: ShardId
    ) -> None:
        records = numbered(20_000)
        assert await apply(store, shard, puts(records)) == [APPLIED]
        assert await get(store, shard, *records) == list(records.values())
        assert await store.count(shard, ROWS) == 20_000
        gone = Mutation([Write(ROWS, key, None) for key in records])
        assert await apply(store, shard, gone) == [APPLIED]
        assert await store.count(shard, ROWS) == 0

    # Life

    async def test_open_and_close_can_be_repeated(self, tmp_path: Path, space: bytes) -> None:
        store = self.make_store(tmp_path)
        await store.open()
        await claim(store, ShardId(space, 0))
        await store.close()
        await store.close()
        with pytest.raises(Unavailable):
            await store.get_many([(ShardId(space, 0), [b"k"])], ROWS)
        await store.open()
        assert await apply(store, ShardId(space, 0), puts({b"k": b"1"})) == [APPLIED]
        await store.close()

    async def test_everything_survives_a_reopening(self, tmp_path: Path, space: bytes) -> None:
        if not self.persistent:
            pytest.skip("the store declares that it keeps nothing")
        shard = ShardId(space, 1)
        first = self.make_store(tmp_path)
        await first.open()
        await claim(first, shard)
        result = await commit(first, shard, puts({b"k": b"1"}, counters={b"n": 3}))
        await first.close()
        second = self.make_store(tmp_path)
        await second.open()
        try:
            assert await get(second, shard, b"k") == [b"1"]
            await refused(second, shard, Fence(3, 4), epoch=3)
            assert await apply(second, shard, puts({b"l": b"2"})) == [APPLIED]
            claimed = await claim(second, shard, Fence(4, 1))
            assert claimed.commit_number > result.commit_number
            assert claimed.counters == {b"n": 3}
        finally:
            await second.close()

    async def test_it_behaves_like_a_dictionary(self, tmp_path: Path) -> None:
        """Random programs of commits, claims, drops and reads, against a model."""
        # In a thread, since hypothesis is synchronous and brings an event loop of its own.
        await asyncio.to_thread(run_against_model, lambda: self.make_store(tmp_path))


def puts(
    records: Mapping[bytes, bytes],
    *compare: Compare,
    counters: Mapping[bytes, int] | None = None,
) -> Mutation:
    """A mutation that puts records into ROWS."""
    return Mutation(
        [Write(ROWS, key, value) for key, value in records.items()], compare, counters or {}
    )


def numbered(count: int) -> dict[bytes, bytes]:
    """Records whose keys begin alike, as badly spread as keys can be."""
    return {b"key-%06d" % i: b"value %d" % i for i in range(count)}


async def claim(store: KVStore, shard: ShardId, fence: Fence = FENCE) -> Claim:
    (answer,) = await store.claim([shard], fence)
    assert isinstance(answer, Claim), answer
    return answer


async def commit(
    store: KVStore, shard: ShardId, *mutations: Mutation, fence: Fence = FENCE
) -> CommitResult:
    (result,) = await store.commit([ShardCommit(shard, fence, mutations)])
    assert result.error is None, result.error
    return result


async def apply(
    store: KVStore, shard: ShardId, *mutations: Mutation, fence: Fence = FENCE
) -> Sequence[Outcome]:
    return list((await commit(store, shard, *mutations, fence=fence)).outcomes)


async def refused(store: KVStore, shard: ShardId, fence: Fence, *, epoch: int) -> None:
    """Assert that a commit with this fence is refused and changes nothing."""
    before = await scanned(store, shard)
    mutation = puts({b"refused": b""}, counters={b"refused": 1})
    (result,) = await store.commit([ShardCommit(shard, fence, [mutation])])
    assert isinstance(result.error, StaleFence)
    assert result.error.epoch == epoch
    assert list(result.outcomes) == []
    assert await scanned(store, shard) == before


async def get(store: KVStore, shard: ShardId, *keys: bytes) -> list[bytes | None]:
    (values,) = values_of(await store.get_many([(shard, keys)], ROWS))
    return values


async def scanned(
    store: KVStore, shard: ShardId, table: Table = ROWS, *, page: int = 300
) -> dict[bytes, bytes]:
    found: list[tuple[bytes, bytes]] = []
    async for part in store.scan(shard, table, page=page):
        found += part
    assert len(found) == len(dict(found))
    return dict(found)


async def counters_of(
    store: KVStore, shard: ShardId, fence: Fence = Fence(3, 6)
) -> Mapping[bytes, int]:
    """The counters, learnt by a claim with a higher fence."""
    return dict((await claim(store, shard, fence)).counters)
