from __future__ import annotations

import pytest
from registry_samples import NewUrl, OpenRegistry, instance
from sqlalchemy import text

from kvcm.core.errors import ConfigError
from kvcm.core.types import AccountRole
from kvcm.registry import database, migrate
from kvcm.registry.copy import copy_registry
from kvcm.registry.registry import Registry


@pytest.fixture
async def filled(registry: Registry) -> Registry:
    await registry.register_instance(instance())
    await registry.register_instance(instance("gone"))
    await registry.close_instance("gone")
    await registry.add_account("ops", "a password", AccountRole.ADMIN)
    for _ in range(5):
        await registry.next_epoch()
    await registry.close()
    return registry


async def test_a_copy_is_the_same_registry_on_either_database(
    filled: Registry,
    db_url: str,
    postgres_urls: NewUrl,
    sqlite_url: str,
    open_registry: OpenRegistry,
) -> None:
    between = postgres_urls()
    counts = copy_registry(db_url, between)
    assert counts["instances"] == 2
    assert copy_registry(between, sqlite_url) == counts
    for url in (between, sqlite_url):
        copied = await open_registry(url)
        # Equal in everything, secret and closing instances included.
        assert copied.view == filled.view
        assert await copied.next_epoch() == 6
        assert await copied.verify_password("ops", "a password") is not None
        fresh = await copied.register_instance(instance("new"))
        assert fresh.uid not in {i.uid for i in filled.view.instances.values()}
        await copied.close()


async def test_a_registry_is_never_copied_over_another(
    filled: Registry, db_url: str, new_url: NewUrl, open_registry: OpenRegistry
) -> None:
    other = await open_registry(new_url())
    await other.close()
    before = other.view
    with pytest.raises(ConfigError, match="has a registry already"):
        copy_registry(db_url, other._url)
    again = await open_registry(other._url)
    assert again.view.secret == before.secret


async def test_a_source_that_is_not_ours_is_refused_and_the_target_left_alone(
    filled: Registry, db_url: str, new_url: NewUrl
) -> None:
    empty, target = new_url(), new_url()
    with pytest.raises(ConfigError, match="is empty or not at revision"):
        copy_registry(empty, target)
    engine = database.open_engine(db_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(ConfigError, match="is empty or not at revision"):
        copy_registry(db_url, target)
    assert migrate.schema_status(target).state is migrate.SchemaState.EMPTY
