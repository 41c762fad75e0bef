"""Ten million keys in one group: what a start, a table of all extents, and planning cost.

The index is filled past StartWrite, through the production encoders, since only its records matter:
there are no bytes. Everything is measured by another process that starts on the filled store.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from time import perf_counter, process_time, time
from typing import Any

import numpy as np

from benchmarks import machine, workload
from benchmarks.inprocess import LocalCalls, local_manager
from benchmarks.workload import Keys
from kvcm.core.limits import HOME_SHARDS
from kvcm.core.types import StorageType
from kvcm.metaindex import bits, records
from kvcm.metaindex.answers import owner_of
from kvcm.metaindex.ids import home_shard
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.layout import held_by, spec_slots
from kvcm.metaindex.ledger import to_counters
from kvcm.metaindex.order import EvictionOrder
from kvcm.metaindex.records import Extent, Phase, Run, State
from kvcm.metaindex.shards import by_shard
from kvcm.metaindex.store import Mutation, Table, Write
from kvcm.server.wiring import Manager

Row = dict[str, Any]
_BLOCKS_AT_ONCE = 16_384
_KEYS_MAX = 16_000_000
_BATCHES = 200
_BATCH = 8
"""What an eviction round asks for at a time."""
_TIMEOUT_S = 1_800


@dataclass(frozen=True)
class Shape:
    """``keys`` in extents of ``extent`` blocks, in chains of ``chain`` extents."""

    extent: int
    keys: int
    chain: int


@dataclass(frozen=True)
class Options:
    """What is measured; ``folder`` "" is a temporary one, else stores are kept and used again."""

    shapes: tuple[Shape, ...]
    folder: str = ""


SHAPES = (Shape(88, 10_000_000, 50), Shape(1, 1_000_000, 64), Shape(1, 1_000_000, 1))


# ---- filling -----------------------------------------------------------------------------------


def _chains(shape: Shape) -> Iterator[Keys]:
    """The keys of every chain, always the same ones."""
    chance = np.random.default_rng(7)
    length = shape.extent * shape.chain
    for _ in range(max(1, shape.keys // length)):
        yield chance.integers(-(1 << 62), 1 << 62, length, dtype=np.int64)


def _extents(index: InstanceIndex, shape: Shape) -> Iterator[Extent]:
    shared = index.shared
    storage = shared.storages.get(workload.STORAGE)
    assert storage is not None
    now_ms = int(shared.clock.now() * 1000)
    for keys in _chains(shape):
        parent: bytes | None = None
        for at in range(0, len(keys), shape.extent):
            part = keys[at : at + shape.extent]
            draft = Extent(
                extent_id=shared.new_extent_id(),
                keys=part.astype("<i8").tobytes(),
                storage=workload.STORAGE,
                storage_type=int(StorageType.NFS),
                descriptor=b"",
                specs=((workload.SPEC, workload.BLOCK_BYTES),),
                spec_sets=(1,),
                subset_of=b"",
                trim=0,
                runs=(Run(0, at, parent, shape.extent - 1 if parent else 0),),
                started_ms=now_ms,
                timeout_s=60,
            )
            owner = owner_of(shared.cluster_uid, index.uid, draft)
            descriptor = storage.place(owner, spec_slots(draft))
            parent = draft.extent_id
            yield replace(draft, descriptor=descriptor)


async def _commit(index: InstanceIndex, extents: list[Extent]) -> None:
    """Settled extents with their counters and rows, all of a shard in one commit."""
    parts: dict[int, list[Mutation]] = {}
    for extent in extents:
        everything = bits.ones(extent.count)
        state = State(
            index.new_version(),
            Phase.SETTLED,
            extent.started_ms,
            serving=everything,
            finished=everything,
            finished_ms=extent.started_ms,
        )
        stamp = state.stamp_ms.to_bytes(8, "big")
        writes = [Write(Table.EXTENTS, k, v) for k, v in records.encode_extent(extent)]
        writes.append(Write(Table.STATES, extent.extent_id, records.encode_state(state)))
        writes.append(Write(Table.DUE, extent.extent_id, stamp))
        counters = to_counters(extent.storage, held_by(extent, state))
        mutation = Mutation(writes=writes, counters=counters)
        parts.setdefault(home_shard(extent.extent_id), []).append(mutation)
    for number, rows in _rows(index, extents).items():
        parts.setdefault(number, []).append(Mutation(writes=rows))
    await index.shards.commit(list(parts.items()))


def _rows(index: InstanceIndex, extents: list[Extent]) -> dict[int, list[Write]]:
    """The row of every block, by shard."""
    raw = b"".join(extent.keys for extent in extents)
    refs = [records.encode_ref(e.extent_id, p) for e in extents for p in range(e.count)]
    order, parts = by_shard(np.frombuffer(raw, dtype="<i8").astype(np.int64), index.shard_count)
    places = order.tolist()
    return {
        number: [Write(Table.ROWS, raw[8 * i : 8 * i + 8], refs[i]) for i in places[start:end]]
        for number, start, end in parts
    }


async def _fill(folder: Path, shape: Shape) -> None:
    async with local_manager(folder, "", key_count_max=_KEYS_MAX) as (cache, calls):
        await calls.register()
        index = cache.index.by_id[workload.INSTANCE]
        extents = _extents(index, shape)
        while batch := list(islice(extents, _BLOCKS_AT_ONCE // shape.extent)):
            await _commit(index, batch)


# ---- measuring, in a process of its own --------------------------------------------------------


class _Pulse:
    """The longest time for which the event loop was held."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task = asyncio.ensure_future(self._beat())

    async def _beat(self) -> None:
        last = perf_counter()
        while True:
            await asyncio.sleep(0)
            now = perf_counter()
            self.longest_s = max(self.longest_s, now - last)
            last = now

    async def stop(self) -> float:
        """End; milliseconds."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        return self.longest_s * 1000


async def _measure(folder: Path, shape: Shape, spawned: float) -> Row:
    imported_s = time() - spawned
    async with local_manager(folder, "", key_count_max=_KEYS_MAX) as (cache, calls):
        await calls.register()
        empty = not cache.shared.ledger.groups and shape.keys == 0
        row: Row = {"import_s": imported_s, "ready_s": time() - spawned}
        index = cache.index.by_id[workload.INSTANCE]
        if not empty:
            row |= await _first_lookup(calls, shape, spawned)
        row |= await _load(cache, index, spawned)
        gc.collect()
        row["rss"] = machine.rss_bytes_of_self()
        row["extents"] = len(index.book.entries)
        row["blocks"] = cache.shared.ledger.instance(index.uid).blocks
        if not empty:
            row |= await _plan(index)
    return row


async def _first_lookup(calls: LocalCalls, shape: Shape, spawned: float) -> Row:
    """A chain is found though nothing is loaded yet."""
    keys = next(_chains(shape))
    begin = perf_counter()
    found = await calls.lookup(keys)
    if found != len(keys):
        raise RuntimeError(f"{found} of {len(keys)} keys were found")
    return {
        "first_lookup_ms": (perf_counter() - begin) * 1000,
        "first_lookup_keys": found,
        "answered_s": time() - spawned,
    }


async def _load(cache: Manager, index: InstanceIndex, spawned: float) -> Row:
    begin = perf_counter()
    await index.shards.ensure(range(HOME_SHARDS))
    claims_ms = (perf_counter() - begin) * 1000
    pulse = _Pulse()
    cpu = process_time()
    (loop,) = (loop for loop in cache.loops if loop.name == "load")
    await loop.run_once(index.shared.clock.monotonic())
    longest = await pulse.stop()
    if not index.loaded:
        raise RuntimeError("the index is not loaded")
    return {
        "claims_ms": claims_ms,
        "load_s": perf_counter() - begin,
        "evictable_s": time() - spawned,
        "load_cpu_s": process_time() - cpu,
        "load_step_ms": longest,
    }


async def _plan(index: InstanceIndex) -> Row:
    """Ask for victims, first after everything was used in an order of its own.

    No step of the background loop comes between: what it would have caught up with is all there.
    """
    order: EvictionOrder = index.shared.order_of(index.group)
    entries = list(index.book.entries.values())
    chance = np.random.default_rng(11)
    now_ms = int(index.shared.clock.now() * 1000)
    begin = perf_counter()
    order.coldest(_BATCH)
    fresh_ms = (perf_counter() - begin) * 1000
    used = chance.permutation(len(entries))
    for number, at in enumerate(used.tolist()):
        index.book.touch((entries[at],), now_ms + 1 + number)
    steps: list[float] = []
    found: list[Any] = []
    while not found:
        begin = perf_counter()
        found = order.coldest(_BATCH)
        steps.append((perf_counter() - begin) * 1000)
        if not found and not order.behind:
            raise RuntimeError("nothing can be evicted")
    # As a round goes on: what was given out is gone, or failed and is passed over.
    gone = set(found)
    rounds: list[float] = []
    for _ in range(_BATCHES):
        begin = perf_counter()
        batch = order.coldest(_BATCH, skip=gone)
        rounds.append((perf_counter() - begin) * 1000)
        gone.update(batch)
    return {
        "plan_fresh_ms": fresh_ms,
        "plan_stale_calls": len(steps),
        "plan_stale_step_ms": max(steps),
        "plan_stale_ms": sum(steps),
        "plan_ms": statistics.median(rounds),
        "plan_worst_ms": max(rounds),
        "planned": len(gone),
    }


def child(folder: str, shape: str, spawned: str) -> None:
    """The measuring process: one JSON document on standard output."""
    row = asyncio.run(_measure(Path(folder), Shape(**json.loads(shape)), float(spawned)))
    sys.stdout.write(json.dumps(row) + "\n")


# ---- the whole ---------------------------------------------------------------------------------


def _run_child(folder: Path, shape: Shape) -> Row:
    code = "import sys; from benchmarks.space import child; child(*sys.argv[1:])"
    given = [str(folder), json.dumps(asdict(shape)), repr(time())]
    command = [sys.executable, "-c", code, *given]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def fill(options: Options, say: Callable[[str], None]) -> list[Path]:
    """The filled stores, one a shape; those that are there already stay as they are."""
    folders = []
    for shape in options.shapes:
        folder = Path(options.folder) / f"{shape.keys}-{shape.extent}-{shape.chain}"
        done = folder / "filled"
        if not done.exists():
            folder.mkdir(parents=True, exist_ok=True)
            begin = perf_counter()
            asyncio.run(_fill(folder, shape))
            done.touch()
            say(f"filled {shape} in {perf_counter() - begin:.0f} s")
        folders.append(folder)
    return folders


def measure(options: Options, say: Callable[[str], None]) -> list[Row]:
    """One row a shape."""
    if not options.folder:
        with tempfile.TemporaryDirectory(prefix="kvcm-bench-") as name:
            return measure(Options(options.shapes, name), say)
    folders = fill(options, say)
    with tempfile.TemporaryDirectory(prefix="kvcm-bench-") as name:
        empty = _run_child(Path(name), Shape(1, 0, 1))
    rows = []
    for shape, folder in zip(options.shapes, folders, strict=True):
        row = asdict(shape) | _run_child(folder, shape)
        grown = row["rss"] - empty["rss"]
        row["rss_mib"] = row["rss"] / (1 << 20)
        row["rss_per_extent"] = grown / row["extents"]
        row["rss_per_key"] = grown / row["blocks"]
        row["empty_mib"] = empty["rss"] / (1 << 20)
        rows.append(row)
        say(json.dumps(row))
    return rows
