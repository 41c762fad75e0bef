"""A manager's calls against an index store, in process: what a cold cache and writes cost."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

from benchmarks import bare, machine
from benchmarks.inprocess import LocalCalls, local_calls
from benchmarks.workload import Chains, finish_message, lookup_message, start_message
from kvcm._pb import meta_pb2 as pb
from kvcm.core.clock import SystemClock
from kvcm.metaindex.store import Claim, Fence, KVStore, ShardId
from kvcm.metaindex.stores.valkey import ValkeyStore
from kvcm.server import wiring
from kvcm.server.settings import load
from kvcm.testing.servers_valkey import ValkeyServer, valkey_server

SIZE = 4_400
CLAIMS = 10_000
_FINISHES = (64, 10_000)
_WRITES = 15
_LOOKUPS_MAX = 100
_SHARDS_PER_SPACE = 64

Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What is measured: blocks per StartWrite; ``index_url`` "" is a Valkey of our own."""

    index_url: str
    keys: int
    extents: tuple[int, ...]


def measure(options: Options, say: Callable[[str], None]) -> list[Row]:
    """Measure and tell; one row per extent size."""
    if options.index_url.startswith("memory:"):
        raise ValueError("memory: forgets what a second manager would look up")
    return [_row(options.index_url, options.keys, extent, say) for extent in options.extents]


def _row(index_url: str, keys: int, extent: int, say: Callable[[str], None]) -> Row:
    with ExitStack() as stack:
        server: ValkeyServer | None = None
        if not index_url:
            machine.pin(machine.LOADER_CPU)
            server = stack.enter_context(valkey_server("io-threads 1"))
            index_url = server.url
        machine.pin(machine.SERVER_CPU)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcm-bench-")))
        chains = Chains(keys, extent, (SIZE,))
        row: Row = {"extent": extent, "keys": chains.total}
        asyncio.run(_measure(folder, index_url, server, chains, row))
    for name, value in row.items():
        say(f"{name}: {value:,.1f}" if isinstance(value, float) else f"{name}: {value:,}")
    return row


async def _measure(
    folder: Path, index_url: str, server: ValkeyServer | None, chains: Chains, row: Row
) -> None:
    before = _used_memory(server)
    async with local_calls(folder, index_url) as calls:
        started = perf_counter()
        for chain in chains.all():
            await calls.write(chain)
        row["load_s"] = perf_counter() - started
        row["load_keys_per_s"] = chains.total / row["load_s"]
        if server is not None:
            row["bytes_per_key"] = (_used_memory(server) - before) / chains.total
    # Another manager on the same records: nothing is cached.
    async with local_calls(folder, index_url) as calls:
        floors = bare.Floors(server.port, SIZE) if server is not None else None
        share = chains.by_size[SIZE][:_LOOKUPS_MAX]
        for state in ("cold", "warm"):
            lookups = []
            for chain in share:
                if floors is not None and state == "cold":
                    floors.measure()
                took, data = await _timed(calls, "GetCacheLocation", lookup_message, chain.keys)
                if len(pb.GetCacheLocationResponse.FromString(data).locations) < SIZE:
                    raise RuntimeError("a key was not found")
                lookups.append(took)
            _put(row, state, lookups)
        for size in (SIZE, *_FINISHES):
            starts, finishes = [], []
            for _ in range(_WRITES):
                if floors is not None:
                    floors.measure()
                fresh = chains.new_keys(size)
                took, data = await _timed(calls, "StartWriteCache", start_message, fresh)
                starts.append(took)
                session = pb.StartWriteCacheResponse.FromString(data).write_session_id
                took, _ = await _timed(calls, "FinishWriteCache", finish_message, session, size)
                finishes.append(took)
            _put(row, f"start_{size}", starts)
            _put(row, f"finish_{size}", finishes)
        if floors is not None:
            for name, times in (("hmget", floors.reads_ms), ("hset", floors.writes_ms)):
                row[f"{name}_ms"], row[f"{name}_least_ms"] = statistics.median(times), min(times)
    # Thousands of claims in one exchange must not meet the time-out of a busy machine.
    patient = f"{index_url}?timeout_ms=30000" if server is not None else index_url
    await _claims(patient, folder, row)


class Times(NamedTuple):
    """Milliseconds from a request's bytes to its reply's: on the clock, and of CPU in this process,
    which other programs on the machine change less."""

    wall: float
    cpu: float


async def _timed(
    calls: LocalCalls, name: str, make: Callable[..., Any], *arguments: Any
) -> tuple[Times, bytes]:
    data = make(*arguments).SerializeToString()
    begun, begun_cpu = perf_counter(), process_time()
    reply = await calls.call(name, data)
    return Times((perf_counter() - begun) * 1e3, (process_time() - begun_cpu) * 1e3), reply


async def _claims(index_url: str, folder: Path, row: Row) -> None:
    clock = SystemClock()
    settings = load({"data_dir": str(folder / "claims"), "index_url": index_url}, environ={})
    store: KVStore = (
        ValkeyStore(index_url) if "://" in index_url else wiring.build_store(settings, clock)
    )
    shards = [
        ShardId(b"claims-%d" % (at // _SHARDS_PER_SPACE), at % _SHARDS_PER_SPACE)
        for at in range(CLAIMS)
    ]
    await store.open()
    try:
        for n in (1, 2):
            begun = perf_counter()
            answers = await store.claim(shards, Fence(1, n))
            took = perf_counter() - begun
            if not all(isinstance(answer, Claim) for answer in answers):
                raise RuntimeError("a claim failed")
            row[f"claims_{n}_ms"] = took * 1e3
        for shard in shards:
            await store.drop(shard)
    finally:
        await store.close()


def _used_memory(server: ValkeyServer | None) -> int:
    if server is None:
        return 0
    info = server.call("INFO", "memory").decode()
    facts = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    return int(facts["used_memory_dataset"])


def _put(row: Row, name: str, times: Sequence[Times]) -> None:
    row[f"{name}_ms"] = statistics.median(t.wall for t in times)
    row[f"{name}_least_ms"] = min(t.wall for t in times)
    row[f"{name}_cpu_ms"] = statistics.median(t.cpu for t in times)
