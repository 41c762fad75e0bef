"""The manager is killed in the middle of a replay and comes back."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcm.cli.local_manager import LocalManager, running_manager
from kvcm.core.errors import KvcmError
from kvcm.optimizer.trace import TRACE_BLOCK_TOKENS
from kvcm.optimizer.workload import WorkloadKind, generate, write_rows
from kvcm.testing.eventually import eventually_sync
from tests.cli.conftest import write_bootstrap


def replay(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvcm.cli.main", "replay", "--json", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict:
    return json.loads(process.communicate(timeout=120)[0])


def kill_during_replay(
    data_dir: Path, log: Path, bootstrap: Path, acks: Path, common: tuple[object, ...]
) -> tuple[LocalManager, subprocess.Popen[str]]:
    """A manager that was killed when 100 blocks were acknowledged, and the replay, under way."""
    # It complains that the manager ended by itself.
    with contextlib.suppress(KvcmError):
        with running_manager(data_dir, bootstrap=bootstrap, log=log) as manager:
            under_way = replay(*common, "-t", manager.target, "--workers", "2", "--acks", acks)
            eventually_sync(
                lambda: acks.exists() and acks.read_bytes().count(b"\n") > 100,
                timeout=60,
                message="blocks are acknowledged",
            )
            manager.process.kill()
            manager.process.wait()
    return manager, under_way


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_manager_loses_no_acknowledged_block_and_no_key_for_ever(tmp_path: Path):
    trace, acks, data_dir = tmp_path / "t.jsonl", tmp_path / "acks", tmp_path / "data"
    data_dir.mkdir()
    bootstrap = write_bootstrap(tmp_path)
    with trace.open("wb") as file:
        write_rows(file, generate(WorkloadKind.CHAT, 300, 9), block_size=TRACE_BLOCK_TOKENS)
    common = (trace, "--instance", "crash", "--block-bytes", "512", "--write-timeout", "3")
    killed, under_way = kill_during_replay(data_dir, tmp_path / "1.log", bootstrap, acks, common)
    target = killed.target

    with running_manager(
        data_dir, bootstrap=bootstrap, log=tmp_path / "2.log", rpc_port=killed.rpc_port
    ):
        report = result(under_way)
        assert under_way.returncode == 0
        assert report["requests"] == 300
        assert report["retries"], "the kill was noticed"
        assert (report["blocks"]["wrong"], report["blocks"]["lost"]) == (0, 0)

        check = result(replay("--check-acks", acks, "-t", target))
        assert check["keys"] > 100
        assert check["right"] == check["keys"]

        def everything_can_be_had_again() -> bool:
            """What sessions of the crash still hold is free once they time out."""
            again = result(replay(*common, "-t", target))["blocks"]
            assert (again["wrong"], again["lost"], again["failed"]) == (0, 0, 0)
            return again["hit"] == again["asked"]

        eventually_sync(everything_can_be_had_again, timeout=60)
