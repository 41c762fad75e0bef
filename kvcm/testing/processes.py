"""What the real servers of tests share: they end with whoever started them, and their ports."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
from collections.abc import Sequence

_PORTS = range(10_240, 32_000)
"""Below what Linux gives to clients (32,768 and up): a server that is started again must find its
own port free."""
# Becomes the user first: changing it would drop the request to be told of the parent's end.
_RUN = """
import ctypes, os, sys
uid, gid, parent, number = map(int, sys.argv[1:5])
if os.getuid() != uid:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    os.umask(0o077)
ctypes.CDLL(None).prctl(1, number, 0, 0, 0)
if os.getppid() != parent:
    sys.exit(1)
os.execv(sys.argv[5], sys.argv[5:])
"""


def ending_with_us(
    program: Sequence[str],
    number: signal.Signals = signal.SIGKILL,
    *,
    uid: int | None = None,
    gid: int | None = None,
) -> list[str]:
    """A command that becomes ``program`` and is sent signal ``number`` when this process ends.

    Not by a ``preexec_fn``, for which Python forks: in the copy of a process that uses gRPC the
    threads of gRPC are gone and its handlers run, which now and then ends it before the program
    begins.

    Args:
        uid, gid: whom it runs as; by default whoever calls.
    """
    uid = os.getuid() if uid is None else uid
    gid = os.getgid() if gid is None else gid
    who = (uid, gid, os.getpid(), int(number))
    return [sys.executable, "-ISc", _RUN, *map(str, who), *program]


def free_port(distance: int = 0) -> int:
    """A port of 127.0.0.1 that is free now, and the one at a distance too."""
    while True:
        port = _numbers.choice(_PORTS[: len(_PORTS) - distance])
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                if distance:
                    second.bind(("127.0.0.1", port + distance))
            except OSError:
                continue
        return port


_numbers = random.Random(os.getpid())
