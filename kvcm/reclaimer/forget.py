"""Removing the records of what is over."""

from __future__ import annotations

import heapq
import logging
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from kvcm.core.errors import KvcmError, StorageError
from kvcm.core.types import Instance
from kvcm.metaindex.book import Entry
from kvcm.metaindex.changes import forget_many
from kvcm.metaindex.instance import Found, InstanceIndex
from kvcm.reclaimer.base import BACKOFF_S_FIRST, PER_ROUND, Report, Surroundings

_log = logging.getLogger(__name__)
_EXTENTS_AT_ONCE = 16


@dataclass(slots=True)
class _Over:
    """Ended extents of one instance: those that wait for their time, and for their trash."""

    later: list[tuple[float, int, Entry]] = field(default_factory=list)
    in_trash: dict[bytes, Entry] = field(default_factory=dict)
    pushed: int = 0

    def push(self, entry: Entry, due: float) -> None:
        self.pushed += 1
        heapq.heappush(self.later, (due, self.pushed, entry))

    def gather(self, index: InstanceIndex, now: float) -> None:
        """Take in what ended, and what has no trash any more, since the last round."""
        while index.ended:
            entry = index.ended.popleft()
            self.push(entry, entry.keep_until)
        while index.trash.freed:
            entry_of_it = self.in_trash.pop(index.trash.freed.popleft(), None)
            if entry_of_it is not None:
                self.push(entry_of_it, now)

    def take(self, index: InstanceIndex, now: float, limit: int) -> list[Entry]:
        """Up to ``limit`` entries whose records may go."""
        ready: list[Entry] = []
        while self.later and self.later[0][0] <= now and len(ready) < limit:
            entry = heapq.heappop(self.later)[2]
            extent_id = entry.extent_id
            if index.book.over.get(extent_id) is not entry:
                continue
            if index.trash.of_extent(extent_id):
                self.in_trash[extent_id] = entry
            else:
                ready.append(entry)
        return ready


class ForgetLoop:
    """Removes the records of extents that are over, and instances that are empty."""

    name = "forget"
    period_s = 0.5

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._over: WeakKeyDictionary[InstanceIndex, _Over] = WeakKeyDictionary()

    async def run_once(self, now: float) -> Report:
        report = Report()
        for index in list(self._around.index.by_uid.values()):
            if not index.loaded:
                continue
            if index.closed:
                await self._close(index, report)
                continue
            over = self._over.setdefault(index, _Over())
            over.gather(index, now)
            ready = over.take(index, now, PER_ROUND)
            for at in range(0, len(ready), _EXTENTS_AT_ONCE):
                await self._forget(index, over, ready[at : at + _EXTENTS_AT_ONCE], now, report)
            report.waiting += len(over.later) + len(over.in_trash)
        return report

    async def _forget(
        self, index: InstanceIndex, over: _Over, entries: list[Entry], now: float, report: Report
    ) -> None:
        left = {entry.extent_id: entry for entry in entries}
        try:
            found: list[Found] = []
            for extent_id, answer in (await index.read_many(list(left))).items():
                if answer is None:
                    index.book.forget(extent_id)
                    del left[extent_id]
                elif not isinstance(answer, KvcmError):
                    found.append(answer)
            if found:
                for (extent, _), error in zip(found, await forget_many(index, found), strict=True):
                    if error is None:
                        del left[extent.extent_id]
                        report.done += 1
                    else:
                        _log.warning("forgetting extent %s: %s", extent.extent_id.hex(), error)
        finally:
            report.failed += len(left)
            for entry in left.values():
                over.push(entry, now + BACKOFF_S_FIRST)

    async def _close(self, index: InstanceIndex, report: Report) -> None:
        """A removed instance goes as a whole, once it holds no space; its records are not taken
        out one by one."""
        if len(index.book.entries) > len(index.book.over) or index.trash:
            return
        try:
            await self._drop(index.instance)
            report.done += 1
        except KvcmError as error:
            _log.warning("forgetting instance %s: %s", index.uid, error)
            report.failed += 1

    async def _drop(self, instance: Instance) -> None:
        shared = self._around.index.shared
        index = self._around.index.by_uid[instance.uid]
        for number in range(instance.shard_count):
            await shared.store.drop(index.shards.id(number))
        for name in list(shared.storage_types):
            backend = self._around.backend(name)
            if backend is None:
                continue
            try:
                await backend.remove_instance(shared.cluster_uid, instance.uid)
            except StorageError as error:
                # Empty folders are all it leaves behind.
                _log.warning("folders of instance %s on storage %s: %s", instance.uid, name, error)
        await self._around.forget_instance(instance.uid)
