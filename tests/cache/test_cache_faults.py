"""Crashes and unknown outcomes at every store commit, and cancellation at every await."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from kvcm.cache.api import FinishWriteRequest
from kvcm.core.errors import KvcmError
from kvcm.core.mask import BlockMask
from kvcm.core.types import QueryType
from kvcm.metaindex.ids import home_shard
from kvcm.metaindex.store import CommitResult, ShardCommit
from kvcm.reclaimer.base import retire_with
from kvcm.testing.faults import Crash, Fault, Op, at_random, no_faults, script
from tests.cache.harness import Grant, Harness, file_of, payload, read_slot

KEYS = list(range(6))


class Flow:
    """start → finish → remove one block → evict the rest → delete, of one extent."""

    def __init__(self, h: Harness) -> None:
        self.h = h
        self.grant: Grant | None = None
        self.done: list[str] = []

    async def run(self) -> None:
        h = self.h
        self.grant = await h.start(KEYS, timeout=30)
        self.done.append("start")
        h.fill(self.grant)
        await h.finish(self.grant, [True] * 5 + [False])
        self.done.append("finish")
        await h.lookup(KEYS)
        await h.remove([1])
        self.done.append("remove")
        await evict_all(h)
        self.done.append("evict")
        await h.wait(11)
        self.done.append("delete")


async def evict_all(h: Harness) -> None:
    """What the eviction loop does to the coldest extents."""
    index = h.index()
    for entry in index.book.order.coldest(100):
        entry.leaving = True
        try:
            await index.change(entry.extent_id, retire_with(index))
        finally:
            entry.leaving = False


async def made(tmp_path: Path) -> Harness:
    h = await Harness(root=tmp_path, timeout_max_s=60).open()
    await h.register()
    # A claim of the row shards is not part of the flow.
    await h.lookup(list(range(100, 200)), query=QueryType.BATCH_GET)
    return h


async def check_served(h: Harness, grant: Grant | None) -> int:
    """Everything served is what its session wrote; how many keys that is."""
    found = await h.lookup(KEYS, query=QueryType.BATCH_GET)
    for key, location in zip(KEYS, found, strict=True):
        if location.hit:
            assert grant is not None
            assert location == grant.by_key[key]
            for spec, uri in location.uris.items():
                assert read_slot(uri) == payload(grant.session, key, spec, file_of(uri)[2])
    return sum(location.hit for location in found)


async def check_after(h: Harness, flow: Flow) -> None:
    """The promises that hold wherever the flow was cut."""
    await h.check_counters()
    served = await check_served(h, flow.grant)
    if "evict" in flow.done:
        assert served == 0
    elif "remove" in flow.done:
        assert served in (0, 4)
    elif "finish" in flow.done:
        assert served in (4, 5)
    elif "start" not in flow.done:
        assert served == 0
    if "finish" in flow.done and "evict" not in flow.done:
        # A lost reply: the same finish again is fine.
        await h.finish(flow.grant, [True] * 5 + [False])  # type: ignore[arg-type]
    await h.drain()
    if "evict" in flow.done:
        assert not h.files()
    await h.check_rest()
    again = await h.start(KEYS)
    h.fill(again)
    await h.finish(again)
    assert await h.hits(KEYS) == len(KEYS)
    assert (await h.lookup(KEYS))[-1] == again.locations[-1]
    await h.check_counters()


async def commits_of_the_flow(tmp_path: Path) -> tuple[int, int]:
    h = await made(tmp_path)
    first = h.store.calls[Op.COMMIT]
    await Flow(h).run()
    last = h.store.calls[Op.COMMIT]
    await h.close()
    return first, last


@pytest.mark.parametrize("fault", [Fault.CRASH_BEFORE, Fault.CRASH_AFTER])
async def test_a_crash_at_any_commit_loses_nothing_and_leaks_nothing(
    tmp_path: Path, fault: Fault
) -> None:
    first, last = await commits_of_the_flow(tmp_path / "dry")
    assert last - first > 8
    for number in range(first + 1, last + 1):
        h = await made(tmp_path / str(number))
        h.store.plan = script([(Op.COMMIT, number, fault)])
        flow = Flow(h)
        with pytest.raises(Crash):
            await flow.run()
        await h.crash()
        await check_after(h, flow)
        await h.close()


@pytest.mark.parametrize("fault", [Fault.UNKNOWN_DONE, Fault.UNKNOWN_LOST, Fault.UNAVAILABLE])
async def test_a_failed_commit_anywhere_leaves_a_state_that_heals(
    tmp_path: Path, fault: Fault
) -> None:
    first, last = await commits_of_the_flow(tmp_path / "dry")
    for number in range(first + 1, last + 1):
        h = await made(tmp_path / str(number))
        h.store.plan = script([(Op.COMMIT, number, fault)])
        flow = Flow(h)
        with contextlib.suppress(KvcmError):
            await flow.run()
        assert [n for _, n, _ in h.store.injected] == [number]
        await h.manager._writes.settled()
        await h.rounds(2)
        await check_after(h, flow)
        await h.close()


async def test_a_reload_that_fails_leaves_the_shard_in_doubt(tmp_path: Path) -> None:
    h = await made(tmp_path)
    grants = [await h.put([10 * i, 10 * i + 1]) for i in range(20)]
    open_grant = await h.start([999], timeout=30)
    reads = h.store.calls[Op.READ]
    commits = h.store.calls[Op.COMMIT]
    # The outcome of a removal is unknown, and the first reads of the shard fail.
    h.store.plan = script(
        [(Op.COMMIT, commits + 1, Fault.UNKNOWN_DONE)]
        + [(Op.READ, reads + n, Fault.UNAVAILABLE) for n in range(1, 8)]
    )
    with contextlib.suppress(KvcmError):
        await h.remove([0])
    h.store.plan = no_faults
    await h.rounds(2)
    await h.check_counters()
    for i, grant in enumerate(grants[1:], 1):
        assert await h.lookup([10 * i, 10 * i + 1]) == grant.locations
    assert (await h.start([999])).granted == []
    await h.wait(31)
    with pytest.raises(KvcmError):
        await h.finish(open_grant)
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_reading_a_shard_again_keeps_pins_and_ancestors(tmp_path: Path) -> None:
    h = await made(tmp_path)
    index = h.index()
    base = await h.put([1])
    child = await h.put([1, 2])
    writer = await h.start([1, 2, 3])
    pinned = [e for e in index.book.entries.values() if e.pins]
    assert len(pinned) == 2
    for number in range(16):
        index.shards._doubt(number, index.shards._fences[number])
    await h.rounds(1)
    assert sorted(e.extent_id for e in index.book.entries.values() if e.pins) == sorted(
        e.extent_id for e in pinned
    )
    kid = index.book.entries[index.sessions.read(child.session).extent_id or b""]
    mother = index.book.entries[index.sessions.read(base.session).extent_id or b""]
    assert kid.parents == (mother,)
    h.fill(writer)
    await h.finish(writer)
    assert not any(e.pins for e in index.book.entries.values())
    assert await h.hits([1, 2, 3]) == 3
    await h.check_counters()
    await h.close()


def steps_of(name: str) -> list[int]:
    """After how many turns of the loop a call is cancelled. A round has hundreds of awaits, and
    turns pass while a trim waits for the registry's thread: of those some are tried."""
    if name == "round":
        return list(range(0, 2000, 13))
    if name.startswith("trim"):
        return [*range(20), *(2**n for n in range(5, 20))]
    return list(range(400))


