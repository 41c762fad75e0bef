from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvcm.testing import servers_postgres
from kvcm.testing.eventually import eventually_sync
from kvcm.testing.servers_postgres import PostgresServer, postgres_server

OWNER = """
import sys
from kvcm.testing.servers_postgres import PostgresServer
server = PostgresServer()
server.start()
print(server._process.pid, server._home, flush=True)
sys.stdin.read()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_nothing_is_left_at_the_end() -> None:
    with postgres_server() as server:
        pids = server._pids()
        home = server._home
        assert server.execute("SELECT 1") == [(1,)]
        if os.getuid() == 0:
            assert home.stat().st_uid != 0
    assert not any(map(is_running, pids))
    assert not home.exists()


def test_the_server_ends_with_a_process_that_is_killed() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid, home = owner.stdout.readline().split()
    assert is_running(int(pid))
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    eventually_sync(lambda: not is_running(int(pid)))
    subprocess.run(["rm", "-rf", home], check=True)


def test_a_database_given_back_is_empty_for_its_next_user(postgres: PostgresServer) -> None:
    name = postgres.take_database()
    postgres.execute("CREATE TABLE left_over (i int)", name)
    postgres.give_back(name)
    assert postgres.take_database() == name
    tables = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
    assert postgres.execute(tables, name) == [(0,)]
    postgres.give_back(name)


@pytest.mark.skipif(os.getuid() != 0, reason="only root runs it as another user")
def test_root_may_have_the_programs_where_nobody_else_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers_postgres, "_open_to_all", lambda folder: False)
    with postgres_server() as server:
        assert server._bin.is_relative_to(server._home)
        assert server.execute("SELECT 1") == [(1,)]
