"""``kvcm admin fsck`` against a real manager that serves meanwhile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
from click.testing import Result
from typer.testing import CliRunner

from kvcm.cli.local_manager import LocalManager
from kvcm.cli.main import build_app
from kvcm.client import AdminClient, Client


def fsck(manager: LocalManager, *arguments: str) -> Result:
    http = f"http://{manager.host}:{manager.admin_http_port}"
    return CliRunner().invoke(build_app(), ["admin", "fsck", "--target", http, *arguments])


def report_of(result: Result) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def storage_root(manager: LocalManager) -> Path:
    """The folder of the one storage."""
    view = fsck(manager, "--json")
    assert view.exit_code == 0, view.output
    (root,) = {Path(p) for p in _roots(manager)}
    return root


def _roots(manager: LocalManager) -> list[str]:
    with AdminClient(manager.admin_target) as client:
        return [str(s.spec["root_path"]) for s in client.list_storage()]


def test_a_dry_run_a_repair_and_a_clean_run(manager: LocalManager) -> None:
    root = storage_root(manager)
    leftover = root / f".kvcm-probe-{'0' * 24}"
    leftover.write_bytes(b"left")
    # Its change time is now, whatever its write time says: too young to be touched.
    os.utime(leftover, (0, 0))
    assert fsck(manager, "--fix").exit_code == 0
    assert leftover.exists()

    clean = fsck(manager)
    assert clean.exit_code == 0
    assert "nothing is wrong" in clean.stdout
    report = report_of(fsck(manager, "--json"))
    assert report["clean"] is True
    assert report["phase"] == "done"
    assert report["errors"] == []


def test_what_it_cannot_do_ends_with_two(manager: LocalManager) -> None:
    for arguments, message in (
        (("--instance", "nobody"), "instance 'nobody' does not exist"),
        (("--storage", "nowhere"), "storage 'nowhere' does not exist"),
        (("--target", "http://127.0.0.1:1"), "http://127.0.0.1:1"),
    ):
        result = fsck(manager, *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_damage_ends_with_one(manager: LocalManager) -> None:
    with Client(manager.target) as client:
        client.register_instance("default", "broken", 4, {"tp0": 64})
        grant = client.start_write_cache("broken", [1, 2, 3])
        # Finished, and never written: the files are missing.
        client.finish_write_cache("broken", grant.session_id, 3)
    result = fsck(manager, "--instance", "broken")
    assert result.exit_code == 1
    assert "missing_file" in result.stdout
    assert "nothing was changed" in result.stderr
    # All of the storage's files are missing: that is for a human to decide.
    report = fsck(manager, "--instance", "broken", "--fix")
    assert report.exit_code == 1
    assert "--force" in report.stderr
    assert report_of(fsck(manager, "--json"))["kinds"]["missing_file"]["fixed"] == 0
    mended = report_of(fsck(manager, "--fix", "--force", "--json"))
    assert mended["kinds"]["missing_file"]["fixed"] == mended["kinds"]["missing_file"]["found"]
    assert fsck(manager).exit_code == 0
    metrics = httpx.get(
        f"http://{manager.host}:{manager.admin_http_port}/metrics", trust_env=False
    ).text
    count = float(mended["kinds"]["missing_file"]["found"])
    assert f'kvcm_repair_fixed_total{{kind="missing_file"}} {count}' in metrics


def test_one_run_at_a_time_and_it_can_be_stopped(manager: LocalManager) -> None:
    url = f"http://{manager.host}:{manager.admin_http_port}/v1/fsck"
    with httpx.Client(trust_env=False) as http:
        assert http.post(url, json={"fix": 1, "wrong": 2}).status_code == 422
        first = http.post(url, json={})
        assert first.status_code == 202
        second = http.post(url, json={})
        assert second.status_code == 409 or not first.json()["running"]
        stopped = http.delete(url).json()
        assert stopped["running"] is False
        assert stopped["report"]["phase"] in ("stopped", "done")
