"""Real Mooncake masters and lenders of memory for tests, from the binaries of the extra
``mooncake``. They end with the process that started them, however that ends.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvcm.testing.eventually import eventually_sync
from kvcm.testing.processes import ending_with_us, free_port

_START_S = 30.0
_STOP_S = 10.0


def why_not() -> str:
    """What keeps Mooncake from running here; empty when nothing does."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake is not installed: pip install 'kvcm[mooncake]'"
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return "libibverbs1 is missing (Debian's package): Mooncake's library needs it"
    return ""


needs_mooncake = pytest.mark.skipif(bool(why_not()), reason=why_not())
"""For tests that start one. Where Mooncake cannot run they say why and skip; CI installs it, and
fails where it cannot."""


class _Server:
    def __init__(self, binary: str) -> None:
        self._binary = binary
        self._home = Path(tempfile.mkdtemp(prefix="kvcm-mooncake-"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id, 0 while it does not run."""
        return self._process.pid if self._process else 0

    def kill(self) -> None:
        """``kill -9``. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_STOP_S)

    def pause(self) -> None:
        """It takes connections (the kernel does) and never answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Undoes ``pause``."""
        os.kill(self.pid, signal.SIGCONT)

    def remove(self) -> None:
        """Ends it and removes its files. Idempotent."""
        self.kill()
        shutil.rmtree(self._home, ignore_errors=True)

    def log(self) -> str:
        """What it wrote."""
        return (self._home / "log").read_text(errors="replace")

    def _launch(self, arguments: Sequence[str], port: int) -> bool:
        """Start it; False when it ended instead of listening."""
        assert self._process is None, "it runs"
        with (self._home / "log").open("ab") as log:
            self._process = process = subprocess.Popen(
                ending_with_us([str(_package() / self._binary), *arguments]),
                stdout=log,
                stderr=log,
                cwd=self._home,
            )
        eventually_sync(
            lambda: process.poll() is not None or _listens(port),
            timeout=_START_S,
            message=f"{self._binary} does not listen",
        )
        if process.poll() is None:
            return True
        self._process = None
        return False


class MooncakeMaster(_Server):
    """A master on free ports of 127.0.0.1 that can be killed, paused and started again.

    It holds its objects' places in memory: after a restart it has none.
    """

    def __init__(self, options: Sequence[str] = ()) -> None:
        super().__init__("mooncake_master")
        self._options = list(options)
        self.port = 0

    @property
    def entry(self) -> str:
        """The field ``master_service_entry``."""
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it, on its old port if it had one; returns when it listens."""
        is_new = not self.port
        for _ in range(10):
            self.port = free_port() if is_new else self.port
            arguments = [
                "-rpc_address=127.0.0.1",
                f"-rpc_port={self.port}",
                "-metrics_host=127.0.0.1",
                f"-metrics_port={free_port()}",
                *self._options,
            ]
            if self._launch(arguments, self.port):
                return
            # Somebody else may have been quicker to take a port.
        raise AssertionError(self.log())


class MooncakeLender(_Server):
    """A process that lends memory to a master's store; the bytes of the objects lie in it."""

    def __init__(self, master: MooncakeMaster, segment_bytes: int = 64 << 20) -> None:
        super().__init__("mooncake_client")
        self._master = master
        self._segment_bytes = segment_bytes

    def start(self) -> None:
        """Returns when it listens; its memory can be used a moment later."""
        for _ in range(10):
            port = free_port()
            arguments = [
                "-host=127.0.0.1",
                f"-port={port}",
                f"-global_segment_size={self._segment_bytes}",
                f"-master_server_address={self._master.entry}",
                "-metadata_server=P2PHANDSHAKE",
                "-protocol=tcp",
            ]
            if self._launch(arguments, port):
                return
        raise AssertionError(self.log())


@contextmanager
def mooncake_store(
    *options: str, segment_bytes: int = 64 << 20
) -> Iterator[tuple[MooncakeMaster, MooncakeLender]]:
    """A running master and one that lends it memory, both removed at the end."""
    master = MooncakeMaster(options)
    lender = MooncakeLender(master, segment_bytes)
    try:
        master.start()
        lender.start()
        yield master, lender
    finally:
        lender.remove()
        master.remove()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def _package() -> Path:
    if reason := why_not():
        raise RuntimeError(reason)
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None  # why_not looked
    assert spec.origin is not None
    return Path(spec.origin).parent
