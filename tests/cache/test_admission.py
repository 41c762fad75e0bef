"""TinyLFU admission through the whole service, with exact numbers.

A group here has a mark of some blocks and room above it, so that a write that crosses the mark is
granted at once and the next round evicts what it displaced.
"""

from __future__ import annotations

from array import array
from functools import partial
from pathlib import Path

import pytest

from kvcm.cache.admission import PERIOD_CAPACITIES, Admission, GroupFrequencies
from kvcm.core.keys import KeyBatch, pack_keys
from kvcm.core.limits import ADMISSION_QUEUE_BYTES_MAX, SKETCH_CELLS_MIN
from kvcm.core.mask import BlockMask
from kvcm.core.mixing import hashes, seed_of
from kvcm.core.types import AdmissionPolicy, CacheReclaimStrategy, InstanceGroup
from kvcm.metaindex.sketch import FrequencySketch
from tests.cache.harness import SLOT, Grant, Harness, group

BLOCK = 2 * SLOT
NEVER = 1 << 40
TINYLFU = int(AdmissionPolicy.TINYLFU)


def group_of(blocks: int, admission: int = TINYLFU) -> InstanceGroup:
    """A mark at ``blocks``, where eviction stops too, below a quota twice as large."""
    return group(capacity=2 * blocks * BLOCK, percentage=0.5, low=0.5, admission=admission)


async def opened(tmp_path: Path, blocks: int, admission: int = TINYLFU) -> Harness:
    h = await Harness(root=tmp_path, groups=[group_of(blocks, admission)]).open()
    await h.register()
    return h


def frequencies(h: Harness) -> GroupFrequencies:
    return h.manager.admission.groups["default"]


def judging(h: Harness) -> None:
    """As after the first period, with nothing counted yet and counts that do not fade."""
    sketch = FrequencySketch(SKETCH_CELLS_MIN, NEVER)
    sketch.periods = 1
    frequencies(h).sketch = sketch


def blocks(h: Harness) -> int:
    return h.manager.usage().groups["default"].counted_bytes // BLOCK


async def request(h: Harness, keys: list[int], *, lookup: bool = True) -> tuple[int, Grant]:
    """What an engine does: look up, write what is missing; (hits, grant)."""
    hits = await h.hits(keys) if lookup else 0
    grant = await h.start(keys)
    h.fill(grant)
    await h.finish(grant)
    h.clock.advance(1)
    await h.rounds(1)
    return hits, grant


def chain(number: int, length: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + length))


# ---- the comparison ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("victims", "candidate", "granted"),
    [
        pytest.param([1, 1], [1] * 4, 4, id="as often: the newer one wins"),
        pytest.param([2, 2], [1] * 4, 0, id="more often: the victim stays"),
        pytest.param([2, 2], [2] * 4, 4, id="equal again"),
        pytest.param([1, 2], [1] * 4, 2, id="a leading part up to the victim that stays"),
        pytest.param([2, 2], [2, 2, 1, 1], 2, id="a popular head and a new tail"),
        pytest.param([3, 1], [2] * 4, 0, id="the coldest decides first, whatever the next is"),
        pytest.param([9, 9], [9, 9, 9, 8], 4, id="the first block that would displace decides"),
    ],
)
async def test_a_write_gets_what_beats_the_next_victims(
    tmp_path: Path, victims: list[int], candidate: list[int], granted: int
) -> None:
    """Two victims of two blocks, the first the colder; a chain of four that would displace both.
    The numbers are how often each was asked for."""
    h = await opened(tmp_path, blocks=4)
    judging(h)
    for number, uses in enumerate(victims):
        await request(h, chain(number, 2))
        for _ in range(uses - 1):
            await h.hits(chain(number, 2))
    wanted = chain(9, 4)
    # Asked for before without being written; the write's own lookup is the last use.
    for n in range(1, max(candidate)):
        await h.hits(wanted[: sum(uses > n for uses in candidate)])
    await h.round()
    _, grant = await request(h, wanted)
    assert len(grant.granted) == granted
    assert grant.granted == wanted[:granted]
    assert grant.reason == ("" if granted == 4 else "ADMISSION")
    assert await h.hits(wanted) == granted
    assert blocks(h) == 4
    await h.check_counters()
    await h.close()


