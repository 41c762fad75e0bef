"""A TCP proxy between a test and a server: counts round trips, cuts, speaks TLS to its clients."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Proxy:
    """Forwards connections to one port of 127.0.0.1.

    Attributes:
        round_trips: how often a client spoke after the server had, on all connections; requests
            sent together, without waiting for an answer between them, count as one.
        to_server, to_client: bytes forwarded.
        swallow_replies: what the server says is thrown away, and the connection cut.
    """

    def __init__(self, target: int) -> None:
        self.port = 0
        self.round_trips = 0
        self.to_server = 0
        self.to_client = 0
        self.swallow_replies = False
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A client has connected."""
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def close(self) -> None:
        """Hang up, and wait until all is over."""
        self.cut()
        await asyncio.gather(*self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, back_writer}
        turn = _Turn()
        forward = asyncio.ensure_future(self._to_server(reader, back_writer, turn))
        backward = asyncio.ensure_future(self._to_client(back_reader, writer, turn))
        await asyncio.wait({forward, backward}, return_when=asyncio.FIRST_COMPLETED)
        for task in (forward, backward):
            task.cancel()
        for end in (writer, back_writer):
            end.close()
            self._writers.discard(end)

    async def _to_server(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, turn: _Turn
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 20):
                if turn.is_clients:
                    self.round_trips += 1
                    turn.is_clients = False
                self.to_server += len(data)
                writer.write(data)
                await writer.drain()

    async def _to_client(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, turn: _Turn
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 20):
                if self.swallow_replies:
                    return
                turn.is_clients = True
                self.to_client += len(data)
                writer.write(data)
                await writer.drain()

    def cut(self) -> None:
        """Hang up on everybody; from any thread."""
        for writer in list(self._writers):
            with suppress(OSError):
                writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


class _Turn:
    is_clients = True


@contextmanager
def proxy(target: int, tls: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    """A proxy that runs in a thread of its own, so that a test may wait for all of its own tasks.

    Clients speak TLS to it when given a context.
    """
    forwarder = Proxy(target)
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        server = await asyncio.start_server(forwarder.accept, "127.0.0.1", 0, ssl=tls)
        forwarder.port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()
        await forwarder.close()

    def serve() -> None:
        # A client that refuses our certificate is a test's intent, not worth a line in the log.
        loop.set_exception_handler(lambda _loop, _context: None)
        loop.run_until_complete(run())
        loop.close()

    thread = threading.Thread(target=serve, name="proxy")
    thread.start()
    started.wait()
    try:
        yield forwarder
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
