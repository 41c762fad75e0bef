"""A file system in memory that fails on demand: ``python -m kvcm.testing.fuse MOUNTPOINT``.

It speaks the kernel's FUSE protocol on ``/dev/fuse`` itself, as ``linux/fuse.h`` describes it
(version 7.31), so it needs root and no library. Commands come as lines on standard input, each
answered by ``ok``:

* ``well``
* ``error NUMBER``: every operation fails with that errno
* ``writes NUMBER``: only writing bytes does
* ``slow SECONDS``: every operation is answered so much later
* ``hang``: none is

It ends with its standard input, and what it held with it.

Hanging means that it does not even take requests: whoever calls then waits in the kernel, and can
be killed there, as on a network mount. Were a request taken and not answered (as when this process
is stopped by a signal), its caller could not be. The same holds for a close that has to be
answered, which is why the kernel is told to leave those out (ENOSYS for FLUSH).
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import stat
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcm.core.clock import SystemClock

_LOOKUP, _FORGET, _GETATTR, _SETATTR, _MKDIR, _UNLINK, _RMDIR = 1, 2, 3, 4, 9, 10, 11
_OPEN, _READ, _WRITE, _STATFS, _RELEASE, _FSYNC, _INIT = 14, 15, 16, 17, 18, 20, 26
_OPENDIR, _READDIR, _RELEASEDIR, _FSYNCDIR, _INTERRUPT, _CREATE = 27, 28, 29, 30, 36, 35
_DESTROY, _BATCH_FORGET = 38, 42
_UNANSWERED = frozenset({_FORGET, _BATCH_FORGET, _INTERRUPT})
_SPARED = frozenset({_INIT, _RELEASE, _RELEASEDIR, _DESTROY})
"""Part of no call that a program makes, so they neither fail nor wait."""

_IN = struct.Struct("=IIQQIIIHH")
_OUT = struct.Struct("=IiQ")
_ATTR = struct.Struct("=6Q10I")
_NO_CACHE = struct.Struct("=QII")
_OPENED = struct.Struct("=QIi")
_MAX_WRITE = 1 << 17
_BUFFER = _MAX_WRITE + 4096
_SPACE = 16 << 20
_BLOCK = 4096
_SIZE_GIVEN = 1 << 3
_MODE_GIVEN = 1 << 0
_ROOT = 1
_CLOCK = SystemClock()


@dataclass(slots=True)
class _Node:
    mode: int
    changed: float
    data: bytearray = field(default_factory=bytearray)
    children: dict[str, int] = field(default_factory=dict)
    linked: bool = True


class FaultyFileSystem:
    """Answers one request after the other."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._nodes = {_ROOT: _Node(stat.S_IFDIR | 0o777, _CLOCK.now())}
        self._last = _ROOT
        self._error = 0
        self._fails_writes_only = False
        self._delay_s = 0.0
        self._hangs = False
        self._answers: dict[int, Callable[[int, memoryview], bytes]] = {
            _INIT: self._init,
            _LOOKUP: lambda node, body: self._entry(self._child(node, _name(body))),
            _GETATTR: lambda node, _: self._attributes(node),
            _SETATTR: self._set_attributes,
            _MKDIR: self._make_folder,
            _UNLINK: self._unlink,
            _RMDIR: self._unlink,
            _CREATE: self._create,
            _READ: self._read,
            _WRITE: self._write,
            _STATFS: self._statfs,
            _READDIR: self._read_folder,
            **dict.fromkeys((_OPEN, _OPENDIR), lambda _, __: _OPENED.pack(0, 0, 0)),
            **dict.fromkeys(
                (_RELEASE, _RELEASEDIR, _FSYNC, _FSYNCDIR, _DESTROY), lambda _, __: b""
            ),
        }

    def serve(self) -> None:
        """Until standard input ends or the file system is unmounted."""
        while True:
            sources = [sys.stdin] if self._hangs else [self._device, sys.stdin]
            ready, _, _ = select.select(sources, [], [])
            if sys.stdin in ready and not self._command():
                return
            if self._device in ready and not self._request():
                return

    def _command(self) -> bool:
        line = os.read(sys.stdin.fileno(), 256).decode()
        if not line:
            return False
        word, _, value = line.strip().partition(" ")
        self._error = int(value) if word in ("error", "writes") else 0
        self._fails_writes_only = word == "writes"
        self._delay_s = float(value) if word == "slow" else 0.0
        self._hangs = word == "hang"
        _say_ok()
        return True

    def _request(self) -> bool:
        try:
            request = memoryview(os.read(self._device, _BUFFER))
        except OSError as error:
            if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                return True
            if error.errno == errno.ENODEV:
                return False
            raise
        _, kind, unique, node, *_ = _IN.unpack_from(request)
        body = request[_IN.size :]
        if kind in _UNANSWERED:
            if kind == _FORGET and not self._nodes[node].linked:
                del self._nodes[node]
            return True
        number, answer = 0, b""
        if kind not in _SPARED:
            if self._delay_s and select.select([sys.stdin], [], [], self._delay_s)[0]:
                # The command that came instead may end the delay.
                self._command()
            if kind == _WRITE or not self._fails_writes_only:
                number = self._error
        try:
            if not number:
                answer = self._answers[kind](node, body)
        except KeyError:
            number = errno.ENOSYS
        except OSError as error:
            number = error.errno or errno.EIO
        try:
            os.write(self._device, _OUT.pack(_OUT.size + len(answer), -number, unique) + answer)
        except FileNotFoundError:
            pass  # whoever asked is gone
        return True

    # ---- operations ----------------------------------------------------------------------------

    def _init(self, _: int, body: memoryview) -> bytes:
        _, _, readahead, _ = struct.unpack_from("=4I", body)
        fixed = struct.pack("=4I2H2I2HI", 7, 31, readahead, 0, 16, 12, _MAX_WRITE, 1, 0, 0, 0)
        return fixed.ljust(64, b"\0")

    def _child(self, node: int, name: str) -> int:
        found = self._nodes[node].children.get(name)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, name)
        return found

    def _attr(self, number: int) -> bytes:
        node = self._nodes[number]
        size, seconds = len(node.data), int(node.changed)
        nanos = int((node.changed - seconds) * 1e9)
        blocks = -(-size // 512)
        times = (seconds, seconds, seconds, nanos, nanos, nanos)
        return _ATTR.pack(
            number, size, blocks, *times, node.mode, int(node.linked), 0, 0, 0, _BLOCK, 0
        )

    def _entry(self, number: int) -> bytes:
        return struct.pack("=4Q2I", number, 0, 0, 0, 0, 0) + self._attr(number)

    def _attributes(self, number: int) -> bytes:
        return _NO_CACHE.pack(0, 0, 0) + self._attr(number)

    def _set_attributes(self, number: int, body: memoryview) -> bytes:
        valid, _, _, size = struct.unpack_from("=IIQQ", body)
        (mode,) = struct.unpack_from("=I", body, 68)
        node = self._nodes[number]
        if valid & _SIZE_GIVEN:
            del node.data[size:]
            node.data.extend(bytes(size - len(node.data)))
        if valid & _MODE_GIVEN:
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(mode)
        node.changed = _CLOCK.now()
        return self._attributes(number)

    def _add(self, parent: int, name: str, mode: int) -> int:
        if name in self._nodes[parent].children:
            raise FileExistsError(errno.EEXIST, name)
        self._last += 1
        self._nodes[self._last] = _Node(mode, _CLOCK.now())
        self._nodes[parent].children[name] = self._last
        return self._last

    def _make_folder(self, parent: int, body: memoryview) -> bytes:
        mode, umask = struct.unpack_from("=II", body)
        made = self._add(parent, _name(body[8:]), stat.S_IFDIR | mode & ~umask)
        return self._entry(made)

    def _create(self, parent: int, body: memoryview) -> bytes:
        _, mode, umask, _ = struct.unpack_from("=4I", body)
        made = self._add(parent, _name(body[16:]), stat.S_IFREG | stat.S_IMODE(mode) & ~umask)
        return self._entry(made) + _OPENED.pack(0, 0, 0)

    def _unlink(self, parent: int, body: memoryview) -> bytes:
        name = _name(body)
        node = self._nodes[self._child(parent, name)]
        if node.children:
            raise OSError(errno.ENOTEMPTY, name)
        del self._nodes[parent].children[name]
        node.linked = False
        return b""

    def _read(self, number: int, body: memoryview) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", body)
        return bytes(self._nodes[number].data[offset : offset + size])

    def _write(self, number: int, body: memoryview) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", body)
        node = self._nodes[number]
        node.data.extend(bytes(max(0, offset - len(node.data))))
        node.data[offset : offset + size] = body[40 : 40 + size]
        node.changed = _CLOCK.now()
        return struct.pack("=II", size, 0)

    def _statfs(self, _: int, __: memoryview) -> bytes:
        total = _SPACE // _BLOCK
        free = total - sum(len(node.data) for node in self._nodes.values()) // _BLOCK
        return struct.pack("=5Q4I", total, free, free, 1 << 20, 1 << 20, _BLOCK, 255, _BLOCK, 0) + (
            bytes(24)
        )

    def _read_folder(self, number: int, body: memoryview) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", body)
        pieces, left = [], size
        children = list(self._nodes[number].children.items())
        for at, (name, child) in enumerate(children[offset:], offset + 1):
            raw = name.encode()
            kind = stat.S_IFMT(self._nodes[child].mode) >> 12
            piece = struct.pack("=QQII", child, at, len(raw), kind) + raw
            piece = piece.ljust(-(-len(piece) // 8) * 8, b"\0")
            left -= len(piece)
            if left < 0:
                break
            pieces.append(piece)
        return b"".join(pieces)


def _name(body: memoryview) -> str:
    return bytes(body).partition(b"\0")[0].decode()


def _say_ok() -> None:
    os.write(sys.stdout.fileno(), b"ok\n")


def main(mountpoint: str) -> None:
    """Mount it, say ``ok``, and serve."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"kvcm", mountpoint.encode(), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), "mount")
    _say_ok()
    FaultyFileSystem(device).serve()


if __name__ == "__main__":
    main(sys.argv[1])
