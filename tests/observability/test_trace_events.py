"""The queue of trace events: what it drops it counts, and nobody waits for anybody."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvcm.core import limits
from kvcm.core.errors import InvalidArgument, NotReady
from kvcm.core.keys import KeyBatch, pack_keys
from kvcm.core.mask import BlockMask
from kvcm.core.types import Instance, QueryType, ReclaimPolicy
from kvcm.metaindex.events import (
    BlocksRemoved,
    Cleared,
    Event,
    LookedUp,
    Reason,
    Watchers,
    WriteFinished,
    WriteRefused,
    WriteStarted,
)
from kvcm.observability import trace_files
from kvcm.observability.event_stream import Subscriber
from kvcm.observability.trace_events import TraceEvents, is_sampled
from kvcm.observability.trace_files import TraceFiles
from kvcm.observability.trace_form import TYPES, encode, number_steps, numbers_of, size_of, type_of
from kvcm.testing.clock import SimClock


def instance(name: str = "i1") -> Instance:
    return Instance(instance_id=name, instance_group="g", block_size=16, uid=f"uid-{name}")


def removed(name: str = "i1", *keys: int) -> BlocksRemoved:
    raw = KeyBatch.from_ints(keys).data
    return BlocksRemoved(
        instance(name), Reason.EVICTED, raw, len(keys), 8 * len(keys), "s", ReclaimPolicy.LRU
    )


def lookup_of(batch: KeyBatch) -> LookedUp:
    return LookedUp(instance(), QueryType.PREFIX_MATCH, batch, None, None, 0, batch, 0, 1, 1)


def encoded(event: Event, event_id: str, at_us: int) -> bytes:
    numbers = {k: b",".join(number_steps(batch)) for k, batch in numbers_of(event).items()}
    return encode(event, event_id, at_us, numbers)


def events(folder: Path | None = None, sample: float = 1.0) -> tuple[TraceEvents, Watchers]:
    clock, watchers = SimClock(), Watchers()
    files = None
    if folder is not None:
        files = TraceFiles(folder, clock.now, file_bytes_max=1 << 20, files_max=4)
    return TraceEvents(clock, watchers, files, sample), watchers


def recorded(folder: Path) -> list[dict[str, Any]]:
    return [event for path in trace_files.paths(folder) for event in trace_files.read(path)]


async def sent(subscriber: Subscriber) -> list[tuple[str, dict[str, Any]]]:
    """The (event, data) that wait for a subscriber."""
    text = await subscriber.next(10)
    assert text is not None
    found = []
    for block in text.decode().strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((fields["event"], json.loads(fields["data"])))
    return found


def test_every_kind_of_event_has_its_form() -> None:
    of = instance()
    raw = KeyBatch.from_ints([-1, 2, 3]).data
    tokens = KeyBatch.from_ints([7, 8])
    batch = KeyBatch.from_ints([-1, 2])
    every: list[Event] = [
        LookedUp(of, QueryType.BATCH_GET, batch, tokens, BlockMask(offset=1), 4, batch, 8, 1, 1),
        WriteStarted(of, "sess", raw, None, BlockMask(values=[True, False, True]), raw, 30, "s"),
        WriteRefused(of, "QUOTA_GROUP", raw, "s", True),
        WriteFinished(of, "sess", Reason.FINISHED, raw, 3, 7, 5, 4, 30, 10, 10, "s"),
        BlocksRemoved(of, Reason.AGED, raw, 3, 30, "s", ReclaimPolicy.TTL),
        BlocksRemoved(of, Reason.REMOVED, raw, 3, 30, "s", ReclaimPolicy.LRU, True),
        Cleared(of, Reason.TRIMMED),
    ]
    assert tuple(map(type_of, every)) == TYPES
    common = {"id": "e", "source": "i1", "trigger_time_us": 5}
    common |= {"instance_group": "g", "block_size": 16}
    keys = [-1, 2, 3]
    special: list[dict[str, Any]] = [
        {
            "query_type": "QT_BATCH_GET",
            "keys": [-1, 2],
            "tokens": [7, 8],
            "block_mask": {"offset": 1},
            "sw_size": 4,
            "asked_blocks": 1,
            "hit_blocks": 1,
        },
        {
            "write_session_id": "sess",
            "keys": keys,
            "tokens": [],
            "block_mask": {"bool_masks": {"values": [True, False, True]}},
            "granted_blocks": 3,
            "bytes": 30,
            "storage": "s",
        },
        {"keys": keys, "reason": "QUOTA_GROUP", "is_whole": True, "storage": "s"},
        {
            "write_session_id": "sess",
            "success_block": {"bool_masks": {"values": [True, False, True]}},
            "keys": [3],
            "published_blocks": 1,
            "bytes": 10,
            "reason": "finished",
            "storage": "s",
        },
        {
            "keys": keys,
            "blocks": 3,
            "bytes": 30,
            "reason": "aged",
            "policy": "ttl",
            "storage": "s",
            "was_open": False,
        },
        {
            "keys": keys,
            "blocks": 3,
            "bytes": 30,
            "reason": "removed",
            "policy": "lru",
            "storage": "s",
            "was_open": True,
        },
        {"reason": "trimmed"},
    ]
    for event, fields in zip(every, special, strict=True):
        kind = type_of(event)
        component = "reclaimer" if kind == "CacheReclaimSubmit" else "cache"
        expected = {**common, "component": component, "type": kind, **fields}
        assert json.loads(encoded(event, "e", 5)) == expected


def test_the_sample_of_instances_is_always_the_same_and_grows_with_its_share() -> None:
    names = [f"instance-{i}" for i in range(2_000)]
    tenth = {name for name in names if is_sampled(name, 0.1)}
    assert 140 < len(tenth) < 260
    assert tenth == {name for name in names if is_sampled(name, 0.1)}
    assert tenth < {name for name in names if is_sampled(name, 0.5)}
    assert not any(is_sampled(name, 0.0) for name in names)
    assert all(is_sampled(name, 1.0) for name in names)
    # The same in every process and version: recordings of one fleet fit together.
    assert is_sampled("instance-2", 0.1) == (is_sampled("instance-2", 0.1000001))


async def test_only_sampled_instances_are_recorded(tmp_path: Path) -> None:
    names = [f"instance-{i}" for i in range(50)]
    made, watchers = events(tmp_path, 0.3)
    for name in names:
        watchers.tell(removed(name, 1))
    await made.close()
    assert [e["source"] for e in recorded(tmp_path)] == [n for n in names if is_sampled(n, 0.3)]


async def test_what_happens_is_recorded_in_order_with_its_time(tmp_path: Path) -> None:
    made, watchers = events(tmp_path)
    clock = made._clock
    assert isinstance(clock, SimClock)
    began = clock.now()
    for i in range(3):
        watchers.tell(removed("i1", i))
        clock.advance(1)
    await made.run_once(clock.monotonic())
    await made.close()
    found = recorded(tmp_path)
    assert [e["keys"] for e in found] == [[0], [1], [2]]
    assert [e["trigger_time_us"] for e in found] == [int((began + i) * 1e6) for i in range(3)]
    assert len({e["id"] for e in found}) == 3
    assert made.counts.recorded == 3


async def test_a_full_queue_drops_and_counts_and_takes_again_once_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = removed("i1", 1)
    monkeypatch.setattr(
        "kvcm.observability.trace_events.TRACE_EVENT_QUEUE_BYTES_MAX", 3 * size_of(one)
    )
    made, watchers = events(tmp_path)
    for _ in range(5):
        watchers.tell(one)
    assert made.counts.dropped == 2
    await made.run_once(0)
    watchers.tell(one)
    await made.close()
    assert (len(recorded(tmp_path)), made.counts.dropped) == (4, 2)


async def test_a_disk_that_refuses_loses_events_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    made, watchers = events(blocked)
    watchers.tell(removed("i1", 1))
    await made.run_once(0)
    assert (made.counts.recorded, made.counts.failed) == (0, 1)
    assert "trace events are lost" in caplog.text
    blocked.unlink()
    watchers.tell(removed("i1", 2))
    await made.close()
    assert [e["keys"] for e in recorded(blocked)] == [[2]]


async def test_nothing_is_watched_while_nobody_reads() -> None:
    made, watchers = events()
    assert not watchers
    first, second = made.subscribe([], []), made.subscribe([], [])
    assert len(watchers) == 1
    made.leave(first)
    assert len(watchers) == 1
    made.leave(second)
    assert not watchers
    assert not made.stream.subscribers


async def test_subscribers_get_what_they_asked_for() -> None:
    made, watchers = events()
    both = made.subscribe([], [])
    one = made.subscribe(["i2"], [])
    kind = made.subscribe([], ["TrimCache"])
    watchers.tell(removed("i1", 1))
    watchers.tell(removed("i2", 2))
    watchers.tell(Cleared(instance("i1"), Reason.TRIMMED))
    await made._pass_on()
    shown = [[(name, event["source"]) for name, event in await sent(s)] for s in (both, one, kind)]
    removal, trim = "CacheReclaimSubmit", "TrimCache"
    assert shown == [
        [(removal, "i1"), (removal, "i2"), (trim, "i1")],
        [(removal, "i2")],
        [(trim, "i1")],
    ]


async def test_a_subscriber_that_does_not_read_loses_events_is_told_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, watchers = events()
    slow, quick = made.subscribe([], []), made.subscribe([], [])
    size = len(encoded(removed("i1", 1), f"{made._run}-1", int(made._clock.now() * 1e6)))
    monkeypatch.setattr("kvcm.observability.event_stream.SUBSCRIBER_QUEUE_BYTES_MAX", 3 * size)
    for i in range(1, 6):
        watchers.tell(removed("i1", i))
        await made._pass_on()
        assert [event["keys"] for _, event in await sent(quick)] == [[i]]
    told = await sent(slow)
    assert told[0] == ("Dropped", {"dropped": 2})
    assert [event["keys"] for _, event in told[1:]] == [[1], [2], [3]]
    assert made.stream.dropped == 2
    watchers.tell(removed("i1", 6))
    await made._pass_on()
    assert [event.get("keys") for _, event in await sent(slow)] == [[6]]


async def test_what_the_common_queue_drops_is_told_to_those_who_wanted_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, watchers = events()
    concerned, other = made.subscribe(["i1"], []), made.subscribe(["i2"], [])
    monkeypatch.setattr("kvcm.observability.trace_events.TRACE_EVENT_QUEUE_BYTES_MAX", 0)
    watchers.tell(removed("i1", 1))
    assert await sent(concerned) == [("Dropped", {"dropped": 1})]
    assert await other.next(0) == b": nothing new\n\n"


async def test_so_many_subscribers_and_no_more() -> None:
    made, _ = events()
    found = [made.subscribe([], []) for _ in range(limits.EVENT_SUBSCRIBERS_MAX)]
    with pytest.raises(NotReady, match=str(limits.EVENT_SUBSCRIBERS_MAX)):
        made.subscribe([], [])
    made.leave(found[0])
    made.subscribe([], [])


async def test_an_unknown_type_is_named() -> None:
    made, _ = events()
    with pytest.raises(InvalidArgument, match="'Trim' is not one of GetCacheLocation, "):
        made.subscribe([], ["TrimCache", "Trim"])


async def test_the_end_of_the_manager_is_the_end_of_every_stream() -> None:
    made, watchers = events()
    subscriber = made.subscribe([], [])
    waiting = asyncio.ensure_future(subscriber.next(60))
    await asyncio.sleep(0)
    watchers.tell(removed("i1", 1))
    await made.end_streams()
    assert b'"keys":[1]' in (await waiting or b"")
    assert await subscriber.next(60) is None
    with pytest.raises(NotReady):
        made.subscribe([], [])
    await made.close()
    assert not watchers


async def test_a_cancelled_round_loses_nothing(tmp_path: Path) -> None:
    made, watchers = events(tmp_path)
    for i in range(3):
        watchers.tell(removed("i1", i))
    running = asyncio.ensure_future(made.run_once(0))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    watchers.tell(removed("i1", 3))
    await made.close()
    assert [e["keys"] for e in recorded(tmp_path)] == [[0], [1], [2], [3]]
    assert made.counts.recorded == 4


async def test_packed_keys_of_many_lookups_are_recorded_and_malformed_ones_skipped(
    tmp_path: Path,
) -> None:
    made, watchers = events(tmp_path)
    asked = [[-1, i, 1 << 62] for i in range(100)]
    for keys in asked:
        packed = pack_keys(KeyBatch.from_ints(keys).data)[0]
        watchers.tell(lookup_of(KeyBatch.from_packed(packed)))
        watchers.tell(lookup_of(KeyBatch.from_packed(packed + b"\x80")))
    watchers.tell(lookup_of(KeyBatch.from_packed(b"\x80" * 11 + b"\x01")))
    await made.close()
    found = recorded(tmp_path)
    assert [e["keys"] for e in found] == asked
    assert [e["id"].split("-")[1] for e in found] == [str(i + 1) for i in range(100)]


@pytest.mark.parametrize("is_packed", [False, True])
async def test_a_long_event_is_encoded_in_steps_and_whole(tmp_path: Path, is_packed: bool) -> None:
    made, watchers = events(tmp_path)
    keys = [i * 0x9E3779B97F4A7C15 % (1 << 64) - (1 << 63) for i in range(20_000)]
    batch = KeyBatch.from_ints(keys)
    if is_packed:
        batch = KeyBatch.from_packed(pack_keys(batch.data)[0])
    assert len(list(number_steps(batch))) > 9
    watchers.tell(lookup_of(batch))
    watchers.tell(lookup_of(KeyBatch.from_ints([])))
    await made.close()
    assert [e["keys"] for e in recorded(tmp_path)] == [keys, []]


async def test_a_round_that_is_cancelled_within_an_event_gives_it_again(tmp_path: Path) -> None:
    made, watchers = events(tmp_path)
    clock = made._clock
    assert isinstance(clock, SimClock)
    # Every look at the clock finds the turn over.
    clock.monotonic = iter(float(i) for i in range(10_000)).__next__  # type: ignore[method-assign]
    keys = list(range(20_000))
    watchers.tell(removed("i1", 1))
    watchers.tell(lookup_of(KeyBatch.from_ints(keys)))
    running = asyncio.ensure_future(made.run_once(0))
    for _ in range(4):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(made._queue) == 1
    await made.close()
    assert [e["keys"] for e in recorded(tmp_path)] == [[1], keys]
    assert made._queued_bytes == 0


async def test_a_long_event_is_bounded_by_its_keys() -> None:
    short, long = (lookup_of(KeyBatch.from_ints(range(n))) for n in (1, 1_000))
    assert size_of(long) - size_of(short) == 999 * 8
