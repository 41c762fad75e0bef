"""What is advised."""

from __future__ import annotations

import pytest

from kvcm.observability import tally
from kvcm.observability.ceiling_report import CAUSE_NAMES, Help, SpaceStep, advise, report
from kvcm.observability.tally import Cause
from kvcm.observability.windows import Window

GIB = 1 << 30


def _window(blocks: int, hits: int, need: int = GIB, **misses: int) -> Window:
    counts = tally.empty()
    counts[tally.BLOCKS], counts[tally.HITS] = blocks, hits
    for name, count in misses.items():
        counts[tally.cause_at(Cause(name))] = count
    counts[tally.age_at(5_000)] = misses.get("evicted", 0)
    counts[tally.need_at(need)] = misses.get("evicted", 0)
    counts[tally.SAMPLED] = sum(misses.values())
    return Window("24h", 86_400.0, counts, blocks / 2)


@pytest.mark.parametrize(
    ("window", "capacity", "help_", "text"),
    [
        (_window(999, 0, never_written=999), None, Help.UNKNOWN, "too few blocks yet"),
        (_window(1_000, 500, new=490, evicted=10), None, Help.NOTHING, "nothing helps"),
        (_window(1_000, 0), None, Help.UNKNOWN, "none of the misses is in the sample"),
        (
            _window(1_000, 500, new=200, evicted=300),
            10 * GIB,
            Help.MORE_SPACE,
            "more space: about 1.0 GiB more would have made 30.0% of blocks hits",
        ),
        (
            _window(1_000, 500, new=200, evicted=300, need=400 * GIB),
            None,
            Help.MORE_SPACE,
            "more space: about 512 GiB more",
        ),
        (_window(1_000, 500, evicted=500), 20 * GIB, Help.MORE_SPACE, "or another policy"),
        (
            _window(1_000, 500, evicted=500, need=90 * GIB),
            20 * GIB,
            Help.OTHER_POLICY,
            "more than 4 times the capacity",
        ),
        (_window(1_000, 500, refused_quota=500), None, Help.MORE_SPACE, "raise the quota"),
        (_window(1_000, 500, refused_admission=500), None, Help.OTHER_POLICY, "admission keeps"),
        (_window(1_000, 500, never_written=500), None, Help.ELSEWHERE, "no engine writes (50.0%"),
        (_window(1_000, 500, storage_unavailable=500), None, Help.ELSEWHERE, "a storage cannot be"),
        (_window(1_000, 500, unfinished=400, evicted=100), None, Help.ELSEWHERE, "too late"),
        (_window(1_000, 500, removed=500), None, Help.ELSEWHERE, "ttl"),
        (_window(1_000, 500, unreachable=500), None, Help.OTHER_POLICY, "reply limit"),
    ],
)
def test_the_largest_cause_that_can_be_avoided_decides(
    window: Window, capacity: int | None, help_: Help, text: str
) -> None:
    advice = report(window, capacity).advice
    assert advice.help is help_
    assert text in advice.text
    assert "\n" not in advice.text


@pytest.mark.parametrize(("near", "help_"), [(25, Help.MORE_SPACE), (24, Help.OTHER_POLICY)])
def test_twice_the_capacity_is_advised_where_it_brings_much(near: int, help_: Help) -> None:
    misses = dict.fromkeys(CAUSE_NAMES, 0) | {"evicted": 200}
    space = (SpaceStep(GIB, near), SpaceStep(9 * GIB, 100))
    advice = advise(1_000, misses, space, 2 * GIB)
    assert advice.help is help_
    assert "about 9.0 GiB more would have made 20.0% of blocks hits" in advice.text
    assert ("twice the capacity would have made 5.0%" in advice.text) == (near == 25)


def test_an_estimated_split_adds_up_to_the_exact_misses() -> None:
    found = report(_window(10_000, 3_001, new=10, evicted=20, removed=3), None)
    assert sum(found.misses.values()) == 6_999
    assert found.misses["new"] == pytest.approx(6_999 * 10 / 33, abs=1)
    assert sum(found.evicted_ages.values()) == found.space[-1].hits == found.misses["evicted"]
    assert found.evicted_ages["6h"] == found.misses["evicted"]
    assert not found.is_exact


def test_no_blocks_are_no_hit_rate_and_no_ceiling() -> None:
    found = report(_window(0, 0), None)
    assert (found.hit_rate, found.ceiling, found.gap, found.standard_error) == (0, 0, 0, 0)
    assert found.most_space is None


def test_a_hit_rate_above_the_ceiling_is_shown_as_it_is() -> None:
    found = report(_window(1_000, 800, new=200), None)
    assert (found.ceiling, found.hit_rate) == (0.5, 0.8)
    assert found.gap == pytest.approx(-0.3)
    assert found.advice.help is Help.NOTHING


def test_every_cause_has_an_advice() -> None:
    for cause in set(Cause) - {Cause.NEW}:
        misses = dict.fromkeys(CAUSE_NAMES, 0) | {cause.value: 1_000}
        space = report(_window(2_000, 1_000, **{cause.value: 1_000}), None).space
        assert advise(2_000, misses, space, None).help is not Help.UNKNOWN
