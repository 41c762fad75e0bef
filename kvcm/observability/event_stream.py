"""Subscribers of trace events. Each has a bounded queue of its own and delays nobody else."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from kvcm.core.errors import InvalidArgument, NotReady
from kvcm.core.limits import EVENT_SUBSCRIBERS_MAX, SUBSCRIBER_QUEUE_BYTES_MAX
from kvcm.observability.trace_form import TYPES


@dataclass(frozen=True, slots=True)
class Encoded:
    """A trace event as it is sent: ``data`` is its JSON."""

    event_id: str
    instance_id: str
    kind: str
    data: bytes


class Subscriber:
    """One reader of events: those of ``instances`` and of ``types``, each empty for all."""

    def __init__(self, instances: Collection[str], types: Collection[str]) -> None:
        self._instances = frozenset(instances)
        self._types = frozenset(types)
        self._queue: deque[Encoded] = deque()
        self._queued_bytes = 0
        self._dropped = 0
        self._changed = asyncio.Event()
        self.closed = asyncio.Event()
        """Set at the end: by `EventStream.leave`, or when the manager stops."""

    def wants(self, instance_id: str, kind: str) -> bool:
        """Whether an event is for this one."""
        return (not self._instances or instance_id in self._instances) and (
            not self._types or kind in self._types
        )

    def offer(self, event: Encoded) -> bool:
        """Queue an event; False when it is dropped because too much waits."""
        if self._queued_bytes + len(event.data) > SUBSCRIBER_QUEUE_BYTES_MAX:
            self.miss()
            return False
        self._queue.append(event)
        self._queued_bytes += len(event.data)
        self._changed.set()
        return True

    def miss(self) -> None:
        """An event is lost on this one, and it will be told."""
        self._dropped += 1
        self._changed.set()

    def close(self) -> None:
        """Nothing comes any more but what waits."""
        self.closed.set()
        self._changed.set()

    async def next(self, timeout_s: float) -> bytes | None:
        """What to send next, as server-sent events: what waits, or a comment after ``timeout_s``
        without anything. None: the end.

        What was dropped is told in front of what came before it too: whoever follows blocks cannot
        trust what it knows in either case.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return b": nothing new\n\n"
        if not self.closed.is_set():
            self._changed.clear()
        elif not self._queue and not self._dropped:
            return None
        pieces: list[bytes] = []
        if self._dropped:
            lost = msgspec.json.encode({"dropped": self._dropped})
            pieces.append(b"event: Dropped\ndata: %b\n\n" % lost)
            self._dropped = 0
        for event in self._queue:
            head = f"id: {event.event_id}\nevent: {event.kind}\ndata: ".encode()
            pieces += (head, event.data, b"\n\n")
        self._queue.clear()
        self._queued_bytes = 0
        return b"".join(pieces)


class EventStream:
    """All subscribers.

    Attributes:
        dropped: events that subscribers missed since the start.
    """

    def __init__(self) -> None:
        self.subscribers: set[Subscriber] = set()
        self.dropped = 0
        self._is_closed = False

    def subscribe(self, instances: Collection[str], types: Collection[str]) -> Subscriber:
        """A new reader, from now on; end it with `leave`.

        Raises:
            InvalidArgument: an unknown type.
            NotReady: there are too many, or the manager stops.
        """
        unknown = sorted(set(types) - set(TYPES))
        if unknown:
            raise InvalidArgument(f"type {unknown[0][:200]!r} is not one of {', '.join(TYPES)}")
        if self._is_closed:
            raise NotReady("the manager stops")
        if len(self.subscribers) >= EVENT_SUBSCRIBERS_MAX:
            raise NotReady(f"there are {EVENT_SUBSCRIBERS_MAX} subscribers, the limit, already")
        subscriber = Subscriber(instances, types)
        self.subscribers.add(subscriber)
        return subscriber

    def leave(self, subscriber: Subscriber) -> None:
        """Forget a subscriber."""
        self.subscribers.discard(subscriber)
        subscriber.close()

    def wants(self, instance_id: str, kind: str) -> bool:
        """Whether anybody reads such an event."""
        return any(s.wants(instance_id, kind) for s in self.subscribers)

    def send(self, event: Encoded) -> None:
        """Queue an event for all that want it."""
        for subscriber in self.subscribers:
            if subscriber.wants(event.instance_id, event.kind) and not subscriber.offer(event):
                self.dropped += 1

    def lose(self, instance_id: str, kind: str) -> None:
        """An event was lost on the way to all that wanted it."""
        for subscriber in self.subscribers:
            if subscriber.wants(instance_id, kind):
                subscriber.miss()
                self.dropped += 1

    def close(self) -> None:
        """End all streams; none can begin."""
        self._is_closed = True
        for subscriber in self.subscribers:
            subscriber.close()
