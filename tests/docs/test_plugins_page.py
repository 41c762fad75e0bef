"""docs/plugins.md, done: its package is installed beside a real manager and used by an engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvcm.cli.local_manager import LocalManager, running_manager
from kvcm.cli.main import build_app
from kvcm.client import AdminClient, block_keys
from kvcm.client.router import Transfers
from kvcm.client.sync import Client
from kvcm.client.transfer import storage_specs
from kvcm.core.errors import InvalidArgument, Unsupported
from kvcm.core.types import InstanceGroup, StorageConfig, StorageType
from kvcm.testing.plugins import install

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plugins.md").read_text()
GROUP = "kvcm.storage_backends"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


ADAPTER, CONTRACT, ENGINE = blocks("python")
(COMMANDS,) = blocks("sh")
(JSON,) = blocks("json")
(TOML,) = map(tomllib.loads, blocks("toml"))


@dataclass(frozen=True, slots=True)
class Place:
    folder: Path
    site: Path
    manager: LocalManager

    def in_folder(self, text: str) -> str:
        assert "/tmp/kvcm-blocks.db" in text
        return text.replace("/tmp/kvcm-blocks.db", f"{self.folder}/blocks.db")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def kvcm(self, line: str) -> str:
        words = line.split()
        assert words.pop(0) == "kvcm"
        words += ["--target", self.manager.admin_target]
        done = CliRunner().invoke(build_app(), words)
        assert (done.exit_code, done.stderr) == (0, "")
        return done.stdout

    async def over_http(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"http://{self.manager.host}:{self.manager.admin_http_port}/api/{method}"
        async with httpx.AsyncClient(trust_env=False) as client:
            answer: dict[str, Any] = (await client.post(url, json=body)).json()
        return answer


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of packages that managers and engines started from here see."""
    site = tmp_path_factory.mktemp("site")
    project = TOML["project"]
    modules = {"kvcm_sqlite.py": ADAPTER}
    install(site, project["name"], project["entry-points"], modules, version=project["version"])
    broken = {"kvcm_broken.py": "import a_library_that_nobody_has\n"}
    install(site, "kvcm-broken", {GROUP: {"broken": "kvcm_broken:Backend"}}, broken)
    with pytest.MonkeyPatch.context() as patch:
        before = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", f"{site}{os.pathsep}{before}" if before else str(site))
        yield site


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manager")
    storage = {
        "global_unique_name": "nfs_01",
        "nfs": {"root_path": f"{folder}/blocks/", "key_count_per_file": 8},
    }
    group = {"name": "default", "storage_candidates": ["nfs_01"]}
    content = {"storages": [storage], "instance_groups": [group]}
    (folder / "bootstrap.json").write_text(json.dumps(content))
    return folder


def managed(folder: Path) -> Any:
    return running_manager(folder, bootstrap=folder / "bootstrap.json", log=folder / "log")


@pytest.fixture(scope="module")
def place(site: Path, folder: Path) -> Iterator[Place]:
    with managed(folder) as manager:
        yield Place(folder, site, manager)


def added(name: str, kind: str, **options: str) -> StorageConfig:
    spec = {"plugin": kind, **options}
    return StorageConfig(global_unique_name=name, type=StorageType.PLUGIN, spec=spec)


