"""Counts by instance: exact, bounded, gone with their instance, and never going back."""

from __future__ import annotations

from collections.abc import Sequence

from kvcm.core.keys import KeyBatch
from kvcm.core.types import Instance, QueryType, ReclaimPolicy
from kvcm.metaindex.events import BlocksRemoved, Cleared, LookedUp, Reason, WriteFinished
from kvcm.observability.traffic import OTHER, Counts, Traffic
from kvcm.observability.traffic_metrics import TrafficMetrics
from kvcm.testing.clock import SimClock

NO_KEYS = KeyBatch.from_ints([])


class Site:
    """A registry and who watches; ``instances_max`` have counts of their own."""

    def __init__(self, instances_max: int = 2, groups_max: int = 3) -> None:
        self.groups = ["g"]
        self.active: list[Instance] = []
        self.closing: list[Instance] = []
        self.clock = SimClock()
        self.traffic = Traffic(
            lambda: (self.groups, self.active, self.closing),
            self.clock.monotonic,
            instances_max=instances_max,
            groups_max=groups_max,
            silent_after_s=60,
        )

    def register(self, name: str, group: str = "g", block_size: int = 4) -> Instance:
        instance = Instance(
            instance_id=name, instance_group=group, block_size=block_size, uid=f"uid-{name}"
        )
        self.active.append(instance)
        return instance

    def lookup(self, instance: Instance, blocks: int = 4, hits: int = 4, times: int = 1) -> None:
        event = LookedUp(
            *(instance, QueryType.PREFIX_MATCH, NO_KEYS, None, None, 0, NO_KEYS, 0, blocks, hits)
        )
        for _ in range(times):
            self.traffic(event)

    def remove(self, instance: Instance) -> None:
        self.active.remove(instance)
        self.traffic(Cleared(instance, Reason.INSTANCE))

    async def pass_s(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await self.traffic.run_once(self.clock.monotonic())

    def counts(self, instance_id: str, group: str = "g") -> Counts | None:
        labels = (group, instance_id)
        return next((c for c in self.traffic.counts() if (c.group, c.instance_id) == labels), None)

    def silent(self) -> list[tuple[str, str]]:
        return self.traffic.silent(self.clock.monotonic())

    def series(self) -> set[tuple[str, str]]:
        shown = TrafficMetrics(self.traffic, self.clock, 10).collect()
        return {(s.name, str(sorted(s.labels.items()))) for m in shown for s in m.samples}


def full(counts: Counts | None) -> int:
    assert counts is not None
    return counts.asked[QueryType.PREFIX_MATCH].full


def test_the_three_hit_rates_differ_where_they_should() -> None:
    site = Site()
    small, large = site.register("small", block_size=1), site.register("large", block_size=100)
    site.traffic = Traffic(
        lambda: (site.groups, site.active, ()),
        site.clock.monotonic,
        instances_max=0,
        groups_max=3,
        silent_after_s=60,
    )
    site.lookup(small, 10, 10)
    site.lookup(large, 2, 1)
    site.lookup(large, 8, 0)
    site.lookup(large, 0, 0)
    counts = site.counts(OTHER)
    assert counts is not None
    asked = counts.asked[QueryType.PREFIX_MATCH]
    assert (asked.full, asked.partial, asked.miss, asked.empty) == (1, 1, 1, 1)
    assert asked.ratios == 1.5
    assert (asked.hits, asked.blocks) == (11, 20)
    assert (asked.hit_tokens, asked.tokens) == (110, 1010)


def test_whoever_has_no_counts_of_its_own_counts_among_the_others() -> None:
    site = Site(instances_max=2)
    for name in ("a", "b", "c", OTHER):
        site.lookup(site.register(name))
    assert full(site.counts("a")) == full(site.counts("b")) == 1
    assert site.counts("c") is None
    assert full(site.counts(OTHER)) == 2


def test_what_a_session_held_is_counted_by_how_it_ended() -> None:
    site = Site()
    instance = site.register("a")
    site.lookup(instance)

    def end(how: Reason, success: int, published: int) -> None:
        held, failed = 0b1111, 0b1111 & ~success
        site.traffic(
            WriteFinished(
                *(instance, "s", how, b"", 4, held, success, published),
                *(40, 10 * published.bit_count(), 10 * failed.bit_count(), "disk"),
            )
        )

    end(Reason.FINISHED, 0b0111, 0b0111)
    end(Reason.EXPIRED, 0, 0)
    end(Reason.ABANDONED, 0, 0)
    end(Reason.TRIMMED, 0, 0)
    counts = site.counts("a")
    assert counts is not None
    assert counts.ends == {"finished": 1, "expired": 1, "abandoned": 1, "cancelled": 1}
    lost = {"expired": 4, "abandoned": 4, "cancelled": 4}
    assert counts.ended_blocks == {"finished": 3, "failed": 1, **lost}
    lost_bytes = {"expired": 40, "abandoned": 40, "cancelled": 40}
    assert counts.ended_bytes == {"finished": 30, "failed": 10, **lost_bytes}


async def test_more_traffic_wins_counts_of_its_own_and_what_is_shown_never_goes_back() -> None:
    site = Site(instances_max=1)
    quiet, busy = site.register("quiet"), site.register("busy")
    site.lookup(quiet)
    site.lookup(busy, times=2)
    await site.pass_s(10)
    assert site.counts("busy") is None, "twice as much is not enough"
    site.lookup(busy, times=5)
    await site.pass_s(10)
    site.lookup(busy)
    site.lookup(quiet)
    assert site.counts("quiet") is None
    assert full(site.counts("busy")) == 1
    assert full(site.counts(OTHER)) == 8


async def test_a_thousand_instances_leave_no_series_behind() -> None:
    site = Site(instances_max=5)
    stays = site.register("stays")
    site.lookup(stays)
    before = site.series()
    for i in range(1_000):
        instance = site.register(f"i{i}")
        site.lookup(instance)
        site.remove(instance)
        site.closing.append(instance)
        site.traffic(BlocksRemoved(instance, Reason.INSTANCE, b"", 4, 40, "s", ReclaimPolicy.LRU))
    assert site.series() == before
    site.closing.clear()
    await site.pass_s(10)
    assert site.series() == before
    other = site.counts(OTHER)
    assert other is not None
    assert other.removed_blocks == {"instance": 4_000}
    assert len(site.traffic._members) == 1


async def test_groups_are_bounded_and_series_go_with_their_group() -> None:
    site = Site(groups_max=2)
    site.groups = ["g", "h", "late"]
    late = site.register("x", group="late")
    site.lookup(late)
    assert site.traffic.groups() == [OTHER, "g", "h"]
    assert full(site.counts(OTHER, OTHER)) == 1
    site.groups = ["h", "late"]
    await site.pass_s(10)
    assert site.traffic.groups() == [OTHER, "h", "late"]
    site.lookup(late)
    assert full(site.counts("x", "late")) == 1
    assert full(site.counts(OTHER, OTHER)) == 1


async def test_an_instance_that_does_nothing_is_silent_until_it_does_something() -> None:
    site = Site()
    talks = site.register("talks")
    site.register("never")
    await site.pass_s(10)
    for _ in range(6):
        site.lookup(talks)
        await site.pass_s(10)
    assert site.silent() == [("g", "never")]
    site.lookup(site.active[1])
    assert site.silent() == []


async def test_an_idle_minute_moves_nothing() -> None:
    site = Site()
    site.lookup(site.register("a"), 4, 2)

    def shown() -> Sequence[object]:
        metrics = TrafficMetrics(site.traffic, site.clock, 10).collect()
        return [(s.name, s.labels, s.value) for m in metrics for s in m.samples]

    await site.pass_s(10)
    before = shown()
    for _ in range(5):
        await site.pass_s(10)
    assert shown() == before
