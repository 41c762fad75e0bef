"""Where writes go: by type, room and free space, with a ramp for what comes back (R33, R38)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcm.cache.placement import Candidate, Grant, choose, grant, next_turn, shares
from kvcm.core.errors import CapacityReached, NoStorage
from kvcm.core.limits import BLOCKS_PER_EXTENT_MAX, PROBE_FAILURES_MAX, PROBE_SUCCESSES_MIN, RAMP_S
from kvcm.core.types import CachePreferStrategy, InstanceGroup, StorageType
from kvcm.storage_backends.base import DataStorageBackend, ProbeResult
from tests.cache.harness import SLOT, Harness, file_of, group

ANY = CachePreferStrategy.UNSPECIFIED
PREFER, ALWAYS = CachePreferStrategy.PREFER_3FS, CachePreferStrategy.ALWAYS_3FS
NFS, FS, MC = StorageType.NFS, StorageType.HF3FS, StorageType.MOONCAKE
BLOCK = 2 * SLOT
GIB = 1 << 30


def of(name: str, kind: StorageType = NFS, **fields: Any) -> Candidate:
    return Candidate(name, kind, **fields)


def name_of(chosen: Candidate | None) -> str:
    return chosen.name if chosen is not None else ""


# ---- which ones may take it --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "candidates", "expected"),
    [
        # The type: the strategy's, or the first candidate's.
        (ANY, [of("n"), of("f", FS)], "n"),
        (PREFER, [of("n"), of("f", FS)], "f"),
        (ALWAYS, [of("n"), of("f", FS)], "f"),
        (PREFER, [of("n"), of("m", MC)], "n"),
        (ALWAYS, [of("n"), of("m", MC)], ""),
        (ALWAYS, [], ""),
        (ANY, [], ""),
        (CachePreferStrategy.PREFER_MOONCAKE, [of("n"), of("m", MC)], "m"),
        (CachePreferStrategy.ALWAYS_MOONCAKE, [of("n"), of("f", FS)], ""),
        # Room: exactly enough, one byte short.
        (PREFER, [of("n"), of("f", FS, own_room=100)], "f"),
        (PREFER, [of("n"), of("f", FS, own_room=99)], "n"),
        (PREFER, [of("n"), of("f", FS, type_room=100)], "f"),
        (PREFER, [of("n"), of("f", FS, type_room=99)], "n"),
        (ALWAYS, [of("n"), of("f", FS, own_room=0)], "f"),
        (ANY, [of("n1", own_room=99), of("f", FS), of("n2", own_room=100)], "n2"),
        # Free bytes: a storage that lacks them comes after all that have them.
        (PREFER, [of("n"), of("f", FS, disk_free=100)], "f"),
        (PREFER, [of("n"), of("f", FS, disk_free=99)], "n"),
        (ALWAYS, [of("n"), of("f", FS, disk_free=0)], "f"),
        (ALWAYS, [of("f1", FS, disk_free=99), of("f2", FS, disk_free=100)], "f2"),
        (PREFER, [of("n", disk_free=99), of("f", FS, disk_free=99)], "f"),
        # … but before those whose limits leave no room.
        (PREFER, [of("n", own_room=99), of("f", FS, disk_free=0)], "f"),
        (ANY, [of("n", disk_free=0), of("f", FS, type_room=99, disk_free=GIB)], "n"),
        # Nobody has room for all: most of it is granted where most fits.
        (PREFER, [of("n", own_room=60), of("f", FS, own_room=50)], "n"),
        (PREFER, [of("n", own_room=50), of("f", FS, own_room=50)], "f"),
        (ANY, [of("n", type_room=-5), of("f", FS, own_room=0)], "f"),
    ],
)
def test_type_room_and_free_bytes_decide_in_this_order(
    strategy: CachePreferStrategy, candidates: Sequence[Candidate], expected: str
) -> None:
    for turn in (0.0, 0.5, 0.999):
        assert name_of(choose(candidates, strategy, 100, turn)) == expected


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([of("a"), of("b")], "aaaaabbbbb"),
        ([of("a", disk_free=4 * GIB), of("b", disk_free=GIB)], "aaaaaaaabb"),
        (
            [of("a", disk_free=GIB), of("b", disk_free=GIB), of("c", disk_free=3 * GIB)],
            "aabbcccccc",
        ),
        # What it may hold counts, when that is less than what is free on it.
        ([of("a", disk_free=9 * GIB, own_room=GIB), of("b", disk_free=4 * GIB)], "aabbbbbbbb"),
        ([of("a", own_room=GIB), of("b", own_room=4 * GIB)], "aabbbbbbbb"),
        # Unknown: as much as the mean of the others.
        ([of("a", own_room=GIB), of("b"), of("c", own_room=3 * GIB)], "aabbbccccc"),
        # Nothing free anywhere: all alike.
        ([of("a", disk_free=0), of("b", disk_free=0)], "aaaaabbbbb"),
        # All types' quota full: still spread.
        (
            [of("a", type_room=50, disk_free=GIB), of("b", type_room=50, disk_free=GIB)],
            "aaaaabbbbb",
        ),
        # Within the type only.
        ([of("a"), of("f", FS), of("b")], "aaaaabbbbb"),
    ],
)
def test_within_a_type_turns_are_given_in_proportion_to_free_space(
    candidates: Sequence[Candidate], expected: str
) -> None:
    turns = [(i + 0.5) / 10 for i in range(10)]
    assert "".join(name_of(choose(candidates, ANY, 100, turn)) for turn in turns) == expected


def test_a_storage_to_keep_to_is_taken_while_it_is_one_of_the_best() -> None:
    near = of("b", own_room=1000)
    for turn in (0.0, 0.99):
        assert name_of(choose([of("a"), near, of("c")], ANY, 1000, turn, "b")) == "b"
        assert name_of(choose([of("a"), near, of("c")], ANY, 1001, turn, "b")) != "b"
        assert name_of(choose([of("a"), of("b", FS)], ANY, 1, turn, "b")) == "a"


def test_one_write_is_granted_as_many_blocks_as_an_extent_holds() -> None:
    sizes = [1] * (BLOCKS_PER_EXTENT_MAX + 1)
    assert grant(sizes[1:], []) == Grant(BLOCKS_PER_EXTENT_MAX, "")
    assert grant(sizes, []) == Grant(BLOCKS_PER_EXTENT_MAX, "EXTENT_SIZE", ("EXTENT_SIZE",))


# ---- the ramp ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age_s", "empty", "expected"),
    [
        (0.0, 10, 1 / 4),
        (RAMP_S, 10, 2 / 5),
        (3 * RAMP_S, 10, 4 / 7),
        (9 * RAMP_S, 10, 10 / 13),
        (90 * RAMP_S, 10, 10 / 13),
        (math.inf, 10, 10 / 13),
        # Fuller than the others: its own share, from the first moment on.
        (0.0, 0.5, 0.5 / 3.5),
    ],
)
def test_what_came_back_grows_from_its_fair_share_to_what_its_free_space_gives(
    age_s: float, empty: float, expected: float
) -> None:
    others = [of(n, disk_free=GIB) for n in "abc"]
    found = shares([*others, of("d", disk_free=int(empty * GIB), age_s=age_s)])
    assert found[3] == pytest.approx(expected)
    assert found[:3] == pytest.approx([(1 - expected) / 3] * 3)


def test_two_that_came_back_at_once_do_not_lift_each_other() -> None:
    back = [of(n, disk_free=10 * GIB, age_s=0.0) for n in "cd"]
    assert shares([of("a", disk_free=GIB), of("b", disk_free=GIB), *back]) == pytest.approx(
        [0.25] * 4
    )


def test_when_all_came_back_all_is_given_out() -> None:
    for ages in itertools.product([0.0, 1.0, RAMP_S, 1e9], repeat=3):
        back = [of(f"{i}", disk_free=10**i, age_s=a) for i, a in enumerate(ages)]
        assert sum(shares(back)) == pytest.approx(1)


def test_turns_are_even_however_many_are_taken() -> None:
    turn, counts = 0.0, Counter[int]()
    for count in range(1, 2001):
        turn = next_turn(turn)
        assert 0 <= turn < 1
        counts[int(turn * 4)] += 1
        assert all(abs(counts[i] - count / 4) < 3 for i in range(4)), count


# ---- through the whole service -----------------------------------------------------------------

NAMES = ("a", "b", "c", "d")


class Disk:
    """A storage whose probe tells what the test wants."""

    def __init__(self, backend: DataStorageBackend) -> None:
        self._backend = backend
        self.result = ProbeResult(True, free_bytes=100 * GIB)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def probe(self) -> ProbeResult:
        return self.result


@asynccontextmanager
async def disks(
    root: Path, made: InstanceGroup | None = None, **options: Any
) -> AsyncIterator[tuple[Harness, dict[str, Disk]]]:
    built: dict[str, Disk] = {}

    def wrap(backend: DataStorageBackend) -> Any:
        return built.setdefault(backend.config.global_unique_name, Disk(backend))

    h = Harness(
        root=root, groups=[made or group(storages=NAMES)], storages=NAMES, wrap=wrap, **options
    )
    await h.open()
    await h.register()
    await probed(h)
    try:
        yield h, built
    finally:
        await h.close()


async def probed(h: Harness, times: int = 1) -> None:
    for _ in range(times):
        await h.backends.run_once(h.clock.monotonic())


async def writes(h: Harness, keys: Sequence[int], pause_s: float = 0.0) -> Counter[str]:
    """How many of these writes, of one key each, went to each storage."""
    got: Counter[str] = Counter()
    for key in keys:
        granted = await h.start([key])
        got[storage_of(h, granted.locations[0].uris["tp0"])] += 1
        h.clock.advance(pause_s)
    return got


def storage_of(h: Harness, uri: str) -> str:
    return file_of(uri)[0].relative_to(h.root).parts[0]


async def test_an_empty_storage_that_comes_back_is_not_flooded(tmp_path: Path) -> None:
    """R38, against storages that are 90 % full."""
    async with disks(tmp_path) as (h, built):
        even = await writes(h, range(100))
        assert all(24 <= even[name] <= 26 for name in NAMES), even
        built["d"].result = ProbeResult(False, "not mounted")
        await probed(h)
        assert not h.backends.available("d")
        assert (await writes(h, range(1000, 1099))).keys() == set("abc")
        built["d"].result = ProbeResult(True, free_bytes=1000 * GIB)
        await probed(h, PROBE_SUCCESSES_MIN)
        assert h.backends.available("d")
        first_minute = await writes(h, range(2000, 2600), RAMP_S / 600)
        assert 150 <= first_minute["d"] <= 2 * 150, first_minute
        h.clock.advance(9 * RAMP_S)
        later = await writes(h, range(3000, 3130))
        assert later["d"] == pytest.approx(100, abs=2)
        await h.registry.set_storage_enabled("d", False)
        h.backends.follow(h.registry.view)
        assert (await writes(h, range(4000, 4099))).keys() == set("abc")


@pytest.mark.parametrize("multi_storage", [False, True])
async def test_a_chain_stays_on_one_storage_for_clients_that_read_one_an_answer(
    tmp_path: Path, multi_storage: bool
) -> None:
    async with disks(tmp_path) as (h, _):
        used: set[str] = set()
        chains = [range(100 * chain, 100 * chain + 8) for chain in range(12)]
        for keys in chains:
            for end in range(2, 9, 2):
                granted = await h.put(keys[:end], multi_storage=multi_storage)
                used.add(storage_of(h, granted.locations[-1].uris["tp0"]))
        assert used == set(NAMES)
        found = [len(await h.lookup(keys)) for keys in chains]
        assert max(found) == 2 if multi_storage else found == [8] * 12


async def test_a_disk_that_is_full_takes_only_what_fits_nowhere_else(tmp_path: Path) -> None:
    async with disks(tmp_path) as (h, built):
        built["a"].result = ProbeResult(True, free_bytes=BLOCK - 1)
        built["b"].result = ProbeResult(True, free_bytes=BLOCK)
        await probed(h)
        # By now the free bytes of b are hardly any.
        assert (await writes(h, range(50))).keys() == {"c", "d"}
        for name in "bcd":
            await h.registry.set_storage_enabled(name, False)
        h.backends.follow(h.registry.view)
        assert await writes(h, range(1000, 1010)) == {"a": 10}


async def test_an_unknown_disk_gets_its_fair_share(tmp_path: Path) -> None:
    async with disks(tmp_path) as (h, built):
        built["a"].result = ProbeResult(True)
        await probed(h)
        got = await writes(h, range(100))
        assert all(24 <= got[name] <= 26 for name in NAMES), got


async def test_while_no_storage_is_available_nothing_is_evicted(tmp_path: Path) -> None:
    """R33, in a group that is at its mark."""
    full = group(storages=NAMES, capacity=50 * BLOCK, percentage=1.0)
    async with disks(tmp_path, full) as (h, built):
        for key in range(50):
            await h.put([key])
        for disk in built.values():
            disk.result = ProbeResult(False, "not mounted")
        await probed(h, PROBE_FAILURES_MAX)
        for i in range(1000):
            with pytest.raises(NoStorage) as refused:
                await h.start([1000 + i])
            assert refused.value.reason == "NO_STORAGE"
            if i % 100 == 0:
                await h.wait(1)
        assert h.manager.usage().groups["default"].serving_blocks == 50
        assert h.manager.usage().refused == {("default", "NO_STORAGE"): 1000}


# ---- the strategy ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("full", "reason"),
    [("type", "QUOTA_TYPE"), ("storage", "STORAGE_FULL"), ("disabled", "NO_STORAGE")],
)
async def test_what_a_full_type_cannot_take_is_diverted_or_refused_by_strategy(
    tmp_path: Path, full: str, reason: str
) -> None:
    fs: dict[str, Any] = {
        "type": FS,
        "spec": {"mountpoint": str(tmp_path / "hf3fs"), "root_dir": "kv", "key_count_per_file": 3},
    }
    (tmp_path / "hf3fs").mkdir()
    if full == "storage":
        fs["capacity_bytes"] = 10 * BLOCK
    types = [(FS, 10 * BLOCK)] if full == "type" else []
    names = ("nfs_01", "fs_01")
    h = Harness(
        root=tmp_path,
        storages=names,
        space={"fs_01": fs},
        groups=[
            preferring(group(name.name, storages=names, types=types), name)
            for name in (PREFER, ALWAYS)
        ],
    )
    await h.open()
    for strategy in (PREFER, ALWAYS):
        await h.register(strategy.name, group_name=strategy.name)
    if full == "disabled":
        await h.registry.set_storage_enabled("fs_01", False)
        h.backends.follow(h.registry.view)
    else:
        assert await types_of(h, PREFER, range(9)) == {FS}
        if full == "type":
            assert await types_of(h, ALWAYS, range(9)) == {FS}
        # Ten fit, so one more does, and two do not.
        assert await types_of(h, PREFER, [100, 101]) == {NFS}
        assert await types_of(h, PREFER, [200]) == {FS}
        if full == "type":
            assert await types_of(h, ALWAYS, [100]) == {FS}
    assert await types_of(h, PREFER, [300]) == {NFS}
    with pytest.raises(CapacityReached) as refused:
        await h.start([300], ALWAYS.name)
    assert refused.value.reason == reason
    await h.close()


def preferring(made: InstanceGroup, strategy: CachePreferStrategy) -> InstanceGroup:
    assert made.cache_config is not None
    cache = made.cache_config.model_copy(update={"data_storage_strategy": strategy})
    return made.model_copy(update={"cache_config": cache})


async def types_of(h: Harness, strategy: CachePreferStrategy, keys: Sequence[int]) -> set[int]:
    """Types of the storages that a write of these keys went to; all of it was granted."""
    granted = await h.start(list(keys), strategy.name)
    assert granted.granted == list(keys)
    return {location.type for location in granted.locations}
