"""Managers, engines and audits as real processes on one folder."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from kvcm.client import Client
from kvcm.metaindex.stores.valkey import ValkeyStore
from kvcm.optimizer.trace import TRACE_BLOCK_TOKENS
from kvcm.optimizer.workload import WorkloadKind, generate, write_rows
from kvcm.testing.audit import AuditReport, audit, audit_data_dir
from kvcm.testing.eventually import eventually_sync

# A start takes a second of processor time, and the machine may be busy.
PATIENCE_S = 90.0
STORAGE = "files"
WRITE_TIMEOUT_S = 3
# So that whatever a crash left behind is over within seconds.
QUICK = (
    f"cache.write_timeout_s_default={WRITE_TIMEOUT_S}",
    f"cache.write_timeout_s_max={WRITE_TIMEOUT_S}",
    "cache.grace_s_min=0.2",
)

_ADDRESS = re.compile(r"^(meta|admin) (gRPC|HTTP) .*:(\d+)$", re.MULTILINE)

ANY_PORTS = [f"--{name}-port=0" for name in ("rpc", "http", "admin-rpc", "admin-http")]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "kvcm.cli.main", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """Without the settings of a real manager on this machine."""
    return {k: v for k, v in os.environ.items() if not k.startswith("KVCM_")} | more


def run(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """A ``kvcm`` command that ends by itself."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment(**env),
        check=False,
    )


