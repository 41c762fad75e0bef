from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from argon2 import PasswordHasher
from registry_samples import NewUrl, OpenRegistry, group, storage

from kvcm.registry import accounts
from kvcm.registry.registry import Registry
from kvcm.testing.clock import SimClock
from kvcm.testing.servers_postgres import PostgresServer


@pytest.fixture(autouse=True)
def quick_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same hash with the least work."""
    hasher = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
    monkeypatch.setattr(accounts, "_HASHER", hasher)


@pytest.fixture
def postgres_urls(postgres: PostgresServer) -> Iterator[NewUrl]:
    """Makes URLs of empty databases."""
    taken: list[str] = []

    def new_url() -> str:
        taken.append(postgres.take_database())
        return postgres.url(taken[-1])

    yield new_url
    for name in taken:
        postgres.give_back(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> NewUrl:
    """Makes URLs of empty databases; everything that asks for it runs on both."""
    if request.param == "postgresql":
        urls: NewUrl = request.getfixturevalue("postgres_urls")
        return urls
    numbers = iter(range(100))
    return lambda: f"sqlite:///{tmp_path}/registry{next(numbers)}.db"


@pytest.fixture
def db_url(new_url: NewUrl) -> str:
    return new_url()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/registry.db"


@pytest.fixture
async def open_registry(db_url: str) -> AsyncIterator[OpenRegistry]:
    """Opens registries, by default on the same database, and closes them at the end."""
    opened: list[Registry] = []

    async def open_one(url: str = db_url, **options: Any) -> Registry:
        registry = Registry(url, options.pop("clock", None) or SimClock(), **options)
        opened.append(registry)
        await registry.open()
        return registry

    yield open_one
    for registry in opened:
        await registry.close()


@pytest.fixture
async def registry(open_registry: OpenRegistry) -> Registry:
    """An open registry with storage ``nfs_01`` and group ``team``."""
    opened = await open_registry()
    await opened.put_storage(storage(), expect_new=True)
    await opened.create_group(group())
    return opened
