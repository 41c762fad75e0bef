"""The blocking clients. Safe to share between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from kvcm.client import calls
from kvcm.client.call import Call, take_arguments
from kvcm.client.grpc_transport import GrpcTransport
from kvcm.client.http_transport import HttpTransport
from kvcm.client.methods import AdminMethods, MetaMethods
from kvcm.client.options import ClientBase
from kvcm.client.retry import Pause, attempts
from kvcm.client.session import WriteSession
from kvcm.client.types import WriteGrant
from kvcm.core.errors import KvcmError, Unavailable

P = ParamSpec("P")
T = TypeVar("T")


class SyncCaller(ClientBase):
    """Sends calls; the clients below add one method a call."""

    _transports: dict[int, GrpcTransport | HttpTransport]

    def __init__(self, addresses: str | Sequence[str], **options: Any) -> None:
        super().__init__(addresses, **options)
        self._transports = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    __init__.__doc__ = ClientBase.__init__.__doc__

    def call(self, call: Call[T]) -> T:
        """Make a call that `kvcm.client.calls` or `admin_calls` built.

        Raises:
            KvcmError: what the manager answered. Without an answer: NotLeader (no address leads),
                Unavailable (none could be reached, nothing happened), OutcomeUnknown (a reply
                was lost, it may have happened).
        """
        steps = attempts(call, self._peers, self.timeout, self._retry, self._clock)
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    # Ends early when the client is closed.
                    self._closed.wait(step.seconds)
                    step = next(steps)
                    continue
                failure: KvcmError | None = None
                try:
                    reply = self._transport(step.index).send(call, step.timeout_s)
                except KvcmError as error:
                    failure = error
                step = steps.send(reply) if failure is None else steps.throw(failure)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def close(self) -> None:
        """Close the connections; calls under way are broken off."""
        with self._lock:
            self._closed.set()
            transports = list(self._transports.values())
            self._transports.clear()
        for transport in transports:
            transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _transport(self, index: int) -> GrpcTransport | HttpTransport:
        transport = self._transports.get(index)
        if transport is not None:
            return transport
        with self._lock:
            if self._closed.is_set():
                raise Unavailable("the client is closed")
            if index not in self._transports:
                address = self._peers.addresses[index]
                self._transports[index] = (
                    GrpcTransport(address, self._receive_bytes_max)
                    if address.scheme == "grpc"
                    else HttpTransport(address, self._receive_bytes_max, self._clock)
                )
            return self._transports[index]


def _session(
    builder: Callable[P, Call[WriteGrant]],
) -> Callable[Concatenate[SyncCaller, P], WriteSession]:
    def write(self: SyncCaller, /, *args: P.args, **kwargs: P.kwargs) -> WriteSession:
        """A write session, for a ``with`` statement; arguments of `start_write_cache`."""
        return WriteSession(self, builder(*args, **kwargs))

    return take_arguments(write, builder, "WriteSession")


class Client(MetaMethods, SyncCaller):
    """MetaService for engines; `AsyncClient` is the same for asyncio.

    Several addresses are tried in order, going on where a manager does not lead or cannot be
    reached. Calls are repeated only where that is safe; see `kvcm.client.retry`.
    """

    write = _session(calls.start_write_cache)


class AdminClient(AdminMethods, SyncCaller):
    """AdminService for operators; `AsyncAdminClient` is the same for asyncio."""
