"""One call of an RPC, the same for both transports: bytes in, bytes out.

An `Endpoint` parses the request, runs the service's handler, puts what came of it into the
response's header, and encodes the response. Application errors become codes there; only errors of
the transport (a body that does not parse, a reply that is too large) leave it as exceptions.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from kvcm.cache.api import WireForm
from kvcm.core import limits
from kvcm.core.clock import Clock
from kvcm.core.errors import (
    ErrorCode,
    InternalError,
    InvalidArgument,
    KvcmError,
    MalformedRequest,
    ReplyTooLarge,
    wire_code,
)
from kvcm.core.keys import KeyBatch
from kvcm.server import fastpb, jsonwire, logs
from kvcm.server.access_log import AccessLog, Seen
from kvcm.server.callstats import CallStats

log = logging.getLogger(__name__)

Req = TypeVar("Req", bound=Message)
Resp = TypeVar("Resp", bound=Message)
Handler = Callable[["Call[Any, Any]"], Awaitable[None]]

PACKED_FIELDS = ("block_keys", "token_ids")
_LIST_START = b'"locations":['
"""The list that the cache hands over already encoded."""
_EMPTY_LIST = _LIST_START + b"]"
_TRANSPORTS = {WireForm.PROTO: "grpc", WireForm.JSON: "http"}


@dataclass(slots=True)
class Call(Generic[Req, Resp]):
    """A call under way.

    A handler fills ``response`` (all but header and ``locations``) and ``body``, the entries of
    ``locations`` in ``form``, in pieces so that they are copied only once. ``lost`` is called when
    the reply cannot be delivered.
    """

    request: Req
    response: Resp
    form: WireForm
    packed: dict[str, KeyBatch] = field(default_factory=dict)
    """``block_keys`` or ``token_ids`` that were not decoded into ``request``."""
    body: Sequence[bytes] = ()
    reason: str = ""
    lost: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """An encoded response; ``lost`` is to be called when it could not be sent."""

    body: bytes
    lost: Callable[[], None] | None = None


class Header(Protocol):
    """CommonResponseHeader of either package."""

    status: Any
    request_id: str


@dataclass(frozen=True, slots=True)
class Context:
    """What all endpoints share."""

    clock: Clock
    stats: CallStats
    require_leader: Callable[[], None]
    access: AccessLog | None = None
    """None = off."""


class Endpoint:
    """One RPC of one service."""

    def __init__(
        self,
        context: Context,
        descriptor: Any,
        request_type: type[Message],
        response_type: type[Message],
        handler: Handler,
        *,
        leader_only: bool,
    ) -> None:
        self._context = context
        self._handler = handler
        self._leader_only = leader_only
        fields = request_type.DESCRIPTOR.fields_by_name
        self._packed = {fields[name].number: name for name in PACKED_FIELDS if name in fields}
        self.name: str = descriptor.name
        self.request_type = request_type
        self.response_type = response_type

    @property
    def json_name(self) -> str:
        """The method as the HTTP path has it: lowerCamelCase."""
        return self.name[0].lower() + self.name[1:]

    @property
    def grants(self) -> bool:
        """Whether a reply may hand out something that is to be taken back when it is lost."""
        return "write_session_id" in self.response_type.DESCRIPTOR.fields_by_name

    def call(
        self, data: bytes, form: WireForm, peer: Callable[[], str] = lambda: ""
    ) -> Coroutine[Any, Any, Reply]:
        """Run one call, in a task of its own: what it logs has its request id.

        Args:
            data: the request's bytes, protobuf or JSON as ``form`` says.
            peer: tells the client's address, for the access log.

        Raises:
            MalformedRequest: the bytes do not parse.
            ReplyTooLarge: the answer exceeds the reply limit.
        """
        access = self._context.access
        if access is None:
            return self._answer(data, form, None)
        return self._logged(access, data, form, peer)

    async def _logged(
        self, access: AccessLog, data: bytes, form: WireForm, peer: Callable[[], str]
    ) -> Reply:
        seen = access.begun(self.name, _TRANSPORTS[form], peer, len(data))
        try:
            reply = await self._answer(data, form, seen)
            seen.bytes_out = len(reply.body)
            return reply
        except BaseException as error:
            # Cancelled, too: whatever ended it without an answer.
            seen.reason = type(error).__name__
            raise
        finally:
            access.ended(seen)

    async def _answer(self, data: bytes, form: WireForm, seen: Seen | None) -> Reply:
        started = self._context.clock.monotonic()
        code, keys = ErrorCode.INVALID_ARGUMENT, 0
        try:
            call = self._parse(data, form)
            logs.request_id.set(call.request.trace_id[: limits.TRACE_ID_BYTES_MAX])
            keys = self._keys_of(call)
            if seen is not None:
                _identify(seen, call, keys)
            code, message = await self._run(call)
        finally:
            seconds = self._context.clock.monotonic() - started
            self._context.stats.record(self.name, code, seconds, keys)
        reply = Reply(self._encode(call, code, message), call.lost)
        if seen is not None:
            seen.code, seen.reason = code, call.reason
        return reply

    def _parse(self, data: bytes, form: WireForm) -> Call[Any, Any]:
        if form is WireForm.JSON:
            request: Message = jsonwire.parse(data, self.request_type)
            if not self._packed:
                return Call(request, self.response_type(), form)
            # Keys travel on as packed varints, the form that extents are compared in.
            data = request.SerializeToString()
        try:
            split = fastpb.split(data, self._packed) if self._packed else None
            if split is not None:
                request = self.request_type.FromString(split.rest)
                name = self._packed[split.number]
                if not getattr(request, name):
                    return Call(request, self.response_type(), form, {name: split.values})
            return Call(self.request_type.FromString(data), self.response_type(), form)
        except DecodeError:
            raise MalformedRequest(
                f"{self.name}: the body is not a {self.request_type.DESCRIPTOR.full_name}"
            ) from None

    def _keys_of(self, call: Call[Any, Any]) -> int:
        for batch in call.packed.values():
            return len(batch)
        return max((len(getattr(call.request, n)) for n in self._packed.values()), default=0)

    async def _run(self, call: Call[Any, Any]) -> tuple[ErrorCode, str]:
        try:
            if len(call.request.trace_id.encode()) > limits.TRACE_ID_BYTES_MAX:
                raise InvalidArgument(f"trace_id is longer than {limits.TRACE_ID_BYTES_MAX} bytes")
            if self._leader_only:
                self._context.require_leader()
            await self._handler(call)
        except ReplyTooLarge:
            raise
        except KvcmError as error:
            call.response = self.response_type()
            call.body = ()
            call.reason = error.reason
            if isinstance(error, InternalError):
                log.error("%s failed: %s", self.name, error)
            return wire_code(error), str(error)
        except Exception:
            # The edge: a fault of ours is one failed call, and the log has the traceback.
            call.response = self.response_type()
            call.body = ()
            log.exception("%s failed", self.name)
            return ErrorCode.INTERNAL_ERROR, "internal error; the server's log has the details"
        return ErrorCode.OK, ""

    def _encode(self, call: Call[Any, Any], code: ErrorCode, message: str) -> bytes:
        response = call.response
        trace_id = call.request.trace_id[: limits.TRACE_ID_BYTES_MAX]
        fill_header(response.header, trace_id, self._context.clock, code, message, call.reason)
        if call.form is WireForm.PROTO:
            encoded: bytes = response.SerializeToString()
            return b"".join((encoded, *call.body))
        rendered = jsonwire.render(response)
        if not any(call.body):
            return rendered
        # Quotes within strings are escaped, so this can only be the list itself.
        head, _, tail = rendered.partition(_EMPTY_LIST)
        return b"".join((head, _LIST_START, *call.body, b"]", tail))


def _identify(seen: Seen, call: Call[Any, Any], keys: int) -> None:
    # Cut: before it is checked, either can be as long as a request.
    instance_id: str = getattr(call.request, "instance_id", "")
    seen.instance_id = instance_id[: limits.INSTANCE_ID_BYTES_MAX]
    seen.request_id = logs.request_id.get()
    seen.keys = keys


def fill_header(
    header: Header, trace_id: str, clock: Clock, code: ErrorCode, message: str, reason: str
) -> None:
    """Set status (present even when it says nothing) and request id."""
    status = header.status
    status.code = code
    if message:
        # Messages quote what was asked for, which can be as large as a request.
        status.message = message[: limits.STATUS_MESSAGE_CHARS_MAX]
    if reason:
        status.reason = reason
    header.request_id = f"{trace_id}_{int(clock.now() * 1e6)}"


def endpoints_of(
    context: Context,
    service: Any,
    module: Any,
    handlers: object,
    *,
    answered_by_all: frozenset[str] = frozenset(),
) -> list[Endpoint]:
    """One endpoint for every method of a service descriptor.

    Args:
        service: the ServiceDescriptor.
        module: the generated module with its message classes.
        handlers: has one coroutine method per RPC, of the same name.
        answered_by_all: RPCs that are answered without being the leader.
    """
    return [
        Endpoint(
            context,
            method,
            getattr(module, method.input_type.name),
            getattr(module, method.output_type.name),
            getattr(handlers, method.name),
            leader_only=method.name not in answered_by_all,
        )
        for method in service.methods
    ]
