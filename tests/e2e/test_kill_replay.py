"""The manager, or its engines, are killed in the middle of a replay; nothing acknowledged is lost,
nothing is stuck, and the data passes the audit afterwards."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest
from e2e_harness import (
    PATIENCE_S,
    WRITE_TIMEOUT_S,
    Site,
    acknowledged,
    engines_of,
    make_trace,
    result,
)

from kvcm.optimizer.trace import ceiling, read_trace
from kvcm.optimizer.workload import WorkloadKind
from kvcm.testing.eventually import eventually_sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMON = ("--instance", "e2e", "--block-bytes", 1024, "--specs", 2)
TIMEOUT = ("--write-timeout", WRITE_TIMEOUT_S)


def kill_at(site: Site, under_way: subprocess.Popen[str], acks: Path, blocks: int) -> None:
    """kill -9 the manager once so many blocks are acknowledged."""

    def reached() -> bool:
        assert under_way.poll() is None, under_way.communicate()
        return acknowledged(acks) >= blocks

    eventually_sync(reached, timeout=2 * PATIENCE_S, interval=0.002)
    site.kill()


def check_everything_can_be_had(site: Site, trace: Path, acks: Path) -> None:
    check = result(site.replay("--check-acks", acks))
    assert check["keys"] > 0
    assert check["right"] == check["keys"], check

    site.settle()
    again = result(site.replay(*COMMON, trace))["blocks"]
    assert (again["wrong"], again["lost"], again["failed"], again["refused"]) == (0, 0, 0, 0)
    with site.client() as client:
        for row in read_trace(str(trace)).rows:
            found = client.get_cache_location("e2e", row.hash_ids)
            assert len(found) == len(row.hash_ids), "a key that can never be written again"


def check_audit(site: Site, trace: Path) -> None:
    report = site.audit_at_rest()
    assert report.problems == []
    assert report.overdue == 0
    assert (
        report.serving_blocks == ceiling(r.hash_ids for r in read_trace(str(trace)).rows).distinct
    )


def replay_with_kills(site: Site, folder: Path, seed: int, requests: int, kills: int) -> None:
    chance = random.Random(seed)
    trace, acks = folder / "trace.jsonl", folder / "acks"
    make_trace(trace, WorkloadKind.CHAT, requests, seed)
    blocks = ceiling(r.hash_ids for r in read_trace(str(trace)).rows).distinct
    site.start()
    under_way = site.replay(*COMMON, *TIMEOUT, "--workers", 3, "--acks", acks, trace)
    try:
        for at in sorted(chance.uniform(0.05, 0.8) for _ in range(kills)):
            kill_at(site, under_way, acks, int(at * blocks))
            report = site.audit(after_crash=True)
            assert report.problems == []
            site.start()
        done = result(under_way)
    finally:
        under_way.kill()
    assert done["requests"] == requests
    assert done["retries"], "the kills were noticed"
    assert (done["blocks"]["wrong"], done["blocks"]["lost"]) == (0, 0)
    check_everything_can_be_had(site, trace, acks)
    check_audit(site, trace)


def test_a_manager_killed_twice_loses_nothing_it_acknowledged(site: Site, tmp_path: Path) -> None:
    replay_with_kills(site, tmp_path, seed=20, requests=600, kills=2)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_a_manager_killed_many_times_loses_nothing_it_acknowledged(
    site: Site, tmp_path: Path, seed: int
) -> None:
    replay_with_kills(site, tmp_path, seed, requests=3_000, kills=12)


def kill_engine_while_it_writes(site: Site, trace: Path, acks: Path) -> None:
    """SIGKILL the only engine while its session is open."""
    under_way = site.replay(*COMMON, *TIMEOUT, "--acks", acks, trace)
    try:
        eventually_sync(lambda: acknowledged(acks) > 50, timeout=PATIENCE_S)
        (engine,) = engines_of(under_way)

        def is_writing() -> bool:
            """Held still while we look: what is open now is open when it dies."""
            os.kill(engine, signal.SIGSTOP)
            if site.usage()["open_blocks"]:
                return True
            os.kill(engine, signal.SIGCONT)
            return False

        eventually_sync(is_writing, timeout=PATIENCE_S, interval=0.003)
        os.kill(engine, signal.SIGKILL)
        out, _ = under_way.communicate(timeout=PATIENCE_S)
    finally:
        under_way.kill()
    assert under_way.returncode == 1
    assert json.loads(out)["engine_errors"] == ["an engine died, exit code -9"]


def test_an_engine_killed_while_it_writes_gives_its_space_back(site: Site, tmp_path: Path) -> None:
    trace, acks = tmp_path / "trace.jsonl", tmp_path / "acks"
    make_trace(trace, WorkloadKind.CHAT, 150, 21)
    site.start()
    kill_engine_while_it_writes(site, trace, acks)
    held = site.usage()
    assert held["open_blocks"] > 0
    settled = site.settle()
    assert settled["serving_blocks"] == acknowledged(acks)
    assert (settled["open_bytes"], settled["trash_bytes"]) == (0, 0)
    check_everything_can_be_had(site, trace, acks)
    check_audit(site, trace)
