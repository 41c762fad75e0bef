"""Schema revisions: which one a database has, and bringing it to ours."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect
from sqlalchemy.exc import SQLAlchemyError

from kvcm.core.errors import ConfigError
from kvcm.registry.database import embedded_path, lock_schema, open_engine, reason, shown
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
        _refuse_foreign(connection)
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

    Of several that run at once each waits for the one before, and finds its work done.

    Returns:
        The revisions before and after.

    Raises:
        ConfigError: the database cannot be opened, is at or was asked for a revision this version
            does not know, or has tables of unknown origin. Nothing is changed then.
    """
    with _opened(url) as connection:
        lock_schema(connection)
        before = current_revision(connection)
        for name in (before, revision):
            if name not in (None, "head", "base") and not _knows(str(name)):
                raise ConfigError(f"schema revision {name} is unknown to this version of kvcm")
        if before is None and revision != "base":
            _refuse_foreign(connection)
        migrate_connection(connection, revision)
        after = current_revision(connection)
        connection.commit()
        return before, after


class SchemaState(Enum):
    """How a database's schema stands to ours."""

    EMPTY = "empty"
    CURRENT = "current"
    BEHIND = "behind"
    AHEAD = "ahead"


class SchemaStatus(NamedTuple):
    """Revision of a database (None when it has no tables of ours), and the newest one we know."""

    state: SchemaState
    revision: str | None
    head: str


def schema_status(url: str) -> SchemaStatus:
    """Looks, and changes nothing.

    Raises:
        ConfigError: the database cannot be opened, or has tables of unknown origin.
    """
    path = embedded_path(url)
    head = head_revision()
    if path is not None and not path.exists():
        return SchemaStatus(SchemaState.EMPTY, None, head)
    with _opened(url) as connection:
        found = current_revision(connection)
        if found is None:
            _refuse_foreign(connection)
            return SchemaStatus(SchemaState.EMPTY, None, head)
        if found == head:
            return SchemaStatus(SchemaState.CURRENT, found, head)
        return SchemaStatus(SchemaState.BEHIND if _knows(found) else SchemaState.AHEAD, found, head)


@contextmanager
def _opened(url: str) -> Iterator[Connection]:
    engine = open_engine(url)
    try:
        with engine.connect() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise ConfigError(f"the registry at {shown(url)}: {reason(error)}") from error
    finally:
        engine.dispose()


def _refuse_foreign(connection: Connection) -> None:
    foreign = sorted(set(inspect(connection).get_table_names()) & set(METADATA.tables))
    if foreign:
        raise ConfigError(
            f"the registry database has tables ({', '.join(foreign)}) but no schema revision"
        )


def _scripts() -> ScriptDirectory:
    return ScriptDirectory(str(migrations_dir()))


def _knows(revision: str) -> bool:
    return any(script.revision == revision for script in _scripts().walk_revisions())


def _is_below(revision: str, than: str) -> bool:
    if revision == "head":
        return False
    below = [script.revision for script in _scripts().iterate_revisions(than, "base")]
    return revision in below[1:]
