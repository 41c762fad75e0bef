"""Counting distinct keys in 64 KiB."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest
from datasketches import hll_sketch

from kvcm.core.errors import InvalidArgument
from kvcm.core.mixing import hashes
from kvcm.observability.distinct import PLACES_LOG2, STANDARD_ERROR, Distinct, integers


def _of(keys: range, seed: int = 7) -> Distinct:
    made = Distinct()
    made.add(integers(hashes(np.array(keys, dtype="<i8").tobytes(), seed << 32)))
    return made


@pytest.mark.parametrize("count", [1, 20, 3_000, 60_000, 200_000, 600_000])
def test_the_error_is_what_it_is_said_to_be(count: int) -> None:
    errors = [_of(range(-count // 2, -count // 2 + count), s).count() / count - 1 for s in range(5)]
    # The root of the mean square of five; beyond this once in about a thousand.
    assert np.sqrt(np.mean(np.square(errors))) < 2.1 * STANDARD_ERROR
    assert STANDARD_ERROR < 0.01


def test_nothing_counts_as_nothing() -> None:
    assert Distinct().count() == 0


def test_a_key_counts_once_however_often_and_with_whom_it_comes() -> None:
    once, pieces = _of(range(5_000)), Distinct()
    keys = [*range(5_000), *range(2_000)]
    random.Random(5).shuffle(keys)
    for start in range(0, len(keys), 700):
        raw = np.array(keys[start : start + 700], dtype="<i8").tobytes()
        pieces.add(integers(hashes(raw, 7 << 32)))
    assert pieces.count() == pytest.approx(once.count(), rel=STANDARD_ERROR)
    assert pieces.count_with(once) == pytest.approx(5_000, rel=4 * STANDARD_ERROR)


def test_a_union_counts_what_is_in_both_once() -> None:
    united = _of(range(40_000))
    united.merge(_of(range(20_000, 60_000)))
    assert united.count() == pytest.approx(60_000, rel=4 * STANDARD_ERROR)
    assert united.count() == _of(range(40_000)).count_with(_of(range(20_000, 60_000)))


def test_equal_keys_of_two_instances_are_two_blocks() -> None:
    united = _of(range(10_000), seed=1)
    united.merge(_of(range(10_000), seed=2))
    assert united.count() == pytest.approx(20_000, rel=4 * STANDARD_ERROR)


def test_packing_loses_nothing_and_is_small() -> None:
    for count in (0, 10, 500_000):
        found = _of(range(count))
        packed = found.pack()
        assert Distinct.unpack(packed).count() == found.count()
        assert len(packed) < (400 if count < 100 else 32 << 10)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no zlib",
        zlib.compress(b""),
        zlib.compress(bytes(65_537)),
        zlib.compress(hll_sketch(PLACES_LOG2 - 1).serialize_compact()),
        _of(range(100_000)).pack()[:-1_000],
    ],
)
def test_what_is_no_packed_set_is_refused(packed: bytes) -> None:
    with pytest.raises(InvalidArgument):
        Distinct.unpack(packed)