def test_the_pages_adapter_passes_the_contract_suite(site: Path, tmp_path: Path) -> None:
    (tmp_path / "test_contract.py").write_text(CONTRACT)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:valkey", "-p", "no:cacheprovider"]
    command += ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"]
    command += ["-W", "error", "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, "test_contract.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^2\d passed in", done.stdout, re.MULTILINE), done.stdout


async def test_an_engine_writes_and_reads_blocks_on_the_pages_storage(place: Place) -> None:
    for line in place.in_folder(COMMANDS).splitlines():
        place.kvcm(line)

    assert "127.0.0.1:6381" in ENGINE
    engine = ENGINE.replace("127.0.0.1:6381", place.manager.target)
    done = place.run(sys.executable, "-c", engine)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "4 blocks found, the last begins with b'\\x03\\x03\\x03\\x03'\n"

    with Client(place.manager.target) as client:
        known = client.register_instance("team-a", "llama-8b", 16, {"tp0": 4096})
        assert storage_specs(known.storage_configs)["sqlite_01"] == (
            "sqlite",
            {"path": f"{place.folder}/blocks.db"},
        )
        found = client.get_cache_location("llama-8b", block_keys(list(range(64)), 16))
        assert [location.type for location in found.locations] == [StorageType.PLUGIN] * 4
        assert all(uri.startswith("sqlite://sqlite_01/") for uri in found.locations.uris("tp0"))
    listed = json.loads(place.kvcm("kvcm admin storage list --json"))
    (shown,) = [each for each in listed if each["global_unique_name"] == "sqlite_01"]
    assert (shown["type"], shown["health"]) == ("sqlite", "available")
    answer = await place.over_http("listStorage", {})
    (shown,) = [each for each in answer["storage"] if each["global_unique_name"] == "sqlite_01"]
    assert shown["plugin"] == json.loads(place.in_folder(JSON))["plugin"]


async def test_both_transports_and_the_command_add_the_same_storage(place: Place) -> None:
    storage = json.loads(place.in_folder(JSON))
    answer = await place.over_http(
        "addStorage", {"storage": {**storage, "global_unique_name": "a"}}
    )
    assert answer["header"]["status"]["code"] == "OK", answer
    with AdminClient(place.manager.admin_target) as admin:
        admin.add_storage(added("b", "sqlite", path=f"{place.folder}/blocks.db"))
        file = place.folder / "storage.json"
        shown = place.kvcm("kvcm admin storage list --json")
        (a,) = [each for each in json.loads(shown) if each["global_unique_name"] == "a"]
        file.write_text(json.dumps({**a, "global_unique_name": "c"}))
        place.kvcm(f"kvcm admin storage add --file {file}")
        specs = {s.global_unique_name: (s.type, s.spec) for s in admin.list_storage()}
        assert specs["a"] == specs["b"] == specs["c"]
        for name in "abc":
            admin.remove_storage(name)


def test_a_plugin_that_cannot_be_used_is_named_and_disturbs_nobody(place: Place) -> None:
    refused: list[tuple[StorageConfig, type[Exception], str]] = [
        (added("x", "broken"), Unsupported, r"'x': plug-in 'broken' \(kvcm_broken:Backend, kvcm-"),
        (added("x", "broken"), Unsupported, "No module named 'a_library_that_nobody_has'"),
        (added("x", "nobodys"), Unsupported, "'x': type 'nobodys' is not built in, and no plug-in"),
        (added("x", "sqlite", path="relative"), InvalidArgument, "'relative' must be an absolute"),
        (added("x", "file", path="/x"), InvalidArgument, "'file' is a type of its own"),
    ]
    with AdminClient(place.manager.admin_target) as admin:
        for config, kind, message in refused:
            with pytest.raises(kind, match=message):
                admin.add_storage(config)
        assert "x" not in {each.global_unique_name for each in admin.list_storage()}
        (nfs,) = [each for each in admin.list_storage() if each.global_unique_name == "nfs_01"]
        assert nfs.health == "available"


def test_a_manager_without_the_plugin_serves_all_other_storages(
    site: Path, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "data"
    own.mkdir()
    (own / "bootstrap.json").write_text((folder / "bootstrap.json").read_text())
    with managed(own) as manager, AdminClient(manager.admin_target) as admin:
        admin.add_storage(added("sqlite_01", "sqlite", path=f"{tmp_path}/blocks.db"))
        candidates = ("sqlite_01", "nfs_01")
        admin.create_instance_group(InstanceGroup(name="g", storage_candidates=candidates))
    monkeypatch.setenv("PYTHONPATH", "")
    with (
        managed(own) as manager,
        AdminClient(manager.admin_target) as admin,
        Client(manager.target) as client,
    ):
        states = {s.global_unique_name: s for s in admin.list_storage()}
        assert states["sqlite_01"].health == "unavailable"
        assert "no plug-in kvcm.storage_backends:sqlite" in states["sqlite_01"].unavailable_reason
        assert states["nfs_01"].health == "available"
        client.register_instance("g", "i", 16, {"tp0": 64})
        with client.write("i", [1, 2, 3]) as session:
            uris = [location.specs["tp0"] for _, location in session]
            assert [uri.split("/")[2] for uri in uris] == ["nfs_01"] * 3


def test_blocks_in_memory_do_not_leave_the_process(place: Place) -> None:
    with AdminClient(place.manager.admin_target) as admin, Client(place.manager.target) as client:
        # By our own entry point.
        admin.add_storage(added("mem_01", "memory"))
        admin.create_instance_group(InstanceGroup(name="mem", storage_candidates=("mem_01",)))
        known = client.register_instance("mem", "in-memory", 16, {"tp0": 64})
        sdk = Transfers(known.storage_configs)
        with client.write("in-memory", [1, 2]) as session:
            uris = [location.specs["tp0"] for _, location in session]
            assert all(uri.startswith("memory://mem_01/?key=kvcm-") for uri in uris)
            errors = session.put(sdk, [b"x" * 64] * 2)
        assert [type(error) for error in errors.values()] == [Unsupported, Unsupported]
        assert "mem_01" in str(errors[0])
        assert client.get_cache_location("in-memory", [1, 2]).locations.uris("tp0") == []
