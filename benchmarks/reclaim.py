"""Does reclaim keep up: writers at the disk's speed into a group that is full, beside lookups.

A real manager on core 0; on core 1 writer processes that write every byte they are granted, and one
that looks chains up at a steady rate. Phases: lookups alone; beside processes that write and delete
as many bytes without the manager (what the disk and the machine cost); beside writes with room; and
beside writes at 95 % of the capacity, where every byte written is one to be evicted.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks import machine
from kvcm.cli.local_manager import LocalManager, running_manager
from kvcm.client import AdminClient, Client
from kvcm.client.file_sdk import FileSdk
from kvcm.core.clock import SystemClock
from kvcm.core.errors import CapacityReached, KvcmError
from kvcm.core.types import InstanceGroupQuota

GROUP = "default"
CLOCK = SystemClock()
_NEVER = threading.Event()
_TIMEOUT_S = 30.0
_SAMPLE_S = 0.25
_BARE_FILES_KEPT = 100


@dataclass(frozen=True)
class Options:
    """``blocks`` a write, of ``block_bytes`` each; ``seconds`` of the phase with reclaim."""

    writers: int = 2
    blocks: int = 64
    block_bytes: int = 131_072
    lookups_per_s: int = 100
    chains: int = 32
    watermark: float = 0.95
    seconds: float = 60.0
    quiet_seconds: float = 15.0


def measure(options: Options, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The phases; one row each."""
    folder = Path(tempfile.mkdtemp(prefix="kvcm-bench-"))
    allowed = os.sched_getaffinity(0)
    try:
        machine.pin(machine.SERVER_CPU)
        data = folder / "data"
        data.mkdir()
        with running_manager(data, bootstrap=_bootstrap(folder), log=folder / "log") as manager:
            machine.pin(machine.LOADER_CPU)
            return _phases(manager, folder, options, say)
    finally:
        os.sched_setaffinity(0, allowed)
        shutil.rmtree(folder, ignore_errors=True)


