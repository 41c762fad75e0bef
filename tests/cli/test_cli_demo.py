"""The first command a user runs: it explains itself, keeps its data, leaves nothing running."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvcm.testing.eventually import eventually_sync

pytestmark = pytest.mark.timeout(180)


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvcm.cli.main", "demo", "--data-dir", str(folder)]
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def run(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    process = start(folder, *arguments, **environment)
    out, err = process.communicate(timeout=150)
    assert "Traceback" not in err
    return process.returncode, out, err


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_the_demo_says_what_came_of_it_and_runs_again_on_its_own_data(tmp_path):
    folder = tmp_path / "demo"
    # A setting meant for the user's own manager does not reach the demo's.
    code, out, err = run(
        folder, "-n", "150", "--workers", "2", KVCM_REGISTRY_URL="sqlite:////nonexistent/x.db"
    )
    assert code == 0, out + err
    for words in (
        "150 requests",
        "blocks looked up",
        "written",
        "hit rate, by blocks",
        "ceiling",
        "bytes written",
        "p50",
        "p99",
        "0 wrong bytes",
        str(folder),
        "Try next",
    ):
        assert words in out
    assert list((folder / "blocks").rglob("*_tp0_*"))
    assert processes_of(folder) == []

    code, out, _ = run(folder, "-n", "150", "--workers", "2")
    assert code == 0
    assert "1.00000" in out
    assert "earlier replay" in out

    moved = tmp_path / "moved"
    folder.rename(moved)
    code, _, err = run(moved, "-n", "10")
    assert code == 1
    assert "moved" in err
    assert processes_of(moved) == []


def test_a_folder_in_use_is_a_clear_error_and_the_other_manager_lives_on(tmp_path, manager):
    folder = tmp_path / "demo"
    folder.mkdir()
    own = Path(f"/proc/{manager.process.pid}/cmdline").read_text().split("\0")
    (folder / "manager").symlink_to(own[own.index("--data-dir") + 1])
    code, _, err = run(folder, "-n", "10")
    assert code == 1
    assert "the manager ended at its start" in err
    assert manager.process.poll() is None


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run(tmp_path / "file" / "demo", "-n", "10")
    assert code == 1
    assert len(err.splitlines()) == 1


def test_a_signal_ends_the_demo_and_all_its_processes(tmp_path):
    folder = tmp_path / "demo"
    process = start(folder, "-n", "20000", "--workers", "2")
    blocks = folder / "blocks"
    eventually_sync(lambda: list(blocks.rglob("*_tp0_*")), timeout=60, message="bytes are written")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "partial" in out
    assert "Traceback" not in err
    assert processes_of(folder) == []
