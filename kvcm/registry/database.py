"""Opening the registry's database. The one place that knows a dialect from another."""

from __future__ import annotations

import os
import re
import socket
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError

from kvcm.core.errors import ConfigError

_BUSY_TIMEOUT_MS = 10_000
_CONNECT_TIMEOUT_S = 5
_STATEMENT_TIMEOUT_MS = 10_000
"""Waiting for another manager's lock included."""
_IDLE_TIMEOUT_MS = 15_000
"""A manager that stands still within a transaction loses it, and the others its locks."""
_TRANSACTION_TIMEOUT_S = 15.0
"""What the server cannot enforce when it is the one that stands still."""
_SCHEMA_LOCK_KEY = 0x6B76636D
"""Any fixed number; names our advisory lock where the database has such locks."""
_DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}
_NOT_NOW = re.compile(r"starting up|shutting down|recovery|not yet accepting|too many|slots are")
_SECRET_QUERY = re.compile("password|passwd|secret|token", re.IGNORECASE)


def parse_url(url: str) -> URL:
    """The registry URL, with the driver we ship filled in.

    Raises:
        ConfigError: not the URL of a database that we support. The text never repeats a password.
    """
    try:
        parsed = make_url(re.sub(r"\Apostgres://", "postgresql://", url))
    except (ArgumentError, ValueError):
        # Also a password that is not percent-encoded: its end reads as a port.
        raise ConfigError(
            "registry_url is not a database URL such as sqlite:///path/registry.db or "
            "postgresql://user:password@host/database, with the password percent-encoded"
        ) from None
    backend = parsed.get_backend_name()
    driver = _DRIVERS.get(backend)
    if driver is None or parsed.drivername not in (backend, driver):
        raise ConfigError(
            f"registry_url: {parsed.drivername!r} is no database that kvcm supports; "
            "it knows sqlite:///… and postgresql://…"
        )
    return parsed.set(drivername=driver)


def with_password(url: str, password: str) -> str:
    """The URL with ``password`` in it, unless it has one.

    Raises:
        ConfigError: not a database URL.
    """
    parsed = parse_url(url)
    if parsed.password is None and not is_embedded(url):
        parsed = parsed.set(password=password)
    return parsed.render_as_string(hide_password=False)


def is_embedded(url: str) -> bool:
    """Whether the database is a file of this machine (SQLite)."""
    return parse_url(url).get_backend_name() == "sqlite"


def embedded_path(url: str) -> Path | None:
    """The file of an SQLite database; None for any other."""
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        return None
    return Path(str(parsed.database))


def shown(url: str) -> str:
    """The URL with its password hidden."""
    parsed = parse_url(url)
    hidden = {key: "***" for key in parsed.query if _SECRET_QUERY.search(key)}
    return parsed.update_query_dict(hidden).render_as_string(hide_password=True)


def reason(error: SQLAlchemyError) -> str:
    """What went wrong in the database's own words, without a statement, values or a password."""
    if not isinstance(error, DBAPIError) or error.orig is None:
        return type(error).__name__
    # The details of PostgreSQL's errors repeat whole rows.
    primary = getattr(getattr(error.orig, "diag", None), "message_primary", None)
    return " ".join((primary or str(error.orig)).split())


def is_away(error: SQLAlchemyError) -> bool:
    """Whether the server could not be talked to; what it refused itself is not that.

    The library gives no code for a connection that failed. A server says FATAL when it refuses,
    also while it starts or stops: then it will take the connection later.
    """
    if not isinstance(error, OperationalError) or error.orig is None:
        return False
    if type(error.orig).__module__.partition(".")[0] == "sqlite3":
        return False
    state = getattr(error.orig, "sqlstate", None)
    if state is not None:
        return str(state)[:2] in ("08", "53", "57")
    text = str(error.orig)
    return "FATAL" not in text or _NOT_NOW.search(text) is not None


