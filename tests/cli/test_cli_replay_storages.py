"""kvcm replay --storage: real managers and engines on storages of several types."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcm.cli.local_manager import LocalManager
from kvcm.cli.replay_storages import parse_storage, prepare
from kvcm.client import AdminClient
from kvcm.core.errors import InvalidArgument
from kvcm.core.types import StorageConfig, StorageType
from kvcm.optimizer.trace import TRACE_BLOCK_TOKENS
from kvcm.optimizer.workload import WorkloadKind, generate, write_rows
from kvcm.testing.servers_mooncake import mooncake_store, needs_mooncake
from tests.cli.conftest import Kvcm

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "sample.jsonl"
    with path.open("wb") as file:
        write_rows(file, generate(WorkloadKind.MIXED, 40, 5), block_size=TRACE_BLOCK_TOKENS)
    return path


class Replay:
    """``kvcm replay --json`` as a process, against the module's manager."""

    def __init__(self, manager: LocalManager) -> None:
        self._to = ("-t", manager.target, "--admin-target", manager.admin_target)
        self.notes = ""

    def __call__(self, *arguments: object) -> tuple[int, str]:
        command = [sys.executable, "-m", "kvcm.cli.main", "replay", "--json", *self._to]
        done = subprocess.run(
            [*command, *map(str, arguments)], capture_output=True, text=True, timeout=120
        )
        self.notes = done.stderr
        return done.returncode, done.stdout

    def ok(self, *arguments: object) -> dict:
        code, out = self(*arguments)
        assert code == 0, self.notes
        return json.loads(out)


@pytest.fixture
def replay(manager: LocalManager) -> Replay:
    return Replay(manager)


def assert_complete(report: dict) -> None:
    """One engine reached the ceiling, and the storages account for every block and byte."""
    blocks = report["blocks"]
    assert report["hit_rate"]["blocks"] == report["ceiling"]["blocks"]
    assert (blocks["wrong"], blocks["lost"], blocks["failed"], blocks["refused"]) == (0, 0, 0, 0)
    for what, count in (("written", blocks["written"]), ("read", blocks["hit"])):
        moved = [entry[what] for entry in report["storages"]]
        assert sum(m["blocks"] for m in moved) == count
        assert sum(m["bytes"] for m in moved) == report[f"bytes_{what}"]
        assert all(m["mb_per_s"] > 0 and m["failed"] == 0 for m in moved if m["blocks"])


def test_a_replay_spreads_over_the_storages_it_adds(
    tmp_path: Path, trace: Path, replay: Replay, kvcm: Kvcm
) -> None:
    storages = ("-s", f"a=file://{tmp_path}/a", "-s", f"b=file://{tmp_path}/b/")
    report = replay.ok(trace, *storages, "--specs", 2, "--block-bytes", 300, "--capacity", "1GB")
    assert_complete(report)
    assert [(entry["storage"], entry["type"]) for entry in report["storages"]] == [
        ("a", "file"),
        ("b", "file"),
    ]
    assert "storage a: added" in replay.notes
    made = kvcm.json("admin", "group", "show", "replay")
    assert made["storage_candidates"] == ["a", "b"]
    assert int(made["quota"]["capacity"]) == 10**9


def test_a_trace_that_is_not_there_adds_nothing(tmp_path: Path, replay: Replay, kvcm: Kvcm) -> None:
    code, _ = replay(tmp_path / "none.jsonl", "-s", f"new=file://{tmp_path}/new")
    assert code == 1
    assert "none.jsonl" in replay.notes
    assert "new" not in [one["global_unique_name"] for one in kvcm.json("admin", "storage", "list")]


@needs_mooncake
def test_a_replay_on_mooncake_and_its_check_afterwards(
    tmp_path: Path, trace: Path, replay: Replay
) -> None:
    acks = tmp_path / "acks"
    with mooncake_store() as (master, _):
        options = ("-s", f"mc=mooncake://{master.entry}", "--group", "mc", "--instance", "mc")
        report = replay.ok(trace, *options, "--acks", acks)
        assert_complete(report)
        assert [entry["storage"] for entry in report["storages"]] == ["mc"]
        # What it needs to know of the store stands in the file.
        code, out = replay("--check-acks", acks)
        assert code == 0, replay.notes
        assert json.loads(out)["right"] == report["blocks"]["written"]


