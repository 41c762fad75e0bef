from __future__ import annotations

import os
import stat
import traceback
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from registry_samples import OpenRegistry, group, instance, storage
from sqlalchemy import inspect, text

from kvcm.core.errors import ConfigError, CorruptRecord, Unavailable
from kvcm.core.types import AccountRole
from kvcm.registry import database, migrate
from kvcm.registry.registry import Registry
from kvcm.registry.tables import METADATA
from kvcm.testing.clock import SimClock


def run(url: str, statement: str) -> None:
    engine = database.open_engine(url)
    with engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()


def revision_of(url: str) -> str | None:
    engine = database.open_engine(url)
    try:
        with engine.connect() as connection:
            return migrate.current_revision(connection)
    finally:
        engine.dispose()


async def test_an_empty_database_gets_the_schema_of_the_tables(
    registry: Registry, db_url: str
) -> None:
    assert revision_of(db_url) == migrate.head_revision()
    engine = database.open_engine(db_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []
    engine.dispose()


async def test_migrations_go_down_and_up_with_data(
    db_url: str, open_registry: OpenRegistry
) -> None:
    first = await open_registry()
    await first.put_storage(storage(), expect_new=True)
    await first.create_group(group())
    await first.register_instance(instance())
    snapshot = await first.export_snapshot()
    await first.close()
    head = migrate.head_revision()
    assert migrate.migrate_database(db_url, "base") == (head, None)
    engine = database.open_engine(db_url)
    assert not set(METADATA.tables) & set(inspect(engine).get_table_names())
    engine.dispose()
    assert migrate.migrate_database(db_url) == (None, head)
    assert migrate.migrate_database(db_url) == (head, head)
    again = await open_registry()
    assert not again.view.groups
    await again.load_snapshot(snapshot)
    assert again.view.instances == first.view.instances


def rows_of(url: str) -> dict[str, int]:
    """Number of rows of every table but the migrations' own."""
    engine = database.open_engine(url)
    try:
        with engine.connect() as connection:
            names = set(inspect(connection).get_table_names()) - {"alembic_version"}
            return {
                name: connection.execute(text(f'SELECT count(*) FROM "{name}"')).scalar_one()
                for name in names
            }
    finally:
        engine.dispose()


async def test_each_migration_goes_one_step_down_and_up_and_keeps_the_rows_it_can(
    db_url: str, open_registry: OpenRegistry
) -> None:
    """Every revision, also those to come, with something in every table."""
    first = await open_registry()
    await first.put_storage(storage(), expect_new=True)
    await first.create_group(group())
    await first.register_instance(instance())
    await first.add_account("alice", "secret", AccountRole.ADMIN)
    await first.close()
    full = rows_of(db_url)
    assert all(full.values()), f"a table without a row tests nothing: {full}"
    script = ScriptDirectory(str(migrate.migrations_dir()))
    revisions = [step.revision for step in script.walk_revisions()]
    assert revisions[0] == migrate.head_revision()
    for at, revision in enumerate(revisions):
        before = rows_of(db_url)
        below = revisions[at + 1] if at + 1 < len(revisions) else "base"
        migrate.migrate_database(db_url, below)
        down = rows_of(db_url)
        migrate.migrate_database(db_url, revision)
        up = rows_of(db_url)
        assert up.keys() == before.keys()
        kept = down.keys() & before.keys()
        assert {name: up[name] for name in kept} == {name: before[name] for name in kept}
        migrate.migrate_database(db_url, below)
    assert rows_of(db_url) == {}
    migrate.migrate_database(db_url)
    await open_registry()


async def test_a_schema_ahead_of_ours_is_refused_with_both_revisions(
    registry: Registry, db_url: str
) -> None:
    await registry.close()
    run(db_url, "UPDATE alembic_version SET version_num = '9999'")
    for auto_migrate in (True, False):
        later = Registry(db_url, SimClock(), auto_migrate=auto_migrate)
        with pytest.raises(ConfigError) as caught:
            await later.open()
        assert "9999" in str(caught.value)
        assert migrate.head_revision() in str(caught.value)
    with pytest.raises(ConfigError, match="9999"):
        migrate.migrate_database(db_url)
    assert revision_of(db_url) == "9999"


async def test_a_schema_behind_ours_is_upgraded_or_refused_with_advice(
    registry: Registry, db_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await registry.register_instance(instance())
    await registry.close()
    later = tmp_path / "migrations"
    (later / "versions").mkdir(parents=True)
    for source in ("env.py", "script.py.mako", "versions/0001_registry.py"):
        (later / source).write_text((migrate.migrations_dir() / source).read_text())
    (later / "versions" / "0002_later.py").write_text(
        "import sqlalchemy as sa\nfrom alembic import op\n"
        "revision, down_revision = '0002', '0001'\n"
        "def upgrade():\n    op.add_column('storages', sa.Column('note', sa.Text()))\n"
        "def downgrade():\n    op.drop_column('storages', 'note')\n"
    )
    monkeypatch.setattr(migrate, "migrations_dir", lambda: later)
    refusing = Registry(db_url, SimClock(), auto_migrate=False)
    with pytest.raises(ConfigError, match=r"0001, behind 0002.*`kvcm registry migrate`"):
        await refusing.open()
    assert revision_of(db_url) == "0001"
    upgrading = Registry(db_url, SimClock(), auto_migrate=True)
    await upgrading.open()
    assert upgrading.view.instances == registry.view.instances
    await upgrading.close()
    assert revision_of(db_url) == "0002"
    assert migrate.migrate_database(db_url, "0001") == ("0002", "0001")
    again = Registry(db_url, SimClock(), auto_migrate=True)
    await again.open()
    assert again.view.instances == registry.view.instances
    await again.close()


async def test_a_failing_migration_leaves_the_database_as_it_was(
    registry: Registry, db_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await registry.close()
    later = tmp_path / "migrations"
    (later / "versions").mkdir(parents=True)
    for source in ("env.py", "script.py.mako", "versions/0001_registry.py"):
        (later / source).write_text((migrate.migrations_dir() / source).read_text())
    (later / "versions" / "0002_bad.py").write_text(
        "import sqlalchemy as sa\nfrom alembic import op\n"
        "revision, down_revision = '0002', '0001'\n"
        "def upgrade():\n    op.drop_table('storages')\n    op.execute('SELECT nonsense')\n"
    )
    monkeypatch.setattr(migrate, "migrations_dir", lambda: later)
    failing = Registry(db_url, SimClock(), auto_migrate=True)
    with pytest.raises(ConfigError, match="nonsense"):
        await failing.open()
    monkeypatch.undo()
    again = Registry(db_url, SimClock())
    await again.open()
    assert again.view.storages == registry.view.storages
    await again.close()


async def test_tables_of_unknown_origin_are_left_alone(db_url: str) -> None:
    run(db_url, "CREATE TABLE accounts (x INTEGER)")
    registry = Registry(db_url, SimClock())
    with pytest.raises(ConfigError, match="accounts"):
        await registry.open()
    engine = database.open_engine(db_url)
    assert inspect(engine).get_table_names() == ["accounts"]
    engine.dispose()


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("no url", "database URL"),
        ("nosuchdb://x", "nosuchdb"),
        ("sqlite:////nowhere/at/all/r.db", "/nowhere/at/all/r.db"),
    ],
)
async def test_a_database_that_cannot_be_opened_is_a_clear_error(url: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        await Registry(url, SimClock()).open()


async def test_a_file_that_is_no_database_is_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "registry.db"
    file.write_text("this is a text of some length and not a database at all" * 100)
    with pytest.raises(ConfigError, match="not a database"):
        await Registry(f"sqlite:///{file}", SimClock()).open()


async def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'psycopg'", name="psycopg")

    monkeypatch.setattr(database, "create_engine", missing)
    url = "postgresql://kvcm:hidden@127.0.0.1/kvcm"
    with pytest.raises(ConfigError, match=r"kvcm\[postgres\]") as caught:
        database.open_engine(url)
    assert "hidden" not in str(caught.value) + database.shown(url)
    assert database.parse_url(url).drivername == "postgresql+psycopg"


async def test_a_row_that_does_not_parse_is_named(registry: Registry, db_url: str) -> None:
    await registry.close()
    run(db_url, "UPDATE storages SET body = '{}'")
    with pytest.raises(CorruptRecord, match=r"storages.*'nfs_01'"):
        await Registry(db_url, SimClock()).open()


REFUSE = {
    "sqlite": (
        "CREATE TRIGGER no_more BEFORE INSERT ON instances "
        "BEGIN SELECT RAISE(ABORT, 'disk is full'); END",
        "DROP TRIGGER no_more",
    ),
    "postgresql": (
        "CREATE FUNCTION no_more() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE EXCEPTION 'disk is full' USING ERRCODE = 'check_violation', DETAIL = NEW.body; "
        "END $$; CREATE TRIGGER no_more BEFORE INSERT ON instances "
        "FOR EACH ROW EXECUTE FUNCTION no_more()",
        "DROP TRIGGER no_more ON instances",
    ),
}


async def test_a_read_only_database_refuses_changes_and_keeps_its_view(
    registry: Registry, db_url: str
) -> None:
    refuse, allow = REFUSE[database.parse_url(db_url).get_backend_name()]
    run(db_url, refuse)
    before = registry.view
    with pytest.raises(Exception, match="disk is full") as caught:
        await registry.register_instance(instance())
    assert not isinstance(caught.value, Unavailable), "a constraint is no outage"
    everything = "".join(traceback.format_exception(caught.value))
    assert "tp0" not in everything, "statement values stay out of messages"
    assert registry.view is before
    run(db_url, allow)
    await registry.register_instance(instance())
    assert set(registry.view.instances) == {"model-a"}


async def test_the_database_file_is_for_its_owner_only(sqlite_url: str) -> None:
    database.open_engine(sqlite_url).dispose()
    mode = os.stat(sqlite_url.removeprefix("sqlite:///")).st_mode
    assert stat.S_IMODE(mode) == 0o600


async def test_sqlite_is_opened_for_durability(sqlite_url: str) -> None:
    engine = database.open_engine(sqlite_url)
    with engine.connect() as connection:
        settings = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    engine.dispose()
    assert settings == {
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "busy_timeout": 10_000,
    }