async def test_below_the_mark_everything_is_granted(tmp_path: Path) -> None:
    h = await opened(tmp_path, blocks=6)
    judging(h)
    for _ in range(5):
        await request(h, chain(1, 2))
    _, grant = await request(h, chain(2, 4))
    assert (len(grant.granted), grant.reason) == (4, "")
    _, grant = await request(h, chain(3, 1))
    assert (len(grant.granted), grant.reason) == (0, "ADMISSION")
    await h.close()


async def test_what_fits_below_the_mark_is_granted_whatever_the_victims(tmp_path: Path) -> None:
    h = await opened(tmp_path, blocks=5)
    judging(h)
    for _ in range(3):
        await request(h, chain(1, 2))
        await request(h, chain(2, 2))
    _, grant = await request(h, chain(3, 4))
    assert (len(grant.granted), grant.reason) == (1, "ADMISSION")
    usage = h.manager.usage()
    assert usage.cut == {("default", "ADMISSION"): 1}
    assert usage.admission["default"].refused == 3
    await h.close()


async def test_a_write_is_not_compared_with_what_it_builds_on(tmp_path: Path) -> None:
    """A head that is used by all its continuations is always the more popular one."""
    h = await opened(tmp_path, blocks=2)
    judging(h)
    for _ in range(5):
        await request(h, chain(1, 2))
    _, grant = await request(h, chain(1, 4))
    assert (len(grant.granted), grant.reason) == (2, "")
    await h.close()


async def test_staying_costs_a_victim_its_uses(tmp_path: Path) -> None:
    """What was popular once gives way: of four uses three are worth two stays each. Being used
    again makes it whole."""
    h = await opened(tmp_path, blocks=2)
    judging(h)
    for _ in range(4):
        await request(h, chain(1, 2))
    one_off = iter(range(2, 100))

    async def granted(requests: int) -> list[int]:
        chains = [chain(next(one_off), 2) for _ in range(requests)]
        return [len((await request(h, c))[1].granted) for c in chains]

    assert await granted(5) == [0] * 5
    assert (await request(h, chain(1, 2)))[0] == 2
    assert await granted(9) == [0] * 8 + [2]
    assert (await request(h, chain(1, 2)))[0] == 0
    await h.close()


async def test_nothing_granted_is_no_error_and_its_session_can_be_finished(tmp_path: Path) -> None:
    h = await opened(tmp_path, blocks=2)
    judging(h)
    for _ in range(3):
        await request(h, chain(1, 2))
    answer = await h.start_raw(chain(2, 3))
    assert (answer.granted, answer.mask, answer.body) == (0, BlockMask(offset=3), b"")
    assert answer.reason == "ADMISSION"
    await h.finish(Grant("i1", [], answer.session_id, [], [], "", []))
    usage = h.manager.usage()
    assert usage.refused == {("default", "ADMISSION"): 1}
    assert usage.instances["i1"].refusals == {"ADMISSION": 1}
    assert usage.admission["default"].admitted == 0
    assert usage.admission["default"].refused == 3
    await h.close()


async def test_a_hard_limit_without_a_mark_is_not_admissions_business(tmp_path: Path) -> None:
    only_quota = group(capacity=2 * BLOCK, percentage=2.0, admission=TINYLFU)
    h = await Harness(root=tmp_path, groups=[only_quota]).open()
    await h.register()
    judging(h)
    for _ in range(5):
        await request(h, chain(1, 1))
    _, grant = await request(h, chain(2, 2))
    assert (len(grant.granted), grant.reason) == (1, "QUOTA_GROUP")
    await h.close()


async def test_a_key_limit_is_compared_within_its_instance(tmp_path: Path) -> None:
    keys = group(max_keys=8, percentage=0.5, low=0.5, admission=TINYLFU)
    h = await Harness(root=tmp_path, groups=[keys]).open()
    await h.register()
    await h.register("i2")
    judging(h)
    for _ in range(3):
        await request(h, chain(1, 4))
    await h.put(chain(7, 4), "i2")
    # The other instance's cold blocks are no victims for this one's limit.
    _, grant = await request(h, chain(2, 2))
    assert (len(grant.granted), grant.reason) == (0, "ADMISSION")
    await h.close()


