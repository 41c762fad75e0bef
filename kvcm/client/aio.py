"""The asyncio clients. Each belongs to the event loop of its first call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from kvcm.client import calls
from kvcm.client.call import Call, take_arguments
from kvcm.client.grpc_transport import AsyncGrpcTransport
from kvcm.client.http_transport import AsyncHttpTransport
from kvcm.client.methods import AdminMethods, MetaMethods
from kvcm.client.options import ClientBase
from kvcm.client.retry import Pause, attempts
from kvcm.client.session import AsyncWriteSession
from kvcm.client.types import WriteGrant
from kvcm.core.errors import KvcmError, Unavailable

P = ParamSpec("P")
T = TypeVar("T")


class AsyncCaller(ClientBase):
    """Sends calls; the clients below add one method a call."""

    _transports: dict[int, AsyncGrpcTransport | AsyncHttpTransport]

    def __init__(self, addresses: str | Sequence[str], **options: Any) -> None:
        super().__init__(addresses, **options)
        self._transports = {}
        self._closed = False
        self._kept: set[asyncio.Task[Any]] = set()

    __init__.__doc__ = ClientBase.__init__.__doc__

    async def call(self, call: Call[T]) -> T:
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
                    await self._clock.sleep(step.seconds)
                    step = next(steps)
                    continue
                failure: KvcmError | None = None
                try:
                    reply = await self._transport(step.index).send(call, step.timeout_s)
                except KvcmError as error:
                    failure = error
                step = steps.send(reply) if failure is None else steps.throw(failure)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run to the end even if its caller goes away; `close` waits for it."""
        task = asyncio.ensure_future(work)
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)
        return task

    async def close(self) -> None:
        """Close the connections, after sessions whose finish is under way."""
        self._closed = True
        if self._kept:
            await asyncio.wait(list(self._kept))
        transports = list(self._transports.values())
        self._transports.clear()
        for transport in transports:
            await transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _transport(self, index: int) -> AsyncGrpcTransport | AsyncHttpTransport:
        transport = self._transports.get(index)
        if transport is None:
            if self._closed:
                raise Unavailable("the client is closed")
            address = self._peers.addresses[index]
            kind = AsyncGrpcTransport if address.scheme == "grpc" else AsyncHttpTransport
            transport = self._transports[index] = kind(address, self._receive_bytes_max)
        return transport


def _session(
    builder: Callable[P, Call[WriteGrant]],
) -> Callable[Concatenate[AsyncCaller, P], AsyncWriteSession]:
    def write(self: AsyncCaller, /, *args: P.args, **kwargs: P.kwargs) -> AsyncWriteSession:
        """A write session, for an ``async with`` statement; arguments of `start_write_cache`."""
        return AsyncWriteSession(self, builder(*args, **kwargs))

    return take_arguments(write, builder, "AsyncWriteSession")


class AsyncClient(MetaMethods, AsyncCaller):
    """MetaService for engines, as `Client` is; every call is a coroutine.

    Several addresses are tried in order, going on where a manager does not lead or cannot be
    reached. Calls are repeated only where that is safe; see `kvcm.client.retry`.
    """

    write = _session(calls.start_write_cache)


class AsyncAdminClient(AdminMethods, AsyncCaller):
    """AdminService for operators, as `AdminClient` is; every call is a coroutine."""
