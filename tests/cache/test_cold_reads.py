"""Prefix lookups that read a far store: few rows, few round trips, the same answers."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kvcm.cache.api import LookupRequest
from kvcm.core.errors import KvcmError
from kvcm.core.keys import KeyBatch
from kvcm.metaindex.store import ShardId, Table, Values
from kvcm.metaindex.stores.memory import MemoryStore
from tests.cache.harness import Harness


class FarStore(MemoryStore):
    """Counts what is read, as if every call were a round trip."""

    read_ahead = 64

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.rows = 0

    async def get_many(
        self, shard_keys: Sequence[tuple[ShardId, Sequence[bytes]]], table: Table
    ) -> list[Values | KvcmError]:
        self.calls += 1
        if table is Table.ROWS:
            self.rows += sum(len(keys) for _, keys in shard_keys)
        return await super().get_many(shard_keys, table)


@pytest.fixture
def store() -> FarStore:
    return FarStore()


@pytest.fixture
async def harness(tmp_path: Path, store: FarStore) -> AsyncIterator[Harness]:
    made = await Harness(root=tmp_path, store=store).open()
    await made.register(specs=(("tp0", 64),))
    yield made
    await made.close()


def cold(harness: Harness) -> None:
    index = harness.index()
    index.shared.cache.clear_instance(index.rows)
    index.row_generation += 1


async def write(harness: Harness, keys: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """Write a chain in extents of these sizes; the URI of each block."""
    uris: list[str] = []
    for size in sizes:
        grant = await harness.start(keys[max(0, len(uris) - 1) : len(uris) + size])
        await harness.finish(grant)
        uris += [location.uris["tp0"] for location in grant.locations]
    return uris


async def uris_of(harness: Harness, keys: Sequence[int], packed: bool) -> list[str]:
    return [x.uris["tp0"] for x in await harness.lookup(keys, packed=packed)]


@pytest.mark.parametrize("packed", [False, True])
async def test_long_extents_cost_two_rows_each_and_two_waits(
    harness: Harness, store: FarStore, packed: bool
) -> None:
    keys = list(range(1, 2001))
    uris = await write(harness, keys, [64] * 31)
    for number, (rows_max, calls_max) in enumerate([(64 + 70, 6), (70, 3), (70, 3)]):
        cold(harness)
        store.rows = store.calls = 0
        assert await uris_of(harness, keys[:1984], packed) == uris
        assert store.rows <= rows_max, number
        # Rows, then states and extents at once.
        assert store.calls <= calls_max, number


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", range(6))
async def test_answers_do_not_depend_on_what_was_guessed(
    harness: Harness, store: FarStore, packed: bool, seed: int
) -> None:
    chance = random.Random(seed)
    keys = [chance.getrandbits(64) - (1 << 63) for _ in range(700)]
    sizes = [chance.choice((1, 2, 8, 33, 90)) for _ in range(12)]
    uris = await write(harness, keys, sizes)
    # A branch: other keys after some of the first, of an extent with a hole in it.
    cut = chance.randrange(1, len(uris) - 40)
    fork = keys[:cut] + [chance.getrandbits(60) for _ in range(100)]
    other = await harness.start(fork)
    gap = chance.randrange(100)
    await harness.finish(other, [i != gap for i in range(100)])
    wanted = uris[:cut] + [x.uris["tp0"] for x in other.locations[:gap]]
    for stretch in (0, 1, 8, 20, 64, 500):
        for start in (0, chance.randrange(len(uris))):
            cold(harness)
            harness.index().stretch = stretch
            assert await uris_of(harness, keys[start:], packed) == uris[start:]
        cold(harness)
        harness.index().stretch = stretch
        assert await uris_of(harness, fork, packed) == wanted
        assert await uris_of(harness, keys, packed) == uris


async def test_a_lookup_is_cut_where_the_reply_is_full(harness: Harness, store: FarStore) -> None:
    keys = list(range(1, 1001))
    uris = await write(harness, keys, [50] * 20)
    whole = (await harness.manager.lookup(LookupRequest("i1", KeyBatch.from_ints(keys)))).body
    for part in (len(whole) // 3, len(whole) // 20):
        cold(harness)
        object.__setattr__(harness.settings, "reply_bytes_max", part)
        found = await uris_of(harness, keys, True)
        assert 0 < len(found) < 1000
        assert found == uris[: len(found)]
        assert len(found) >= len(uris) * part // len(whole) - 1


async def test_a_miss_at_the_first_key_is_one_small_read(harness: Harness, store: FarStore) -> None:
    await write(harness, list(range(1, 2001)), [64] * 31)
    for stretch in (0, 64):
        harness.index().stretch = stretch
        store.rows = store.calls = 0
        assert await harness.hits(list(range(10_000, 14_400))) == 0
        assert store.calls == 1
        assert store.rows <= 138
