"""Every client test runs over both transports with both kinds of client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvcm.client import AdminClient, AsyncAdminClient, AsyncClient, Client, RetryPolicy
from tests.client.stand_in import GrpcServer, HttpServer, StandIn

QUICK = RetryPolicy(rounds_max=3, backoff_s=0.01)


class Driver:
    """Calls a client of either kind in the same way."""

    def __init__(self, client: Client | AsyncClient | AdminClient | AsyncAdminClient) -> None:
        self.client = client

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self.client, name)
        if isinstance(self.client, AsyncClient | AsyncAdminClient):
            return await method(*args, **kwargs)
        return await asyncio.to_thread(method, *args, **kwargs)

    async def write(
        self, body: Callable[[Any], None], instance_id: str, keys: Any, **kwargs: Any
    ) -> None:
        """Run ``body`` inside a write session."""
        client: Any = self.client
        if isinstance(client, AsyncClient):
            async with client.write(instance_id, keys, **kwargs) as session:
                body(session)
            return

        def run() -> None:
            with client.write(instance_id, keys, **kwargs) as session:
                body(session)

        await asyncio.to_thread(run)

    async def close(self) -> None:
        if isinstance(self.client, AsyncClient | AsyncAdminClient):
            await self.client.close()
        else:
            self.client.close()


Connect = Callable[..., Driver]
Serve = Callable[..., Any]


@pytest.fixture(params=["grpc", "http"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["sync", "async"])
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def serve(transport: str) -> Iterator[Serve]:
    """serve(stand_in) → a running server of the test's transport, with ``address``."""
    with ExitStack() as stack:

        def start(stand_in: StandIn, port: int = 0) -> GrpcServer | HttpServer:
            kind: Any = GrpcServer if transport == "grpc" else HttpServer
            server = kind(stand_in, port=port)
            stack.callback(server.stop)
            return server  # type: ignore[no-any-return]

        yield start


@pytest.fixture
async def connect(flavour: str) -> AsyncIterator[Connect]:
    """connect(addresses, **options) → a Driver; admin=True for the admin service."""
    drivers: list[Driver] = []

    def make(addresses: Any, *, admin: bool = False, **options: Any) -> Driver:
        options.setdefault("retry", QUICK)
        kinds: dict[tuple[str, bool], Any] = {
            ("sync", False): Client,
            ("async", False): AsyncClient,
            ("sync", True): AdminClient,
            ("async", True): AsyncAdminClient,
        }
        driver = Driver(kinds[flavour, admin](addresses, **options))
        drivers.append(driver)
        return driver

    yield make
    for driver in drivers:
        await driver.close()


@pytest.fixture
def manager() -> StandIn:
    return StandIn()


@pytest.fixture
def driver(manager: StandIn, serve: Serve, connect: Connect) -> Driver:
    """A client of one stand-in manager."""
    return connect(serve(manager).address)
