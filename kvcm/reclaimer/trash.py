"""Deleting the bytes of what was retired."""

from __future__ import annotations

import asyncio
import heapq
import logging
from dataclasses import dataclass, replace

from kvcm.core.errors import KvcmError, StorageError
from kvcm.metaindex import bits
from kvcm.metaindex.ids import home_shard
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.records import Trash
from kvcm.reclaimer.base import BACKOFF_S_FIRST, Report, Surroundings

_log = logging.getLogger(__name__)
_BACKOFF_S_MAX = 300.0
_DELETES_AT_ONCE = 256
_DELETE_S_MAX = 5.0
"""A storage that takes longer is left to itself; the others go on."""


@dataclass(slots=True)
class _Pending:
    index: InstanceIndex
    trash: Trash
    tries: int = 0


class TrashLoop:
    """Deletes the bytes of retired objects once their grace is over.

    Failures are retried with back-off and hold up nothing else; neither does a storage that hangs.
    """

    name = "trash"
    period_s = 0.2

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._queue: list[tuple[float, int, _Pending]] = []
        self._added = 0
        self._busy: dict[str, asyncio.Task[None]] = {}
        self.failing: dict[bytes, str] = {}
        around.index.shared.on_trash = self.add

    @property
    def waiting(self) -> int:
        """Trash entries not deleted yet."""
        return len(self._queue)

    def add(self, index: InstanceIndex, trash: Trash) -> None:
        """Queue trash; its grace starts now."""
        grace = self._around.late_s if trash.again else self._around.grace_s(index.group)
        self._push(self._around.clock.monotonic() + grace, _Pending(index, trash))

    def _push(self, ready: float, pending: _Pending) -> None:
        self._added += 1
        heapq.heappush(self._queue, (ready, self._added, pending))

    async def run_once(self, now: float) -> Report:
        report = Report()
        batch: list[_Pending] = []
        while self._queue and self._queue[0][0] <= now and len(batch) < _DELETES_AT_ONCE:
            batch.append(heapq.heappop(self._queue)[2])
        by_storage: dict[str, list[_Pending]] = {}
        for pending in batch:
            by_storage.setdefault(pending.trash.storage, []).append(pending)
        tasks: list[asyncio.Task[None]] = []
        for name, items in by_storage.items():
            if name in self._busy:
                for pending in items:
                    self._push(now + BACKOFF_S_FIRST, pending)
                continue
            self._busy[name] = task = asyncio.ensure_future(self._delete(name, items, now, report))
            tasks.append(task)
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=_DELETE_S_MAX)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise
        for task in tasks:
            if task.done():
                task.result()
        report.waiting = self.waiting
        return report

    async def _delete(
        self, storage: str, items: list[_Pending], now: float, report: Report
    ) -> None:
        left = items[::-1]
        try:
            await self._delete_all(storage, left, now, report)
        finally:
            del self._busy[storage]
            # Cut short by a fault of ours: nothing may be forgotten.
            for pending in left:
                self._push(now + BACKOFF_S_FIRST, pending)

    async def _delete_all(
        self, storage: str, left: list[_Pending], now: float, report: Report
    ) -> None:
        """Work through ``left`` from its end; what is dealt with leaves it."""
        while left:
            pending = left[-1]
            try:
                await self._delete_one(storage, pending)
                self.failing.pop(pending.trash.key, None)
                report.done += 1
            except KvcmError as error:
                report.failed += 1
                self.failing[pending.trash.key] = str(error)
                pending.tries += 1
                wait = min(_BACKOFF_S_MAX, BACKOFF_S_FIRST * 2 ** min(pending.tries, 10))
                _log.warning("deleting bytes on storage %s: %s", storage, error)
                self._push(now + wait, pending)
            left.pop()

    async def _delete_one(self, storage: str, pending: _Pending) -> None:
        index, trash = pending.index, pending.trash
        # Only what cannot come back may lose its bytes: a replica that takes over without the
        # retiring commit would serve the blocks again.
        await index.shards.confirm(home_shard(trash.extent_id))
        if index.trash.get(trash.key) != trash:
            return
        if not self._around.registered(storage):
            # Its storage was removed by force: nobody can free these bytes any more.
            await index.replace_trash(trash, None)
            return
        backend = self._around.backend(storage)
        found = await index.read(trash.extent_id)
        if found is None:
            # What named the objects does not parse any more: they are left to the repair sweep.
            _log.error("extent %s: its record is lost, its bytes stay", trash.extent_id.hex())
            await index.replace_trash(trash, None)
            return
        layout = index.layout(found[0])
        if backend is None or layout is None:
            raise StorageError(f"storage {storage!r} is not open")
        names = [
            layout.objects[i].name for i in bits.positions(trash.objects) if i < len(layout.objects)
        ]
        for start in range(0, len(names), _DELETES_AT_ONCE):
            answers = await backend.delete(names[start : start + _DELETES_AT_ONCE])
            failed = next((a for a in answers if a is not None), None)
            if failed is not None:
                raise StorageError(f"delete failed: {failed}") from failed
        again = replace(trash, again=True, size=0)
        wants_again = trash.late_writer and not trash.again
        await index.replace_trash(trash, again if wants_again else None)
        if wants_again:
            self.add(index, again)