Call = Callable[[Harness], Awaitable[object]]


async def _finish_call(h: Harness) -> object:
    return await h.manager.finish_write(
        FinishWriteRequest("i1", h.flying.session, BlockMask(offset=2))  # type: ignore[attr-defined]
    )


CALLS: dict[str, Call] = {
    "start": lambda h: h.start([50, 1, 51, 52]),
    "finish": _finish_call,
    "remove": lambda h: h.remove([1, 2, 40]),
    "trim": lambda h: h.trim(),
    "trim by time": lambda h: h.trim(3, begin=0, end=2_000_000_000),
    "abandon": lambda h: h.manager.abandon("i1", h.flying.session),  # type: ignore[attr-defined]
    "lookup": lambda h: h.lookup([1, 2, 3, 40, 41]),
    "meta": lambda h: h.meta([1, 2, 3, 40, 41]),
    "round": lambda h: h.wait(5),
}


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("turns", [0, 2])
async def test_a_call_cancelled_at_any_await_leaks_nothing(
    tmp_path: Path, name: str, turns: int
) -> None:
    h = await Harness(root=tmp_path, timeout_max_s=60, turns=turns).open()
    for step in steps_of(name):
        instance = f"i{step}"
        await h.register(instance)
        await h.put([1, 2, 3], instance)
        h.flying = await h.start([40, 41], instance)  # type: ignore[attr-defined]
        h.fill(h.flying)  # type: ignore[attr-defined]
        h.index(instance).shared.cache.clear_instance(h.index(instance).rows)
        task = asyncio.ensure_future(_on(instance)(h, name))
        for _ in range(step):
            await asyncio.sleep(0)
        finished = task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await h.manager._writes.settled()
        await h.rounds(2)
        await h.check_counters()
        if name == "start" and not finished:
            assert await h.statuses([50, 51, 52], instance) == ["NOT_FOUND"] * 3
        if name == "finish":
            await h.finish(h.flying, BlockMask(offset=2))  # type: ignore[attr-defined]
            assert await h.hits([40, 41], instance) == 2
        await h.manager.remove_instance(instance, None)
        if finished:
            break
    else:
        pytest.fail("the call never came to its end")
    await h.drain()
    await h.check_rest()
    assert not h.files()
    await h.close()


