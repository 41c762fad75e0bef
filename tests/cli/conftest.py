"""A real manager as its own process, shared by the tests of a module."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvcm.cli.admin_common import plain
from kvcm.cli.local_manager import LocalManager, running_manager
from kvcm.cli.main import build_app
from kvcm.registry.defaults import default_group, default_storage


def write_bootstrap(folder: Path) -> Path:
    """The startup defaults with the storage below ``folder``."""
    storage = default_storage(f"{folder}/blocks/")
    spec = {"global_unique_name": storage.global_unique_name, "nfs": storage.spec}
    path = folder / "bootstrap.json"
    path.write_text(json.dumps({"storages": [spec], "instance_groups": [plain(default_group())]}))
    return path


@pytest.fixture(scope="module")
def manager_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of the manager lies; its blocks in ``blocks``."""
    return tmp_path_factory.mktemp("manager")


@pytest.fixture(scope="module")
def manager(manager_folder: Path) -> Iterator[LocalManager]:
    """A manager on an empty folder."""
    folder = manager_folder
    data_dir = folder / "data"
    data_dir.mkdir()
    bootstrap = write_bootstrap(folder)
    with running_manager(data_dir, bootstrap=bootstrap, log=folder / "log") as running:
        yield running


class Kvcm:
    """``kvcm`` in this process; ``ok`` and ``fails`` also check the exit code."""

    def __init__(self, manager: LocalManager) -> None:
        self._manager = manager

    def __call__(self, *arguments: object, stdin: str = "") -> Result:
        listed = [str(argument) for argument in arguments]
        if listed[0] == "admin" and listed[1] in ("usage", "trash", "removals", "ceiling"):
            listed += ["--http", f"http://{self._manager.host}:{self._manager.admin_http_port}"]
        elif listed[:3] == ["admin", "cache", "trim"]:
            listed += ["--meta-target", self._manager.target]
        elif listed[0] == "admin":
            # Before the arguments: keys may follow a "--".
            words = 2 if listed[1] in ("health", "metrics", "logger") else 3
            listed[words:words] = ["--target", self._manager.admin_target]
        return CliRunner().invoke(build_app(), listed, input=stdin)

    def ok(self, *arguments: object, stdin: str = "") -> str:
        """Standard output of a command that must succeed."""
        result = self(*arguments, stdin=stdin)
        assert result.exit_code == 0, result.output
        return result.stdout

    def json(self, *arguments: object) -> Any:
        """What ``--json`` prints."""
        return json.loads(self.ok(*arguments, "--json"))

    def fails(self, *arguments: object, code: int = 1, stdin: str = "") -> str:
        """The one line on standard error of a command that must fail."""
        result = self(*arguments, stdin=stdin)
        assert result.exit_code == code, result.output
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("error: ")
        return result.stderr


@pytest.fixture(scope="module")
def kvcm(manager: LocalManager) -> Kvcm:
    """The command, pointed at the manager."""
    return Kvcm(manager)
