"""kvcm replay against a real manager: one worker reaches the ceiling exactly, bytes included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcm.optimizer.trace import TRACE_BLOCK_TOKENS
from kvcm.optimizer.workload import WorkloadKind, generate, write_rows

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


def replay(*arguments: object) -> dict:
    command = [sys.executable, "-m", "kvcm.cli.main", "replay", "--json", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_at_the_ceiling(report: dict) -> None:
    blocks, best = report["blocks"], report["ceiling"]
    assert report["hit_rate"] == {name: best[name] for name in ("blocks", "requests")}
    assert blocks["written"] == best["distinct_blocks"]
    assert blocks["asked"] == blocks["hit"] + blocks["written"]
    assert report["bytes_read"] == blocks["hit"] * report["specs"] * report["block_bytes"]


@pytest.fixture(params=["grpc", "http"])
def target(request, manager):
    return {"grpc": manager.target, "http": f"http://{manager.host}:{manager.http_port}"}[
        request.param
    ]


def test_a_sample_workload_with_two_specs(tmp_path, target):
    trace = tmp_path / "sample.jsonl"
    with trace.open("wb") as file:
        write_rows(file, generate(WorkloadKind.MIXED, 80, 2), block_size=TRACE_BLOCK_TOKENS)
    instance = f"sample-{target.partition(':')[0]}"
    options = (trace, "-t", target, "--specs", "2", "--block-bytes", "300")
    assert_at_the_ceiling(replay(*options, "--instance", instance))


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_a_slice_of_a_real_trace(manager, name):
    trace = SHARED / f"mooncake_{name}.jsonl"
    if not trace.exists():
        pytest.skip("the real traces are not here")
    report = replay(trace, "-t", manager.target, "--limit", "200", "--block-bytes", "256")
    assert report["requests"] == 200
    assert_at_the_ceiling(report)


def test_blocks_whose_files_are_deleted_are_lost_once(tmp_path, manager_folder, manager):
    trace = tmp_path / "sample.jsonl"
    with trace.open("wb") as file:
        write_rows(file, generate(WorkloadKind.MIXED, 30, 3), block_size=TRACE_BLOCK_TOKENS)
    options = (trace, "-t", manager.target, "--block-bytes", "300", "--instance", "lossy")
    asked = replay(*options)["blocks"]["asked"]
    # Every third file that there is, whoever's it is.
    files = [p for p in (manager_folder / "blocks").rglob("*_tp0_*") if p.is_file()]
    for path in sorted(files)[::3]:
        path.unlink()
    second = replay(*options)["blocks"]
    assert second["lost"] == second["reported"] > 0
    assert (second["wrong"], second["failed"], second["refused"]) == (0, 0, 0)
    third = replay(*options)["blocks"]
    assert (third["lost"], third["hit"]) == (0, asked)
