"""The ``kvcm`` command line, in this process."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from manager_harness import settings_in
from stand_in_cache import StandInCache
from typer.testing import CliRunner, Result

import kvcm
from kvcm.cli import main
from kvcm.core.errors import ConfigError
from kvcm.server.lifecycle import Manager


def run(*arguments: object, **env: str) -> Result:
    return CliRunner().invoke(main.build_app(), [str(a) for a in arguments], env=env)


@pytest.mark.parametrize("subcommand", ["serve", "config"])
@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        (["--rpc-port=x"], {}, "--rpc-port"),
        (["--http-port=5", "--admin-http-port=5"], {}, "admin_http_port"),
        (["--set", "cache.reply_byte_max=1"], {}, "cache.reply_bytes_max"),
        (["--set", "drain_s"], {}, "KEY=VALUE"),
        ([], {"KVCM_RPC_PRT": "1"}, "KVCM_RPC_PORT"),
        (["--config=none.toml"], {}, "none.toml"),
    ],
)
def test_wrong_settings_are_one_line_and_exit_2(
    subcommand: str, arguments: list[str], env: dict[str, str], says: str
) -> None:
    ended = run(subcommand, *arguments, **env)
    assert ended.exit_code == 2
    assert ended.stderr.count("\n") == 1
    assert says in ended.stderr


def test_a_folder_that_cannot_be_used_is_one_line_and_exit_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcm.server.logs.configure", lambda level, form: None)
    (tmp_path / "file").write_text("")
    ended = run("serve", f"--data-dir={tmp_path / 'file'}")
    assert ended.exit_code == 1
    assert ended.stderr.count("\n") == 1
    assert str(tmp_path / "file") in ended.stderr


@pytest.mark.parametrize("name", ["rpc_port", "http_port", "admin_rpc_port", "admin_http_port"])
async def test_a_port_in_use_is_named_and_everything_is_let_go(tmp_path: Path, name: str) -> None:
    def build(settings: object, clock: object, registry: object, *rest: object) -> StandInCache:
        return StandInCache(registry)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        manager = Manager(settings_in(tmp_path, **{name: port}), build_cache=build)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: address"):
            await manager.start()
    again = Manager(settings_in(tmp_path), build_cache=build)  # type: ignore[arg-type]
    await again.start()
    await again.stop()


def test_config_prints_what_would_be_used() -> None:
    printed = run("config", "--registry-url=postgresql://u:hunter2@h/db", KVCM_RPC_PORT="7")
    assert printed.exit_code == 0
    assert "rpc_port = 7\n" in printed.stdout
    assert "hunter2" not in printed.stdout
    as_json = json.loads(run("config", "--json", "--set", "rocksdb.sync=true").stdout)
    assert as_json["rocksdb"]["sync"] is True


def test_the_command_shows_version_and_help() -> None:
    assert run("--version").stdout == f"kvcm {kvcm.__version__}\n"
    listed = run("--help").stdout
    for name in ("serve", "config", "replay", "workload"):
        assert name in listed


def test_an_unknown_command_is_refused() -> None:
    ended = run("serv")
    assert ended.exit_code == 2
    assert "serve" in ended.stderr


def test_a_base_install_names_the_extra_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bare_serve.py").write_text("import a_module_of_the_server_extra\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(main.COMMANDS, "serve", main.Lazy("bare_serve", "Run a manager."))
    ended = run("serve", "--rpc-port=0")
    assert ended.exit_code == 2
    assert ended.stderr.count("\n") == 1
    assert "'a_module_of_the_server_extra'" in ended.stderr
    assert "kvcm[server]" in ended.stderr
