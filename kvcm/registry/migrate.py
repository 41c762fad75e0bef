"""Schema revisions: which one a database has, and bringing it to ours."""

from __future__ import annotations

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from kvcm.core.errors import ConfigError
from kvcm.registry.database import lock_schema, open_engine
from kvcm.registry.tables import METADATA

_ALEMBIC_LOCK = threading.Lock()
"""Alembic keeps the running migration in module globals."""


def migrations_dir() -> Path:
    """Where the migrations are: inside an installed wheel, else at the top of the checkout.

    Raises:
        ConfigError: in neither place.
    """
    here = Path(__file__).resolve().parent
    for path in (here / "migrations", here.parents[1] / "migrations"):
        if (path / "env.py").is_file():
            return path
    raise ConfigError("the registry's migrations are not installed")


def head_revision() -> str:
    """The newest schema revision this version knows."""
    return str(_scripts().get_current_head())


def current_revision(connection: Connection) -> str | None:
    """The database's schema revision; ``None`` for a database without our tables."""
    return MigrationContext.configure(connection).get_current_revision()


def ensure_schema(connection: Connection, *, auto_migrate: bool) -> None:
    """Creates the schema in an empty database, otherwise holds it against ours.

    Call it inside a write transaction; nothing is changed when that is rolled back.

    Raises:
        ConfigError: tables of unknown origin, or a schema ahead of or (without ``auto_migrate``)
            behind ours; the text gives both revisions.
    """
    lock_schema(connection)
    found, head = current_revision(connection), head_revision()
    if found == head:
        return
    if found is None:
        foreign = sorted(set(inspect(connection).get_table_names()) & set(METADATA.tables))
        if foreign:
            raise ConfigError(
                f"the registry database has tables ({', '.join(foreign)}) but no schema revision"
            )
    elif not _knows(found):
        raise ConfigError(
            f"the registry schema is at revision {found}, ahead of {head}, the newest this "
            "version of kvcm knows; run the version that made it"
        )
    elif not auto_migrate:
        raise ConfigError(
            f"the registry schema is at revision {found}, behind {head}, which this version of "
            "kvcm needs; stop all managers and run `kvcm registry migrate`"
        )
    migrate_connection(connection, "head")


def migrate_connection(connection: Connection, revision: str) -> None:
    """Moves the schema to ``revision`` ("head", "base" or a name) within the open transaction."""
    config = Config()
    config.set_main_option("script_location", str(migrations_dir()).replace("%", "%%"))
    config.attributes["connection"] = connection
    found = current_revision(connection)
    down = revision == "base" or (found is not None and _is_below(revision, found))
    with _ALEMBIC_LOCK:
        (command.downgrade if down else command.upgrade)(config, revision)


def migrate_database(url: str, revision: str = "head") -> tuple[str | None, str | None]:
    """Moves the schema of the database at ``url``; the managers using it must be stopped.

    Returns:
        The revisions before and after.

    Raises:
        ConfigError: the database is at, or was asked for, a revision this version does not know.
    """
    engine = open_engine(url)
    try:
        with engine.begin() as connection:
            lock_schema(connection)
            before = current_revision(connection)
            for name in (before, revision):
                if name not in (None, "head", "base") and not _knows(str(name)):
                    raise ConfigError(f"schema revision {name} is unknown to this version of kvcm")
            migrate_connection(connection, revision)
            return before, current_revision(connection)
    finally:
        engine.dispose()


def _scripts() -> ScriptDirectory:
    return ScriptDirectory(str(migrations_dir()))


def _knows(revision: str) -> bool:
    return any(script.revision == revision for script in _scripts().walk_revisions())


def _is_below(revision: str, than: str) -> bool:
    if revision == "head":
        return False
    below = [script.revision for script in _scripts().iterate_revisions(than, "base")]
    return revision in below[1:]
