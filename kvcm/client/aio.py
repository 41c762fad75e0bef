"""The asyncio clients. Each belongs to the event loop of its first call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

from kvcm.client import admin_calls, calls
from kvcm.client.addresses import ADMIN_PORTS
from kvcm.client.call import Call, describe_method
from kvcm.client.grpc_transport import AsyncGrpcTransport
from kvcm.client.http_transport import AsyncHttpTransport
from kvcm.client.options import ClientBase
from kvcm.client.retry import Pause, attempts
from kvcm.client.session import AsyncWriteSession
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


def _method(
    builder: Callable[P, Call[T]],
) -> Callable[Concatenate[AsyncCaller, P], Coroutine[Any, Any, T]]:
    async def method(self: AsyncCaller, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.call(builder(*args, **kwargs))

    return describe_method(method, builder)


class AsyncClient(AsyncCaller):
    """MetaService for engines, as `Client` is; every method is a coroutine.

    Several addresses are tried in order, going on where a manager does not lead or cannot be
    reached. Calls are repeated only where that is safe; see `kvcm.client.retry`.
    """

    register_instance = _method(calls.register_instance)
    get_instance_info = _method(calls.get_instance_info)
    get_cache_location = _method(calls.get_cache_location)
    get_cache_meta = _method(calls.get_cache_meta)
    start_write_cache = _method(calls.start_write_cache)
    finish_write_cache = _method(calls.finish_write_cache)
    remove_cache = _method(calls.remove_cache)
    trim_cache = _method(calls.trim_cache)

    def write(
        self,
        instance_id: str,
        keys: calls.Ints = (),
        *,
        token_ids: calls.Ints = (),
        spec_group_names: Sequence[str] = (),
        write_timeout_s: int = 0,
        trace_id: str = "",
        timeout: float | None = None,
    ) -> AsyncWriteSession:
        """A write session, for an ``async with`` statement; arguments of `start_write_cache`."""
        start = calls.start_write_cache(
            instance_id,
            keys,
            token_ids=token_ids,
            spec_group_names=spec_group_names,
            write_timeout_s=write_timeout_s,
            trace_id=trace_id,
            timeout=timeout,
        )
        return AsyncWriteSession(self, start, instance_id, trace_id)


class AsyncAdminClient(AsyncCaller):
    """AdminService for operators, as `AdminClient` is; every method is a coroutine."""

    default_ports: ClassVar[dict[str, int]] = ADMIN_PORTS

    add_storage = _method(admin_calls.add_storage)
    enable_storage = _method(admin_calls.enable_storage)
    disable_storage = _method(admin_calls.disable_storage)
    remove_storage = _method(admin_calls.remove_storage)
    update_storage = _method(admin_calls.update_storage)
    list_storage = _method(admin_calls.list_storage)
    create_instance_group = _method(admin_calls.create_instance_group)
    update_instance_group = _method(admin_calls.update_instance_group)
    remove_instance_group = _method(admin_calls.remove_instance_group)
    get_instance_group = _method(admin_calls.get_instance_group)
    get_cache_meta = _method(admin_calls.get_cache_meta)
    remove_cache = _method(admin_calls.remove_cache)
    register_instance = _method(admin_calls.register_instance)
    remove_instance = _method(admin_calls.remove_instance)
    get_instance_info = _method(admin_calls.get_instance_info)
    list_instance_info = _method(admin_calls.list_instance_info)
    add_account = _method(admin_calls.add_account)
    delete_account = _method(admin_calls.delete_account)
    list_account = _method(admin_calls.list_account)
    gen_config_snapshot = _method(admin_calls.gen_config_snapshot)
    load_config_snapshot = _method(admin_calls.load_config_snapshot)
    get_metrics = _method(admin_calls.get_metrics)
    check_health = _method(admin_calls.check_health)
    get_manager_cluster_info = _method(admin_calls.get_manager_cluster_info)
    leader_demote = _method(admin_calls.leader_demote)
    get_leader_elector_config = _method(admin_calls.get_leader_elector_config)
    update_leader_elector_config = _method(admin_calls.update_leader_elector_config)
    update_logger = _method(admin_calls.update_logger)