class Site:
    """A data folder, a storage of files beside it, and the manager on them; its index is in the
    data folder too unless ``index_url`` names a Valkey.

    The first start takes free ports; later ones the same, so that engines find it again.

    Args:
        document: storages and groups, other than that storage and a group of it.
        inside: put before every command.
    """

    def __init__(
        self,
        folder: Path,
        *,
        root: Path | None = None,
        keys_per_file: int = 8,
        index_url: str = "",
        document: dict[str, Any] | None = None,
        inside: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.inside = inside
        self.index_url = index_url
        self.data_dir = folder / "data"
        self.root = root or folder / "blocks"
        self.ready_file = folder / "ready.json"
        self.bootstrap = folder / "bootstrap.json"
        self.log = folder / "manager.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.ready: dict[str, Any] = {}
        document = document or {
            "storages": [
                {
                    "global_unique_name": STORAGE,
                    "nfs": {"root_path": str(self.root), "key_count_per_file": keys_per_file},
                }
            ],
            "instance_groups": [
                {
                    "name": "default",
                    "storage_candidates": [STORAGE],
                    "quota": {"capacity": 1 << 40},
                    "cache_config": {
                        "reclaim_strategy": {"trigger_strategy": {"used_percentage": 2.0}},
                        "meta_indexer_config": {"mutex_shard_num": 16},
                    },
                }
            ],
        }
        self.bootstrap.write_text(json.dumps(document))

    # ---- the manager -------------------------------------------------------------------------

    def start(self, *arguments: object, settings: Sequence[str] = QUICK) -> None:
        """Start it and wait until it serves."""
        self.launch(*arguments, settings=settings)
        self.wait_ready()

    def launch(self, *arguments: object, settings: Sequence[str] = QUICK) -> None:
        """Start it."""
        self.ready_file.unlink(missing_ok=True)
        ports = [
            f"--{name.replace('_', '-')}={self.ready.get(name, 0)}"
            for name in ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")
        ]
        options = [item for setting in settings for item in ("--set", setting)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(
                    "serve",
                    *ports,
                    f"--data-dir={self.data_dir}",
                    f"--bootstrap={self.bootstrap}",
                    f"--ready-file={self.ready_file}",
                    *([f"--index-url={self.index_url}"] if self.index_url else []),
                    *options,
                    *arguments,
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(),
            )

    def wait_ready(self) -> None:
        """Wait until it serves."""

        def is_ready() -> bool:
            if self.process is not None and self.process.poll() is not None:
                raise RuntimeError(f"the manager ended: {self.log.read_text()}")
            return self.ready_file.exists()

        eventually_sync(is_ready, timeout=PATIENCE_S)
        self.ready = json.loads(self.ready_file.read_text())

    def wait_listening(self) -> None:
        """Wait until it takes calls, ready or not."""

        def ports() -> dict[str, int] | None:
            assert self.process is not None
            if self.process.poll() is not None:
                raise RuntimeError(f"the manager ended: {self.log.read_text()}")
            found = {
                f"{kind} {transport}": int(port)
                for kind, transport, port in _ADDRESS.findall(self.log.read_text())
            }
            return found if len(found) == 4 else None

        found = eventually_sync(ports, timeout=PATIENCE_S)
        self.ready = {
            "rpc_port": found["meta gRPC"],
            "http_port": found["meta HTTP"],
            "admin_rpc_port": found["admin gRPC"],
            "admin_http_port": found["admin HTTP"],
        }

    def is_ready(self) -> bool:
        """What ``/readyz`` says."""
        url = f"http://127.0.0.1:{self.ready['http_port']}/readyz"
        return httpx.get(url, timeout=PATIENCE_S).status_code == 200

    def ended(self) -> int:
        """The exit code of a manager that ends by itself."""
        assert self.process is not None
        code = self.process.wait(PATIENCE_S)
        self.process = None
        return code

    def kill(self) -> None:
        """kill -9, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        self.process = None
        return code

    @property
    def target(self) -> str:
        return f"grpc://127.0.0.1:{self.ready['rpc_port']}"

    def client(self, **options: Any) -> Client:
        return Client(self.target, **{"timeout": PATIENCE_S, **options})

    def usage(self) -> dict[str, Any]:
        """What ``/v1/usage`` says of the storage, and of the manager."""
        url = f"http://127.0.0.1:{self.ready['admin_http_port']}/v1/usage"
        document = httpx.get(url, timeout=PATIENCE_S).json()
        whole = {name: document[name] for name in ("sessions", "quarantined")}
        return {**document["storages"][STORAGE], **whole}

    def settle(self) -> dict[str, Any]:
        """Wait until no session is open and no bytes wait to be deleted; the usage then."""

        def settled() -> dict[str, Any] | None:
            usage = self.usage()
            busy = usage["sessions"] or usage["open_blocks"] or usage["trash_bytes"]
            return None if busy else usage

        return eventually_sync(settled, timeout=PATIENCE_S, interval=0.1)

    def audit(self, *, after_crash: bool = False) -> AuditReport:
        """Audit the stopped manager's data."""
        if self.index_url:
            return asyncio.run(self._audit_elsewhere(after_crash))
        return asyncio.run(audit_data_dir(self.data_dir, after_crash=after_crash))

    async def _audit_elsewhere(self, after_crash: bool) -> AuditReport:
        store = ValkeyStore(self.index_url)
        await store.open()
        try:
            url = f"sqlite:///{self.data_dir}/registry.db"
            return await audit(url, store, after_crash=after_crash)
        finally:
            await store.close()

    def audit_at_rest(
        self, *, settings: Sequence[str] = QUICK, grace_s: float = 0.0
    ) -> AuditReport:
        """As ``audit``, once the second deletes of late writers are over too.

        Each try starts and stops the manager, since only a stopped one's trash can be listed; and
        each start begins the graces anew, so that it must run for longer than these.
        """
        self.settle()

        def empty() -> AuditReport | None:
            assert self.stop() == 0
            report = self.audit()
            if report.problems or not (report.trash or report.open):
                return report
            self.start(settings=settings)
            return None

        return eventually_sync(empty, timeout=PATIENCE_S, interval=WRITE_TIMEOUT_S + grace_s)

    def _command(self, *arguments: object) -> list[str]:
        return [*self.inside, *command(*arguments)]

    # ---- engines -----------------------------------------------------------------------------

    def replay(self, *arguments: object) -> subprocess.Popen[str]:
        """``kvcm replay --json`` against the manager, under way."""
        fixed = ("--json", "-t", self.target, "--outage", PATIENCE_S)
        return subprocess.Popen(
            self._command("replay", *fixed, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The report of a replay that ends well."""
    out, err = process.communicate(timeout=2 * PATIENCE_S)
    assert process.returncode == 0, (out, err)
    report: dict[str, Any] = json.loads(out)
    return report


def make_trace(path: Path, kind: WorkloadKind, requests: int, seed: int) -> None:
    """Write a generated trace."""
    with path.open("wb") as file:
        write_rows(file, generate(kind, requests, seed), block_size=TRACE_BLOCK_TOKENS)


def engines_of(replay: subprocess.Popen[str]) -> list[int]:
    """Pids of a replay's engine processes."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            line = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == replay.pid and b"spawn_main" in line:
            found.append(int(stat.parent.name))
    return found


def acknowledged(acks: Path) -> int:
    """Blocks a replay has recorded so far."""
    return max(0, acks.read_bytes().count(b"\n") - 1) if acks.exists() else 0
