"""Which server a key lies on, and what to do when it says that it does not."""

from __future__ import annotations

import abc
import asyncio
import binascii
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import hiredis

from kvcm.core.clock import Clock
from kvcm.core.errors import CorruptRecord, KvcmError, OutcomeUnknown, Unavailable
from kvcm.metaindex.stores.common import Turn, below
from kvcm.metaindex.stores.valkey_scripts import SOURCES
from kvcm.metaindex.stores.valkey_url import Kind, ValkeyConfig
from kvcm.metaindex.stores.valkey_wire import Address, Command, Exchange, Node, is_final, pack

SLOTS = 16_384
_ASKING = pack((b"ASKING",))
_RETRY_PAUSE_S = 0.005
_RETRY_PAUSE_S_MAX = 0.1
_REFRESH_PAUSE_S = 0.2
_STORE_FULL = "STORE_FULL"
_SUFFERING = frozenset(("LOADING", "MASTERDOWN", "CLUSTERDOWN", "READONLY"))
_NOTHING_HAPPENED = _SUFFERING.union(
    ("OOM", "BUSY", "NOREPLICAS", "MISCONF", "NOAUTH", "NOPERM", "WRONGPASS"),
    ("TRYAGAIN", "MOVED", "ASK", "NOSCRIPT"),
)
"""Refusals that a server gives before it runs anything of a script."""


class Request(NamedTuple):
    """One command for the server that holds ``tag``; ``behind`` follows on the same connection.

    The answer is the reply, or both replies as a pair when there is a second command.
    """

    tag: bytes
    command: Command
    behind: Command | None = None


