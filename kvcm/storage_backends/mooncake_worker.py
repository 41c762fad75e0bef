"""The process in which a manager runs Mooncake's SDK: ``python -m`` this module.

The SDK holds the interpreter's lock while it connects: half a minute when the master hangs, more
when it is gone. In the manager that would stop every RPC; here it stops nobody, and a process can
be ended where a thread cannot. Frames on stdin and stdout: length (4 bytes, big-endian) and
msgpack. The first is the configuration, every other ``[id, operation, arguments…]``, answered in
order by ``[id, None, result]`` or ``[id, what failed, None]``. Ends when stdin does.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, TypeAlias

import msgspec

from kvcm.core import mooncake

PROBE_BYTES = 256
_GREET_S = 3.0
Answer: TypeAlias = "tuple[str | None, Any]"


class Failed(Exception):
    """A call failed as a whole; the text says why."""


class Worker:
    """A client without memory of its own, connected at the first call and again after the master
    did not answer."""

    def __init__(self, spec: mooncake.MooncakeSpec) -> None:
        self._spec = spec
        self._store: Any = None
        # Registered, as RDMA wants it: what the probe puts, and where it gets it back.
        self._memory = ctypes.create_string_buffer(2 * PROBE_BYTES)

    def answer(self, operation: str, *arguments: Any) -> Answer:
        """One call; never raises for what the store does."""
        operations: dict[str, Callable[..., Any]] = {
            "probe": self.probe,
            "delete": self.delete,
            "exists": self.exists,
        }
        try:
            self._connect()
            return None, operations[operation](*arguments)
        except Failed as error:
            return str(error), None

    def probe(self, key: str, content: bytes) -> str:
        """Put, get, compare and remove a key. Not pinned: one left behind is evicted in time.

        Returns:
            Why nothing can be put though the master answers; empty when all went well.
        """
        where = ctypes.addressof(self._memory)
        ctypes.memmove(where, content, len(content))
        ctypes.memset(where + PROBE_BYTES, 0, PROBE_BYTES)
        codes: list[int] = self._store.batch_put_from([key], [where], [len(content)])
        if codes == [mooncake.NO_SPACE]:
            return mooncake.meaning(mooncake.NO_SPACE)
        self._check("put", codes)
        sizes = self._store.batch_get_into([key], [where + PROBE_BYTES], [len(content)])
        self._check("get", sizes)
        read = self._memory.raw[PROBE_BYTES : PROBE_BYTES + len(content)]
        # The read's own lease would refuse it otherwise; nobody else knows the key.
        self._check("remove", self._store.batch_remove([key], True))
        if sizes != [len(content)] or read != content:
            raise Failed("a probe read other bytes than it wrote")
        return ""

    def delete(self, keys: Sequence[str]) -> list[int]:
        """A result code a key. Never by force: the master refuses while a reader holds a lease,
        without which a slow reader would get the bytes of whatever is written there next."""
        codes: list[int] = self._store.batch_remove(list(keys))
        self._disconnect_if_lost(codes)
        return codes

    def exists(self, keys: Sequence[str], sizes: Sequence[int]) -> list[bool]:
        """Whether a complete copy of at least so many bytes is there."""
        present = self._present(keys)
        held = self._store.batch_get_replica_desc(present) if present else {}
        lost = [key for key in present if key not in held]
        if lost and self._present(lost):
            # A master that goes away meanwhile describes nothing: that is not "missing".
            raise Failed("the master does not describe objects that it has")
        return [
            any(_bytes_in(copy) >= size for copy in held.get(key, ()))
            for key, size in zip(keys, sizes, strict=True)
        ]

    def _present(self, keys: Sequence[str]) -> list[str]:
        codes: list[int] = self._store.batch_is_exist(list(keys))
        self._check("exists", codes)
        return [key for key, code in zip(keys, codes, strict=True) if code == 1]

    def _connect(self) -> None:
        if self._store is not None:
            return
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise Failed(f"{mooncake.INSTALL_HINT}: {error}") from error
        spec, store = self._spec, MooncakeDistributedStore()
        self._greet()
        code = store.setup(
            spec.local_hostname,
            spec.metadata_connstring,
            0,
            0,
            spec.protocol,
            spec.rdma_device,
            spec.master,
        )
        if code:
            raise Failed(f"cannot connect (code {code})")
        store.register_buffer(ctypes.addressof(self._memory), len(self._memory))
        self._store = store

    def _greet(self) -> None:
        """Whether anybody listens there: the SDK takes seconds to find out that nobody does."""
        if (address := self._spec.master_address) is None:
            return
        try:
            socket.create_connection(address, timeout=_GREET_S).close()
        except OSError as error:
            raise Failed(f"does not answer: {error}") from error

    def _check(self, what: str, codes: Sequence[int]) -> None:
        self._disconnect_if_lost(codes)
        worst = min(codes, default=0)
        if worst < 0:
            raise Failed(f"{what}: {mooncake.meaning(worst)}")

    def _disconnect_if_lost(self, codes: Sequence[int]) -> None:
        # A transfer that failed too: a client whose connections are stuck does not recover.
        if any(code in mooncake.NO_MASTER or code == mooncake.TRANSFER_FAILED for code in codes):
            self._store = None


def _bytes_in(copy: Any) -> int:
    """Bytes of a copy that is complete; -1 of any other."""
    if copy.status.name != "COMPLETE":
        return -1
    if copy.is_memory_replica():
        return int(copy.get_memory_descriptor().buffer_descriptor.size)
    # On a disk the master says how many bytes there are by a field of its own.
    return int(getattr(copy.get_disk_descriptor(), "object_size", -1))


def read_frame(stream: BinaryIO) -> Any:
    """The next frame; None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    return msgspec.msgpack.decode(stream.read(int.from_bytes(head, "big")))


def frame(value: Any) -> bytes:
    """A value as it goes over the pipe."""
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(4, "big") + body


def main() -> None:
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    # Whatever the SDK prints must not come between the frames.
    os.dup2(2, 1)
    spec = read_frame(requests)
    if spec is not None:
        worker = Worker(mooncake.MooncakeSpec(**spec))
        while (request := read_frame(requests)) is not None:
            number, operation, *arguments = request
            answers.write(frame([number, *worker.answer(operation, *arguments)]))
            answers.flush()
    # Without the SDK's own clean-up, which waits for a master that may hang.
    os._exit(0)


if __name__ == "__main__":
    main()