def _on(instance: str) -> Callable[[Harness, str], Awaitable[object]]:
    async def call(h: Harness, name: str) -> object:
        return await CALLS[name](_Bound(h, instance))  # type: ignore[arg-type]

    return call


class _Bound:
    """A harness whose calls go to one instance."""

    def __init__(self, h: Harness, instance: str) -> None:
        self._h = h
        self._instance = instance
        self.flying: Grant = h.flying  # type: ignore[attr-defined]
        self.manager = self

    async def start(self, keys: list[int]) -> object:
        return await self._h.start(keys, self._instance)

    async def finish_write(self, request: FinishWriteRequest) -> object:
        request.instance_id = self._instance
        return await self._h.manager.finish_write(request)

    async def remove(self, keys: list[int]) -> object:
        return await self._h.remove(keys, self._instance)

    async def trim(self, strategy: int = 1, begin: int = 0, end: int = 0) -> object:
        return await self._h.trim(strategy, self._instance, begin, end)

    async def abandon(self, _instance: str, session: str) -> object:
        return await self._h.manager.abandon(self._instance, session)

    async def lookup(self, keys: list[int]) -> object:
        return await self._h.lookup(keys, self._instance)

    async def meta(self, keys: list[int]) -> object:
        return await self._h.meta(keys, self._instance)

    async def wait(self, seconds: float) -> object:
        return await self._h.wait(seconds)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("turns", [0, 3])
async def test_counters_stay_exact_under_random_faults_and_races(
    tmp_path: Path, seed: int, turns: int
) -> None:
    h = await Harness(root=tmp_path, timeout_max_s=60, turns=turns).open()
    await h.register()
    h.store.plan = at_random(seed, 0.1)

    async def writer(number: int) -> None:
        for i in range(12):
            keys = [(number + n) * 7 % 30 for n in range(i % 7 + 1)]
            with contextlib.suppress(KvcmError):
                grant = await h.start(keys, timeout=30)
                h.fill(grant)
                await h.finish(grant, [n % 5 != 4 for n in range(len(grant.granted))])
                await h.remove(keys[:2])
                await h.lookup(keys)

    await asyncio.gather(*(writer(n) for n in range(6)))
    h.store.plan = no_faults
    await h.manager._writes.settled()
    await h.rounds(2)
    await h.check_counters()
    await h.drain()
    await h.check_rest()
    await h.close()


async def test_an_answer_that_comes_after_the_shard_was_claimed_again_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim's counters hold the commit already."""
    h = await made(tmp_path)
    grant = await h.put([1])
    index = h.index()
    extent_id = index.sessions.read(grant.session).extent_id
    assert extent_id is not None
    shard = home_shard(extent_id)
    real, release, committed = h.store.commit, asyncio.Event(), asyncio.Event()

    async def slow(commits: Sequence[ShardCommit]) -> list[CommitResult]:
        results = await real(commits)
        committed.set()
        await release.wait()
        return results

    monkeypatch.setattr(h.store, "commit", slow)
    removing = asyncio.ensure_future(h.remove([1]))
    await committed.wait()
    index.shards._doubt(shard, index.shards._fences[shard])
    await index.shards.ensure([shard])
    release.set()
    await removing
    await h.check_counters()
    await h.drain()
    await h.check_rest()
    await h.close()