class Router(abc.ABC):
    """Sends requests where their keys lie, all in one round trip unless keys have moved."""

    def __init__(self, config: ValkeyConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._link = config.link()
        self._nodes: dict[Address, Node] = {}
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    @property
    def nodes(self) -> list[Node]:
        """The servers known now."""
        return list(self._nodes.values())

    @property
    def is_partly_well(self) -> bool:
        """Whether some servers answer, though others may not."""
        return len(self._nodes) > 1 and any(node.is_well for node in self.nodes)

    async def open(self) -> None:
        """Find the servers; Unavailable when none can be reached."""
        self._asked_at = float("-inf")
        await self.refresh()

    def close(self) -> None:
        """Hang up everything."""
        for node in self.nodes:
            node.close()
        self._nodes.clear()

    @abc.abstractmethod
    async def _find(self) -> None:
        """Learn anew where keys lie.

        Raises:
            Unavailable: nobody could tell.
        """

    @abc.abstractmethod
    def node_of(self, tag: bytes) -> Node:
        """The server of a tag; Unavailable when nobody holds its slot."""

    def moved(self, slot: int, address: Address) -> None:
        """A server said that the slot now lies there; matters in a cluster only."""
        del slot, address

    async def refresh(self) -> None:
        """Learn where keys lie, unless that was done a moment ago."""
        async with self._asking:
            if self._clock.monotonic() - self._asked_at >= _REFRESH_PAUSE_S:
                self._asked_at = self._clock.monotonic()
                await self._find()

    def node(self, address: Address) -> Node:
        """The server at an address."""
        found = self._nodes.get(address)
        if found is None:
            found = self._nodes[address] = Node(address, self._link, self._clock)
        return found

    def keep(self, addresses: Iterable[Address]) -> None:
        """Forget the servers that are not among these."""
        for address in set(self._nodes) - set(addresses):
            self._nodes.pop(address).close()

    async def run(self, requests: Sequence[Request], *, repeatable: bool) -> list[Any]:
        """One answer per request, in order: the reply, or the KvcmError that stands for it.

        Args:
            repeatable: reads and the like, which are sent once more when a connection broke. All
                others are repeated only where the server said that it did nothing.

        Raises:
            Nothing but cancellation.
        """
        work = _Work(self, requests, repeatable)
        end = self._clock.monotonic() + self._link.timeout_s
        pause = _RETRY_PAUSE_S
        while await work.round():
            if self._clock.monotonic() >= end:
                break
            if work.must_wait:
                await asyncio.sleep(pause * (0.5 + below(1 << 16, self._clock) / (1 << 16)))
                pause = min(2 * pause, _RETRY_PAUSE_S_MAX)
        return work.answers


class _Work:
    """The requests of one call, while some are still without an answer."""

    def __init__(self, router: Router, requests: Sequence[Request], repeatable: bool) -> None:
        self.answers: list[Any] = [None] * len(requests)
        self.must_wait = False
        self._router = router
        self._requests = list(requests)
        self._repeatable = repeatable
        self._open = list(range(len(requests)))
        self._once_more: set[int] = set()
        self._ask: dict[int, Address] = {}
        self._refresh = False

    async def round(self) -> bool:
        """Send what is open, each server's part in one go; True when some must be sent again."""
        groups: dict[Node, list[int]] = {}
        ask, self._ask = self._ask, {}
        left, self._open = self._open, []
        self.must_wait = False
        for at in left:
            try:
                address = ask.get(at)
                router = self._router
                node = router.node(address) if address else router.node_of(self._requests[at].tag)
            except Unavailable as error:
                self.answers[at] = error
                self._refresh = True
            else:
                groups.setdefault(node, []).append(at)
        parts = [self._send(node, places, ask) for node, places in groups.items()]
        if len(parts) == 1:
            await parts[0]
        else:
            await asyncio.gather(*parts)
        if self._refresh:
            self._refresh = False
            try:
                await self._router.refresh()
            except KvcmError:
                # The answers say it already.
                self.must_wait = True
        self._open.sort()
        return bool(self._open)

    async def _send(self, node: Node, places: list[int], ask: dict[int, Address]) -> None:
        turn = Turn(self._router._clock)
        packed: list[bytes] = []
        count = 0
        for at in places:
            request = self._requests[at]
            if at in ask:
                packed.append(_ASKING)
                count += 1
            packed.append(pack(request.command))
            count += 1
            if request.behind is not None:
                packed.append(pack(request.behind))
                count += 1
            if turn.is_over():
                await turn.give()
        try:
            exchange = await node.exchange(b"".join(packed), count)
        except Unavailable as error:
            self._refresh = True
            for at in places:
                self.answers[at] = error
            return
        self._take(node, places, ask, exchange)

    def _take(
        self, node: Node, places: list[int], ask: dict[int, Address], exchange: Exchange
    ) -> None:
        replies = exchange.replies
        next_reply = 0
        node.is_refusing = False
        for at in places:
            next_reply += at in ask
            behind = self._requests[at].behind is not None
            if next_reply + behind >= len(replies):
                self._lost(node, at, exchange)
                continue
            reply = replies[next_reply]
            if isinstance(reply, hiredis.ReplyError):
                self._refused(node, at, str(reply))
            else:
                self.answers[at] = (reply, replies[next_reply + 1]) if behind else reply
            next_reply += 1 + behind

    def _lost(self, node: Node, at: int, exchange: Exchange) -> None:
        self._refresh = True
        text = f"index store at {node.address}: {exchange.failure}"
        if not self._repeatable:
            self.answers[at] = OutcomeUnknown(text)
            return
        self.answers[at] = Unavailable(text)
        if not exchange.is_late and at not in self._once_more:
            self._once_more.add(at)
            self._open.append(at)

    def _refused(self, node: Node, at: int, text: str) -> None:
        code, _, rest = text.partition(" ")
        message = f"index store at {node.address}: {text}"
        if code not in _NOTHING_HAPPENED:
            if code == "WRONGTYPE":
                self.answers[at] = CorruptRecord(message)
            else:
                self.answers[at] = (Unavailable if self._repeatable else OutcomeUnknown)(message)
            return
        self.answers[at] = Unavailable(message, reason=_STORE_FULL if code == "OOM" else "")
        if code in _SUFFERING:
            node.is_refusing = self._refresh = True
        elif code == "NOSCRIPT":
            request = self._requests[at]
            name, source, command = b"EVAL", SOURCES[request.command[1]], request.command[2:]
            self._requests[at] = request._replace(command=(name, source, *command))
            self._open.append(at)
        elif code == "TRYAGAIN":
            self.must_wait = True
            self._open.append(at)
        elif code in ("MOVED", "ASK"):
            slot, _, where = rest.partition(" ")
            address = _address_in(where, node)
            if code == "ASK":
                self._ask[at] = address
            else:
                self._router.moved(int(slot), address)
                self._refresh = True
            self._open.append(at)


def _address_in(text: str, told_by: Node) -> Address:
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]") or told_by.address.host, int(port))


