"""The best hit rate that any cache could have reached, beside the one that was measured.

Of N blocks asked for, U of them distinct, no cache that was empty at first hits more than N - U
(r* = (N - U) / N). Whoever serves requests only queues them here; a background loop counts them in
steps of less than 2 ms, per instance and per group, and tells why what was missed was missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcm.core.clock import Clock
from kvcm.core.errors import InvalidArgument
from kvcm.core.keys import KeyBatch
from kvcm.core.limits import CEILING_QUEUE_BYTES_MAX
from kvcm.observability import ceiling_file
from kvcm.observability.causes import Fate, Sample
from kvcm.observability.ceiling_counts import Counts, Slice
from kvcm.observability.ceiling_report import CeilingReport, ScopeReport

log = logging.getLogger(__name__)

REPORT_PERIOD_S = 10.0
SAVE_PERIOD_S = 60.0
_PAUSE = 12.0
"""Counting takes a thirteenth of a core at the most."""
_TURN_S_MAX = 1.0
_WAKE_BYTES = 1 << 20
_KEYS_PER_EVENT = 64
"""What its fixed cost amounts to."""
EVENT_BYTES = 64
"""What an event takes beside its keys, about."""


@dataclass(slots=True)
class _Asked:
    """A prefix lookup: the keys of ``batch`` from byte ``at`` on, of which ``hits`` were found."""

    uid: str
    group: str
    batch: KeyBatch
    at: int
    hits: int
    unreadable: bool
    begun: bool = False


@dataclass(slots=True)
class _Became:
    """Something else that happened to keys; ``size`` bytes of them were evicted."""

    uid: str
    group: str
    batch: KeyBatch
    fate: Fate
    size: int
    at: int = 0
    evicted: int = 0


@dataclass(slots=True)
class _Trimmed:
    uid: str


_Event = _Asked | _Became | _Trimmed


class Ceilings:
    """Windows of all instances and groups, and the background loop that fills them.

    Args:
        path: the file that keeps the windows; None = they end with the process.
    """

    name = "ceiling"
    period_s = 0.5

    def __init__(
        self, clock: Clock, path: Path | None = None, sample: Sample | None = None
    ) -> None:
        self.wakeup = asyncio.Event()
        self._clock = clock
        self._path = path
        self._cluster = ""
        self._counts = Counts(sample)
        self._queue: deque[_Event] = deque()
        self._queued_bytes = 0
        self._uncounted = 0
        self._turn = asyncio.Lock()
        self._report = CeilingReport()
        self._is_saved = True
        self._writing: asyncio.Future[None] | None = None
        self._report_at = self._save_at = clock.monotonic()

    # ---- what happens; called while requests are served ----------------------------------------

    def asked(
        self, uid: str, group: str, batch: KeyBatch, at: int, hits: int, *, unreadable: bool = False
    ) -> None:
        """A prefix lookup was answered.

        Args:
            at: byte of ``batch.data`` where the keys begin that the client does not have.
            hits: leading ones of those that were found.
            unreadable: the first one that was not found lies on a storage that cannot be read.
        """
        size = len(batch.data) - at
        if self._queued_bytes + size + EVENT_BYTES > CEILING_QUEUE_BYTES_MAX:
            self._uncounted += 1
            return
        self._enqueue(_Asked(uid, group, batch, at, hits, unreadable), size)

    def became(self, uid: str, group: str, batch: KeyBatch, fate: Fate, size: int = 0) -> None:
        """Something happened to blocks.

        Args:
            size: bytes that were evicted.
        """
        # Without these the causes drift: they may fill what lookups may not.
        if self._queued_bytes + len(batch.data) + EVENT_BYTES > 2 * CEILING_QUEUE_BYTES_MAX:
            self._uncounted += 1
            return
        self._enqueue(_Became(uid, group, batch, fate, size), len(batch.data))

    def trimmed(self, uid: str) -> None:
        """All blocks of an instance are gone."""
        self._enqueue(_Trimmed(uid), 0)

    def _enqueue(self, event: _Event, size: int) -> None:
        self._queue.append(event)
        self._queued_bytes += size + EVENT_BYTES
        if self._queued_bytes > _WAKE_BYTES:
            self.wakeup.set()

    # ---- life ----------------------------------------------------------------------------------

    def follow(
        self,
        cluster: str,
        registered: Mapping[str, tuple[str, str]],
        capacities: Mapping[str, int | None],
    ) -> None:
        """What there is now; the windows of the rest are dropped.

        Args:
            cluster: uid of the registry.
            registered: (instance id, group) by instance uid.
            capacities: bytes that each group may hold; None = no limit.
        """
        self._cluster = cluster
        self._counts.follow(registered, capacities)

    async def open(self) -> None:
        """Take over what the file has; call ``follow`` first. A file that is damaged, or of another
        registry, is left alone until the next save replaces it."""
        if self._path is None:
            return
        try:
            records = await asyncio.to_thread(ceiling_file.read, self._path, self._cluster)
            self._counts.take_over(records)
        except (OSError, ValueError, InvalidArgument) as error:
            log.warning("hit-rate windows begin anew: %s cannot be used: %s", self._path, error)

    async def close(self) -> None:
        """Count what waits, and save."""
        async with self._turn:
            await self._count()
        await self.save()

    # ---- the loop ------------------------------------------------------------------------------

    async def run_once(self, now: float) -> None:
        """Count what waits; now and then make the report, and save the windows."""
        self.wakeup.clear()
        async with self._turn:
            await self._count(pause=_PAUSE)
            if now >= self._report_at:
                self._report_at = now + REPORT_PERIOD_S
                await self._make_report()
        if now >= self._save_at:
            self._save_at = now + SAVE_PERIOD_S
            await self.save()

    def snapshot(self) -> CeilingReport:
        """The last report, at most some seconds old; see ``refresh``."""
        return self._report

    async def refresh(self) -> CeilingReport:
        """A report of now."""
        async with self._turn:
            await self._count()
            await self._make_report()
        return self._report

    async def _count(self, *, pause: float = 0.0) -> None:
        """Count what waits. ``pause``: seconds left to others for each second of work, so that
        calls stay fast however many there are; what does not fit the queue meanwhile is dropped."""
        clock = self._clock
        for windows in self._counts.all():
            if windows.due(clock.now()):
                for _ in windows.rotate(clock.now()):
                    await asyncio.sleep(0)
        self._counts.forget_idle(clock.now())
        ends = clock.monotonic() + _TURN_S_MAX
        while (began := clock.monotonic()) < ends:
            counted = self._step(clock.now())
            tidied = self._counts.sample.tidy(int(clock.now()), clock.monotonic())
            if not counted and not tidied:
                break
            self._is_saved = False
            await clock.sleep(pause * (clock.monotonic() - began))

    async def _make_report(self) -> None:
        now_s = self._clock.now()
        scopes: list[ScopeReport] = []
        for scope in self._counts.scopes(now_s):
            scopes.append(scope)
            await asyncio.sleep(0)
        self._report = self._counts.report(tuple(scopes), now_s, self._uncounted)

    def _step(self, now_s: float) -> bool:
        """Count some keys; False when nothing waits."""
        if not self._queue:
            return False
        head = self._queue[0]
        if isinstance(head, _Asked):
            self._count_lookups(now_s)
        elif isinstance(head, _Became):
            self._count_changes(now_s)
        else:
            self._counts.trimmed(head.uid, now_s)
            self._done(0)
        return True

    def _done(self, size: int) -> None:
        self._queue.popleft()
        self._queued_bytes -= size + EVENT_BYTES

    def _count_lookups(self, now_s: float) -> None:
        """The next keys of the lookups at the head of the queue, those of an instance together:
        NumPy's fixed cost is most of a small lookup's."""
        room = self._counts.slice_keys
        slices: dict[str, Slice] = {}
        while room > 0 and self._queue and isinstance(head := self._queue[0], _Asked):
            size, began = len(head.batch.data), head.at
            raw, head.at = _piece(head.batch, began, room)
            count = len(raw) // 8
            if count:
                found = min(head.hits, count)
                slices.setdefault(head.uid, Slice(head.group)).add(
                    raw, found, unreadable=head.unreadable, is_first=not head.begun
                )
                head.begun = True
                head.hits -= found
            room -= max(count, 1)
            self._queued_bytes -= head.at - began
            if head.at >= size:
                self._done(0)
        for uid, asked in slices.items():
            self._counts.asked(uid, asked, now_s)

    def _count_changes(self, now_s: float) -> None:
        room = self._counts.slice_keys
        while room > 0 and self._queue and isinstance(head := self._queue[0], _Became):
            if not head.at:
                head.evicted = self._counts.count_evicted(head.group, head.size)
            raw, head.at = _piece(head.batch, head.at, room)
            if raw:
                self._counts.became(head.uid, raw, head.fate, now_s, evicted=head.evicted)
            room -= max(len(raw) // 8, _KEYS_PER_EVENT)
            if head.at >= len(head.batch.data):
                self._done(len(head.batch.data))

    # ---- the file ------------------------------------------------------------------------------

    async def save(self) -> None:
        """Write the file, if anything was counted since the last time. Never fails: a warning."""
        if self._path is None or self._is_saved:
            return
        async with self._turn:
            if self._writing is not None:
                # Of a save that was cancelled: its thread goes on.
                await asyncio.wait([self._writing])
            self._is_saved = True
            records: list[bytes] = []
            for record in self._counts.records():
                await asyncio.sleep(0)
                records.append(ceiling_file.encode(record))
                await asyncio.sleep(0)
            end = ceiling_file.End(len(records), self._cluster)
            records.append(ceiling_file.encode(end))
            self._writing = asyncio.ensure_future(self._write(self._path, records))
        await asyncio.shield(self._writing)

    async def _write(self, path: Path, records: list[bytes]) -> None:
        try:
            await asyncio.to_thread(ceiling_file.write, path, records)
        except OSError as error:
            self._is_saved = False
            log.warning("hit-rate windows are not saved in %s: %s", path, error)


def _piece(batch: KeyBatch, at: int, count: int) -> tuple[bytes, int]:
    try:
        return batch.piece(at, count)
    except InvalidArgument:
        # Its caller got that answer.
        return b"", len(batch.data)
