"""One Valkey server: its connections, and what is known of a batch that did not end well.

Written on hiredis' parser: whether a command was sent decides between "nothing happened" and
"unknown", and the client libraries do not tell (docs/decisions/0011).
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import hiredis

from kvcm.core.clock import Clock
from kvcm.core.errors import KvcmError, Unavailable
from kvcm.metaindex.stores.common import below

Command = tuple[bytes, ...]
_pack: Callable[[Command], bytes] = cast(Any, hiredis.pack_command)
_PACK_JOINED_MIN = 64
_PACK_HEAD = 16
_NOT_VALKEY = "not the protocol of Valkey"
_NOT_TLS = "TLS cannot be agreed on"
_FINAL = re.compile(
    rf"\b(?:WRONGPASS|NOAUTH|NOPERM|DENIED)\b|{_NOT_VALKEY}|{_NOT_TLS}"
    r"|ERR (?:AUTH|Client sent AUTH|DB index|unknown command|This instance has cluster support)"
)
"""What only an operator can change: passwords, rights, the kind of the server or of the URL."""
_PAUSE_S_FIRST = 0.02
_PAUSE_S_MAX = 1.0
_CONNECT_TRIES = 2


def is_final(failure: str) -> bool:
    """Whether a server that failed like this will fail for ever, as it and the URL stand."""
    return _FINAL.search(failure) is not None


def pack(command: Command) -> bytes:
    """A command as the server reads it.

    hiredis takes a step per argument, and longer ones in long commands. Those of the thousands are
    keys, or keys and values, of one size each: joined without a step per argument.
    """
    count = len(command)
    if count < _PACK_JOINED_MIN:
        return _pack(command)
    cut = _PACK_HEAD + count % 2
    odd, even = command[cut::2], command[cut + 1 :: 2]
    sizes = (set(map(len, odd)), set(map(len, even)))
    if len(sizes[0]) > 1 or len(sizes[1]) > 1:
        return _pack(command)
    first, second = (b"\r\n$%d\r\n" % size.pop() for size in sizes)
    pairs = first.join([a + second + b for a, b in zip(odd, even, strict=True)])
    _, _, head = _pack(command[:cut]).partition(b"\r\n")
    return b"".join((b"*%d\r\n" % count, head, first[2:], pairs, b"\r\n"))


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: a host and a port, or the path of a socket."""

    host: str
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Link:
    """How to talk to a server, with bounds for everything; ``greeting`` begins a connection."""

    greeting: Sequence[Command]
    tls: ssl.SSLContext | None
    connect_timeout_s: float
    timeout_s: float
    connections_max: int


class Exchange:
    """A batch of commands on its way; ``replies`` are those that came, in order.

    ``failure`` says why no more will come, "" when all is well; ``is_late`` that time ran out.
    """

    __slots__ = ("count", "done", "failure", "is_late", "replies")

    def __init__(self, count: int, done: asyncio.Future[None]) -> None:
        self.count = count
        self.done = done
        self.replies: list[Any] = []
        self.failure = ""
        self.is_late = False


class Connection(asyncio.Protocol):
    """One exchange at a time. It ends by itself, whether or not anyone still waits for it."""

    def __init__(self, ended: Callable[[Connection], None]) -> None:
        self._ended = ended
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._watch: asyncio.TimerHandle | None = None
        self.alive = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.alive = True

    def start(self, packed: bytes, count: int, timeout_s: float) -> Exchange:
        """Send packed commands; the exchange is done after ``count`` replies, or a failure."""
        loop = asyncio.get_running_loop()
        exchange = self._exchange = Exchange(count, loop.create_future())
        if self._transport is None or not self.alive:
            self._end("not connected")
            return exchange
        self._watch = loop.call_later(timeout_s, self._expire, timeout_s)
        self._transport.write(packed)
        return exchange

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                if exchange is None or len(exchange.replies) == exchange.count:
                    raise hiredis.ProtocolError("a reply that nothing asked for")
                exchange.replies.append(reply)
        except hiredis.ProtocolError as error:
            self.drop(f"{_NOT_VALKEY}: {error}")
            return
        if exchange is not None and len(exchange.replies) == exchange.count:
            self._end("")

    def connection_lost(self, error: Exception | None) -> None:
        self.drop(f"connection lost{f': {error}' if error else ''}")

    def _expire(self, timeout_s: float) -> None:
        if self._exchange is not None:
            self._exchange.is_late = True
        self.drop(f"no answer within {timeout_s:g} s")

    def drop(self, failure: str) -> None:
        """Hang up; what is on its way ends with this failure."""
        was_alive, self.alive = self.alive, False
        if self._transport is not None:
            self._transport.abort()
        if self._exchange is not None:
            self._end(failure)
        elif was_alive:
            self._ended(self)

    def _end(self, failure: str) -> None:
        exchange, self._exchange = self._exchange, None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if exchange is not None:
            exchange.failure = failure
            if not exchange.done.done():
                exchange.done.set_result(None)
        self._ended(self)


