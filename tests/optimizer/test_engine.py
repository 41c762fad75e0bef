"""What an engine does with each answer, and how it counts it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.core.errors import (
    InstanceNotExist,
    NotLeader,
    SessionNotExist,
    Unavailable,
    Unsupported,
)
from kvcm.core.types import ReportKind
from kvcm.optimizer.content import BlockContent
from kvcm.optimizer.counters import Counters
from kvcm.optimizer.engine import Engine, EngineSettings, GaveUp
from kvcm.optimizer.trace import ceiling
from kvcm.testing.clock import SimClock
from tests.optimizer.fakes import DictManager, DictStore


class Bench:
    def __init__(self, *, verify: bool = True, outage_s: float = 30.0, **manager) -> None:
        self.manager = DictManager(**manager)
        self.store = DictStore()
        self.acked: list[int] = []
        self.slept: list[float] = []
        self.clock = _InstantClock()
        self.engine = Engine(
            self.manager,
            self.store,
            BlockContent("x"),
            EngineSettings(self.manager.specs, 64, verify, outage_s),
            self.clock,
            acknowledged=self.acked.extend,
        )

    @property
    def counts(self) -> Counters:
        return self.engine.counters


class _InstantClock(SimClock):
    """Sleeping moves the time and returns at once."""

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)


async def test_the_second_request_reads_what_the_first_wrote():
    bench = Bench(specs=("tp0", "tp1"))
    await bench.engine.serve([1, 2, 3])
    await bench.engine.serve([1, 2, 4])
    counts = bench.counts
    assert (counts.requests, counts.blocks_asked) == (2, 6)
    assert (counts.blocks_hit, counts.blocks_written) == (2, 4)
    assert (counts.blocks_wrong, counts.blocks_lost, counts.blocks_failed) == (0, 0, 0)
    assert counts.bytes_written == 4 * 2 * 64
    assert counts.bytes_read == 2 * 2 * 64
    assert bench.acked == [1, 2, 3, 4]
    assert counts.hit_rate == pytest.approx(2 / 6)
    assert counts.hit_rate_requests == pytest.approx((0 + 2 / 3) / 2)


async def test_a_request_that_hits_whole_starts_no_write():
    bench = Bench()
    await bench.engine.serve([1])
    await bench.engine.serve([1])
    assert bench.counts.start.count == 1
    assert bench.counts.lookup.count == 2


async def test_a_request_without_blocks_is_counted_and_asks_nothing():
    bench = Bench()
    await bench.engine.serve([])
    assert bench.counts.requests == 1
    assert bench.counts.lookup.count == 0


@pytest.mark.parametrize("damage", ["other", "zero", "short", "other_spec"])
async def test_wrong_bytes_are_counted_named_and_no_hit(damage):
    bench = Bench(specs=("tp0", "tp1"))
    await bench.engine.serve([1, 2])
    blocks = bench.store.blocks
    mine, uri = blocks["file://s/1_tp0?size=64"], "file://s/2_tp0?size=64"
    blocks[uri] = {
        "other": mine,
        "zero": bytes(64),
        "short": blocks[uri][:-1],
        "other_spec": blocks["file://s/2_tp1?size=64"],
    }[damage]
    await bench.engine.serve([1, 2])
    counts = bench.counts
    assert (counts.blocks_wrong, counts.blocks_lost, counts.blocks_hit) == (1, 0, 1)
    assert "WRONG BYTES: block 2 tp0" in counts.faults[0]


async def test_a_block_wrong_in_two_specs_is_one_wrong_block():
    bench = Bench(specs=("tp0", "tp1"))
    await bench.engine.serve([1])
    for uri in bench.store.blocks:
        bench.store.blocks[uri] = bytes(64)
    await bench.engine.serve([1])
    assert bench.counts.blocks_wrong == 1


async def test_missing_bytes_are_a_miss_not_a_fault():
    bench = Bench()
    await bench.engine.serve([1, 2])
    del bench.store.blocks["file://s/1_tp0?size=64"]
    await bench.engine.serve([1, 2])
    counts = bench.counts
    assert (counts.blocks_lost, counts.blocks_wrong, counts.blocks_hit) == (1, 0, 1)


async def test_what_cannot_be_read_is_reported_block_by_block_with_its_kind():
    bench = Bench(specs=("tp0", "tp1"))
    await bench.engine.serve([1, 2, 3, 4, 5])
    del bench.store.blocks["file://s/2_tp1?size=64"]
    bench.store.blocks["file://s/3_tp0?size=64"] = bytes(64)
    bench.store.refuse.add("file://s/5_tp0?size=64")
    await bench.engine.serve([1, 2, 3, 4, 5])
    assert bench.manager.reported == [
        (2, ReportKind.MISSING),
        (3, ReportKind.CORRUPT),
        (5, ReportKind.UNREACHABLE),
    ]
    assert (bench.counts.blocks_hit, bench.counts.blocks_reported) == (5 - 3, 3)


async def test_what_only_this_engine_cannot_read_is_lost_to_it_and_not_reported():
    bench = Bench()
    await bench.engine.serve([1, 2, 3])
    bench.store.foreign.add("file://s/1_tp0?size=64")
    bench.store.refuse.add("file://s/3_tp0?size=64")
    await bench.engine.serve([1, 2, 3])
    assert bench.manager.reported == [(3, ReportKind.UNREACHABLE)]
    assert bench.counts.blocks_lost == 2


async def test_no_transfer_may_take_for_ever():
    bench = Bench()
    await bench.engine.serve([1, 2, 3])
    await bench.engine.serve([1, 2, 3])
    assert bench.store.deadlines == [30.0, 30.0]


async def test_blocks_bytes_and_failures_are_counted_for_each_storage():
    bench = Bench(specs=("tp0", "tp1"))
    bench.store.refuse.add("file://s/2_tp1?size=64")
    await bench.engine.serve([1, 2, 3])
    bench.store.refuse = {"file://s/1_tp1?size=64"}
    await bench.engine.serve([1])
    at = bench.counts.storages["file://s"]
    assert (at.blocks_written, at.writes_failed, at.bytes_written) == (2, 1, 5 * 64)
    assert (at.blocks_read, at.reads_failed, at.bytes_read) == (0, 1, 64)
    total = Counters()
    total.merge(bench.counts)
    total.merge(bench.counts)
    assert total.storages["file://s"].blocks_written == 4


async def test_what_a_report_took_out_is_written_again_at_once():
    bench = Bench()
    await bench.engine.serve([1, 2, 3])
    del bench.store.blocks["file://s/2_tp0?size=64"]
    bench.manager.forgets = True
    await bench.engine.serve([1, 2, 3])
    assert bench.acked == [1, 2, 3, 2]
    await bench.engine.serve([1, 2, 3])
    assert (bench.counts.blocks_lost, bench.counts.blocks_hit) == (1, 2 + 3)


@pytest.mark.parametrize(
    ("error", "errors"),
    [(Unavailable("away"), {"Unavailable": 2}), (Unsupported("what is that?"), {})],
)
async def test_a_manager_that_takes_no_reports_stops_nothing(error, errors):
    bench = Bench()
    await bench.engine.serve([1])
    bench.store.blocks.clear()
    bench.manager.report_error = error
    await bench.engine.serve([1])
    await bench.engine.serve([1])
    counts = bench.counts
    assert (counts.blocks_lost, counts.requests_failed, counts.blocks_reported) == (2, 0, 0)
    assert counts.errors == errors


async def test_without_verifying_nothing_is_read():
    bench = Bench(verify=False)
    await bench.engine.serve([1])
    bench.store.blocks.clear()
    await bench.engine.serve([1])
    assert (bench.counts.blocks_hit, bench.counts.bytes_read) == (1, 0)


async def test_a_block_that_could_not_be_written_is_reported_and_can_be_written_again():
    bench = Bench(specs=("tp0", "tp1"))
    bench.store.refuse.add("file://s/2_tp1?size=64")
    await bench.engine.serve([1, 2, 3])
    assert bench.manager.finished[-1][1] == [True, False, True]
    assert (bench.counts.blocks_written, bench.counts.blocks_failed) == (2, 1)
    assert bench.acked == [1, 3]
    bench.store.refuse.clear()
    await bench.engine.serve([1, 2, 3])
    assert bench.acked == [1, 3, 2]


async def test_what_a_limit_refuses_is_counted_by_reason_and_the_replay_goes_on():
    bench = Bench(capacity=3)
    await bench.engine.serve([1, 2, 3, 4, 5])
    await bench.engine.serve([6, 7])
    await bench.engine.serve([1, 2, 3])
    counts = bench.counts
    assert counts.blocks_refused == {"QUOTA_GROUP": 4}
    assert (counts.blocks_written, counts.blocks_hit, counts.blocks_present) == (3, 3, 0)
    assert counts.requests_failed == 0


async def test_what_another_engine_is_writing_is_present_neither_hit_nor_refused():
    bench = Bench()
    await bench.manager.start([1, 2])
    await bench.engine.serve([1, 2, 3])
    assert (bench.counts.blocks_present, bench.counts.blocks_written) == (2, 1)


@pytest.mark.parametrize("error", [Unavailable("gone"), NotLeader("other")])
async def test_an_outage_shorter_than_the_patience_costs_retries_only(error):
    bench = Bench()
    bench.manager.fail_next = [error] * 8
    await bench.engine.serve([1, 2])
    counts = bench.counts
    assert counts.blocks_written == 2
    assert counts.retries == {type(error).__name__: 8}
    assert counts.requests_failed == 0
    assert counts.lookup.max_s == 0.0, "pauses are no latency"


async def test_an_outage_longer_than_the_patience_ends_the_engine():
    bench = Bench(outage_s=5.0)
    bench.manager.fail_next = [Unavailable("gone")] * 100
    began = bench.clock.monotonic()
    with pytest.raises(GaveUp, match="no answer for 5 s: gone"):
        await bench.engine.serve([1])
    assert 3.5 < bench.clock.monotonic() - began <= 5.0
    assert bench.counts.requests_failed == 1


async def test_an_answer_that_no_retry_cures_fails_the_request_and_the_next_is_served():
    bench = Bench()
    bench.manager.fail_next = [InstanceNotExist("who")]
    await bench.engine.serve([1])
    await bench.engine.serve([2])
    assert bench.counts.requests_failed == 1
    assert bench.counts.errors == {"InstanceNotExist": 1}
    assert bench.counts.blocks_written == 1


async def test_a_session_that_is_over_fails_its_blocks_and_nothing_is_acknowledged():
    bench = Bench()
    real = bench.manager.start

    async def start(keys):
        grant = await real(keys)
        bench.manager.fail_next = [SessionNotExist("late")]
        return grant

    bench.manager.start = start
    await bench.engine.serve([1, 2])
    assert (bench.counts.blocks_failed, bench.counts.blocks_written) == (2, 0)
    assert bench.acked == []
    assert bench.counts.errors == {"SessionNotExist": 1}


chains = st.lists(st.integers(0, 3), max_size=6).map(
    # A chain of ids such that equal ids mean equal prefixes.
    lambda steps: tuple(hash(tuple(steps[: i + 1])) for i in range(len(steps)))
)


@given(st.lists(chains, max_size=12))
def test_one_engine_on_an_unlimited_cache_reaches_exactly_the_ceiling(requests):
    import asyncio

    bench = Bench()

    async def replay() -> None:
        for ids in requests:
            await bench.engine.serve(ids)

    asyncio.run(replay())
    best = ceiling(requests)
    counts = bench.counts
    assert counts.hit_rate == pytest.approx(best.block_rate)
    assert counts.hit_rate_requests == pytest.approx(best.request_rate)
    assert counts.blocks_asked == best.blocks == counts.blocks_hit + counts.blocks_written


def test_counters_of_two_engines_add_up():
    left = Counters(requests=1, late_max_s=2.0, errors={"A": 1}, faults=["a"] * 4)
    right = Counters(requests=2, late_max_s=1.0, errors={"A": 1, "B": 3}, faults=["b"] * 4)
    right.lookup.add(0.5)
    left.merge(right)
    assert left.requests == 3
    assert left.late_max_s == 2.0
    assert left.errors == {"A": 2, "B": 3}
    assert left.faults == ["a"] * 4 + ["b"]
    assert left.lookup.count == 1