def open_engine(url: str) -> Engine:
    """An engine for ``url``; nothing is connected yet, but an SQLite file is made.

    The file is readable by its owner only: it holds password hashes and the session secret.

    Raises:
        ConfigError: unknown database, missing driver, or an SQLite path that cannot be opened.
    """
    parsed = parse_url(url)
    embedded = parsed.get_backend_name() == "sqlite"
    try:
        engine = create_engine(
            parsed, hide_parameters=True, **({} if embedded else _postgres_options(parsed))
        )
    except ImportError:
        # psycopg without its library is an ImportError too.
        raise ConfigError(
            "registry_url: the driver psycopg is missing; pip install 'kvcm[postgres]' brings it"
        ) from None
    if embedded:
        _prepare_sqlite(engine, parsed)
    return engine


@contextmanager
def transaction(engine: Engine, *, write: bool) -> Iterator[Connection]:
    """A connection in a transaction, rolled back at the end unless it was committed.

    A reading one sees one moment and takes no lock. One that lasts longer than the time-out is cut
    off, also when the server stands still: then the statement under way, or the next, fails.

    Raises:
        SQLAlchemyError: no connection.
    """
    with ExitStack() as stack:
        connection = stack.enter_context(_begin(engine, write))
        stack.enter_context(_cut_off_late(connection))
        if not _still_there(connection):
            stack.close()
            connection = stack.enter_context(_begin(engine, write))
            stack.enter_context(_cut_off_late(connection))
        yield connection


def is_new(connection: Connection) -> bool:
    """Whether this is the first transaction since it was connected: what was known of the database
    before may be wrong, since a failed-over server can have lost its latest commits."""
    first = "kvcm_known" not in connection.info
    connection.info["kvcm_known"] = True
    return first


def lock_schema(connection: Connection) -> None:
    """Keeps two starting managers from creating or migrating the schema at once.

    Held to the end of the transaction. SQLite's write transactions exclude each other anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _SCHEMA_LOCK_KEY})


def _still_there(connection: Connection) -> bool:
    """False when it comes from the pool and died there, with all others, or with its server."""
    if connection.dialect.name != "postgresql":
        return True
    try:
        connection.execute(text("SELECT 1"))
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
        return False
    return True


def _begin(engine: Engine, write: bool) -> Connection:
    connection = engine.connect()
    if write:
        return connection
    if engine.dialect.name == "postgresql":
        return connection.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )
    return connection.execution_options(kvcm_read=True)


@contextmanager
def _cut_off_late(connection: Connection) -> Iterator[None]:
    """Shuts the connection's socket down when the time is over, which ends any wait for it."""
    if connection.dialect.name != "postgresql":
        yield
        return
    driver: Any = connection.connection.dbapi_connection
    # A duplicate: the number of a socket that was closed meanwhile may be another's.
    with socket.socket(fileno=os.dup(driver.fileno())) as duplicate:
        timer = threading.Timer(_TRANSACTION_TIMEOUT_S, _shut_down, (duplicate,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _shut_down(connected: socket.socket) -> None:
    try:
        connected.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # It is closed already.


def _postgres_options(url: URL) -> dict[str, Any]:
    """Engine options; what the URL says itself counts for more."""
    timeouts = {
        "statement_timeout": _STATEMENT_TIMEOUT_MS,
        "idle_in_transaction_session_timeout": _IDLE_TIMEOUT_MS,
    }
    told = url.query.get("options", "")
    options = [f"-c {name}={value}" for name, value in timeouts.items()]
    arguments: dict[str, Any] = {
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "application_name": "kvcm",
        "keepalives_idle": 10,
    }
    arguments = {key: value for key, value in arguments.items() if key not in url.query}
    arguments["options"] = " ".join([*options, told if isinstance(told, str) else " ".join(told)])
    # Prepared statements get in the way of connection poolers, and changes are rare.
    arguments["prepare_threshold"] = None
    return {"connect_args": arguments, "pool_size": 1, "max_overflow": 1}


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
