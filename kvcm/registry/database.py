"""Opening the registry's database. The one place that knows a dialect from another."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from kvcm.core.errors import ConfigError

_BUSY_TIMEOUT_MS = 10_000
_SCHEMA_LOCK_KEY = 0x6B76636D
"""Any fixed number; names our advisory lock where the database has such locks."""


def parse_url(url: str) -> URL:
    """The registry URL, with the driver we ship filled in.

    Raises:
        ConfigError: not a database URL. The text never repeats a password.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigError(
            "registry_url is not a database URL such as sqlite:///path/registry.db"
        ) from None
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    return parsed


def is_embedded(url: str) -> bool:
    """Whether the database is a file of this machine (SQLite)."""
    return parse_url(url).get_backend_name() == "sqlite"


def shown(url: str) -> str:
    """The URL with its password hidden."""
    return parse_url(url).render_as_string(hide_password=True)


def open_engine(url: str) -> Engine:
    """An engine for ``url``; nothing is connected yet, but an SQLite file is made.

    The file is readable by its owner only: it holds password hashes and the session secret.

    Raises:
        ConfigError: unknown or missing driver, or an SQLite path that cannot be opened.
    """
    parsed = parse_url(url)
    try:
        engine = create_engine(parsed)
    except NoSuchModuleError:
        raise ConfigError(f"registry_url: {parsed.drivername!r} is no known database") from None
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"registry_url: the driver {error.name!r} is missing; install kvcm[postgres]"
        ) from None
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine, parsed)
    return engine


def begin_read(connection: Connection) -> Connection:
    """Marks ``connection`` so that its next transaction takes no write lock where that is told."""
    return connection.execution_options(kvcm_read=True)


def lock_schema(connection: Connection) -> None:
    """Keeps two starting managers from creating or migrating the schema at once.

    Held to the end of the transaction. SQLite's write transactions exclude each other anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _SCHEMA_LOCK_KEY})


def _prepare_sqlite(engine: Engine, url: URL) -> None:
    path = url.database
    if path and path != ":memory:" and not path.startswith("file:") and not os.path.exists(path):
        try:
            _make_sqlite_file(Path(path))
        except OSError as error:
            raise ConfigError(f"registry_url: cannot make {path}: {error.strerror}") from None

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        # Left to itself the driver begins at the first write, after what a rule has read, and a
        # deferred transaction that writes late fails at once when another writer was quicker.
        read = connection.get_execution_options().get("kvcm_read", False)
        connection.exec_driver_sql("BEGIN" if read else "BEGIN IMMEDIATE")


def _make_sqlite_file(path: Path) -> None:
    """Makes an empty database for its owner's eyes, already in WAL mode; an existing one stays.

    It is made beside and linked into place: two managers that switch one file to WAL at the same
    time disturb each other, and closing a file of our own would drop this process's SQLite locks.
    """
    handle, made = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    try:
        connection = sqlite3.connect(made)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.close()
        os.link(made, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(made)
