"""What the README tells a newcomer to type, typed: against a real manager."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcm.cli.local_manager import LocalManager, running_manager

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalManager]:
    """The startup defaults, but with the storage in a folder of this test."""
    folder = tmp_path_factory.mktemp("manager")
    bootstrap = folder / "bootstrap.json"
    storage = {
        "global_unique_name": "nfs_01",
        "nfs": {"root_path": f"{folder}/blocks/", "key_count_per_file": 8},
    }
    group = {"name": "default", "storage_candidates": ["nfs_01"]}
    bootstrap.write_text(json.dumps({"storages": [storage], "instance_groups": [group]}))
    with running_manager(folder, bootstrap=bootstrap, log=folder / "log") as manager:
        yield manager


def block_under(heading: str, language: str) -> str:
    section = README.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, f"{heading}: {len(blocks)} blocks of {language}"
    return str(blocks[0])


def with_port(text: str, default: int, real: int) -> str:
    assert str(default) in text
    return text.replace(str(default), str(real))


@pytest.mark.skipif(shutil.which("curl") is None, reason="the block is made of curl calls")
def test_the_curl_block_registers_writes_finds_and_reads(manager: LocalManager) -> None:
    script = with_port(block_under("An engine's view, with curl", "sh"), 6382, manager.http_port)
    done = subprocess.run(
        ["bash", "-eu", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    *answers, block = done.stdout.splitlines()
    registered, started, finished, found = map(json.loads, answers)
    for answer in (registered, started, finished, found):
        assert answer["header"]["status"]["code"] == "OK", answer
    (storage,) = json.loads(registered["storage_configs"])
    assert (storage["global_unique_name"], storage["is_available"]) == ("nfs_01", True)
    assert started["block_mask"] == {"offset": 0}
    assert len(started["locations"]) == 2
    assert found["locations"] == started["locations"]
    assert block == "block-02"


def test_the_python_block_runs_as_it_stands(manager: LocalManager) -> None:
    program = with_port(block_under("The same in Python", "python"), 6381, manager.rpc_port)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "4 blocks found, the last begins with b'\\x03\\x03\\x03\\x03'\n"


def test_the_first_commands_are_run_and_test() -> None:
    first = re.search(r"^```sh\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert first is not None
    assert [line.split("#")[0].split() for line in first[1].splitlines()] == [
        ["make", "run"],
        ["make", "test"],
    ]