def test_the_same_storages_again_change_nothing(
    tmp_path: Path, manager: LocalManager, kvcm: Kvcm
) -> None:
    path = f"{tmp_path}/kv"
    wanted = [parse_storage(f"file://{path}/"), parse_storage(f"x=hf3fs://{tmp_path}")]
    with AdminClient(manager.admin_target) as client:
        first = prepare(client, wanted, "twice", 10**6)
        before = kvcm.json("admin", "group", "show", "twice"), names(client)
        again = [parse_storage(f"file:/{path.replace('/', '//')}"), wanted[1]]
        second = prepare(client, again, "twice", 10**7)
        # As a candidate it is there; the group has another one too.
        third = prepare(client, wanted[1:], "twice", 10**7)
        assert (kvcm.json("admin", "group", "show", "twice"), names(client)) == before
    assert [note.rpartition(": ")[2] for note in first[:2]] == ["added", "added"]
    assert [note.rpartition(": ")[2] for note in second[:2]] == ["was there", "was there"]
    assert "was there" in second[2]
    assert third[1].endswith(f"blocks may go to {wanted[0].name} too")


def test_what_cannot_be_replayed_on_is_said_and_nothing_is_added(
    tmp_path: Path, manager: LocalManager, kvcm: Kvcm
) -> None:
    group = kvcm.json("admin", "group", "show", "default")
    new = parse_storage(f"y=file://{tmp_path}/y")
    with AdminClient(manager.admin_target) as client:
        client.add_storage(
            StorageConfig(
                global_unique_name="off",
                type=StorageType.NFS,
                spec={"root_path": f"{tmp_path}/off"},
            )
        )
        client.disable_storage("off")
        before = names(client)
        with pytest.raises(InvalidArgument, match="group 'default' exists and has not y as"):
            prepare(client, [new], "default", 1)
        with pytest.raises(InvalidArgument, match="'nfs_01' exists and is another one"):
            prepare(client, [new, parse_storage(f"nfs_01=file://{tmp_path}/z")], "new", 1)
        with pytest.raises(InvalidArgument, match="'off' is disabled"):
            prepare(client, [new, parse_storage(f"file://{tmp_path}/off")], "new", 1)
        assert names(client) == before
    assert kvcm.json("admin", "group", "show", "default") == group


def names(client: AdminClient) -> list[str]:
    return [config.global_unique_name for config in client.list_storage()]


@pytest.mark.parametrize(
    ("text", "name", "kind", "fields"),
    [
        ("file:///mnt/kv/", "file-mnt-kv", StorageType.NFS, {"root_path": "/mnt/kv/"}),
        (
            "x=file:///a?key_count_per_file=4",
            "x",
            StorageType.NFS,
            {"root_path": "/a", "key_count_per_file": 4},
        ),
        ("hf3fs:///3fs", "hf3fs-3fs", StorageType.HF3FS, {"mountpoint": "/3fs"}),
        ("vcns_hf3fs:///3fs", "vcns_hf3fs-3fs", StorageType.VCNS_HF3FS, {"mountpoint": "/3fs"}),
        (
            "mooncake://h:1?protocol=rdma",
            "mooncake-h-1",
            StorageType.MOONCAKE,
            {"master_service_entry": "h:1", "protocol": "rdma"},
        ),
    ],
)
def test_what_a_storage_is_called_and_has(text, name, kind, fields) -> None:
    wanted = parse_storage(text)
    assert (wanted.name, wanted.type, dict(wanted.fields)) == (name, kind, fields)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/mnt",
        "file://host/x",
        "file:///",
        "pace://x",
        "mooncake://",
        "mooncake://h:1/x",
        "a b=file:///x",
        "file://[x/y",
        "file:///a#b",
        "file:///a#",
        "file:///a?key_count_per_file=1&key_count_per_file=2",
        "file:///a?key_count_per_file",
    ],
)
def test_what_is_no_storage_is_refused(text) -> None:
    with pytest.raises(InvalidArgument, match="storage "):
        parse_storage(text)