def _phases(
    manager: LocalManager, folder: Path, options: Options, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    with Client(manager.target, timeout=_TIMEOUT_S) as client:
        for name in ("hot", *(f"writer-{i}" for i in range(options.writers))):
            client.register_instance(GROUP, name, 16, {"tp0": options.block_bytes})
        for chain in range(options.chains):
            with client.write("hot", _chain(chain, options.blocks)) as session:
                for index, _ in session:
                    session.done(index)
    rows = [_phase("lookups alone", manager, replace(options, writers=0), options.quiet_seconds)]
    say(_line(rows[-1]))
    bare = folder / "bare"
    bare.mkdir()
    rows.append(_phase("writes without kvcm", manager, options, options.quiet_seconds, bare=bare))
    say(_line(rows[-1]))
    rows.append(_phase("writes with room", manager, options, options.quiet_seconds))
    say(_line(rows[-1]))
    capacity = int(_used(manager) / options.watermark)
    with AdminClient(manager.admin_target, timeout=_TIMEOUT_S) as admin:
        group = admin.get_instance_group(GROUP)
        full = group.model_copy(
            update={
                "quota": InstanceGroupQuota(capacity=capacity),
                "version": group.version + 1,
            }
        )
        admin.update_instance_group(full, group.version)
    rows.append(_phase("writes under reclaim", manager, options, options.seconds, capacity))
    say(_line(rows[-1]))
    return rows


def _bootstrap(folder: Path) -> Path:
    path = folder / "bootstrap.json"
    reclaim = {
        "reclaim_policy": "POLICY_LRU",
        "trigger_strategy": {"used_percentage": Options.watermark},
        "delay_before_delete_ms": 1000,
    }
    group = {
        "name": GROUP,
        "storage_candidates": ["nfs_01"],
        "quota": {"capacity": str(1 << 60)},
        "cache_config": {
            "reclaim_strategy": reclaim,
            "meta_indexer_config": {"max_key_count": "0", "mutex_shard_num": "16"},
        },
    }
    spec = {"root_path": f"{folder}/blocks/", "key_count_per_file": 64}
    storage = {"global_unique_name": "nfs_01", "nfs": spec}
    path.write_text(json.dumps({"storages": [storage], "instance_groups": [group]}))
    return path


def _phase(
    name: str,
    manager: LocalManager,
    options: Options,
    seconds: float,
    capacity: int = 0,
    bare: Path | None = None,
) -> dict[str, Any]:
    context = mp.get_context("spawn")
    work, where = (_write_bare, str(bare)) if bare is not None else (_write, manager.target)
    jobs = [_start(context, work, where, options, number) for number in range(options.writers)]
    jobs.append(_start(context, _look_up, manager.target, options))
    for _, pipe in jobs:
        pipe.recv()
    end = CLOCK.now() + seconds
    for _, pipe in jobs:
        pipe.send(end)
    highest, cpu = 0, machine.cpu_seconds(manager.process.pid)
    stolen = machine.stolen_seconds()
    with httpx.Client(trust_env=False) as http:
        while CLOCK.now() < end:
            highest = max(highest, _used(manager, http))
            _NEVER.wait(_SAMPLE_S)
    cpu = machine.cpu_seconds(manager.process.pid) - cpu
    stolen = machine.stolen_seconds() - stolen
    answers = [pipe.recv() for _, pipe in jobs]
    for process, _ in jobs:
        process.join()
    *written, latencies = answers
    total = {k: sum(w[k] for w in written) for k in ("whole", "cut", "refused", "failed", "bytes")}
    starts = np.concatenate([w["start_ms"] for w in written]) if written else np.zeros(1)
    count = total["whole"] + total["cut"] + total["refused"] + total["failed"]
    return {
        "phase": name,
        "starts": count,
        "whole": total["whole"],
        "cut": total["cut"],
        "refused": total["refused"],
        "failed": total["failed"],
        "success_percent": 100 * (total["whole"] + total["cut"]) / count if count else 100.0,
        "written_mb_per_s": total["bytes"] / seconds / 1e6,
        "start_p99_ms": float(np.percentile(starts, 99)),
        "lookups": len(latencies),
        "p50_ms": float(np.percentile(latencies, 50)),
        "p99_ms": float(np.percentile(latencies, 99)),
        "highest_percent": 100 * highest / capacity if capacity else 0.0,
        "capacity_mb": capacity / 1e6,
        "cpu_percent": 100 * cpu / seconds,
        "stolen_percent": 100 * stolen / seconds / (os.cpu_count() or 1),
    }


def _start(context: Any, work: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    return process, ours


def _write(pipe: Connection, target: str, options: Options, number: int) -> None:
    """Write chains of their own, one after the other, every byte."""
    # What is measured beside it is the manager, not who gets this core.
    os.nice(10)
    found: dict[str, Any] = {"whole": 0, "cut": 0, "refused": 0, "failed": 0, "bytes": 0}
    started: list[float] = []
    data = os.urandom(options.block_bytes)
    sdk = FileSdk()
    chain = int(CLOCK.now() * 1000) % (1 << 40)
    instance = f"writer-{number}"
    with Client(target, timeout=_TIMEOUT_S) as client:
        client.get_cache_location(instance, [1])
        pipe.send("ready")
        end = pipe.recv()
        while CLOCK.now() < end:
            chain += 1
            began = CLOCK.monotonic()
            try:
                with client.write(instance, _chain(chain, options.blocks)) as session:
                    started.append((CLOCK.monotonic() - began) * 1000)
                    found["whole" if len(session) == options.blocks else "cut"] += 1
                    session.put(sdk, [{"tp0": data}] * options.blocks)
                    found["bytes"] += len(session) * options.block_bytes
            except CapacityReached:
                found["refused"] += 1
            except KvcmError:
                found["failed"] += 1
    found["start_ms"] = np.asarray(started)
    pipe.send(found)


def _write_bare(pipe: Connection, folder: str, options: Options, number: int) -> None:
    """Write files as large as a chain, and delete each when the next few are there."""
    os.nice(10)
    found: dict[str, Any] = {"whole": 0, "cut": 0, "refused": 0, "failed": 0, "bytes": 0}
    data = os.urandom(options.block_bytes)
    kept: deque[Path] = deque()
    pipe.send("ready")
    end = pipe.recv()
    while CLOCK.now() < end:
        path = Path(folder, f"{number}-{found['bytes']}")
        with open(path, "wb", buffering=0) as file:
            for _ in range(options.blocks):
                file.write(data)
        found["bytes"] += options.blocks * options.block_bytes
        kept.append(path)
        if len(kept) > _BARE_FILES_KEPT:
            kept.popleft().unlink()
    found["start_ms"] = np.zeros(1)
    pipe.send(found)


def _look_up(pipe: Connection, target: str, options: Options) -> None:
    """Look chains up at a steady rate; milliseconds of each call."""
    latencies: list[float] = []
    chains = [_chain(i, options.blocks) for i in range(options.chains)]
    period = 1 / options.lookups_per_s
    with Client(target, timeout=_TIMEOUT_S) as client:
        client.get_cache_location("hot", chains[0])
        pipe.send("ready")
        end = pipe.recv()
        due = CLOCK.monotonic()
        while CLOCK.now() < end:
            due += period
            _NEVER.wait(max(0.0, due - CLOCK.monotonic()))
            began = CLOCK.monotonic()
            found = client.get_cache_location("hot", chains[len(latencies) % len(chains)])
            latencies.append((CLOCK.monotonic() - began) * 1000)
            if len(found) != options.blocks:
                raise SystemExit("a chain that is read all the time was evicted")
    pipe.send(np.asarray(latencies))


def _chain(number: int, blocks: int) -> list[int]:
    return [(number << 12) + i for i in range(blocks)]


def _used(manager: LocalManager, http: httpx.Client | None = None) -> int:
    get = http.get if http is not None else httpx.get
    url = f"http://{manager.host}:{manager.admin_http_port}/v1/usage"
    return int(get(url).json()["groups"][GROUP]["counted_bytes"])


def _line(row: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
