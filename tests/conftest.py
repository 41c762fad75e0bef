"""Settings that hold for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from kvcm.testing.servers_postgres import PostgresServer, postgres_server

# On a shared, busy machine the time of one example says nothing about the code.
settings.register_profile(
    "kvcm", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("kvcm")


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server of this test process."""
    with postgres_server() as server:
        yield server