class SingleRouter(Router):
    """One server, whose name is resolved at every connection."""

    async def _find(self) -> None:
        self.node(self._config.addresses[0])

    def node_of(self, tag: bytes) -> Node:
        return self.node(self._config.addresses[0])


class SentinelRouter(Router):
    """One server at a time, named by sentinels."""

    def __init__(self, config: ValkeyConfig, clock: Clock) -> None:
        super().__init__(config, clock)
        link = config.sentinel_link()
        self._sentinels = [Node(address, link, clock) for address in config.addresses]
        self._master: Address | None = None

    def close(self) -> None:
        super().close()
        link = self._config.sentinel_link()
        for sentinel in self._sentinels:
            sentinel.close()
        self._sentinels = [Node(node.address, link, self._clock) for node in self._sentinels]

    async def _find(self) -> None:
        command = (b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._config.master.encode())
        why = ""
        for sentinel in list(self._sentinels):
            reply, failure = await _ask(sentinel, command)
            if isinstance(reply, list) and len(reply) == 2:
                self._master = Address(reply[0].decode(), int(reply[1]))
                self.node(self._master)
                self.keep([self._master])
                # The one that answered is asked first next time.
                self._sentinels.remove(sentinel)
                self._sentinels.insert(0, sentinel)
                return
            if not is_final(why):
                why = failure or f"index store at {sentinel.address}: knows no such master"
        raise Unavailable(f"no sentinel names the master; the last one: {why}")

    def node_of(self, tag: bytes) -> Node:
        if self._master is None:
            raise Unavailable("no sentinel has named the master yet")
        return self.node(self._master)


class ClusterRouter(Router):
    """A cluster: each server holds some of the slots."""

    def __init__(self, config: ValkeyConfig, clock: Clock) -> None:
        super().__init__(config, clock)
        self._slots: list[Address | None] = [None] * SLOTS

    def node_of(self, tag: bytes) -> Node:
        slot = binascii.crc_hqx(tag, 0) % SLOTS
        address = self._slots[slot]
        if address is None:
            raise Unavailable(f"no server of the cluster holds slot {slot}")
        return self.node(address)

    def moved(self, slot: int, address: Address) -> None:
        self._slots[slot] = address

    async def _find(self) -> None:
        seeds = [Node(a, self._link, self._clock) for a in self._config.addresses]
        known = sorted(self.nodes, key=lambda node: not node.is_well)
        have = {node.address for node in known}
        try:
            # One after the other but all within one time-out: a stopped server must not
            # keep the others from being asked.
            await self._learn_from([*known, *(s for s in seeds if s.address not in have)])
        finally:
            for seed in seeds:
                seed.close()

    async def _learn_from(self, nodes: Sequence[Node]) -> None:
        why = ""
        for node in nodes:
            reply, failure = await _ask(node, (b"CLUSTER", b"SLOTS"))
            if isinstance(reply, list) and reply:
                self._learn(reply, node)
                return
            if not is_final(why):
                why = failure or f"index store at {node.address}: its cluster holds no slots"
        raise Unavailable(
            f"no server of the cluster tells where the slots are; the last one: {why}"
        )

    def _learn(self, ranges: Sequence[Any], told_by: Node) -> None:
        slots: list[Address | None] = [None] * SLOTS
        for first, last, holder, *_replicas in ranges:
            host = holder[0].decode() if holder[0] else told_by.address.host
            slots[first : last + 1] = [Address(host, holder[1])] * (last + 1 - first)
        self._slots = slots
        held = {address for address in slots if address is not None}
        for address in held:
            self.node(address)
        self.keep(held)


async def _ask(node: Node, command: Command) -> tuple[Any, str]:
    """The reply and "", or None and what went wrong."""
    try:
        exchange = await node.exchange(pack(command), 1)
    except Unavailable as error:
        return None, str(error)
    (reply,) = exchange.replies or [None]
    if exchange.failure or isinstance(reply, hiredis.ReplyError):
        return None, f"index store at {node.address}: {exchange.failure or reply}"
    return reply, ""


def make_router(config: ValkeyConfig, clock: Clock) -> Router:
    """The router for a URL."""
    kinds: dict[Kind, type[Router]] = {
        Kind.SINGLE: SingleRouter,
        Kind.CLUSTER: ClusterRouter,
        Kind.SENTINEL: SentinelRouter,
    }
    return kinds[config.kind](config, clock)
