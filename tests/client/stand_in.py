"""A manager that answers as a test tells it to, over real gRPC and real HTTP sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message

from kvcm._pb import admin_pb2, meta_pb2
from kvcm.core.errors import ErrorCode

Behaviour = Callable[[Any], Message]


class Lost(Exception):
    """The request was handled; its reply never arrives."""


def status(reply: type[Message], code: int, message: str = "", reason: str = "") -> Any:
    """A reply with the given header.status."""
    return reply(
        header={
            "status": {"code": code, "message": message, "reason": reason},
            "request_id": "t_1",
        }
    )


def ok(reply: type[Message], **fields: Any) -> Any:
    """An OK reply."""
    made = reply(**fields)
    made.header.status.code = ErrorCode.OK
    made.header.request_id = "t_1"
    return made


class StandIn:
    """Answers every call OK and empty, unless told otherwise by ``script``.

    ``script[method]`` is a list of behaviours taken in turn, the last one staying.
    """

    def __init__(self, package: Any = meta_pb2) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.script: dict[str, list[Behaviour]] = defaultdict(list)
        self.delay = threading.Event()
        (self.service,) = package.DESCRIPTOR.services_by_name.values()
        self.package = package

    def asked(self, method: str) -> list[Any]:
        """Requests of a method, in order."""
        return [request for name, request in self.requests if name == method]

    def reply_class(self, method: str) -> type[Message]:
        descriptor = self.service.methods_by_name[method]
        return getattr(self.package, descriptor.output_type.name)  # type: ignore[no-any-return]

    def request_class(self, method: str) -> type[Message]:
        descriptor = self.service.methods_by_name[method]
        return getattr(self.package, descriptor.input_type.name)  # type: ignore[no-any-return]

    def answers(self, method: str, **fields: Any) -> None:
        """Answer OK with these fields from now on."""
        reply = ok(self.reply_class(method), **fields)
        self.script[method] = [lambda _request: reply]

    def refuses(self, method: str, code: int, message: str = "", reason: str = "") -> None:
        """Answer with an application error from now on."""
        reply = status(self.reply_class(method), code, message, reason)
        self.script[method] = [lambda _request: reply]

    def loses_replies(self, method: str, count: int = 1) -> None:
        """Handle the next ``count`` requests without their replies arriving, then answer OK."""

        def lose(_request: Any) -> Message:
            raise Lost

        reply = ok(self.reply_class(method))
        self.script[method] = [lose] * count + [lambda _request: reply]

    def hangs(self, method: str) -> None:
        """Never answer (until the server is stopped)."""

        def hang(_request: Any) -> Message:
            self.delay.wait(30)
            raise Lost

        self.script[method] = [hang]

    def handle(self, method: str, request: Message) -> Message:
        self.requests.append((method, request))
        script = self.script[method]
        if not script:
            return ok(self.reply_class(method))
        behaviour = script.pop(0) if len(script) > 1 else script[0]
        return behaviour(request)


class GrpcServer:
    """The stand-in on a gRPC port of 127.0.0.1 (or another loopback host)."""

    def __init__(self, stand_in: StandIn, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = grpc.server(
            ThreadPoolExecutor(8),
            options=[("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1)],
        )
        self._stand_in = stand_in
        handlers = {
            method.name: grpc.unary_unary_rpc_method_handler(
                self._handler(method.name),
                request_deserializer=stand_in.request_class(method.name).FromString,
                response_serializer=lambda reply: reply.SerializeToString(),
            )
            for method in stand_in.service.methods
        }
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(stand_in.service.full_name, handlers)]
        )
        authority = f"[{host}]" if ":" in host else host
        self.port = self._server.add_insecure_port(f"{authority}:{port}")
        self.address = f"grpc://{authority}:{self.port}"
        self._server.start()

    def stop(self) -> None:
        self._stand_in.delay.set()
        self._server.stop(None).wait()

    def _handler(self, method: str) -> Callable[[Any, grpc.ServicerContext], Message]:
        def handle(request: Any, context: grpc.ServicerContext) -> Message:
            try:
                return self._stand_in.handle(method, request)
            except Lost:
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                raise AssertionError("abort raises") from None

        return handle


class _HttpServer(ThreadingHTTPServer):
    """Knows its connections, to break them when it stops."""

    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        self.connections: list[socket.socket] = []
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def break_connections(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class HttpServer:
    """The stand-in on an HTTP port of 127.0.0.1 (or another loopback host)."""

    def __init__(self, stand_in: StandIn, host: str = "127.0.0.1", port: int = 0) -> None:
        stand_in_ = stand_in

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 65536  # head and body leave together

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                name = self.path.removeprefix("/api/")
                method = name[0].upper() + name[1:]
                if method not in stand_in_.service.methods_by_name:
                    self.answer(404, b'{"error":"unknown path"}')
                    return
                request = json_format.Parse(body, stand_in_.request_class(method)())
                try:
                    reply = stand_in_.handle(method, request)
                except Lost:
                    self.close_connection = True
                    return
                text = json_format.MessageToJson(
                    reply,
                    preserving_proto_field_name=True,
                    always_print_fields_with_no_presence=True,
                )
                self.answer(200, text.encode())

            def answer(self, code: int, body: bytes) -> None:
                self.send_response(code)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self._stand_in = stand_in
        self._server = _HttpServer((host, port), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.port = self._server.server_address[1]
        self.address = f"http://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def stop(self) -> None:
        self._stand_in.delay.set()
        self._server.shutdown()
        self._server.server_close()
        self._server.break_connections()
        self._thread.join()


__all__ = ["GrpcServer", "HttpServer", "Lost", "StandIn", "admin_pb2", "meta_pb2", "ok", "status"]
