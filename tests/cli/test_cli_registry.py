"""``kvcm registry status`` and ``migrate`` on both databases."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvcm.cli.main import build_app
from kvcm.core.clock import SystemClock
from kvcm.core.errors import ConfigError
from kvcm.registry import database, migrate
from kvcm.registry.defaults import default_group, default_storage
from kvcm.registry.registry import Registry
from kvcm.testing.servers_postgres import PASSWORD, PostgresServer


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/registry.db"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    name = server.take_database()
    yield server.url(name)
    server.give_back(name)


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this version one that knows a revision more."""
    folder = tmp_path / "migrations"
    (folder / "versions").mkdir(parents=True)
    ours = migrate.migrations_dir()
    for source in ["env.py", *(f"versions/{p.name}" for p in (ours / "versions").glob("*.py"))]:
        (folder / source).write_text((ours / source).read_text())
    (folder / "versions" / "9000_later.py").write_text(
        "import sqlalchemy as sa\nfrom alembic import op\n"
        f"revision, down_revision = '9000', {migrate.head_revision()!r}\n"
        "def upgrade():\n    op.add_column('storages', sa.Column('note', sa.Text()))\n"
        "def downgrade():\n    op.drop_column('storages', 'note')\n"
    )
    monkeypatch.setattr(migrate, "migrations_dir", lambda: folder)


def kvcm(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["registry", *arguments])


def status(url: str) -> tuple[int, dict[str, Any]]:
    result = kvcm("status", f"--registry-url={url}", "--json")
    return result.exit_code, json.loads(result.stdout)


def fill(url: str) -> None:
    async def run() -> None:
        registry = Registry(url, SystemClock())
        await registry.open()
        await registry.bootstrap([default_storage()], [default_group()])
        await registry.close()

    asyncio.run(run())


def contents(url: str) -> set[str]:
    async def run() -> set[str]:
        registry = Registry(url, SystemClock(), auto_migrate=False)
        await registry.open()
        await registry.close()
        return {*registry.view.storages, *registry.view.groups}

    return asyncio.run(run())


def set_revision(url: str, revision: str) -> None:
    engine = database.open_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{revision}'")
    engine.dispose()


def test_an_empty_database_is_told_from_a_current_one(url: str) -> None:
    head = migrate.head_revision()
    code, found = status(url)
    assert (code, found["state"], found["revision"], found["newest"]) == (1, "empty", None, head)
    assert kvcm("migrate", f"--registry-url={url}").exit_code == 0
    assert status(url)[0] == 0
    again = kvcm("migrate", f"--registry-url={url}")
    assert "nothing to do" in again.stdout
    fill(url)
    assert contents(url) == {"nfs_01", "default"}


def test_looking_at_a_missing_file_does_not_make_it(tmp_path: Path) -> None:
    file = tmp_path / "none" / "registry.db"
    assert status(f"sqlite:///{file}")[0] == 1
    assert not file.parent.exists()


def test_a_schema_behind_is_refused_by_a_start_and_mended_by_migrate(url: str, later: None) -> None:
    fill(url)
    migrate.migrate_database(url, "0001")
    code, found = status(url)
    assert (code, found["state"], found["revision"], found["newest"]) == (
        1,
        "behind",
        "0001",
        "9000",
    )
    with pytest.raises(ConfigError, match="kvcm registry migrate"):
        contents(url)
    result = kvcm("migrate", f"--registry-url={url}", "--json")
    assert json.loads(result.stdout)["before"] == "0001"
    assert json.loads(result.stdout)["after"] == "9000"
    assert status(url)[0] == 0
    assert contents(url) == {"nfs_01", "default"}
    down = kvcm("migrate", f"--registry-url={url}", "--to=0001")
    assert "went from 9000 to 0001" in down.stdout
    assert kvcm("migrate", f"--registry-url={url}").exit_code == 0
    assert contents(url) == {"nfs_01", "default"}


def test_a_schema_ahead_is_refused_by_everything(url: str) -> None:
    fill(url)
    set_revision(url, "9999")
    code, found = status(url)
    assert (code, found["state"], found["revision"]) == (2, "ahead", "9999")
    assert "newer kvcm" in kvcm("status", f"--registry-url={url}").stdout
    result = kvcm("migrate", f"--registry-url={url}")
    assert result.exit_code == 2
    assert "9999" in result.stderr
    with pytest.raises(ConfigError, match="ahead of"):
        contents(url)


def test_a_revision_that_there_is_not_is_refused(url: str) -> None:
    fill(url)
    result = kvcm("migrate", f"--registry-url={url}", "--to=0815")
    assert result.exit_code == 2
    assert "0815" in result.stderr
    assert status(url)[0] == 0


def test_what_cannot_be_read_is_code_2_and_shows_no_password(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    (tmp_path / "text.db").write_text("no database at all, but long enough to look" * 100)
    for url in (
        f"sqlite:///{tmp_path}/text.db",
        postgres.url("nosuchdatabase"),
        postgres.url().replace(f":{postgres.port}/", ":1/"),
        "mysql://u:hidden@h/d",
    ):
        for command in ("status", "migrate"):
            result = kvcm(command, f"--registry-url={url}")
            assert result.exit_code == 2, (url, result.output)
            assert len(result.stderr.splitlines()) == 1
            assert "hidden" not in result.output
            assert PASSWORD not in result.output
            assert "%3A" not in result.output


def test_the_password_may_come_from_a_file_or_the_environment(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = postgres.take_database()
    bare = f"--registry-url={postgres.url(name, password=None)}"
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n", encoding="utf-8")
    assert kvcm("status", bare).exit_code == 2
    assert kvcm("migrate", bare, f"--set=registry_password_file={file}").exit_code == 0
    monkeypatch.setenv("KVCM_REGISTRY_PASSWORD", PASSWORD)
    result = kvcm("status", bare)
    assert result.exit_code == 0
    assert PASSWORD not in result.output
    both = kvcm("status", bare, f"--set=registry_password_file={file}")
    assert both.exit_code == 2
    assert "both set" in both.stderr
    monkeypatch.delenv("KVCM_REGISTRY_PASSWORD")
    gone = kvcm("status", bare, "--set=registry_password_file=/nowhere")
    assert (gone.exit_code, "/nowhere" in gone.stderr) == (2, True)
    postgres.give_back(name)


def test_several_that_migrate_at_once_do_it_once(url: str) -> None:
    arguments = ["registry", "migrate", f"--registry-url={url}", "--json"]
    command = [sys.executable, "-m", "kvcm.cli.main", *arguments]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], answers
    before = [json.loads(out)["before"] for out, _ in answers]
    head = migrate.head_revision()
    assert sorted(map(str, before)) == sorted(["None", head, head])
    fill(url)
