"""Windows of 15 minutes, an hour and a day."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcm.core.errors import InvalidArgument
from kvcm.core.mixing import hashes
from kvcm.observability import tally
from kvcm.observability.distinct import integers
from kvcm.observability.windows import DAY, HOUR, QUARTER, SECONDS, SLOT_S, Windows

START_S = 277_778 * 3_600.0


def _ask(windows: Windows, keys: range, now_s: float) -> None:
    _rotate(windows, now_s)
    windows.add(integers(hashes(np.array(keys, dtype="<i8").tobytes(), 0)))
    windows.counts[tally.REQUESTS] += 1
    windows.counts[tally.BLOCKS] += len(keys)


def _rotate(windows: Windows, now_s: float) -> None:
    if windows.due(now_s):
        for _ in windows.rotate(now_s):
            pass
    assert not windows.due(now_s)


def _blocks(windows: Windows, name: str, now_s: float) -> int:
    _rotate(windows, now_s)
    return int(windows.window(name, now_s).counts[tally.BLOCKS])


def test_windows_hold_what_a_list_of_all_requests_says() -> None:
    chance = random.Random(11)
    now_s, windows = START_S, Windows(START_S)
    requests: list[tuple[float, range]] = []
    for step in range(200):
        now_s += chance.choice((10, 60, 299, 900, 1_800))
        start = chance.randrange(3_000)
        keys = range(start, start + chance.randrange(1, 400))
        _ask(windows, keys, now_s)
        requests.append((now_s, keys))
        if step % 10 == 0:
            for name, unit, count in ((QUARTER, 300, 3), (HOUR, 300, 12), (DAY, 3_600, 24)):
                first_s = (int(now_s) // unit - count) * unit
                inside = [k for at, k in requests if at >= first_s]
                shown = windows.window(name, now_s)
                assert shown.counts[tally.BLOCKS] == sum(map(len, inside))
                assert shown.counts[tally.REQUESTS] == len(inside)
                assert shown.distinct == pytest.approx(len(set().union(*inside)), rel=0.02)


@pytest.mark.parametrize(("name", "unit"), [(QUARTER, SLOT_S), (HOUR, SLOT_S), (DAY, 3_600)])
def test_a_window_covers_its_length_and_at_most_one_unit_more(name: str, unit: int) -> None:
    windows = Windows(START_S)
    _ask(windows, range(10), START_S)
    assert _blocks(windows, name, START_S + SECONDS[name]) == 10
    assert _blocks(windows, name, START_S + SECONDS[name] + unit) == 0


def test_windows_without_requests_are_idle_and_young_ones_say_so() -> None:
    windows = Windows(START_S)
    assert windows.idle
    _ask(windows, range(10), START_S)
    assert not windows.idle
    assert windows.window(DAY, START_S + 100).covered_s == 100
    _rotate(windows, START_S + 100_000)
    assert windows.idle
    assert 86_400 <= windows.window(DAY, START_S + 100_000).covered_s < 86_400 + 3_600


def test_a_day_of_many_keys_takes_less_than_a_mebibyte() -> None:
    windows, keys = Windows(START_S), 100_000
    for hour in range(26):
        for slot in (0, 6):
            start = (2 * hour + slot // 6) * keys
            _ask(windows, range(start, start + keys), START_S + 3_600 * hour + SLOT_S * slot)
    saved = windows.save()
    assert len(saved.hours) == 24
    # Beside them: the current slot and hour, and the sum of the past, as 64 KiB each.
    assert sum(len(hour.keys) for hour in saved.hours) + 3 * (64 << 10) < 1 << 20
    _rotate(windows, START_S + 26 * 3_600)
    assert windows.window(DAY, START_S + 26 * 3_600).distinct == pytest.approx(
        (24 * 2) * keys, rel=0.0123
    )


def test_saved_windows_go_on_where_they_were() -> None:
    windows = Windows(START_S)
    for step in range(60):
        _ask(windows, range(step * 50, step * 50 + 400), START_S + 400 * step)
    now_s = START_S + 400 * 60
    again = Windows.load(windows.save())
    for at_s in (now_s, now_s + 2_000, now_s + 40_000):
        _rotate(windows, at_s)
        _rotate(again, at_s)
        for name in SECONDS:
            before, after = windows.window(name, at_s), again.window(name, at_s)
            assert before.distinct == after.distinct
            assert before.counts.tolist() == after.counts.tolist()
            assert before.covered_s == after.covered_s


def test_counts_of_another_version_are_refused() -> None:
    saved = Windows(START_S).save()
    saved.slot.counts += b"\0" * 8
    with pytest.raises(InvalidArgument):
        Windows.load(saved)


def test_a_clock_that_is_set_back_a_little_loses_nothing_and_much_is_told() -> None:
    windows = Windows(START_S)
    _ask(windows, range(10), START_S)
    assert _blocks(windows, HOUR, START_S - 1_800) == 10
    assert not windows.is_ahead(START_S - 1_800)
    assert windows.is_ahead(START_S - 7_200)
