"""A manager that moves to another IP under the same name is found again (field case R51)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from threading import Thread
from typing import Any

import pytest

from kvcm.client.addresses import Address
from kvcm.core.errors import NotReady
from kvcm.testing.eventually import eventually
from tests.client.conftest import Connect
from tests.client.stand_in import GrpcServer, HttpServer, StandIn

NAME = "manager.example"


class NameServer:
    """Answers every A query with ``ip``, over UDP on 127.0.0.1."""

    def __init__(self, ip: str) -> None:
        self.ip = ip
        self.queries = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = Thread(target=self._serve)
        self._thread.start()

    def stop(self) -> None:
        with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as last:
            last.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            query, sender = self._socket.recvfrom(512)
            if not query:
                return
            self.queries += 1
            end = query.index(b"\0", 12) + 5
            (kind,) = struct.unpack(">H", query[end - 4 : end - 2])
            answers = [socket.inet_aton(self.ip)] if kind == 1 else []
            head = query[:2] + struct.pack(">HHHHH", 0x8180, 1, len(answers), 0, 0)
            records = [struct.pack(">HHHIH", 0xC00C, 1, 1, 0, 4) + ip for ip in answers]
            self._socket.sendto(head + query[12:end] + b"".join(records), sender)


@pytest.fixture
def name_server() -> Iterator[NameServer]:
    server = NameServer("127.0.0.1")
    yield server
    server.stop()


@pytest.fixture
def resolving(
    name_server: NameServer, transport: str, monkeypatch: pytest.MonkeyPatch
) -> NameServer:
    """The test's name server answers for ``NAME``, in whichever way the transport asks."""
    if transport == "grpc":
        monkeypatch.setattr(
            Address,
            "authority",
            property(lambda self: f"dns://127.0.0.1:{name_server.port}/{self.host}:{self.port}"),
        )
        return name_server
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        asked = host.decode() if isinstance(host, bytes) else host
        return real(name_server.ip if asked == NAME else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return name_server


async def test_after_a_connection_error_the_name_is_resolved_again(
    connect: Connect, transport: str, resolving: NameServer
) -> None:
    kind: Any = GrpcServer if transport == "grpc" else HttpServer
    old, new = StandIn(), StandIn()
    first = kind(old)
    driver = connect(f"{transport}://{NAME}:{first.port}")
    await driver.call("trim_cache", "i", timeout=10)
    assert len(old.requests) == 1

    resolving.ip = "127.0.0.2"
    first.stop()
    second = kind(new, host="127.0.0.2", port=first.port)

    async def arrived() -> bool:
        try:
            await driver.call("trim_cache", "i")
        except NotReady:
            return False
        return True

    try:
        await eventually(arrived)
        assert len(new.requests) == 1
    finally:
        second.stop()
