"""Fixtures: managers in this process."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from manager_harness import INSTANCE, Running, Start, settings_in
from stand_in_cache import StandInCache

from kvcm._pb import admin_pb2_grpc, meta_pb2_grpc
from kvcm.server.lifecycle import Manager


@pytest.fixture
def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts managers (``await start(**flags)``) and stops them at the end."""
    async with AsyncExitStack() as stack:

        async def start_one(folder: Path = tmp_path, **flags: Any) -> Running:
            caches: list[StandInCache] = []

            def build(settings: Any, clock: Any, registry: Any, store: Any, backends: Any) -> Any:
                caches.append(StandInCache(registry))
                return caches[0]

            folder.mkdir(exist_ok=True)
            manager = Manager(settings_in(folder, **flags), build_cache=build)
            await manager.start()
            stack.push_async_callback(manager.stop)
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=10))
            channels = [
                await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
                for port in (manager.ports.rpc, manager.ports.admin_rpc)
            ]
            return Running(
                manager,
                caches[0],
                http,
                meta_pb2_grpc.MetaServiceStub(channels[0]),  # type: ignore[arg-type]
                admin_pb2_grpc.AdminServiceStub(channels[1]),  # type: ignore[arg-type]
                channels,
            )

        yield start_one


@pytest.fixture
async def running(start: Start) -> Running:
    """One manager with the instance ``i`` registered."""
    manager: Running = await start()
    assert await manager.code("registerInstance", INSTANCE) == "OK"
    return manager
