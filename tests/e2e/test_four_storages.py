"""Engines on four storages of three types while one is unmounted, one fills up and one forgets."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_harness import PATIENCE_S, QUICK, Site, make_trace, result

from kvcm.client import AdminClient
from kvcm.core.types import StorageStatus
from kvcm.optimizer.acks import read_acks
from kvcm.optimizer.trace import read_trace
from kvcm.optimizer.workload import WorkloadKind
from kvcm.testing.eventually import eventually_sync
from kvcm.testing.mounts import PrivateMounts, private_mounts
from kvcm.testing.servers_mooncake import MooncakeMaster, mooncake_store, needs_mooncake

BLOCK_BYTES = 4096
SPACE_BYTES = 64 << 20
GONE, FULL, THREE_FS, MEMORY = "gone", "full", "3fs", "mc"
# The type of the first candidate that takes writes is what a group uses.
GROUPS = {
    "memory": [MEMORY, GONE, FULL, THREE_FS],
    "files": [GONE, FULL, THREE_FS, MEMORY],
    "3fs": [THREE_FS, MEMORY, GONE, FULL],
}
SETTINGS = (*QUICK, "probe_period_s=0.3", "probe_timeout_s=3")


class Fleet:
    """A manager, its four storages, and an engine a group."""

    def __init__(self, folder: Path, mounts: PrivateMounts, master: MooncakeMaster) -> None:
        self._mounts = mounts
        self.master = master
        self._folder = folder
        self._engines: list[subprocess.Popen[str]] = []
        self._disk = folder / "disk"
        mounts.tmpfs(self._disk, SPACE_BYTES)
        mounts.bind(self._disk, folder / GONE)
        mounts.tmpfs(folder / FULL, SPACE_BYTES)
        mounts.tmpfs(folder / THREE_FS, SPACE_BYTES)
        specs: dict[str, dict[str, Any]] = {
            GONE: {"nfs": {"root_path": str(folder / GONE)}},
            FULL: {"nfs": {"root_path": str(folder / FULL)}},
            THREE_FS: {"threefs": {"mountpoint": str(folder / THREE_FS)}},
            MEMORY: {"mooncake": {"master_service_entry": master.entry}},
        }
        document = {
            "storages": [{"global_unique_name": name, **spec} for name, spec in specs.items()],
            "instance_groups": [
                {
                    "name": name,
                    "storage_candidates": candidates,
                    "quota": {"capacity": 1 << 40},
                    "cache_config": {
                        "reclaim_strategy": {"trigger_strategy": {"used_percentage": 2}}
                    },
                }
                for name, candidates in GROUPS.items()
            ],
        }
        self.site = Site(folder, document=document, inside=mounts.inside)
        self.site.start(settings=SETTINGS)

    # ---- faults ------------------------------------------------------------------------------

    def unmount(self) -> None:
        self._mounts.unmount(self._folder / GONE)

    def mount(self) -> None:
        self._mounts.bind(self._disk, self._folder / GONE)

    def fill(self) -> None:
        """No further byte fits then."""
        self._filler = self._mounts.fill(self._folder / FULL)

    def empty(self) -> None:
        self._filler.unlink()

    # ---- what is seen --------------------------------------------------------------------------

    def storages(self) -> dict[str, StorageStatus]:
        """As ListStorage tells of them."""
        with AdminClient(f"grpc://127.0.0.1:{self.site.ready['admin_rpc_port']}") as admin:
            return {s.global_unique_name: s for s in admin.list_storage()}

    def is_well(self) -> bool:
        """Whether all storages take reads and writes."""
        found = self.storages().values()
        return not any(s.unavailable_reason or s.unwritable_reason for s in found)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of ``/metrics`` with these labels."""
        url = f"http://127.0.0.1:{self.site.ready['admin_http_port']}/metrics"
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in httpx.get(url, timeout=PATIENCE_S).text.splitlines()
            if line.startswith(f"{name}{{") and all(label in line for label in wanted)
        )

    def holds(self, *storages: str) -> list[int]:
        """Blocks that the index has on each."""
        url = f"http://127.0.0.1:{self.site.ready['admin_http_port']}/v1/usage"
        found = httpx.get(url, timeout=PATIENCE_S).json()["storages"]
        return [found[name]["serving_blocks"] for name in storages]

    # ---- engines -------------------------------------------------------------------------------

    def replay(self, group: str, *arguments: object) -> subprocess.Popen[str]:
        """Under way, with an instance of the group."""
        of_group = ("--group", group, "--instance", group, "--block-bytes", BLOCK_BYTES)
        self._engines.append(self.site.replay(*of_group, *arguments))
        return self._engines[-1]

    def end(self) -> None:
        """End whatever runs."""
        for engine in self._engines:
            engine.kill()
            engine.communicate()
        self.site.kill()

    def acks(self, group: str) -> Path:
        return self._folder / f"{group}.acks"


