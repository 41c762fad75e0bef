"""A million random operations with faults and crashes: space is counted exactly, and limits hold.

``make soak ARGS="-k space"`` runs it long; ``KVCM_SPACE_OPS`` says how many operations on each
store (a million on memory), ``KVCM_SPACE_SEED`` repeats a run. The operations and what must hold
are in ``space_machine.py``.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcm.cache import write
from kvcm.metaindex.stores.valkey import ValkeyStore
from kvcm.storage_backends import posix_survey
from kvcm.testing.servers_valkey import ValkeyServer, valkey_server
from tests.reclaimer.space_machine import SpaceMachine

_log = logging.getLogger(__name__)
OPERATIONS = int(os.environ.get("KVCM_SPACE_OPS", "0"))
SEED = int(os.environ.get("KVCM_SPACE_SEED", "0"))
PIECE = 20_000
"""Operations of one seed in a long run: then a new service begins."""
DAY_S = 86_400.0


@pytest.fixture(autouse=True)
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated time runs faster than that of the file system: repair takes all files for old."""
    real = posix_survey.file_system_time
    monkeypatch.setattr(
        posix_survey, "file_system_time", lambda root, name: real(root, name) + DAY_S
    )


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the machine is busy is no reason to answer that the usage is still being read."""
    monkeypatch.setattr(write, "_LOAD_WAIT_S", 30.0)


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with valkey_server() as server:
        yield server


async def run(
    root: Path, kind: str, seed: int, operations: int, server: ValkeyServer | None = None
) -> Counter[str]:
    """Run operations, in pieces of their own seeds; what was done."""
    done: Counter[str] = Counter()
    left = operations
    while left > 0:
        _log.info("%s: seed %d, %d operations left", kind, seed, left)
        if server is not None:
            server.call("FLUSHALL")
        store = ValkeyStore(server.url) if server is not None else None
        machine = SpaceMachine(seed, root / str(seed), kind=kind, store=store)
        await machine.run(min(left, PIECE))
        shutil.rmtree(root / str(seed))
        done += machine.done
        left -= PIECE
        seed += 1
    return done


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_space_is_counted_exactly_and_limits_hold_in_memory(tmp_path: Path) -> None:
    done: Counter[str] = Counter()
    for seed in range(SEED + 1, SEED + 6):
        done += await run(tmp_path, "memory", seed, 4_000)
    # All of it happened, so that it could have failed.
    for what in ("drained", "crashed", "side by side", "chains shortened", "finished too late"):
        assert done[what] > 0, f"{what} never happened"
    for reason in ("QUOTA_GROUP", "QUOTA_TYPE", "STORAGE_FULL", "MAX_KEY_COUNT", "NO_STORAGE"):
        assert done[f"refused {reason}"] > 0, f"nothing was refused with {reason}"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_space_is_counted_exactly_and_limits_hold_on_rocksdb(tmp_path: Path) -> None:
    await run(tmp_path, "rocksdb", SEED + 11, 2_000)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_space_is_counted_exactly_and_limits_hold_on_valkey(
    tmp_path: Path, valkey: ValkeyServer
) -> None:
    await run(tmp_path, "valkey", SEED + 21, 1_000, valkey)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("kind", "operations"), [("memory", 1_000_000), ("rocksdb", 50_000), ("valkey", 50_000)]
)
async def test_space_of_a_million_operations(
    tmp_path: Path, valkey: ValkeyServer, kind: str, operations: int
) -> None:
    server = valkey if kind == "valkey" else None
    await run(tmp_path, kind, SEED + 1_000, OPERATIONS or operations, server)