class Node:
    """One server and a bounded pool of connections to it.

    After a failure callers are refused at once, until a task in the background gets an answer: none
    of them waits for a server that is known to be away.
    """

    def __init__(self, address: Address, link: Link, clock: Clock) -> None:
        self.address = address
        self._link = link
        self._clock = clock
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._opening = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._failures = 0
        self._failure = ""
        self._trial: asyncio.Task[None] | None = None
        self._is_closed = False
        self.is_refusing = False

    @property
    def is_well(self) -> bool:
        """Whether its latest answer was one."""
        return not self._failures and not self.is_refusing

    def close(self) -> None:
        """Hang up all connections, for good."""
        self._is_closed = True
        if self._trial is not None:
            self._trial.cancel()
        for connection in list(self._all):
            connection.drop("closed")
        self._wake()

    async def exchange(self, packed: bytes, count: int, timeout_s: float | None = None) -> Exchange:
        """Send and wait; never longer than connecting and the time-out take.

        Raises:
            Unavailable: nothing was sent.
        """
        if self._failures:
            raise Unavailable(f"index store at {self.address}: {self._failure}")
        connection = await self._connection()
        exchange = connection.start(packed, count, timeout_s or self._link.timeout_s)
        await exchange.done
        if exchange.is_late:
            self._failed(exchange.failure)
        elif exchange.replies:
            self._failures = 0
        return exchange

    async def _try_again(self) -> None:
        """Until the server answers, or the node is closed."""
        while self._failures:
            pause = min(_PAUSE_S_MAX, _PAUSE_S_FIRST * 2 ** min(self._failures, 10))
            await asyncio.sleep(self._pause(pause))
            try:
                connection = await self._open()
            except Unavailable:
                continue
            self._failures = 0
            self._ended(connection)

    async def _connection(self) -> Connection:
        end = self._clock.monotonic() + self._link.timeout_s
        while True:
            while self._idle:
                connection = self._idle.pop()
                if connection.alive:
                    return connection
            if len(self._all) + self._opening < self._link.connections_max:
                return await self._open()
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                async with asyncio.timeout(max(0.0, end - self._clock.monotonic())):
                    await turn
            except TimeoutError:
                raise Unavailable(
                    f"index store at {self.address}: all {self._link.connections_max} connections "
                    f"are busy for {self._link.timeout_s:g} s"
                ) from None
            finally:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                elif turn.cancelled():
                    self._wake()

    def _ended(self, connection: Connection) -> None:
        if connection not in self._all:
            return
        if connection.alive:
            self._idle.append(connection)
        else:
            self._all.discard(connection)
            if connection in self._idle:
                self._idle.remove(connection)
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.pop(0)
            if not turn.done():
                turn.set_result(None)
                return

    async def _open(self) -> Connection:
        self._opening += 1
        try:
            async with asyncio.timeout(self._link.connect_timeout_s):
                for left in range(_CONNECT_TRIES)[::-1]:
                    try:
                        return await self._greet(await self._connect())
                    except OSError:
                        if not left:
                            raise
                        # Nothing was sent. A server that restarts is back in a moment.
                        await asyncio.sleep(self._pause(_PAUSE_S_FIRST))
            raise AssertionError("the last try returns or raises")
        except TimeoutError:
            raise self._failed(f"no connection within {self._link.connect_timeout_s:g} s") from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise self._failed(f"cannot connect: {error.strerror}") from None
        except ssl.SSLError as error:
            raise self._failed(f"{_NOT_TLS}: {error.strerror or error}") from None
        except OSError as error:
            # Names resolve to several addresses; their errors come as one long text.
            raise self._failed(f"cannot connect: {error.strerror or error}") from None
        except KvcmError as error:
            raise self._failed(str(error)) from None
        finally:
            self._opening -= 1
            self._wake()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        address = self.address

        def make() -> Connection:
            return Connection(self._ended)

        if address.path:
            _, connection = await loop.create_unix_connection(make, address.path)
        else:
            _, connection = await loop.create_connection(
                make, address.host, address.port, ssl=self._link.tls
            )
        return connection

    async def _greet(self, connection: Connection) -> Connection:
        """Say who we are, in one round trip."""
        commands = self._link.greeting or [(b"PING",)]
        packed = b"".join(map(pack, commands))
        exchange = connection.start(packed, len(commands), self._link.connect_timeout_s)
        try:
            await exchange.done
        except asyncio.CancelledError:
            connection.drop("given up")
            raise
        refused = next((r for r in exchange.replies if isinstance(r, hiredis.ReplyError)), None)
        if exchange.failure or refused is not None:
            connection.drop("greeting refused")
            raise Unavailable(exchange.failure or str(refused))
        if self._is_closed:
            connection.drop("closed")
            raise Unavailable("closed")
        self._all.add(connection)
        return connection

    def _failed(self, failure: str) -> Unavailable:
        self._failure = failure
        self._failures += 1
        if not self._is_closed and (self._trial is None or self._trial.done()):
            self._trial = asyncio.ensure_future(self._try_again())
        return Unavailable(f"index store at {self.address}: {failure}")

    def _pause(self, seconds: float) -> float:
        """About that long, so that managers do not come back all at once."""
        return seconds * (0.5 + below(1 << 20, self._clock) / (1 << 20))
