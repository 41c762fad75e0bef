from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcm.testing.servers_valkey import ValkeyCluster, ValkeyServer, valkey_cluster, valkey_server


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[ValkeyServer]:
    """A server that tests share; they leave its settings alone."""
    with valkey_server() as server:
        yield server


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[ValkeyCluster]:
    """Three servers that tests share; they leave the slots where they are."""
    with valkey_cluster() as cluster:
        yield cluster
