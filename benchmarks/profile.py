"""Where the time of one call goes: in process, no network."""

from __future__ import annotations

import asyncio
import cProfile
import io
import pstats
import statistics
from enum import StrEnum
from pathlib import Path
from time import perf_counter, thread_time
from typing import NamedTuple

import uvloop

from benchmarks import workload
from benchmarks.inprocess import LocalCalls, local_calls
from benchmarks.workload import Chains
from kvcm._pb import meta_pb2 as pb


class What(StrEnum):
    """The call to profile."""

    LOOKUP = "lookup"
    START = "start"
    FINISH = "finish"


class Took(NamedTuple):
    """Seconds of one call: by the wall clock, and of its thread's processor time, which other
    programs on the machine lengthen less."""

    wall: float
    cpu: float


class Profiler:
    """Times and profiles calls on chains of its own."""

    def __init__(self, local: LocalCalls, keys: int, extent: int, filled: int) -> None:
        self._local = local
        self._keys = keys
        self._chains = Chains(filled, extent, (keys,))
        self._profile: cProfile.Profile | None = None

    async def fill(self) -> None:
        """Write the chains and look each one up once."""
        for chain in self._chains.all():
            await self._local.write(chain)
        for chain in self._chains.all():
            found = await self._local.lookup(chain.keys)
            if found != len(chain.keys):
                raise RuntimeError(f"{found} of {len(chain.keys)} keys were found")

    async def times(self, what: What, calls: int) -> list[Took]:
        """What each of so many calls took."""
        return [await self._once(what) for _ in range(calls)]

    async def profile(self, what: What, calls: int) -> cProfile.Profile:
        """The profile of so many calls, in seconds of thread time."""
        self._profile = found = cProfile.Profile(thread_time)
        for _ in range(calls):
            await self._once(what)
        self._profile = None
        return found

    async def _once(self, what: What) -> Took:
        if what is What.LOOKUP:
            return await self._lookup()
        return await (self._start() if what is What.START else self._finish())

    async def _timed(self, name: str, data: bytes) -> tuple[Took, bytes]:
        if self._profile is not None:
            self._profile.enable()
        wall, cpu = perf_counter(), thread_time()
        reply = await self._local.call(name, data)
        took = Took(perf_counter() - wall, thread_time() - cpu)
        if self._profile is not None:
            self._profile.disable()
        return took, reply

    async def _lookup(self) -> Took:
        (keys,) = self._chains.pick(self._keys, 1)
        data = workload.lookup_message(keys).SerializeToString()
        return (await self._timed("GetCacheLocation", data))[0]

    async def _start(self) -> Took:
        data = workload.start_message(self._chains.new_keys(self._keys)).SerializeToString()
        took, reply = await self._timed("StartWriteCache", data)
        granted = pb.StartWriteCacheResponse.FromString(reply)
        await self._local.finish(granted.write_session_id, len(granted.locations))
        return took

    async def _finish(self) -> Took:
        granted = await self._local.start(self._chains.new_keys(self._keys))
        count = len(granted.locations)
        data = workload.finish_message(granted.write_session_id, count).SerializeToString()
        return (await self._timed("FinishWriteCache", data))[0]


def profile(
    what: What,
    folder: Path,
    *,
    keys: int,
    extent: int,
    filled: int,
    calls: int,
    index_url: str,
    lines: int,
) -> str:
    """Profile one kind of call on a manager that holds ``filled`` keys; the report as text."""

    async def run() -> tuple[list[Took], cProfile.Profile]:
        async with local_calls(folder, index_url) as local:
            profiler = Profiler(local, keys, extent, filled)
            await profiler.fill()
            await profiler.times(what, 1)
            return await profiler.times(what, calls), await profiler.profile(what, calls)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        plain, found = runner.run(run())
    wall = statistics.median(took.wall for took in plain)
    cpu = statistics.median(took.cpu for took in plain)
    out = io.StringIO()
    out.write(
        f"{what} of {keys:,} keys, extents of {extent}, {filled:,} keys in the index, {calls} "
        f"calls:\nmedian {wall * 1e3:.3f} ms, of its thread's time {cpu * 1e3:.3f} ms = "
        f"{keys / cpu / 1e6:.2f} M keys/s\n"
        "With the profiler on (which makes small functions look dear), seconds of thread time:\n"
    )
    pstats.Stats(found, stream=out).strip_dirs().sort_stats("tottime").print_stats(lines)
    return out.getvalue()
