"""Settings that hold for every test."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from kvcm.testing.servers_postgres import PostgresServer, postgres_server

MEMORY = "/dev/shm"
MEMORY_FREE_MIN_BYTES = 2 << 30


def use_memory() -> None:
    """Puts temporary files into memory where there is room, unless TMPDIR says where they go.

    Every instance has 256 folders, which such a file system makes and removes ten times faster;
    and no test asks what a disk keeps when the power fails.
    """
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.R_OK | os.W_OK | os.X_OK):
        return
    room = os.statvfs(MEMORY)
    # Servers of tests may be copied to their folder, to be run there.
    if room.f_bavail * room.f_frsize < MEMORY_FREE_MIN_BYTES or room.f_flag & os.ST_NOEXEC:
        return
    # For the processes that tests start, too.
    os.environ["TMPDIR"] = tempfile.tempdir = MEMORY


use_memory()

# On a shared, busy machine the time of one example says nothing about the code.
settings.register_profile(
    "kvcm", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("kvcm")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow first: whoever runs tests side by side has the quick ones to share in the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server of this test process."""
    with postgres_server() as server:
        yield server
