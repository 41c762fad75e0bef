"""What only a database server does: it ends, hangs, comes back, asks for a password."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import AsyncIterator, Iterator

import pytest
from registry_samples import NewUrl, group, storage
from sqlalchemy import Connection, event, select

from kvcm.core.clock import SystemClock
from kvcm.core.errors import ConfigError, NotReady, OutcomeUnknown, Unavailable
from kvcm.registry import database
from kvcm.registry.registry import Registry
from kvcm.registry.tables import STATE
from kvcm.testing.clock import SimClock
from kvcm.testing.eventually import eventually
from kvcm.testing.servers_postgres import PASSWORD, PostgresServer, postgres_server

SHORT_S = 0.5


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """One of our own: it is stopped, killed and paused."""
    with postgres_server() as made:
        yield made


@pytest.fixture
def url(server: PostgresServer) -> Iterator[str]:
    name = server.take_database()
    yield server.url(name)
    server.give_back(name)


@pytest.fixture
async def registry(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Registry]:
    opened = Registry(url, SystemClock())
    await opened.open()
    await opened.put_storage(storage(), expect_new=True)
    # Not before: making the tables takes longer on a busy machine.
    monkeypatch.setattr(database, "_TRANSACTION_TIMEOUT_S", SHORT_S)
    yield opened
    await opened.close()


async def test_a_restarted_server_is_used_again_without_an_error(
    server: PostgresServer, registry: Registry
) -> None:
    for end in (server.stop, server.kill):
        end()
        server.start()
        name = f"after-{end.__name__}"
        await registry.put_storage(storage(name), expect_new=True)
        assert name in (await registry.refresh()).storages


async def test_changes_are_unavailable_during_an_outage_and_the_view_stays(
    server: PostgresServer, registry: Registry
) -> None:
    server.stop()
    try:
        view = registry.view
        with pytest.raises(Unavailable, match="registry database"):
            await registry.put_storage(storage("new"), expect_new=True)
        with pytest.raises(Unavailable):
            await registry.next_epoch()
        with pytest.raises(Unavailable):
            await registry.refresh()
        assert registry.view is view
    finally:
        server.start()
    await registry.put_storage(storage("new"), expect_new=True)
    assert set(registry.view.storages) == {"nfs_01", "new"}


async def test_a_server_that_stands_still_is_unavailable_within_the_time_out(
    server: PostgresServer, registry: Registry
) -> None:
    loop = asyncio.get_running_loop()
    server.pause()
    try:
        began = loop.time()
        with pytest.raises(Unavailable):
            await registry.put_storage(storage("new"), expect_new=True)
        # The pooled connection hangs until it is cut off; making another one takes its time-out.
        assert loop.time() - began < SHORT_S + database._CONNECT_TIMEOUT_S + 2
    finally:
        server.resume()
    await registry.put_storage(storage("new"), expect_new=True)


async def test_a_commit_without_an_answer_has_an_unknown_outcome(
    server: PostgresServer, registry: Registry
) -> None:
    engine = registry._engine
    assert engine is not None

    def stop_still(_: Connection) -> None:
        server.pause()

    event.listen(engine, "commit", stop_still)
    try:
        with pytest.raises(OutcomeUnknown):
            await registry.put_storage(storage("new"), expect_new=True)
    finally:
        event.remove(engine, "commit", stop_still)
        server.resume()
    assert "new" not in registry.view.storages
    # The commit was on its way, and the server carries it out when it goes on.
    await eventually(lambda: _has(registry, "new"))


async def _has(registry: Registry, name: str) -> bool:
    return name in (await registry.refresh()).storages


async def test_a_server_that_ends_before_the_commit_changed_nothing(
    server: PostgresServer, registry: Registry
) -> None:
    engine = registry._engine
    assert engine is not None
    ended: list[bool] = []

    def end(*_: object) -> None:
        if not ended:
            ended.append(True)
            server.kill()

    event.listen(engine, "before_cursor_execute", end)
    try:
        # The first statement only finds the connection dead; nobody notices but for a new one,
        # and there is none to be had.
        with pytest.raises(Unavailable):
            await registry.put_storage(storage("new"), expect_new=True)
    finally:
        event.remove(engine, "before_cursor_execute", end)
        server.start()
    assert "new" not in (await registry.refresh()).storages


async def test_a_manager_that_stands_still_loses_its_locks(
    url: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_TRANSACTION_TIMEOUT_S", 30.0)
    monkeypatch.setattr(database, "_IDLE_TIMEOUT_MS", 200)
    engine = database.open_engine(url)
    try:
        with engine.connect() as connection:
            connection.execute(select(STATE.c.revision).with_for_update())
            await registry.put_storage(storage("new"), expect_new=True)
            connection.invalidate()
    finally:
        engine.dispose()


async def test_waiting_for_another_managers_lock_has_a_time_out_and_reads_do_not_wait(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_STATEMENT_TIMEOUT_MS", 300)
    monkeypatch.setattr(database, "_TRANSACTION_TIMEOUT_S", 30.0)
    registry = Registry(url, SystemClock())
    await registry.open()
    engine = database.open_engine(url)
    try:
        with engine.connect() as connection:
            connection.execute(select(STATE.c.revision).with_for_update())
            await registry.refresh()
            assert await registry.list_accounts() == []
            with pytest.raises(Unavailable, match="timeout"):
                await registry.put_storage(storage("new"), expect_new=True)
        await registry.put_storage(storage("new"), expect_new=True)
    finally:
        engine.dispose()
        await registry.close()


async def test_commits_that_a_failover_lost_are_noticed(
    server: PostgresServer, url: str, registry: Registry
) -> None:
    await registry.put_storage(storage("lost"), expect_new=True)
    name = url.rpartition("/")[2]
    server.execute("DELETE FROM storages WHERE name = 'lost'", name)
    server.execute("UPDATE registry_state SET revision = revision - 1", name)
    server.stop()
    server.start()
    other = Registry(url, SystemClock())
    await other.open()
    # Its revision has the number of the one that was lost.
    await other.put_storage(storage("theirs"), expect_new=True)
    await other.close()
    assert other.view.revision == registry.view.revision
    assert set((await registry.refresh()).storages) == {"nfs_01", "theirs"}


@pytest.mark.parametrize(("waited_s", "refused"), [(10.0, False), (10.001, True)])
async def test_a_change_that_waited_too_long_is_refused(
    sqlite_url: str, waited_s: float, refused: bool
) -> None:
    clock = SimClock()
    registry = Registry(sqlite_url, clock)
    await registry.open()
    gate = threading.Event()
    try:
        before = registry._worker.submit(gate.wait)
        change = asyncio.ensure_future(registry.put_storage(storage(), expect_new=True))
        await asyncio.sleep(0)
        clock.advance(waited_s)
        gate.set()
        await before
        if refused:
            with pytest.raises(Unavailable, match="too slowly"):
                await change
        else:
            await change
        assert ("nfs_01" in registry.view.storages) is not refused
    finally:
        gate.set()
        await registry.close()


async def test_one_of_two_managers_wins_a_version(postgres_urls: NewUrl) -> None:
    url = postgres_urls()
    managers = [Registry(url, SystemClock()) for _ in range(4)]
    await asyncio.gather(*(manager.open() for manager in managers))
    try:
        await managers[0].create_group(group(version=1))
        results = await asyncio.gather(
            *(m.update_group(group(version=i + 2), 1) for i, m in enumerate(managers)),
            return_exceptions=True,
        )
        assert sum(not isinstance(result, BaseException) for result in results) == 1
        views = [await manager.refresh() for manager in managers]
        assert len({view.groups["team"].version for view in views}) == 1
        epochs = await asyncio.gather(*(m.next_epoch() for m in managers for _ in range(5)))
        assert sorted(epochs) == list(range(1, 21))
    finally:
        await asyncio.gather(*(manager.close() for manager in managers))


# ---- passwords and URLs --------------------------------------------------------------------------


async def test_a_wrong_password_is_refused_and_never_shown(
    server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    url = server.url(password="wr0ng#hidden")
    with pytest.raises(ConfigError, match="password authentication failed") as caught:
        await Registry(url, SimClock()).open()
    everything = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert "hidden" not in everything
    assert "\n" not in str(caught.value)


async def test_nobody_at_the_address_is_a_clear_error(server: PostgresServer) -> None:
    url = server.url().replace(f":{server.port}/", ":1/")
    with pytest.raises(Unavailable, match="server at") as caught:
        await Registry(url, SimClock()).open()
    assert PASSWORD not in str(caught.value)
    assert "%40" not in str(caught.value)


async def test_a_password_from_elsewhere_may_hold_anything(
    server: PostgresServer, url: str
) -> None:
    bare = url.replace(server.url().partition("@")[0], "postgresql://kvcm")
    assert PASSWORD not in bare
    registry = Registry(database.with_password(bare, PASSWORD), SimClock())
    await registry.open()
    await registry.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hid@den@h:port/db",
        "mysql://u:hidden@h/db",
        "postgresql+asyncpg://u:hidden@h/db",
        "hidden",
    ],
)
def test_a_url_that_is_refused_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        database.parse_url(url)
    everything = "".join(traceback.format_exception(caught.value))
    assert "hid" not in everything.replace("hide_input", "")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgres://u:pw@h/db", "postgresql+psycopg://u:***@h/db"),
        ("postgresql://u@h/db?password=pw", "postgresql+psycopg://u@h/db?password=%2A%2A%2A"),
        (
            "postgresql://h/db?sslpassword=pw&x=1",
            "postgresql+psycopg://h/db?sslpassword=%2A%2A%2A&x=1",
        ),
    ],
)
def test_a_shown_url_has_no_password(url: str, shown: str) -> None:
    assert database.shown(url) == shown


def test_the_urls_own_options_count_for_more(url: str) -> None:
    engine = database.open_engine(f"{url}?options=-c%20statement_timeout%3D77&application_name=me")
    try:
        with engine.connect() as connection:
            for name, value in (("statement_timeout", "77ms"), ("application_name", "me")):
                assert connection.exec_driver_sql(f"SHOW {name}").scalar() == value
            idle = connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar()
            assert idle == "15s"
    finally:
        engine.dispose()


async def test_closing_during_an_outage_ends(server: PostgresServer, url: str) -> None:
    registry = Registry(url, SimClock())
    await registry.open()
    server.stop()
    try:
        await registry.close()
    finally:
        server.start()
    with pytest.raises(NotReady):
        await registry.refresh()
