"""The ceiling beside the measured hit rate."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcm.core import limits
from kvcm.core.keys import KeyBatch
from kvcm.observability import ceiling as ceiling_module
from kvcm.observability.causes import Fate, Sample
from kvcm.observability.ceiling import EVENT_BYTES, Ceilings
from kvcm.observability.ceiling_report import WindowReport
from kvcm.observability.windows import DAY, HOUR, QUARTER
from kvcm.optimizer.trace import ceiling, read_trace
from kvcm.testing.clock import SimClock

GIB = 1 << 30
TRACES = Path(os.environ.get("KVCM_TRACES", Path(__file__).parents[3] / "shared" / "traces"))


UIDS = {"u1": "one", "u2": "two", "u3": "three", "u4": "four"}


def _made(path: Path | None = None, clock: SimClock | None = None, **sample: int) -> Ceilings:
    made = Ceilings(clock or SimClock(), path, Sample(**sample))
    made.follow("cluster1", {uid: (name, "g") for uid, name in UIDS.items()}, {"g": 100 * GIB})
    return made


def _packed(keys: Sequence[int]) -> KeyBatch:
    out = bytearray()
    for key in keys:
        value = key & (1 << 64) - 1
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
    return KeyBatch.from_packed(bytes(out))


async def _window(ceilings: Ceilings, name: str = DAY, instance: str = "one") -> WindowReport:
    report = await ceilings.refresh()
    scope = next(s for s in report.scopes if s.instance == instance)
    return next(w for w in scope.windows if w.window == name)


@pytest.mark.parametrize(
    ("name", "expected"), [("mooncake_conversation", 0.36641), ("mooncake_synthetic", 0.63960)]
)
async def test_the_ceiling_of_a_published_trace(name: str, expected: float) -> None:
    """Which keys a sketch confuses depends on the instance: of four, one may lie further off."""
    path = TRACES / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    errors = []
    for uid in UIDS:
        clock = SimClock()
        ceilings, began = _made(clock=clock), clock.now()
        for row in read_trace(path).rows:
            clock.advance(max(0.0, began + row.timestamp_ms / 1000 - clock.now()))
            ceilings.asked(uid, "g", KeyBatch.from_array(array("q", row.hash_ids)), 0, 0)
            if row.number % 100 == 0:
                await ceilings.run_once(clock.monotonic())
        found = await _window(ceilings, DAY, UIDS[uid])
        of_group = await _window(ceilings, DAY, "")
        assert of_group.ceiling == found.ceiling
        assert 2 * found.standard_error < 0.01
        errors.append(abs(found.ceiling - expected) / found.standard_error)
    assert sum(error < 2 for error in errors) >= len(UIDS) - 1
    assert math.sqrt(sum(error**2 for error in errors) / len(UIDS)) < 1.8


async def test_the_ceiling_of_a_generated_workload() -> None:
    chance, clock = random.Random(4), SimClock()
    ceilings = _made(clock=clock)
    requests: list[tuple[int, ...]] = []
    for _ in range(400):
        shared = chance.randrange(40)
        keys = [hash((shared, i)) for i in range(chance.randrange(200))]
        keys += [chance.getrandbits(63) - 2**62 for _ in range(100)]
        requests.append(tuple(keys))
        make = _packed if chance.random() < 0.5 else KeyBatch.from_ints
        ceilings.asked(chance.choice(("u1", "u2")), "g", make(keys), 0, 0)
        clock.advance(20)
    found, exact = await _window(ceilings, DAY, ""), ceiling(requests)
    # Two instances share no blocks, so their group has more distinct ones.
    assert found.blocks == exact.blocks
    assert found.requests == 400
    assert found.ceiling < exact.block_rate
    one, two = [await _window(ceilings, DAY, name) for name in ("one", "two")]
    assert one.blocks + two.blocks == found.blocks
    assert one.distinct + two.distinct == pytest.approx(found.distinct, rel=0.02)


async def test_the_hit_rate_is_of_what_was_asked_of_the_cache() -> None:
    ceilings = _made()
    keys = list(range(3_000))
    ceilings.asked("u1", "g", KeyBatch.from_ints(keys), 8 * 500, 2_000)
    packed = _packed(keys)
    ceilings.asked("u1", "g", packed, packed.offset_of(500), 2_000)
    ceilings.asked("u1", "g", KeyBatch.from_ints(keys), 8 * 3_000, 0)
    found = await _window(ceilings)
    assert (found.requests, found.blocks, found.hits) == (2, 5_000, 4_000)
    assert found.hit_rate == 0.8
    assert found.distinct == pytest.approx(2_500, rel=0.02)
    assert found.misses["new"] == 500
    assert found.misses["never_written"] == 500


async def test_the_causes_add_up_to_the_misses() -> None:
    ceilings = _made()
    batch = KeyBatch.from_ints(range(900))

    def part(start: int) -> KeyBatch:
        return KeyBatch.from_ints(range(start, start + 100))

    ceilings.asked("u1", "g", batch, 0, 0)
    for start, fate in (
        (100, Fate.HELD),
        (200, Fate.REFUSED_QUOTA),
        (300, Fate.REFUSED_ADMISSION),
        (400, Fate.EVICTED),
        (500, Fate.WRITING),
        (600, Fate.FAILED),
        (700, Fate.REMOVED),
    ):
        ceilings.became("u1", "g", part(start), fate, GIB if fate is Fate.EVICTED else 0)
    ceilings.asked("u1", "g", batch, 0, 0)
    ceilings.asked("u1", "g", part(100), 0, 50, unreadable=True)
    ceilings.asked("u1", "g", part(100), 0, 100)
    found = await _window(ceilings)
    assert found.misses == {
        "new": 900,
        "never_written": 200,
        "refused_quota": 100,
        "refused_admission": 100,
        "evicted": 100,
        "storage_unavailable": 50,
        "unfinished": 200,
        "removed": 100,
        "unreachable": 100,
        "unknown": 0,
    }
    assert sum(found.misses.values()) == found.blocks - found.hits
    assert found.is_exact
    assert sum(found.evicted_ages.values()) == found.space[-1].hits == found.misses["evicted"]
    assert (found.space[0].more_bytes, found.evicted_ages["1m"]) == (GIB, 100)


async def test_the_causes_add_up_when_they_are_estimated_and_when_nothing_is_known() -> None:
    ceilings = _made(keys_max=256)
    for start in range(0, 40_000, 500):
        ceilings.asked("u1", "g", KeyBatch.from_ints(range(start, start + 500)), 0, 123)
    found = await _window(ceilings)
    assert not found.is_exact
    assert 0 < found.sampled < 2_000
    assert sum(found.misses.values()) == found.blocks - found.hits == 80 * 377
    assert found.misses["new"] > 0.99 * 80 * 377
    ceilings = _made()
    ceilings._counts.sample.halvings = 40
    ceilings.asked("u1", "g", KeyBatch.from_ints(range(100)), 0, 40)
    assert (await _window(ceilings)).misses["unknown"] == 60


async def test_more_space_is_estimated_from_what_was_evicted_since() -> None:
    """An LRU cache of 100 blocks and a loop over 150: 50 blocks more make all of it hits."""
    block, clock = 1 << 24, SimClock()
    ceilings = _made(clock=clock)
    held: list[int] = []
    for turn in range(10):
        for key in range(150):
            batch = KeyBatch.from_ints([key])
            ceilings.asked("u1", "g", batch, 0, int(key in held))
            if key in held:
                held.remove(key)
            else:
                ceilings.became("u1", "g", batch, Fate.HELD)
            held.append(key)
            if len(held) > 100:
                gone = KeyBatch.from_ints([held.pop(0)])
                ceilings.became("u1", "g", gone, Fate.EVICTED, block)
            clock.advance(1)
        await ceilings.run_once(clock.monotonic())
        assert turn > 0 or ceilings.snapshot().scopes
    found = await _window(ceilings)
    assert found.hits == 0
    assert found.misses["evicted"] == 9 * 150
    # Of space in between LRU would make nothing on a loop.
    most = next(s for s in found.space if s.hits >= 0.9 * 9 * 150)
    assert 50 * block <= most.more_bytes <= 1.5 * 50 * block


async def test_the_estimate_of_space_is_what_a_larger_lru_cache_reaches() -> None:
    chance, block = random.Random(8), 1 << 24
    prompts = [int(chance.paretovariate(0.5)) for _ in range(1_500)]
    keys = [[1_000 * prompt + i for i in range(20)] for prompt in prompts]

    def replay(capacity: int, ceilings: Ceilings | None) -> int:
        held: OrderedDict[int, None] = OrderedDict()
        hits = 0
        for asked in keys:
            found = next((i for i, key in enumerate(asked) if key not in held), len(asked))
            hits += found
            new = [key for key in asked if key not in held]
            # The ends of prefixes go first.
            for key in reversed(asked):
                held[key] = None
                held.move_to_end(key)
            gone = [held.popitem(last=False)[0] for _ in range(len(held) - capacity)]
            if ceilings is not None:
                ceilings.asked("u1", "g", KeyBatch.from_ints(asked), 0, found)
                ceilings.became("u1", "g", KeyBatch.from_ints(new), Fate.HELD)
                evicted = KeyBatch.from_ints(gone)
                ceilings.became("u1", "g", evicted, Fate.EVICTED, block * len(gone))
        return hits

    # All of it happens within one second of the clock.
    ceilings = _made(per_s_max=10**9)
    hits = replay(400, ceilings)
    found = await _window(ceilings)
    assert found.hits == hits
    for share in (0.3, 0.6, 0.9):
        step = next(s for s in found.space if s.hits >= share * found.space[-1].hits)
        reached = replay(400 + step.more_bytes // block, None)
        assert abs(hits + step.hits - reached) < 0.03 * found.blocks
        assert step.hits > 0.03 * found.blocks


async def test_a_removed_instance_takes_its_windows_along() -> None:
    ceilings = _made()
    for uid in ("u1", "u2"):
        ceilings.asked(uid, "g", KeyBatch.from_ints(range(10)), 0, 0)
    assert [s.instance for s in (await ceilings.refresh()).scopes] == ["", "one", "two"]
    ceilings.follow("cluster1", {"u2": ("two", "g")}, {"g": None})
    ceilings.asked("u1", "g", KeyBatch.from_ints(range(10)), 0, 0)
    assert [s.instance for s in (await ceilings.refresh()).scopes] == ["", "two"]
    ceilings.follow("cluster1", {}, {})
    assert (await ceilings.refresh()).scopes == ()


async def test_a_trim_explains_the_misses_after_it() -> None:
    clock = SimClock()
    ceilings, batch = _made(clock=clock), KeyBatch.from_ints(range(10))
    for uid in ("u1", "u2"):
        ceilings.became(uid, "g", batch, Fate.HELD)
    await ceilings.run_once(0)
    clock.advance(10)
    ceilings.trimmed("u1")
    for uid in ("u1", "u2"):
        ceilings.asked(uid, "g", batch, 0, 0)
    assert (await _window(ceilings, QUARTER, "one")).misses["removed"] == 10
    assert (await _window(ceilings, QUARTER, "two")).misses["unreachable"] == 10


@pytest.mark.parametrize(("instances", "without"), [(0, 0), (1, 1)])
async def test_instances_above_the_limit_count_in_their_group_only(
    instances: int, without: int
) -> None:
    count = limits.CEILING_INSTANCES_MAX + instances
    ceilings = Ceilings(SimClock())
    ceilings.follow("c", {f"u{i}": (f"i{i}", "g") for i in range(count)}, {"g": None})
    for i in range(count):
        ceilings.asked(f"u{i}", "g", KeyBatch.from_ints([1]), 0, 0)
    report = await ceilings.refresh()
    assert len(report.scopes) == 1 + limits.CEILING_INSTANCES_MAX
    assert report.instances_without == without
    assert report.scopes[0].windows[0].blocks == count


async def test_groups_above_the_limit_have_no_windows() -> None:
    count = limits.CEILING_GROUPS_MAX + 1
    ceilings = Ceilings(SimClock())
    ceilings.follow("c", {}, {f"g{i}": None for i in range(count)})
    for i in range(count):
        ceilings.asked(f"gone{i}", f"g{i}", KeyBatch.from_ints([1]), 0, 0)
    assert len((await ceilings.refresh()).scopes) == limits.CEILING_GROUPS_MAX


@pytest.mark.parametrize(("over", "uncounted"), [(0, 0), (1, 1)])
async def test_requests_above_the_queue_are_dropped_and_counted(
    over: int, uncounted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceiling_module, "CEILING_QUEUE_BYTES_MAX", 4_096)
    ceilings = _made()
    room = 4_096 - 2 * EVENT_BYTES - 8
    ceilings.asked("u1", "g", KeyBatch.from_ints([1]), 0, 0)
    ceilings.asked("u1", "g", KeyBatch.from_packed(bytes(room + over)), 0, 0)
    report = await ceilings.refresh()
    assert report.uncounted == uncounted
    assert ceilings._queued_bytes == 0
    ceilings.asked("u1", "g", KeyBatch.from_ints([1]), 0, 0)
    assert (await ceilings.refresh()).uncounted == uncounted


async def test_malformed_keys_are_left_out() -> None:
    ceilings = _made()
    for data in (b"\xff" * 30, b"\x01\xff", b"\x01" + b"\xff" * 15 + b"\x01"):
        ceilings.asked("u1", "g", KeyBatch.from_packed(data), 0, 0)
        ceilings.became("u1", "g", KeyBatch.from_packed(data), Fate.HELD)
    ceilings.asked("u1", "g", KeyBatch.from_ints([7]), 0, 0)
    found = await _window(ceilings)
    assert 1 <= found.blocks <= 2
    assert ceilings._queued_bytes == 0


async def test_no_step_holds_the_loop_for_long(tmp_path: Path) -> None:
    ceilings = _made(tmp_path / "ceiling")
    for turn in range(20):
        keys = range(turn * 1_000, turn * 1_000 + 20_000)
        ceilings.asked("u1", "g", KeyBatch.from_ints(keys), 0, 0)
    steps: list[float] = []

    async def watch() -> None:
        # What others on the machine take is not counted.
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            steps.append(time.thread_time() - last)
            last = time.thread_time()

    watcher = asyncio.create_task(watch())
    await ceilings.refresh()
    await ceilings.save()
    watcher.cancel()
    steps.sort()
    assert len(steps) > 300
    # Single ones meet the garbage collector, or cold caches.
    assert steps[len(steps) * 9 // 10] < limits.STEP_S_MAX


# ---- a restart -----------------------------------------------------------------------------------


async def _ask_for_hours(ceilings: Ceilings, clock: SimClock) -> None:
    for hour in range(4):
        ceilings.asked("u1", "g", KeyBatch.from_ints(range(hour * 500, hour * 500 + 900)), 0, 100)
        ceilings.became("u1", "g", KeyBatch.from_ints(range(hour * 500)), Fate.EVICTED, GIB)
        await ceilings.run_once(clock.monotonic())
        clock.advance(3_000)


async def test_a_restart_keeps_the_windows_and_the_fates(tmp_path: Path) -> None:
    path, clock = tmp_path / "ceiling", SimClock()
    ceilings = _made(path, clock)
    await ceilings.open()
    await _ask_for_hours(ceilings, clock)
    ceilings.asked("u2", "g", KeyBatch.from_ints([5]), 0, 1)
    before = await ceilings.refresh()
    await ceilings.close()

    again = _made(path, clock)
    await again.open()
    after = await again.refresh()
    assert after.scopes == before.scopes
    assert after.since_s == before.since_s
    for made in (ceilings, again):
        clock.advance(30)
        made.asked("u1", "g", KeyBatch.from_ints(range(600)), 0, 0)
    assert (await _window(again)).misses == (await _window(ceilings)).misses
    assert (await _window(again)).misses["evicted"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["ceiling"]


async def test_the_loop_saves_now_and_then_but_nothing_new_is_not_saved(tmp_path: Path) -> None:
    path, clock = tmp_path / "ceiling", SimClock()
    ceilings = _made(path, clock)
    await ceilings.run_once(clock.monotonic())
    assert not path.exists()
    ceilings.asked("u1", "g", KeyBatch.from_ints([5]), 0, 1)
    clock.advance(ceiling_module.SAVE_PERIOD_S)
    await ceilings.run_once(clock.monotonic())
    saved = path.stat().st_mtime_ns
    again = _made(path, clock)
    await again.open()
    assert (await _window(again, HOUR)).blocks == 1
    clock.advance(ceiling_module.SAVE_PERIOD_S)
    await ceilings.run_once(clock.monotonic())
    assert path.stat().st_mtime_ns == saved


async def test_windows_of_what_was_removed_meanwhile_are_dropped(tmp_path: Path) -> None:
    path, clock = tmp_path / "ceiling", SimClock()
    ceilings = _made(path, clock)
    await _ask_for_hours(ceilings, clock)
    await ceilings.close()
    again = Ceilings(clock, path)
    again.follow("cluster1", {"u2": ("two", "other")}, {"other": None})
    await again.open()
    assert (await again.refresh()).scopes == ()


@pytest.mark.parametrize("damage", ["flip", "cut", "more", "version", "empty", "registry"])
async def test_a_damaged_or_foreign_file_is_left_out_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "ceiling", SimClock()
    ceilings = _made(path, clock)
    await _ask_for_hours(ceilings, clock)
    if damage == "registry":
        ceilings.follow("cluster2", {"u1": ("one", "g")}, {"g": None})
    ceilings.asked("u1", "g", KeyBatch.from_ints([5]), 0, 1)
    await ceilings.close()
    data = path.read_bytes()
    chance = random.Random(1)
    for _ in range(20):
        at = chance.randrange(20, len(data))
        bad = {
            "flip": data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :],
            "cut": data[:at],
            "more": data + data[at:],
            "version": data.replace(b"ceiling 1", b"ceiling 9", 1),
            "empty": b"",
            "registry": data,
        }[damage]
        path.write_bytes(bad)
        caplog.clear()
        again = _made(path, clock)
        with caplog.at_level(logging.WARNING):
            await again.open()
        assert "hit-rate windows begin anew" in caplog.text
        assert (await again.refresh()).scopes == ()
    again.asked("u1", "g", KeyBatch.from_ints([5]), 0, 1)
    await again.close()
    last = _made(path, clock)
    await last.open()
    assert (await _window(last)).blocks == 1


async def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ceilings = _made(tmp_path / "away" / "ceiling")
    await ceilings.open()
    ceilings.asked("u1", "g", KeyBatch.from_ints([5]), 0, 1)
    with caplog.at_level(logging.WARNING):
        await ceilings.close()
    assert "not saved" in caplog.text
    (tmp_path / "away").mkdir()
    await ceilings.close()
    assert (tmp_path / "away" / "ceiling").exists()
