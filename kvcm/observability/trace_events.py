"""Trace events: recorded in files and streamed to subscribers.

Whoever serves a request only queues what happened. A background loop gives it its form, in steps of
less than 2 ms, and a thread compresses and writes, which takes it off the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from kvcm.core.clock import Clock
from kvcm.core.errors import InvalidArgument
from kvcm.core.keys import unpack_together
from kvcm.core.limits import TRACE_EVENT_QUEUE_BYTES_MAX
from kvcm.metaindex.events import Event, LookedUp, Watchers
from kvcm.metaindex.stores.common import Turn
from kvcm.observability.event_stream import Encoded, EventStream, Subscriber
from kvcm.observability.trace_files import TraceFiles
from kvcm.observability.trace_form import (
    STEP_BYTES,
    encode,
    number_steps,
    numbers_of,
    size_of,
    type_of,
)

log = logging.getLogger(__name__)

_FLUSH_BYTES = 1 << 20
_WAKE_BYTES = 1 << 20
_CHOICES_MAX = 4096
_GATHER_S = 0.01
"""Subscribers get what happened within so long in one piece."""


class _Waiting(NamedTuple):
    event: Event
    kind: str
    at_us: int
    size: int
    recorded: bool


@dataclass(slots=True)
class TraceCounts:
    """Since the start: events ``recorded`` in files, ``dropped`` because too many waited, and
    ``failed`` because they could not be written (no longer counted as recorded)."""

    recorded: int = 0
    dropped: int = 0
    failed: int = 0


def is_sampled(instance_id: str, share: float) -> bool:
    """Whether an instance is among a ``share`` of all; always the same answer."""
    digest = blake2b(instance_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


class TraceEvents:
    """The queue between the calls and whoever reads what they did; a background loop empties it.

    Nothing is watched while nothing is recorded and nobody has subscribed.

    Args:
        files: where events are recorded; None = not at all.
        sample: share of the instances that are recorded, 0 to 1.
    """

    name = "trace-events"
    period_s = 1.0

    def __init__(
        self, clock: Clock, watchers: Watchers, files: TraceFiles | None, sample: float = 1.0
    ) -> None:
        self.wakeup = asyncio.Event()
        self.stream = EventStream()
        self.counts = TraceCounts()
        self._clock = clock
        self._watchers = watchers
        self._files = files
        self._sample = sample
        self._run = clock.random_bytes(4).hex()
        self._number = 0
        self._queue: deque[_Waiting] = deque()
        self._queued_bytes = 0
        self._chosen: dict[str, bool] = {}
        self._lines: list[bytes] = []
        self._lines_bytes = 0
        self._turn = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None
        if files is not None:
            watchers.append(self._watch)

    # ---- what happens; called while requests are served ----------------------------------------

    def _watch(self, event: Event) -> None:
        instance_id = event.instance.instance_id
        recorded = self._is_recorded(instance_id)
        if not recorded and not self.stream.subscribers:
            return
        kind = type_of(event)
        if not recorded and not self.stream.wants(instance_id, kind):
            return
        size = size_of(event)
        if self._queued_bytes + size > TRACE_EVENT_QUEUE_BYTES_MAX:
            self.counts.dropped += 1
            self.stream.lose(instance_id, kind)
            return
        at_us = int(self._clock.now() * 1e6)
        self._queue.append(_Waiting(event, kind, at_us, size, recorded))
        self._queued_bytes += size
        if self.stream.subscribers or self._queued_bytes > _WAKE_BYTES:
            self.wakeup.set()

    def _is_recorded(self, instance_id: str) -> bool:
        chosen = self._chosen.get(instance_id)
        if chosen is None:
            if len(self._chosen) >= _CHOICES_MAX:
                self._chosen.clear()
            chosen = self._files is not None and is_sampled(instance_id, self._sample)
            self._chosen[instance_id] = chosen
        return chosen

    # ---- subscribers ---------------------------------------------------------------------------

    def subscribe(self, instances: list[str], types: list[str]) -> Subscriber:
        """As `EventStream.subscribe`."""
        subscriber = self.stream.subscribe(instances, types)
        if self._watch not in self._watchers:
            self._watchers.append(self._watch)
        return subscriber

    def leave(self, subscriber: Subscriber) -> None:
        """As `EventStream.leave`."""
        self.stream.leave(subscriber)
        if self._files is None and not self.stream.subscribers and self._watch in self._watchers:
            self._watchers.remove(self._watch)

    # ---- the loop ------------------------------------------------------------------------------

    async def run_once(self, now: float) -> None:
        """Pass on what waits."""
        if self.stream.subscribers and self._queued_bytes <= _WAKE_BYTES:
            await self._clock.sleep(_GATHER_S)
        self.wakeup.clear()
        async with self._turn:
            await self._pass_on()

    async def _pass_on(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
        turn = Turn(self._clock)
        while self._queue:
            some = self._some()
            try:
                while some:
                    await self._give(some[0], turn)
                    some.popleft()
            finally:
                # Cancelled: the next round goes on.
                self._queue.extendleft(reversed(some))
                self._queued_bytes += sum(waiting.size for waiting in some)
            if self._lines_bytes >= _FLUSH_BYTES:
                await self._write()
        await self._write()

    def _some(self) -> deque[_Waiting]:
        """The next few of what waits; keys of small ones are decoded."""
        taken: deque[_Waiting] = deque()
        size = 0
        while self._queue and size < STEP_BYTES:
            taken.append(self._queue.popleft())
            size += taken[-1].size
        self._queued_bytes -= size
        batches = [w.event.batch for w in taken if isinstance(w.event, LookedUp)]
        unpack_together([batch for batch in batches if len(batch.data) <= STEP_BYTES])
        return taken

    async def _give(self, waiting: _Waiting, turn: Turn) -> None:
        """Does nothing when cancelled."""
        event, kind = waiting.event, waiting.kind
        numbers: dict[str, bytes] = {}
        try:
            for name, batch in numbers_of(event).items():
                steps: list[bytes] = []
                for step in number_steps(batch):
                    steps.append(step)
                    if turn.is_over():
                        await turn.give()
                numbers[name] = b",".join(steps)
        except InvalidArgument:
            # Keys that the lookup had no need to read are malformed.
            return
        self._number += 1
        event_id = f"{self._run}-{self._number}"
        data = encode(event, event_id, waiting.at_us, numbers)
        self.stream.send(Encoded(event_id, event.instance.instance_id, kind, data))
        if waiting.recorded:
            self._lines += (data, b"\n")
            self._lines_bytes += len(data)

    async def _write(self) -> None:
        lines, self._lines, self._lines_bytes = self._lines, [], 0
        if lines and self._files is not None:
            # Goes on when the loop is cancelled: a thread cannot be.
            self._writing = asyncio.ensure_future(self._append(self._files, lines))
            await asyncio.shield(self._writing)

    async def _append(self, files: TraceFiles, lines: list[bytes]) -> None:
        count = len(lines) // 2
        try:
            # Compressing lets go of the interpreter.
            await asyncio.to_thread(files.append, b"".join(lines))
            self.counts.recorded += count
        except OSError as error:
            self.counts.failed += count
            log.warning("%d trace events are lost, they cannot be written: %s", count, error)

    # ---- end -----------------------------------------------------------------------------------

    async def end_streams(self) -> None:
        """Let all subscribers go, once they have what happened until now; more are refused."""
        if self.stream.subscribers:
            async with self._turn:
                await self._pass_on()
        self.stream.close()

    async def close(self) -> None:
        """Write what waits."""
        await self.end_streams()
        if self._watch in self._watchers:
            self._watchers.remove(self._watch)
        async with self._turn:
            await self._pass_on()
        if self._files is not None:
            await asyncio.to_thread(self._files.close)