# ---- counting ------------------------------------------------------------------------------------


def uses(h: Harness, keys: list[int]) -> list[int]:
    """What is counted for keys of instance ``i1``."""
    counted = frequencies(h)
    while counted.step():
        pass
    found = counted.estimate(hashes(array("q", keys).tobytes(), seed_of(h.index().uid)))
    return [int(count) for count in found]


async def test_a_request_counts_once_though_engines_look_up_and_then_write(tmp_path: Path) -> None:
    h = await opened(tmp_path, blocks=100)
    judging(h)
    await request(h, [1, 2, 3])
    assert uses(h, [1, 2, 3, 4]) == [1, 1, 1, 0]
    # In two writes; and with one more block than was looked up.
    await h.hits([1, 2, 3, 4])
    await h.put([1, 2])
    await h.put([1, 2, 3, 4, 5])
    assert uses(h, [1, 2, 3, 4, 5]) == [3, 3, 2, 1, 1]
    # A write that nobody looked up.
    await request(h, [7], lookup=False)
    assert uses(h, [7]) == [1]
    await h.close()


async def test_masked_keys_and_both_forms_of_keys_count(tmp_path: Path) -> None:
    h = await opened(tmp_path, blocks=100)
    judging(h)
    await h.lookup([-5, 1 << 62], mask=BlockMask(offset=1))
    await h.lookup([-5, 1 << 62], packed=True)
    assert uses(h, [-5, 1 << 62]) == [2, 2]
    await h.close()


def test_a_large_request_is_counted_in_slices_in_either_form() -> None:
    counted = GroupFrequencies()
    counted.sketch = FrequencySketch(1 << 16, NEVER)
    raw = array("q", [n * 0x1234567890AB for n in range(10_000)])
    batch = KeyBatch.from_array(raw)
    assert counted.note(0, batch, write=False)
    assert counted.note(0, KeyBatch.from_packed(pack_keys(batch.data)[0]), write=False)
    steps = 0
    while counted.step():
        steps += 1
    assert steps >= 10
    assert counted._queued_bytes == 0
    found = counted.estimate(hashes(batch.data, 0))
    assert found.min() == 2
    assert found.mean() < 2.05


def test_a_malformed_request_is_not_counted_and_stops_nobody() -> None:
    counted = GroupFrequencies()
    counted.sketch = FrequencySketch(1 << 12, NEVER)
    counted.note(0, KeyBatch.from_packed(b"\x80" * 30), write=False)
    counted.note(0, KeyBatch.from_ints([1]), write=False)
    while counted.step():
        pass
    assert counted.estimate(hashes(KeyBatch.from_ints([1]).data, 0)).tolist() == [1]


