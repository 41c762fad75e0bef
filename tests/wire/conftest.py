"""One manager process for all wire tests of a worker; each test has its own instance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from wire_harness import Instance, Server, Wire, registration, running_server, succeeded

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The shared manager. Tests must not disturb its leadership, default group or ``nfs_01``."""
    with running_server() as running:
        yield running


@pytest.fixture(params=["grpc", "http"])
def wire(request: pytest.FixtureRequest, server: Server) -> Wire:
    """The shared manager over one transport; tests run over both."""
    return Wire(server, request.param)


@pytest.fixture
def fresh_id() -> Callable[[], str]:
    """Names nobody used before."""
    return lambda: f"wire-{next(_numbers)}"


Register = Callable[..., Instance]


@pytest.fixture
def register(wire: Wire, fresh_id: Callable[[], str]) -> Register:
    """Registers an instance of its own; ``changes`` go into the registration."""

    def register_one(**changes: Any) -> Instance:
        body = registration(changes.pop("instance_id", None) or fresh_id(), **changes)
        succeeded(wire.call("RegisterInstance", body))
        return Instance(wire, body["instance_id"])

    return register_one


@pytest.fixture
def instance(register: Register) -> Instance:
    """An instance with block size 4 and specs tp0 (1000 bytes) and tp1 (500 bytes)."""
    return register()
