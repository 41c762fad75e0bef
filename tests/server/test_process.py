"""The ``kvcm`` command as a process: start, signals, what it prints, exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from manager_harness import INSTANCE, bootstrap_document

from kvcm.testing.eventually import eventually_sync

# The machine may be busy; a start takes a second of processor time.
TIMEOUT_S = 60.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ANY_PORTS = [f"--{name}-port=0" for name in ("rpc", "http", "admin-rpc", "admin-http")]
Process = subprocess.Popen[str]


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "kvcm.cli.main", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("KVCM_")}


def run(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**environment(), **env},
        check=False,
    )


class Served:
    """A manager in a process of its own."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self.ready_file = folder / "ready.json"
        bootstrap = folder / "bootstrap.json"
        bootstrap.write_text(json.dumps(bootstrap_document(folder / "blocks")))
        self.process: Process = subprocess.Popen(
            command(
                "serve",
                *ANY_PORTS,
                f"--data-dir={folder / 'data'}",
                f"--bootstrap={bootstrap}",
                f"--ready-file={self.ready_file}",
                *arguments,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.ready: dict[str, Any] = {}

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return self.ready_file.exists()

        eventually_sync(ready, timeout=TIMEOUT_S)
        self.ready = json.loads(self.ready_file.read_text())

    def post(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.ready['http_port']}/api/{method}"
        answer: dict[str, Any] = httpx.post(url, json=body, timeout=TIMEOUT_S).json()
        assert answer["header"]["status"]["code"] == "OK", answer
        return answer

    def ended(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, out, err

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts ``kvcm serve`` in ``tmp_path`` and waits until it is ready."""
    started: list[Served] = []

    def start(*arguments: object) -> Served:
        served = Served(tmp_path, *arguments)
        started.append(served)
        served.wait_ready()
        return served

    yield start
    for served in started:
        served.kill()


def write_blocks(served: Served, keys: list[int]) -> None:
    started = served.post("startWriteCache", {"instance_id": "i", "block_keys": keys})
    session = started["write_session_id"]
    done = {
        "instance_id": "i",
        "write_session_id": session,
        "success_blocks": {"offset": len(keys)},
    }
    served.post("finishWriteCache", done)


def found(served: Served, keys: list[int]) -> int:
    body = {"instance_id": "i", "block_keys": keys, "query_type": "QT_PREFIX_MATCH"}
    return len(served.post("getCacheLocation", body)["locations"])


def test_blocks_survive_a_stop_and_a_kill(serve: Callable[..., Served]) -> None:
    served = serve()
    assert served.ready["pid"] == served.process.pid
    served.post("registerInstance", INSTANCE)
    write_blocks(served, [1, 2, 3])
    served.process.send_signal(signal.SIGTERM)
    code, out, err = served.ended()
    assert code == 0, err
    assert "Traceback" not in err
    assert not served.ready_file.exists()
    lines = out.splitlines()
    for what, port in (
        ("meta gRPC", "rpc_port"),
        ("meta HTTP", "http_port"),
        ("admin gRPC", "admin_rpc_port"),
        ("admin HTTP", "admin_http_port"),
    ):
        (line,) = [line for line in lines if line.startswith(what)]
        assert line.endswith(f":{served.ready[port]}")
    assert "kvcm is ready" in lines
    assert lines[-1] == "kvcm has stopped"

    served = serve()
    assert found(served, [1, 2, 3]) == 3
    write_blocks(served, [4, 5])
    served.process.kill()
    served.ended()
    served.ready_file.unlink()

    served = serve()
    assert found(served, [1, 2, 3, 4, 5, 6]) == 5
    served.process.send_signal(signal.SIGINT)
    assert served.ended()[0] == 0


def test_a_second_signal_exits_at_once(serve: Callable[..., Served]) -> None:
    served = serve("--set", "drain_s=60")
    served.post("registerInstance", INSTANCE)
    # A request that never ends keeps the drain from finishing.
    with socket.create_connection(("127.0.0.1", served.ready["http_port"])) as half:
        half.sendall(
            b"POST /api/getCacheLocation HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
        )
        served.process.send_signal(signal.SIGTERM)
        eventually_sync(lambda: not listens(served.ready["admin_http_port"]), timeout=TIMEOUT_S)
        served.process.send_signal(signal.SIGTERM)
        code, _, _ = served.ended()
    assert code == 128 + signal.SIGTERM


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_second_manager_on_the_same_data_is_refused(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    served = serve()
    second = run("serve", *ANY_PORTS, f"--data-dir={tmp_path / 'data'}")
    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    assert f"in use by another manager (pid {served.process.pid})" in second.stderr
