"""The HTTP transport: ``POST /api/<method>`` as plain ASGI, everything else by FastAPI."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from http import HTTPStatus

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvcm.cache.api import WireForm
from kvcm.core.clock import Clock
from kvcm.core.errors import ErrorCode, MalformedRequest, ReplyTooLarge
from kvcm.server import jsonwire, sockets
from kvcm.server.calls import Endpoint, Reply, fill_header

log = logging.getLogger(__name__)

API_PREFIX = "/api/"
ABORT = "kvcm.abort"
"""ASGI extension: call its member of the same name to end a connection at once."""
_JSON = (b"content-type", b"application/json")


class Refused(Exception):
    """The request is answered with an HTTP status of its own."""

    def __init__(self, status: HTTPStatus, message: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class ClientGone(Exception):
    """The connection ended before the request did."""


class HttpApi:
    """ASGI application of one service's methods; other paths go to ``others``, once it is set."""

    others: ASGIApp

    def __init__(self, endpoints: Sequence[Endpoint], clock: Clock, receive_bytes_max: int) -> None:
        self._endpoints = {API_PREFIX + e.json_name: e for e in endpoints}
        self._error_type = endpoints[0].response_type
        self._clock = clock
        self._receive_bytes_max = receive_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or not scope["path"].startswith(API_PREFIX):
            await self.others(scope, receive, send)
            return
        try:
            endpoint = self._endpoint(scope)
            body = await self._body(scope, receive)
            if endpoint.grants:
                await self._grant(endpoint, body, scope, receive, send)
            else:
                await _send(send, HTTPStatus.OK, (await _run(endpoint, body, scope)).body)
        except Refused as error:
            await _send(send, error.status, self.error_body(str(error)), error.headers)
        except ClientGone:
            return

    def error_body(self, message: str) -> bytes:
        """The JSON of a request that no handler answered."""
        response = self._error_type()
        # Every reply type of the protocol has a header; `Message` does not say so.
        fill_header(
            response.header,  # type: ignore[attr-defined]
            "",
            self._clock,
            ErrorCode.INVALID_ARGUMENT,
            message,
            "",
        )
        header = jsonwire.render(response.header)  # type: ignore[attr-defined]
        return b'{"header":' + header + b"}"

    def _endpoint(self, scope: Scope) -> Endpoint:
        endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            raise Refused(HTTPStatus.NOT_FOUND, f"no such path: {scope['path']}")
        if scope["method"] != "POST":
            raise Refused(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"{scope['path']} takes POST, not {scope['method']}",
                (b"allow", b"POST"),
            )
        return endpoint

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > self._receive_bytes_max:
                raise self._too_large()
        message = await receive()
        if not message.get("more_body") and message["type"] == "http.request":
            # The common case: one piece, no copy.
            return self._within_limit(message.get("body", b""))
        chunks = bytearray()
        while True:
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks += message.get("body", b"")
            self._within_limit(chunks)
            if not message.get("more_body"):
                return bytes(chunks)
            message = await receive()

    def _within_limit(self, body: bytes | bytearray) -> bytes:
        if len(body) > self._receive_bytes_max:
            raise self._too_large()
        # Readers take either; a copy of a long body would be for the type checker alone.
        return body  # type: ignore[return-value]

    def _too_large(self) -> Refused:
        return Refused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {self._receive_bytes_max} bytes (receive_bytes_max)",
            (b"connection", b"close"),
        )

    async def _grant(
        self, endpoint: Endpoint, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """As the plain call, and what was granted is given back when the client has left."""
        left = asyncio.ensure_future(_disconnected(receive))
        running = asyncio.ensure_future(_run(endpoint, body, scope))
        delivered = False
        try:
            await asyncio.wait((running, left), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                reply = await running
                # A turn of the loop, in which a pending disconnect comes through.
                await asyncio.sleep(0)
                if not left.done():
                    await _send(send, HTTPStatus.OK, reply.body, is_last=False)
                    # Waits until the client has taken all but the last bytes, or is gone.
                    await send({"type": "http.response.body", "body": b"", "more_body": True})
                    await asyncio.sleep(0)
                    delivered = not left.done()
                    await send({"type": "http.response.body", "body": b""})
        finally:
            left.cancel()
            if not delivered:
                _give_back(running)


def _give_back(running: asyncio.Future[Reply]) -> None:
    """Undo a call whose reply nobody gets; one under way undoes itself when cancelled."""
    if not running.cancel() and not running.cancelled() and running.exception() is None:
        lost = running.result().lost
        if lost is not None:
            lost()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return sockets.shown(*client) if client else ""


async def _run(endpoint: Endpoint, body: bytes, scope: Scope) -> Reply:
    try:
        return await endpoint.call(body, WireForm.JSON, partial(_peer, scope))
    except MalformedRequest as error:
        raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from None
    except ReplyTooLarge as error:
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error)) from None


async def _send(
    send: Send,
    status: HTTPStatus,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    *,
    is_last: bool = True,
) -> None:
    start: Message = {
        "type": "http.response.start",
        "status": int(status),
        "headers": [_JSON, (b"content-length", str(len(body)).encode()), *headers],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


class _Protocol(HttpToolsProtocol):
    """A connection that an application can end though its client takes nothing."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {ABORT: self.transport.abort}}


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals are the manager's business, not each listener's.
        yield


class HttpListener:
    """One port that serves one ASGI application in the running loop."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        """Binds; `start` begins to serve.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._socket = sockets.bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # Longer than clients keep idle connections, so that they close first.
                timeout_keep_alive=75,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve; returns once connections are accepted."""
        self._task = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
        await self._server.accepting.wait()

    async def stop(self, drain_s: float) -> None:
        """Take no more requests; those under way have ``drain_s`` seconds to finish."""
        self._server.should_exit = True
        self._server.config.timeout_graceful_shutdown = max(int(drain_s), 1)
        if self._task is None:
            self._socket.close()
        else:
            await self._task
