"""A manager as a child process: started stopped whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvcm.core.clock import SystemClock
from kvcm.core.errors import KvcmError

_START_S = 60.0
_STOP_S = 20.0
_POLL_S = 0.05
_LOG_LINES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class LocalManager:
    """A running manager; addresses as the clients take them."""

    process: subprocess.Popen[bytes]
    host: str
    rpc_port: int
    http_port: int
    admin_rpc_port: int
    admin_http_port: int

    @property
    def target(self) -> str:
        """gRPC address of the meta service."""
        return f"grpc://{self.host}:{self.rpc_port}"

    @property
    def admin_target(self) -> str:
        """gRPC address of the admin service."""
        return f"grpc://{self.host}:{self.admin_rpc_port}"


@contextmanager
def running_manager(
    data_dir: Path, *, bootstrap: Path, log: Path, rpc_port: int = 0
) -> Iterator[LocalManager]:
    """Start ``kvcm serve`` on ``data_dir``; on leaving, SIGTERM and wait.

    Args:
        rpc_port: of the meta service's gRPC; 0 and the other ports are free ones.
        bootstrap: storages and groups of an empty registry.
        log: file that gets what the manager prints.

    Raises:
        KvcmError: it does not come up, or does not stop cleanly; shows the end of its log.
    """
    ready = data_dir / "ready.json"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "kvcm.cli.main", "serve"]
    command += ["--data-dir", str(data_dir), "--bootstrap", str(bootstrap)]
    command += ["--ready-file", str(ready), "--host", "127.0.0.1"]
    command += ["--rpc-port", str(rpc_port), "--http-port", "0"]
    command += ["--admin-rpc-port", "0", "--admin-http-port", "0"]
    # The settings of a real manager on this machine must not reach this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVCM_")}
    with open(log, "wb") as out:
        # Its own session: a Ctrl-C in the terminal is ours to handle, in order.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        yield _wait_ready(process, ready, log)
        _stop(process, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(process: subprocess.Popen[bytes], ready: Path, log: Path) -> LocalManager:
    clock = SystemClock()
    give_up_at = clock.monotonic() + _START_S
    while not ready.exists():
        try:
            code = process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            if clock.monotonic() < give_up_at:
                continue
            raise KvcmError(f"the manager is not ready after {_START_S:g} s{_tail(log)}") from None
        raise KvcmError(f"the manager ended at its start, exit code {code}{_tail(log)}")
    value = json.loads(ready.read_text())
    return LocalManager(
        process,
        value["host"],
        value["rpc_port"],
        value["http_port"],
        value["admin_rpc_port"],
        value["admin_http_port"],
    )


def _stop(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        raise KvcmError(f"the manager ended by itself, code {process.returncode}{_tail(log)}")
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        raise KvcmError(f"the manager did not stop within {_STOP_S:g} s{_tail(log)}") from None
    if code != 0:
        raise KvcmError(f"the manager stopped with exit code {code}{_tail(log)}")


def _tail(log: Path) -> str:
    """The end of the log, as an addition to a message."""
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
    return "".join(f"\n  | {line}" for line in lines) + f"\n(whole log: {log})"
