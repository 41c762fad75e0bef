"""Hit rates of the eviction policies on request traces, through the real service.

One process holds a manager as ``kvcm serve`` builds it (registry, index in memory, storage, all
background loops), on a clock that follows the trace's timestamps. Each request looks up its whole
chain, starts the write of it and finishes what was granted; no byte is written.

The group may hold a share of the trace's distinct blocks, and that is a hard limit: its high and
its low mark are both at 100 % of the capacity, so eviction makes exactly the room that a write
lacks, in whole extents, and usage never exceeds the capacity at any moment. The exact per-block LRU
beside it, computed offline, has the same capacity; it is full at any time, writes what a request
misses at once and evicts block by block afterwards. So it has the better terms of the two.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import uvloop

from kvcm.cache.api import FinishWriteRequest, LookupRequest, StartWriteAnswer, StartWriteRequest
from kvcm.cache.base import CacheSettings
from kvcm.core.errors import CapacityReached
from kvcm.core.keys import KeyBatch
from kvcm.core.mask import BlockMask
from kvcm.core.types import (
    AdmissionPolicy,
    CacheConfig,
    CacheReclaimStrategy,
    Instance,
    InstanceGroup,
    InstanceGroupQuota,
    LocationSpecInfo,
    ModelDeployment,
    ReclaimPolicy,
    StorageConfig,
    StorageType,
    TriggerStrategy,
)
from kvcm.metaindex.stores.memory import MemoryStore
from kvcm.optimizer.trace import ceiling, read_trace
from kvcm.registry.registry import Registry
from kvcm.server.backends import BackendSet
from kvcm.server.supervisor import Supervisor, Waking
from kvcm.server.wiring import Manager
from kvcm.storage_backends.factory import build_backend
from kvcm.testing.clock import SimClock

Requests = list[tuple[float, tuple[int, ...]]]
"""Seconds since the trace began, and the chain."""

BLOCK_BYTES = 1 << 20
NAME = "trace"
SAME_TIME_S = 0.001
"""Between requests with one timestamp: what came first in the file is the older."""
BEGIN_S = 10.0
ROUND_S = 5.0
"""Between rounds of the loops that nothing wakes; eviction comes when it is called."""

POLICIES: dict[str, dict[str, Any]] = {
    "lru": {"reclaim_policy": ReclaimPolicy.LRU},
    "lfu": {"reclaim_policy": ReclaimPolicy.LFU},
    "tinylfu_lru": {
        "reclaim_policy": ReclaimPolicy.LRU,
        "admission": AdmissionPolicy.TINYLFU,
    },
}


@dataclass(frozen=True)
class Options:
    """What is measured. ``traces`` are files; ``shares`` of a trace's distinct blocks."""

    traces: tuple[str, ...]
    shares: tuple[float, ...] = (0.05, 0.1, 0.25, 0.5)
    policies: tuple[str, ...] = tuple(POLICIES)
    processes: int = 2
    requests: int = 0
    """At the head of each trace; 0 = all."""


@dataclass(frozen=True)
class Run:
    """What one policy did with one trace. ``refused`` blocks were not granted."""

    hits: int
    asked: int
    written: int
    refused: int
    highest: int
    serving: int
    unreachable: int
    cpu_s: float


def requests_of(path: str, limit: int = 0) -> Requests:
    """The requests of a trace that have blocks, at strictly rising times."""
    rows = [row for row in read_trace(path, limit=limit or None).rows if row.hash_ids]
    out: Requests = []
    for stamp, same in groupby(rows, key=lambda row: row.timestamp_ms):
        for number, row in enumerate(same):
            at = stamp / 1000 + number * SAME_TIME_S
            out.append((max(at, out[-1][0] + SAME_TIME_S) if out else at, row.hash_ids))
    return out


def exact_lru(chains: Iterable[Sequence[int]], capacity: int) -> float:
    """Share of blocks in hit prefixes under LRU by single blocks, of a chain the deepest first."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = asked = 0
    for chain in chains:
        asked += len(chain)
        hits += next((i for i, key in enumerate(chain) if key not in cached), len(chain))
        for key in reversed(chain):
            cached[key] = None
            cached.move_to_end(key)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits / asked if asked else 0.0


def _group(blocks: int, policy: str) -> InstanceGroup:
    strategy = CacheReclaimStrategy(
        trigger_strategy=TriggerStrategy(used_percentage=1.0),
        low_percentage=1.0,
        **POLICIES[policy],
    )
    return InstanceGroup(
        name=NAME,
        storage_candidates=(NAME,),
        quota=InstanceGroupQuota(capacity=blocks * BLOCK_BYTES),
        cache_config=CacheConfig(reclaim_strategy=strategy),
        version=1,
    )


class Fleet:
    """A manager on simulated time, and an engine that sends one request after the other."""

    def __init__(self, manager: Manager, clock: SimClock) -> None:
        self._manager = manager
        self._clock = clock
        self._began = clock.monotonic()
        self._next_round = 0.0
        self.hits = self.asked = self.written = self.refused = self.highest = 0

    async def until(self, seconds: float) -> None:
        """Let time pass. Those loops that wait for nothing else run at most every few seconds."""
        self._clock.advance(max(0.0, self._began + seconds - self._clock.monotonic()))
        now = self._clock.monotonic()
        if now < self._next_round:
            return
        self._next_round = now + ROUND_S
        for loop in self._manager.loops:
            if not isinstance(loop, Waking):
                await loop.run_once(now)

    async def request(self, chain: tuple[int, ...]) -> None:
        """Look up a chain, then write what is missing of it."""
        keys = KeyBatch.from_ints(chain)
        found = await self._manager.lookup(LookupRequest(NAME, keys))
        self.hits += found.hits
        self.asked += len(chain)
        answer = await self._start(keys)
        granted = answer.granted if answer is not None else 0
        self.written += granted
        self.refused += len(set(chain[found.hits :])) - granted
        if answer is not None:
            success = BlockMask(offset=granted)
            await self._manager.finish_write(FinishWriteRequest(NAME, answer.session_id, success))
        self.highest = max(self.highest, self.held())

    async def _start(self, keys: KeyBatch) -> StartWriteAnswer | None:
        try:
            return await self._manager.start_write(StartWriteRequest(NAME, keys))
        except CapacityReached:
            return None

    def held(self) -> int:
        """Blocks that count for the group's limit."""
        return self._manager.shared.ledger.group(NAME).counted // BLOCK_BYTES

    async def reachable(self, chains: Iterable[tuple[int, ...]]) -> int:
        """Blocks that a lookup of one of the chains finds."""
        found: set[int] = set()
        for chain in dict.fromkeys(chains):
            answer = await self._manager.lookup(LookupRequest(NAME, KeyBatch.from_ints(chain)))
            found.update(chain[: answer.hits])
        return len(found)

    def serving(self) -> int:
        """Blocks that serve."""
        return self._manager.shared.ledger.group(NAME).serving_blocks


