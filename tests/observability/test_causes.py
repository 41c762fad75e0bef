"""Why blocks are missed, by a sample of the keys."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcm.core.mixing import hashes
from kvcm.observability import tally
from kvcm.observability.causes import FORGET_S, Fate, Sample
from kvcm.observability.tally import Cause

NOW_S = 1_000_000


def _miss(
    sample: Sample,
    value: int,
    now_s: int = NOW_S,
    evicted: int = 0,
    trimmed_s: int = 0,
    unreadable: bool = False,
) -> tuple[Cause, int, int]:
    return sample.miss(value, now_s, evicted=evicted, trimmed_s=trimmed_s, unreadable=unreadable)


@pytest.mark.parametrize(
    ("fate", "cause"),
    [
        (Fate.ASKED, Cause.NEVER_WRITTEN),
        (Fate.REFUSED_QUOTA, Cause.REFUSED_QUOTA),
        (Fate.REFUSED_ADMISSION, Cause.REFUSED_ADMISSION),
        (Fate.WRITING, Cause.UNFINISHED),
        (Fate.FAILED, Cause.UNFINISHED),
        (Fate.HELD, Cause.UNREACHABLE),
        (Fate.EVICTED, Cause.EVICTED),
        (Fate.REMOVED, Cause.REMOVED),
    ],
)
def test_a_miss_has_the_cause_of_what_last_became_of_the_block(fate: Fate, cause: Cause) -> None:
    sample = Sample()
    assert _miss(sample, 1)[0] is Cause.NEW
    sample.become([1], fate, NOW_S)
    assert _miss(sample, 1)[0] is cause
    # Asking changes nothing.
    assert _miss(sample, 1)[0] is cause


def test_a_block_that_is_there_is_missed_for_its_storage_a_gap_or_a_trim() -> None:
    sample = Sample()
    sample.hit(1, NOW_S)
    assert _miss(sample, 1, unreadable=True)[0] is Cause.STORAGE_UNAVAILABLE
    assert _miss(sample, 1, trimmed_s=NOW_S - 1)[0] is Cause.UNREACHABLE
    # Hits do not make it younger than the trim.
    sample.hit(1, NOW_S + 20)
    assert _miss(sample, 1, NOW_S + 30, trimmed_s=NOW_S + 10)[0] is Cause.REMOVED
    sample.become([1], Fate.HELD, NOW_S + 40)
    assert _miss(sample, 1, NOW_S + 50, trimmed_s=NOW_S + 10)[0] is Cause.UNREACHABLE


def test_an_evicted_block_tells_when_and_how_much_more_space_would_have_kept_it() -> None:
    sample = Sample()
    sample.become([1], Fate.EVICTED, NOW_S, evicted=5_000)
    assert _miss(sample, 1, NOW_S + 70, evicted=9_000) == (Cause.EVICTED, 70, 4_000)
    # As long as nobody writes it, more and more space would have been needed.
    assert _miss(sample, 1, NOW_S + 90, evicted=12_000) == (Cause.EVICTED, 90, 7_000)


def test_what_nothing_happens_to_for_a_day_is_forgotten() -> None:
    sample = Sample()
    sample.become([1, 2], Fate.HELD, NOW_S)
    sample.hit(2, NOW_S + 100)
    sample.tidy(NOW_S + FORGET_S, 0.0)
    assert len(sample) == 1
    assert _miss(sample, 1, NOW_S + FORGET_S)[0] is Cause.NEW


@pytest.mark.parametrize(("keys", "weight"), [(1_000, 1), (1_001, 2), (9_000, 16)])
def test_the_sample_is_halved_above_its_limit(keys: int, weight: int) -> None:
    sample = Sample(keys_max=1_000)
    values = hashes(np.arange(keys, dtype="<i8").tobytes(), 0)
    sample.become((value for _, value in sample.chosen(values)), Fate.HELD, NOW_S)
    while sample.tidy(NOW_S, 0.0):
        pass
    assert sample.weight == weight
    assert len(sample) == len(sample.chosen(values)) <= 1_000


def test_the_sample_is_halved_when_it_is_looked_at_too_often() -> None:
    sample = Sample(per_s_max=100)
    sample.tidy(NOW_S, 0.0)
    for second in range(5):
        for value in range(100):
            sample.hit(value, NOW_S)
        sample.tidy(NOW_S, 1.0 + second)
    assert sample.weight == 1
    sample.hit(0, NOW_S)
    for value in range(100):
        sample.hit(value, NOW_S)
    sample.tidy(NOW_S, 5.5)
    assert sample.weight == 2


def test_a_halved_sample_tells_the_shares_of_all_keys() -> None:
    chance = random.Random(3)
    sample, exact = Sample(keys_max=3_000), Sample(keys_max=10**9, per_s_max=10**9)
    fates = [Fate.HELD] * 2 + [Fate.EVICTED] * 3 + [Fate.FAILED]
    raw = np.arange(30_000, dtype="<i8").tobytes()
    for value in hashes(raw, 0).tolist():
        exact.become([value], chance.choice(fates), NOW_S)
    for start in range(0, len(raw), 8_192):
        values = hashes(raw[start : start + 8_192], 0)
        for _, value in sample.chosen(values):
            fate = exact._keys[value].fate
            sample.become([value], fate, NOW_S)
        while sample.tidy(NOW_S, 0.0):
            pass
    assert sample.weight == 16
    found: dict[Cause, int] = dict.fromkeys(Cause, 0)
    for _, value in sample.chosen(hashes(raw, 0)):
        found[_miss(sample, value)[0]] += sample.weight
    # Of about 1,900 keys: four standard errors.
    assert found[Cause.EVICTED] == pytest.approx(15_000, abs=4 * 15_000 / 1_900**0.5)
    assert found[Cause.UNFINISHED] == pytest.approx(5_000, abs=4 * 11_200 / 1_900**0.5)
    assert found[Cause.NEW] == 0


def test_a_saved_sample_goes_on_where_it_was() -> None:
    sample, again = Sample(), Sample()
    sample.become([5], Fate.EVICTED, NOW_S, evicted=1 << 50)
    sample.become(range(2**64 - 3_000, 2**64), Fate.HELD, NOW_S)
    sample.halvings = 3
    again.load(sample.halvings, sample.save())
    assert again.weight == 8
    assert again._keys == sample._keys
    empty = Sample()
    empty.load(0, Sample().save())
    assert len(empty) == 0


def test_parts_add_up_exactly() -> None:
    chance = random.Random(9)
    for _ in range(200):
        weights = [chance.randrange(50) for _ in range(9)]
        total = chance.randrange(1_000)
        parts = tally.shared_out(total, weights)
        if any(weights):
            assert sum(parts) == total
            shares = (total * w / sum(weights) for w in weights)
            assert all(abs(p - s) < 1 for p, s in zip(parts, shares, strict=True))
        else:
            assert not any(parts)


def test_needs_are_classed_from_above() -> None:
    first = tally.need_at(0)
    for size in (1, tally.NEED_BYTES_MIN, 3_000_000, 1 << 30, (1 << 30) + 1, 1 << 45):
        assert size <= tally.need_bytes(tally.need_at(size) - first) < max(size * 1.5, 1.1e6)
    assert tally.need_at(1 << 62) == first + tally.NEEDS - 1
