"""The frequency sketch against exact counts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.core.limits import SKETCH_CELLS_MAX, SKETCH_CELLS_MIN
from kvcm.core.mixing import Hashes, hashes
from kvcm.metaindex.sketch import COUNT_MAX, FrequencySketch

NEVER = 1 << 40
KEYS = st.integers(0, 30)
BATCHES = st.lists(st.lists(KEYS, min_size=1, max_size=20, unique=True), max_size=60)


def of(keys: Iterable[int], seed: int = 7) -> Hashes:
    return hashes(np.fromiter(keys, dtype="<i8").tobytes(), seed)


def estimates(sketch: FrequencySketch, keys: Iterable[int]) -> list[int]:
    return [int(n) for n in sketch.estimate(of(keys))]


@given(BATCHES)
def test_an_estimate_is_never_below_the_truth_before_counts_fade(batches: list[list[int]]) -> None:
    sketch = FrequencySketch(SKETCH_CELLS_MIN, NEVER)
    for batch in batches:
        sketch.use(of(batch))
    true = Counter(key for batch in batches for key in batch)
    assert all(e >= true[k] for k, e in enumerate(estimates(sketch, range(31))))


@given(BATCHES, st.integers(20, 200))
def test_an_estimate_is_at_least_half_of_the_uses_within_a_period(
    batches: list[list[int]], period: int
) -> None:
    sketch = FrequencySketch(SKETCH_CELLS_MIN, period)
    recent: deque[list[int]] = deque()
    for batch in batches:
        sketch.use(of(batch))
        recent.append(batch)
        while sum(map(len, recent)) > period:
            recent.popleft()
        true = Counter(key for b in recent for key in b)
        assert all(e >= true[k] // 2 for k, e in enumerate(estimates(sketch, range(31))))
    assert sketch.periods == sum(map(len, batches)) // period


@given(st.lists(st.tuples(st.booleans(), st.lists(KEYS, min_size=1, unique=True)), max_size=40))
def test_a_lookup_and_the_write_that_follows_are_one_use(
    calls: list[tuple[bool, list[int]]],
) -> None:
    """In whatever order lookups and writes of requests interleave, and in whatever pieces."""
    sketch = FrequencySketch(SKETCH_CELLS_MIN, NEVER)
    true: Counter[int] = Counter()
    open_lookups: Counter[int] = Counter()
    for write, keys in calls:
        if not write:
            sketch.announce(of(keys))
            true.update(keys)
            open_lookups.update(keys)
            continue
        sketch.write(of(keys))
        for key in keys:
            if open_lookups[key]:
                open_lookups[key] -= 1
            else:
                true[key] += 1
    assert estimates(sketch, range(31)) == [true[k] for k in range(31)]


def test_with_a_counter_a_key_one_in_ten_is_overestimated_by_one() -> None:
    sketch = FrequencySketch(1 << 16, NEVER)
    for start in range(0, 1 << 16, 1024):
        sketch.use(of(range(start, start + 1024)))
    found = np.array(estimates(sketch, range(1 << 16)))
    assert found.min() == 1
    assert (found > 1).mean() < 0.1
    assert (found > 2).mean() < 0.001


def test_a_key_that_is_gone_for_eight_periods_is_forgotten() -> None:
    sketch = FrequencySketch(SKETCH_CELLS_MIN, 100)
    for _ in range(50):
        sketch.use(of([1]))
    assert estimates(sketch, [1])[0] >= 25
    other = iter(range(100, 10_000))
    for _ in range(8 * 100):
        sketch.use(of([next(other)]))
    assert estimates(sketch, [1])[0] <= 2


def test_counters_stop_at_their_highest() -> None:
    sketch = FrequencySketch(SKETCH_CELLS_MIN, NEVER)
    for expected in (COUNT_MAX - 1, COUNT_MAX, COUNT_MAX):
        while estimates(sketch, [1])[0] < expected:
            sketch.announce(of([1]))
        assert estimates(sketch, [1]) == [expected]
        if expected == COUNT_MAX:
            sketch.announce(of([1]))
    assert estimates(sketch, [1]) == [COUNT_MAX]


def test_a_key_twice_in_a_batch_counts_once() -> None:
    sketch = FrequencySketch(SKETCH_CELLS_MIN, NEVER)
    sketch.use(of([1, 2, 1]))
    assert estimates(sketch, [1, 2, 3]) == [1, 1, 0]


def test_equal_keys_of_two_instances_are_different() -> None:
    sketch = FrequencySketch(SKETCH_CELLS_MIN, NEVER)
    sketch.use(of(range(100), seed=1 << 32))
    assert sum(int(n) for n in sketch.estimate(of(range(100), seed=2 << 32))) <= 2


@pytest.mark.parametrize(
    ("wanted", "cells"),
    [
        (0, SKETCH_CELLS_MIN),
        (SKETCH_CELLS_MIN, SKETCH_CELLS_MIN),
        (SKETCH_CELLS_MIN + 1, 2 * SKETCH_CELLS_MIN),
        (SKETCH_CELLS_MAX, SKETCH_CELLS_MAX),
        (SKETCH_CELLS_MAX + 1, SKETCH_CELLS_MAX),
    ],
)
def test_the_number_of_counters_is_a_power_of_two_within_the_limits(
    wanted: int, cells: int
) -> None:
    assert FrequencySketch(wanted, 1).cells == cells


def test_no_keys_are_no_use() -> None:
    sketch = FrequencySketch(SKETCH_CELLS_MIN, 1)
    sketch.announce(of([]))
    sketch.write(of([]))
    assert sketch.periods == 0
    assert estimates(sketch, []) == []
