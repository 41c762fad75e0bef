"""What Valkey and a plain client need for the same rows: the floor below every number of ours."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from time import perf_counter
from typing import Any, cast

import hiredis

_HASHES = 64
_KEY_BYTES = 8
_VALUE_BYTES = 14
_pack: Callable[[tuple[bytes, ...]], bytes] = cast(Any, hiredis.pack_command)


class Floors:
    """Rows of one request, written and read over 64 hashes in one pipeline each, without scripts,
    fences or checks, on a blocking socket.

    Attributes:
        reads_ms, writes_ms: one time per `measure`, packing and parsing included.
    """

    def __init__(self, port: int, rows: int) -> None:
        self._rows = rows
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reads_ms: list[float] = []
        self.writes_ms: list[float] = []

    def measure(self) -> None:
        """Write fresh rows, read them, and remove them."""
        hashes = [b"floor:%d" % n for n in range(_HASHES)]
        keys = [[os.urandom(_KEY_BYTES) for _ in range(self._rows // _HASHES)] for _ in hashes]
        pairs = [[part for k in some for part in (k, os.urandom(_VALUE_BYTES))] for some in keys]
        self.writes_ms.append(
            self._run([(b"HSET", h, *p) for h, p in zip(hashes, pairs, strict=True)])
        )
        self.reads_ms.append(
            self._run([(b"HMGET", h, *k) for h, k in zip(hashes, keys, strict=True)])
        )
        self._run([(b"UNLINK", *hashes)])

    def _run(self, commands: list[tuple[bytes, ...]]) -> float:
        begun = perf_counter()
        self._socket.sendall(b"".join(map(_pack, commands)))
        reader = hiredis.Reader()
        left = len(commands)
        while left:
            reader.feed(self._socket.recv(1 << 20))
            while (reply := reader.gets()) is not False:
                if isinstance(reply, hiredis.ReplyError):
                    raise reply
                left -= 1
        return (perf_counter() - begun) * 1e3