@pytest.mark.parametrize(("extra", "taken"), [(0, True), (1, False)])
def test_the_queue_is_bounded_and_what_is_above_is_said(extra: int, taken: bool) -> None:
    counted = GroupFrequencies()
    half = KeyBatch.from_packed(bytes(ADMISSION_QUEUE_BYTES_MAX // 2))
    assert counted.note(0, half, write=False)
    rest = KeyBatch.from_packed(bytes(ADMISSION_QUEUE_BYTES_MAX // 2 + extra))
    assert counted.note(0, rest, write=False) is taken
    assert counted.usage().uncounted == (0 if taken else 1)


# ---- when it is off ------------------------------------------------------------------------------


async def test_it_is_off_by_default_and_then_counts_nothing(tmp_path: Path) -> None:
    assert CacheReclaimStrategy().admission is AdmissionPolicy.ALL
    h = await opened(tmp_path, 4, admission=int(AdmissionPolicy.ALL))
    await request(h, chain(1, 4))
    assert h.manager.admission.groups == {}
    assert h.manager.usage().admission == {}
    assert not h.manager.admission.judges(h.index())
    await h.close()


async def test_it_judges_after_one_sample_period_and_not_before(tmp_path: Path) -> None:
    """A capacity of ten blocks: a period of eighty uses."""
    h = await opened(tmp_path, blocks=10)
    admission: Admission = h.manager.admission
    assert frequencies(h).sketch is not None
    for _ in range(PERIOD_CAPACITIES - 1):
        await request(h, chain(1, 10))
    await request(h, chain(1, 9))
    assert not admission.judges(h.index())
    assert not h.manager.usage().admission["default"].ready
    await request(h, chain(1, 1))
    assert admission.judges(h.index())
    assert h.manager.usage().admission["default"].ready
    await h.close()


@pytest.mark.parametrize("crash", [False, True])
async def test_a_restart_begins_a_new_sample_period(tmp_path: Path, crash: bool) -> None:
    h = await opened(tmp_path, blocks=10)
    for _ in range(PERIOD_CAPACITIES):
        await request(h, chain(1, 10))
    _, grant = await request(h, chain(2, 10))
    assert (len(grant.granted), grant.reason) == (0, "ADMISSION")
    await (h.crash() if crash else h.restart())
    assert not h.manager.admission.judges(h.index())
    _, grant = await request(h, chain(3, 10))
    assert (len(grant.granted), grant.reason) == (10, "")
    await h.close()


async def test_it_can_be_turned_on_and_off(tmp_path: Path) -> None:
    h = await opened(tmp_path, blocks=10)
    for _ in range(PERIOD_CAPACITIES):
        await request(h, chain(1, 10))
    assert h.manager.admission.judges(h.index())
    for admission in (AdmissionPolicy.ALL, AdmissionPolicy.TINYLFU):
        await h.change_group(partial(_with_admission, admission=admission))
        assert not h.manager.admission.judges(h.index())
    assert frequencies(h).sketch is not None
    await h.close()


def _with_admission(old: InstanceGroup, admission: AdmissionPolicy) -> InstanceGroup:
    cache = old.cache_config
    assert cache is not None
    assert cache.reclaim_strategy is not None
    strategy = cache.reclaim_strategy.model_copy(update={"admission": admission})
    changed = cache.model_copy(update={"reclaim_strategy": strategy})
    return old.model_copy(update={"cache_config": changed})


async def test_another_capacity_of_like_size_keeps_the_counts(tmp_path: Path) -> None:
    h = await opened(tmp_path, blocks=2000)
    before = frequencies(h).sketch
    counted = frequencies(h)
    counted.size(2040)
    assert counted.sketch is before
    assert before is not None
    assert before.period == PERIOD_CAPACITIES * 2040
    counted.size(4000)
    assert counted.sketch is not before
    await h.close()


# ---- the scenario --------------------------------------------------------------------------------


async def scan_rounds(h: Harness, rounds: int) -> list[int]:
    """Hits on a working set of 40 blocks, used twice, then 100 blocks of one-off prompts."""
    hits: list[int] = []
    one_off = iter(range(100, 100_000))
    for _ in range(rounds):
        hits.append(sum([(await request(h, chain(n, 10)))[0] for n in range(4)]))
        for n in range(4):
            await request(h, chain(n, 10))
        for _ in range(10):
            await request(h, chain(next(one_off), 10))
    return hits


@pytest.mark.parametrize(
    ("admission", "expected"),
    [(AdmissionPolicy.ALL, [0] * 20), (AdmissionPolicy.TINYLFU, [0] * 5 + [40] * 15)],
    ids=["without", "with"],
)
async def test_a_scan_of_one_off_prompts_does_not_flush_the_working_set(
    tmp_path: Path, admission: AdmissionPolicy, expected: list[int]
) -> None:
    """100 blocks fit. Between two uses of the working set 100 one-off blocks go by: LRU has lost
    all of it by then, each time. Admission judges after 800 uses, in the fifth round."""
    h = await opened(tmp_path, blocks=100, admission=int(admission))
    found = await scan_rounds(h, 20)
    assert found == expected, str(found)
    assert blocks(h) == 100
    await h.check_counters()
    await h.close()
