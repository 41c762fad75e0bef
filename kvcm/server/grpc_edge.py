"""The gRPC transport: bytes in, bytes out, nothing deserialised by the framework."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvcm.cache.api import WireForm
from kvcm.core.errors import ConfigError, MalformedRequest, ReplyTooLarge
from kvcm.server import sockets
from kvcm.server.calls import Endpoint, Reply

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

Services = Mapping[str, Sequence[Endpoint]]
"""Full service name → its endpoints."""
_Context = grpc.aio.ServicerContext[bytes, bytes]


class GrpcListener:
    """One port that serves some services, with health and reflection."""

    def __init__(self, services: Services, host: str, port: int, receive_bytes_max: int) -> None:
        """Binds; `start` begins to serve.

        Raises:
            ConfigError: the address cannot be bound.
        """
        if port:
            # Tried first: the framework's own words for a port in use say nothing.
            sockets.bind(host, port).close()
        self._server = grpc.aio.server(options=_options(receive_bytes_max))
        # The stubs of grpc_health leave `aio` out.
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    name, {e.name: _method_handler(e) for e in endpoints}
                )
                for name, endpoints in services.items()
            ]
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(self._names, self._server)
        address = sockets.shown(host, port)
        try:
            self.port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from None

    async def start(self) -> None:
        """Serve; the health service says what `set_serving` was told."""
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers, for the server and for each service."""
        for name in ("", *self._names):
            await self._health.set(name, SERVING if serving else NOT_SERVING)

    async def stop(self, drain_s: float) -> None:
        """Take no more calls; those under way have ``drain_s`` seconds to finish."""
        await self._server.stop(drain_s)


def _options(receive_bytes_max: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", receive_bytes_max),
        # Replies have their own limit, which the cache keeps.
        ("grpc.max_send_message_length", -1),
        # Two servers on one port would share its connections by chance.
        ("grpc.so_reuseport", 0),
        # The C++ client pings every 10 s without calls; that must never count as abuse.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        # A peer that is gone without a word is noticed within 25 s.
        ("grpc.keepalive_time_ms", 15_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]


def _method_handler(endpoint: Endpoint) -> Any:
    if endpoint.grants:
        # The same on the wire; but the handler sends the reply itself and sees whether it left.
        return grpc.unary_stream_rpc_method_handler(_granting(endpoint))
    return grpc.unary_unary_rpc_method_handler(_behaviour(endpoint))


def _behaviour(endpoint: Endpoint) -> Callable[[bytes, _Context], Awaitable[bytes]]:
    async def handle(data: bytes, context: _Context) -> bytes:
        return (await _reply(endpoint, data, context)).body

    return handle


def _granting(endpoint: Endpoint) -> Callable[[bytes, _Context], Awaitable[None]]:
    async def handle(data: bytes, context: _Context) -> None:
        reply = await _reply(endpoint, data, context)
        try:
            await context.write(reply.body)
        except (Exception, asyncio.CancelledError):
            # Cancelled, past its deadline, or the connection broke while the reply was sent.
            if reply.lost is not None:
                reply.lost()
            # Any other error would be logged as a fault of ours.
            raise asyncio.CancelledError from None
        remaining = context.time_remaining()
        if reply.lost is not None and remaining is not None and remaining <= 0:
            reply.lost()

    return handle


async def _reply(endpoint: Endpoint, data: bytes, context: _Context) -> Reply:
    try:
        return await endpoint.call(data, WireForm.PROTO, context.peer)
    except MalformedRequest as error:
        await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except ReplyTooLarge as error:
        await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))


async def _abort(context: _Context, code: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(code, message)
    raise AssertionError("abort raises")