async def replay(requests: Requests, blocks: int, policy: str, folder: Path) -> Run:
    """Send all requests to a new manager whose group may hold ``blocks``."""
    clock = SimClock()
    began = time.process_time()
    async with AsyncExitStack() as stack:
        registry = Registry(f"sqlite:///{folder}/registry.db", clock)
        stack.push_async_callback(registry.close)
        await registry.open()
        spec = {"root_path": str(folder / "blocks"), "key_count_per_file": 4096}
        storage = StorageConfig(global_unique_name=NAME, type=StorageType.NFS, spec=spec)
        await registry.bootstrap([storage], [_group(blocks, policy)])
        store = MemoryStore(clock=clock)
        stack.push_async_callback(store.close)
        await store.open()
        backends = BackendSet(lambda c: build_backend(c, clock), clock, period_s=5.0)
        stack.push_async_callback(backends.close)
        await backends.open(registry.view, new=True)
        manager = Manager(registry, store, backends, clock, CacheSettings())
        stack.push_async_callback(manager.close)
        await manager.open()
        supervisor = Supervisor(clock)
        stack.push_async_callback(supervisor.stop)
        supervisor.start([loop for loop in manager.loops if isinstance(loop, Waking)])
        instance = Instance(
            instance_id=NAME,
            instance_group=NAME,
            block_size=512,
            location_spec_infos=(LocationSpecInfo(name="tp0", size=BLOCK_BYTES),),
            model_deployment=ModelDeployment(model_name=NAME),
        )
        await registry.register_instance(instance)
        await manager.index.by_id[NAME].load()
        fleet = Fleet(manager, clock)
        for at, chain in requests:
            await fleet.until(BEGIN_S + at)
            await fleet.request(chain)
        serving = fleet.serving()
        reached = await fleet.reachable(chain for _, chain in requests)
    return Run(
        fleet.hits,
        fleet.asked,
        fleet.written,
        fleet.refused,
        fleet.highest,
        serving,
        serving - reached,
        time.process_time() - began,
    )


def _run(path: str, limit: int, share: float, policy: str) -> float | Run:
    """One cell, in a process of its own; ``exact`` is computed, everything else replayed."""
    requests = requests_of(path, limit)
    blocks = capacity_of(requests, share)
    if policy == "exact":
        return exact_lru((chain for _, chain in requests), blocks)
    with tempfile.TemporaryDirectory(prefix="kvcm-hitrate-") as folder:
        return uvloop.run(replay(requests, blocks, policy, Path(folder)))


def capacity_of(requests: Requests, share: float) -> int:
    """Blocks that are ``share`` of the distinct ones."""
    return int(share * len({key for _, chain in requests for key in chain}))


def measure(options: Options, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """All cells; a row per trace and share."""
    rows = {
        (path, share): _row(path, options.requests, share)
        for path in options.traces
        for share in options.shares
    }
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        cells = {
            pool.submit(_run, path, options.requests, share, policy): (path, share, policy)
            for path, share, policy in _cells(options)
        }
        for done in as_completed(cells):
            path, share, policy = cells[done]
            result = done.result()
            row = rows[path, share]
            if isinstance(result, float):
                row["exact"] = 100 * result
                continue
            _add(row, policy, result)
            say(f"{row['trace']} {share:.0%} {policy}: {row[policy]:.2f} % ({result})")
    return list(rows.values())


def _cells(options: Options) -> Iterator[tuple[str, float, str]]:
    for path in options.traces:
        for share in options.shares:
            for policy in ("exact", *options.policies):
                yield path, share, policy


def _row(path: str, limit: int, share: float) -> dict[str, Any]:
    requests = requests_of(path, limit)
    return {
        "trace": Path(path).name.partition(".")[0],
        "share": 100 * share,
        "blocks": capacity_of(requests, share),
        "ceiling": 100 * ceiling(chain for _, chain in requests).block_rate,
        "unreachable": 0,
        "runs": {},
    }


def _add(row: dict[str, Any], policy: str, run: Run) -> None:
    row[policy] = 100 * run.hits / run.asked
    row["unreachable"] = max(row["unreachable"], run.unreachable)
    row["runs"][policy] = {
        "written": run.written,
        "refused": run.refused,
        "highest": run.highest,
        "serving": run.serving,
        "unreachable": run.unreachable,
        "cpu_s": round(run.cpu_s, 1),
    }
