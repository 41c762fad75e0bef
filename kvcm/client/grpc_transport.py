"""Calls over gRPC, blocking and asyncio.

Channels are made at the first call, so that a client may be built before a fork or outside the
event loop that uses it.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import Message

from kvcm.client.addresses import Address
from kvcm.client.call import Call
from kvcm.core.errors import (
    InternalError,
    KvcmError,
    MalformedRequest,
    OutcomeUnknown,
    ReplyTooLarge,
    Unavailable,
    Unsupported,
)

_NOT_SENT = ("failed to connect to all addresses", "errors resolving")
"""How gRPC's status text begins when no connection could be made; held by tests. Where a version
says it otherwise, the outcome counts as unknown."""


def channel_options(receive_bytes_max: int) -> list[tuple[str, int]]:
    """Options of every channel of ours."""
    return [
        ("grpc.max_receive_message_length", receive_bytes_max),
        ("grpc.max_send_message_length", -1),
        # A manager is reached directly; a proxy from the environment is meant for the web.
        ("grpc.enable_http_proxy", 0),
        # A connection that died silently shows within 15 s.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A manager that moved or came back is found at once: names are resolved again after
        # an error, and reconnecting is never put off longer than a second. The first is also
        # the time one attempt to connect may take, so that the next address gets its turn.
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.dns_min_time_between_resolutions_ms", 100),
        # Clients of one process do not share each other's back-off.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def transport_error(code: grpc.StatusCode, details: str, timeout_s: float) -> KvcmError:
    """The error for a status other than OK."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return OutcomeUnknown(f"no reply within {timeout_s:.3g} s")
    if code is grpc.StatusCode.UNAVAILABLE:
        if details.startswith(_NOT_SENT):
            return Unavailable(details)
        return OutcomeUnknown(f"the connection broke: {details}")
    if code is grpc.StatusCode.CANCELLED:
        return OutcomeUnknown(f"the call was cancelled: {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return ReplyTooLarge(details)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Unsupported(f"the manager does not know this call: {details}")
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE):
        return MalformedRequest(details)
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS):
        return InternalError(f"{code.name}: {details}")
    return KvcmError(f"{code.name}: {details}")


class GrpcTransport:
    """Blocking; safe to share between threads."""

    def __init__(self, address: Address, receive_bytes_max: int) -> None:
        self._channel = grpc.insecure_channel(address.authority, channel_options(receive_bytes_max))
        self._stubs: dict[str, Any] = {}

    def send(self, call: Call[Any], timeout_s: float) -> Message:
        """One attempt; raises what `transport_error` gives."""
        method = call.method
        stub = self._stubs.get(method.grpc_path)
        if stub is None:
            stub = self._channel.unary_unary(
                method.grpc_path,
                request_serializer=type(call.request).SerializeToString,
                response_deserializer=method.reply.FromString,
            )
            self._stubs[method.grpc_path] = stub
        try:
            reply: Message = stub(call.request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise transport_error(error.code(), error.details() or "", timeout_s) from None
        return reply

    def close(self) -> None:
        """Breaks off calls under way."""
        self._channel.close()


class AsyncGrpcTransport:
    """For one event loop."""

    def __init__(self, address: Address, receive_bytes_max: int) -> None:
        self._channel = grpc.aio.insecure_channel(
            address.authority, channel_options(receive_bytes_max)
        )
        self._stubs: dict[str, Any] = {}

    async def send(self, call: Call[Any], timeout_s: float) -> Message:
        """One attempt; raises what `transport_error` gives."""
        method = call.method
        stub = self._stubs.get(method.grpc_path)
        if stub is None:
            stub = self._channel.unary_unary(
                method.grpc_path,
                request_serializer=type(call.request).SerializeToString,
                response_deserializer=method.reply.FromString,
            )
            self._stubs[method.grpc_path] = stub
        try:
            reply: Message = await stub(call.request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise transport_error(error.code(), error.details() or "", timeout_s) from None
        return reply

    async def close(self) -> None:
        """Breaks off calls under way."""
        await self._channel.close(None)
