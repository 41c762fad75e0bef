"""A manager's calls without a network: bytes in, bytes out, in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import workload
from benchmarks.workload import Chain, Keys
from kvcm._pb import meta_pb2 as pb
from kvcm.cache.api import WireForm
from kvcm.cache.base import CacheSettings
from kvcm.client import calls
from kvcm.core.clock import SystemClock
from kvcm.server import bootstrap, wiring
from kvcm.server.calls import Context, Endpoint, endpoints_of
from kvcm.server.callstats import CallStats
from kvcm.server.meta_service import MetaService
from kvcm.server.run import tuned_gc
from kvcm.server.settings import load


class LocalCalls:
    """The meta service's endpoints, as its listeners call them."""

    def __init__(self, endpoints: dict[str, Endpoint]) -> None:
        self._endpoints = endpoints

    async def call(self, name: str, data: bytes, form: WireForm = WireForm.PROTO) -> bytes:
        """The encoded reply of one RPC."""
        return (await self._endpoints[name].call(data, form)).body

    async def register(self) -> None:
        """The one instance; again when it is registered already."""
        request = calls.register_instance(
            workload.GROUP,
            workload.INSTANCE,
            workload.BLOCK_TOKENS,
            {workload.SPEC: workload.BLOCK_BYTES},
        ).request
        data = request.SerializeToString()
        _check(pb.RegisterInstanceResponse.FromString(await self.call("RegisterInstance", data)))

    async def lookup(self, keys: Keys) -> int:
        """Locations found for a prefix."""
        data = workload.lookup_message(keys).SerializeToString()
        reply = pb.GetCacheLocationResponse.FromString(await self.call("GetCacheLocation", data))
        _check(reply)
        return len(reply.locations)

    async def start(self, keys: Keys) -> pb.StartWriteCacheResponse:
        """A write session for these keys."""
        data = workload.start_message(keys).SerializeToString()
        reply = pb.StartWriteCacheResponse.FromString(await self.call("StartWriteCache", data))
        _check(reply)
        return reply

    async def finish(self, session: str, count: int) -> None:
        """All granted blocks are written."""
        data = workload.finish_message(session, count).SerializeToString()
        _check(pb.CommonResponse.FromString(await self.call("FinishWriteCache", data)))

    async def write(self, chain: Chain) -> None:
        """Write a chain, extent by extent."""
        for keys, before in chain.extents():
            granted = await self.start(np.concatenate((before, keys)))
            await self.finish(granted.write_session_id, len(granted.locations))


def _check(reply: Any) -> None:
    status = reply.header.status
    if status.code != pb.OK:
        raise RuntimeError(
            f"the manager answered {pb.ErrorCode.Name(status.code)}: {status.message}"
        )


@asynccontextmanager
async def local_manager(
    folder: Path, index_url: str = "memory:", *, key_count_max: int = 4_000_000
) -> AsyncIterator[tuple[wiring.Manager, LocalCalls]]:
    """A manager without listeners and background loops; nothing is registered or loaded by it.

    Args:
        folder: where everything is kept.
        index_url: as in the settings; "" is RocksDB in ``folder``.
        key_count_max: of an instance.
    """
    document = workload.bootstrap_document(str(folder / "blocks"), key_count_max)
    contents = folder / "bootstrap.json"
    contents.write_text(json.dumps(document))
    settings = load({"data_dir": str(folder / "data"), "index_url": index_url}, environ={})
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        stack.enter_context(tuned_gc())
        registry = wiring.build_registry(settings, clock)
        stack.push_async_callback(registry.close)
        await registry.open()
        created = await registry.bootstrap(*bootstrap.read(contents))
        store = wiring.build_store(settings, clock)
        stack.push_async_callback(store.close)
        await store.open()
        backends = wiring.build_backends(settings, clock)
        stack.push_async_callback(backends.close)
        registry.subscribe(backends.follow)
        await backends.open(registry.view, new=created)
        cache = wiring.Manager(
            *(registry, store, backends, clock),
            CacheSettings(read_cache_bytes=settings.cache.read_cache_bytes),
        )
        stack.push_async_callback(cache.close)
        await cache.open()
        meta = MetaService(registry, cache, backends.available)
        stack.push_async_callback(meta.drained)
        context = Context(clock, CallStats(), lambda: None)
        service = pb.DESCRIPTOR.services_by_name["MetaService"]
        yield cache, LocalCalls({e.name: e for e in endpoints_of(context, service, pb, meta)})


@asynccontextmanager
async def local_calls(folder: Path, index_url: str = "memory:") -> AsyncIterator[LocalCalls]:
    """As ``local_manager``, its one instance registered and loaded."""
    async with local_manager(folder, index_url) as (cache, local):
        await local.register()
        await cache.index.by_id[workload.INSTANCE].load()
        yield local
