"""Freeing what trims and removals left behind."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from kvcm.metaindex.book import Entry
from kvcm.metaindex.changes import change_many
from kvcm.metaindex.events import Reason
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.ledger import Delta
from kvcm.metaindex.records import Phase
from kvcm.metaindex.stores.common import Turn
from kvcm.reclaimer.base import BACKOFF_S_FIRST, PER_ROUND, Report, Surroundings, retire_with

_log = logging.getLogger(__name__)
_LIVE = (Phase.OPEN, Phase.SETTLED)
_ENTRIES_A_LOOK = 64


@dataclass(frozen=True, slots=True)
class Removal:
    """A trim or a removed instance whose space is not all free yet.

    ``what`` is ``trim`` or ``instance``, ``uid`` tells instances of one id apart. ``since`` is in
    epoch seconds, counted anew after a restart. ``extents``, ``blocks`` and ``size`` (bytes) are
    still to be retired; ``trash`` entries and ``trash_size`` bytes of a removed instance are still
    to be deleted. ``is_counted`` False: it began just now, and what is left is not known yet.
    """

    what: str
    instance: str
    uid: str
    since: float
    is_counted: bool
    extents: int = 0
    blocks: int = 0
    size: int = 0
    trash: int = 0
    trash_size: int = 0


@dataclass(slots=True)
class _Work:
    """What one trim, or one removal, has left to do."""

    trim: int
    closed: bool
    todo: deque[tuple[Entry, Delta]] = field(default_factory=deque)
    blocks: int = 0
    size: int = 0
    not_before: float = 0.0

    def put(self, entry: Entry, held: Delta) -> None:
        """Add an extent that holds so much."""
        self.todo.append((entry, held))
        self.blocks += held.blocks
        self.size += held.counted

    def take(self, limit: int) -> list[tuple[Entry, Delta]]:
        """The next extents."""
        batch = [self.todo.popleft() for _ in range(min(limit, len(self.todo)))]
        for _, held in batch:
            self.blocks -= held.blocks
            self.size -= held.counted
        return batch


class TrimLoop:
    """Frees what trims and removed instances left behind, in bounded steps.

    What is to be done follows from the registry (trim numbers, closed instances) and the extents,
    so that a restart at any moment goes on with it.
    """

    name = "trim"
    period_s = 0.1

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._work: WeakKeyDictionary[InstanceIndex, _Work] = WeakKeyDictionary()
        self._since: WeakKeyDictionary[InstanceIndex, float] = WeakKeyDictionary()

    async def run_once(self, now: float) -> Report:
        report = Report()
        for index in list(self._around.index.by_uid.values()):
            if not index.loaded or index.trim_held or not _is_wanted(index):
                continue
            work = self._work.get(index)
            if work is None or (work.trim, work.closed) != (index.trim, index.closed):
                work = self._work[index] = await self._plan(index)
            if work.not_before <= now:
                await self._free(index, work, now, report)
            if not work.todo:
                self._finish(index, work)
            report.waiting += len(work.todo)
        return report

    async def _plan(self, index: InstanceIndex) -> _Work:
        work = _Work(index.trim, index.closed)
        turn = Turn(index.clock)
        entries = list(index.book.entries.values())
        for at in range(0, len(entries), _ENTRIES_A_LOOK):
            for entry in entries[at : at + _ENTRIES_A_LOOK]:
                if entry.phase in _LIVE and (work.closed or entry.trim < work.trim):
                    work.put(entry, entry.held)
            if turn.is_over():
                await turn.give()
        return work

    async def _free(self, index: InstanceIndex, work: _Work, now: float, report: Report) -> None:
        left = dict(work.take(PER_ROUND))
        try:
            answers = await change_many(
                index,
                [e.extent_id for e in left],
                retire_with(index),
                reason=Reason.INSTANCE if work.closed else Reason.TRIMMED,
            )
            failure: Exception | None = None
            for entry in list(left):
                answer = answers[entry.extent_id]
                if isinstance(answer, Exception):
                    failure = answer
                    continue
                if answer is None:
                    # Its record is lost or unreadable: it can free nothing.
                    index.book.forget(entry.extent_id)
                del left[entry]
                report.done += 1
            if failure is not None:
                work.not_before = now + BACKOFF_S_FIRST
                _log.warning("instance %s: %d extents not freed: %s", index.uid, len(left), failure)
                report.failed += len(left)
        finally:
            # Cut short, or their shards failed: they come again.
            for entry, held in left.items():
                work.put(entry, held)

    def _finish(self, index: InstanceIndex, work: _Work) -> None:
        del self._work[index]
        if not work.closed:
            index.trimmed_to = work.trim
            self._since.pop(index, None)

    def removals(self) -> list[Removal]:
        """What is under way, the oldest first."""
        return sorted(
            (self._removal(i) for i in self._around.index.by_uid.values() if _is_shown(i)),
            key=lambda removal: removal.since,
        )

    def _removal(self, index: InstanceIndex) -> Removal:
        work = self._work.get(index)
        since = self._since.setdefault(index, self._around.clock.now())
        what = "instance" if index.closed else "trim"
        name, uid = index.instance.instance_id, index.uid
        if index.closed:
            held = self._around.index.shared.ledger.instance(uid)
            return Removal(
                *(what, name, uid, since, index.loaded),
                extents=len(index.book.entries) - len(index.book.over),
                blocks=held.blocks,
                size=held.counted,
                trash=len(index.trash),
                trash_size=held.trash_bytes,
            )
        if work is None:
            return Removal(what, name, uid, since, False)
        return Removal(what, name, uid, since, True, len(work.todo), work.blocks, work.size)


def _is_wanted(index: InstanceIndex) -> bool:
    if index.closed:
        return len(index.book.entries) > len(index.book.over)
    return index.trimmed_to != index.trim


def _is_shown(index: InstanceIndex) -> bool:
    # A new instance has nothing to trim, though the loop looks at it once.
    return index.closed or (index.trim > 0 and index.trimmed_to != index.trim)
