"""A manager's calls against an index store, in process: what a cold cache and writes cost."""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import machine
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
_WRITES = 15
_SHARDS_PER_SPACE = 64


def measure(index_url: str, keys: int, extent: int, say: Callable[[str], None]) -> None:
    """Measure and tell.

    Args:
        index_url: as in the settings; "" starts a Valkey of its own on the other core.
        keys: keys in the index.
        extent: blocks per StartWrite of what is there.
    """
    if index_url.startswith("memory:"):
        raise ValueError("memory: forgets what a second manager would look up")
    with ExitStack() as stack:
        server: ValkeyServer | None = None
        if not index_url:
            machine.pin(machine.LOADER_CPU)
            server = stack.enter_context(valkey_server("io-threads 1"))
            index_url = server.url
        machine.pin(machine.SERVER_CPU)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcm-bench-")))
        asyncio.run(_measure(folder, index_url, server, Chains(keys, extent, (SIZE,)), say))


async def _measure(
    folder: Path,
    index_url: str,
    server: ValkeyServer | None,
    chains: Chains,
    say: Callable[[str], None],
) -> None:
    before = _used_memory(server)
    async with local_calls(folder, index_url) as calls:
        started = perf_counter()
        for chain in chains.all():
            await calls.write(chain)
        rate = chains.total / (perf_counter() - started)
        say(f"{chains.total:,} keys, {chains.extent} a StartWrite, written at {rate:,.0f} keys/s")
        if server is not None:
            say(f"memory in Valkey: {(_used_memory(server) - before) / chains.total:.1f} bytes/key")
    # Another manager on the same records: nothing is cached.
    async with local_calls(folder, index_url) as calls:
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 50, 1_000)
        share = chains.by_size[SIZE]
        for state in ("cold", "warm"):
            lookups = []
            for chain in share:
                took, data = await _timed(calls, "GetCacheLocation", lookup_message, chain.keys)
                if len(pb.GetCacheLocationResponse.FromString(data).locations) < SIZE:
                    raise RuntimeError("a key was not found")
                lookups.append(took)
            say(f"lookup of {SIZE:,} keys, {state}: {_shown(lookups)}")
        starts, finishes = [], []
        for _ in range(_WRITES):
            fresh = chains.new_keys(SIZE)
            took, data = await _timed(calls, "StartWriteCache", start_message, fresh)
            starts.append(took)
            session = pb.StartWriteCacheResponse.FromString(data).write_session_id
            took, _ = await _timed(calls, "FinishWriteCache", finish_message, session, SIZE)
            finishes.append(took)
        say(f"start of {SIZE:,} keys: {_shown(starts)}")
        say(f"finish of {SIZE:,} keys: {_shown(finishes)}")
    await _claims(index_url, folder, say)


async def _timed(
    calls: LocalCalls, name: str, make: Callable[..., Any], *arguments: Any
) -> tuple[float, bytes]:
    """Milliseconds from the request's bytes to the reply's, and the reply."""
    data = make(*arguments).SerializeToString()
    begun = perf_counter()
    reply = await calls.call(name, data)
    return (perf_counter() - begun) * 1e3, reply


async def _claims(index_url: str, folder: Path, say: Callable[[str], None]) -> None:
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
            say(f"{CLAIMS:,} claims, {'new' if n == 1 else 'again'}: {took * 1e3:.0f} ms")
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


def _shown(times_ms: Sequence[float]) -> str:
    return f"median {statistics.median(times_ms):.1f} ms, least {min(times_ms):.1f} ms"