@contextmanager
def a_fleet(folder: Path) -> Iterator[Fleet]:
    with mooncake_store() as (master, _), private_mounts() as mounts:
        fleet = Fleet(folder, mounts, master)
        try:
            yield fleet
        finally:
            fleet.end()


@needs_mooncake
@pytest.mark.parametrize(
    ("groups", "requests", "seconds"),
    [
        (["memory"], 150, 10),
        pytest.param(list(GROUPS), 1500, 90, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_an_unmounted_a_full_and_a_forgetful_storage_cost_only_what_was_lost(
    tmp_path: Path, groups: list[str], requests: int, seconds: float
) -> None:
    trace = tmp_path / "trace.jsonl"
    make_trace(trace, WorkloadKind.CHAT, requests, 7)
    rows = read_trace(str(trace)).rows
    speed = (rows[-1].timestamp_ms - rows[0].timestamp_ms) / 1000 / seconds
    with a_fleet(tmp_path) as fleet:
        engines = {
            name: fleet.replay(name, "--speed", f"x{speed}", "--acks", fleet.acks(name), trace)
            for name in groups
        }
        could_be_lost = _faults(fleet)
        first = {name: result(engine) for name, engine in engines.items()}
        again = {name: result(fleet.replay(name, trace)) for name in groups}
        for report in (*first.values(), *again.values()):
            assert report["blocks"]["wrong"] == report["requests_failed"] == 0
            assert report["blocks"]["refused"] == 0
            assert report["errors"] == {}
        used = {s["storage"] for report in first.values() for s in report["storages"]}
        assert used == {GONE, FULL, THREE_FS, MEMORY}

        lost = sum(report["blocks"]["lost"] for report in again.values())
        assert lost <= could_be_lost
        for name, report in again.items():
            blocks = report["blocks"]
            _, acked = read_acks(str(fleet.acks(name)))
            unwritten = report["ceiling"]["distinct_blocks"] - len(set(acked))
            assert blocks["failed"] == 0
            assert blocks["written"] <= blocks["lost"] + unwritten
            assert blocks["hit"] >= blocks["asked"] - blocks["written"] - blocks["lost"]
        if len(groups) > 1:
            # All that was lost is there again.
            for name in groups:
                blocks = result(fleet.replay(name, trace))["blocks"]
                assert blocks["hit"] == blocks["asked"]
        _is_told(fleet, lost)


def _faults(fleet: Fleet) -> int:
    """One fault after the other under the engines' load, and their end; the blocks that may be
    lost by that."""
    eventually_sync(lambda: fleet.holds(MEMORY)[0] > 50, timeout=PATIENCE_S)
    fleet.master.kill()
    eventually_sync(lambda: fleet.storages()[MEMORY].unavailable_reason, timeout=PATIENCE_S)
    in_memory = fleet.holds(MEMORY)[0]
    eventually_sync(lambda: all(fleet.holds(GONE, FULL)), timeout=PATIENCE_S)

    fleet.fill()
    fleet.unmount()
    eventually_sync(lambda: fleet.storages()[GONE].unavailable_reason, timeout=PATIENCE_S)
    eventually_sync(lambda: fleet.storages()[FULL].unwritable_reason, timeout=PATIENCE_S)
    held = fleet.holds(GONE, FULL)
    eventually_sync(lambda: fleet.holds(THREE_FS)[0] > 0, timeout=PATIENCE_S)
    assert fleet.holds(GONE, FULL) == held

    fleet.mount()
    fleet.empty()
    fleet.master.start()
    eventually_sync(fleet.is_well, timeout=PATIENCE_S)
    return in_memory


def _is_told(fleet: Fleet, lost: int) -> None:
    """Log and metrics tell what happened."""
    changes = "kvcm_storage_state_changes_total"
    log = fleet.site.log.read_text()
    for name in (GONE, MEMORY):
        assert fleet.metric(changes, storage=name, state="unavailable") == 1
        assert fleet.metric(changes, storage=name, state="available") == 2
        assert log.count(f"storage {name!r} is unavailable: ") >= 1
        assert log.count(f"storage {name!r} is available") == 2
    assert "is its file system mounted?" in log
    for name in (FULL, THREE_FS):
        assert fleet.metric(changes, storage=name, state="unavailable") == 0
    assert f"storage {FULL!r} takes no writes: " in log
    assert f"storage {FULL!r} takes writes again" in log
    for name in (GONE, FULL, THREE_FS, MEMORY):
        assert fleet.metric("kvcm_storage_state", storage=name, state="available") == 1
        assert fleet.metric("kvcm_storage_writable", storage=name) == 1
        assert fleet.metric("kvcm_storage_breaker_open", storage=name) == 0
    assert fleet.metric("kvcm_error_reports_total", outcome="accepted") >= lost
    assert f"blocks on storage {MEMORY!r} are reported missing" in log
