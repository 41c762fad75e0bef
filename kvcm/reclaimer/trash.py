"""Deleting the bytes of what was retired."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from kvcm.core.errors import KvcmError, StorageError
from kvcm.metaindex import bits
from kvcm.metaindex.changes import replace_trash
from kvcm.metaindex.ids import home_shard
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.records import Trash
from kvcm.metaindex.stores.common import Turn
from kvcm.reclaimer.base import BACKOFF_S_FIRST, Report, Surroundings
from kvcm.reclaimer.lanes import Lane, Pending, StorageTrash

_log = logging.getLogger(__name__)
_BACKOFF_S_MAX = 300.0
_LATE_S = 1.0
"""A delete call that takes longer is left to itself; the others go on."""
_BATCHES_PER_ROUND = 64
_WAKE_S = 60.0
_LETTERS_SHOWN = 100


class TrashLoop:
    """Deletes the bytes of retired objects once their grace is over, in batches per storage.

    What fails is retried with back-off and, after some tries, slowly, as a dead letter; it holds
    up nothing else, and neither does a storage that hangs. Trash is stored and so survives a
    restart; how often it failed is not: a new manager begins to count anew.
    """

    name = "trash"
    period_s = 0.2

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._lanes: dict[str, Lane] = {}
        around.index.shared.on_trash = self.add

    @property
    def waiting(self) -> int:
        """Trash entries not deleted yet."""
        return sum(len(lane.entries) for lane in self._lanes.values())

    def add(self, index: InstanceIndex, trash: Trash) -> None:
        """Queue trash; its grace starts now."""
        grace = self._around.late_s if trash.again else self._around.grace_s(index.group)
        lane = self._lanes.setdefault(trash.storage, Lane(trash.storage))
        lane.push(Pending(index, trash), self._around.clock.monotonic() + grace)

    def report(self) -> list[StorageTrash]:
        """The trash of every storage that has any."""
        return [
            lane.report(_LETTERS_SHOWN)
            for _, lane in sorted(self._lanes.items())
            if lane.entries or lane.running
        ]

    def retry(self, storage: str | None = None) -> int:
        """Make what failed on a storage, or on all, due now; how many entries that are."""
        now = self._around.clock.monotonic()
        return sum(
            lane.wake(now) for lane in self._lanes.values() if storage in (None, lane.storage)
        )

    # ---- rounds ------------------------------------------------------------------------------

    async def run_once(self, now: float) -> Report:
        report = Report()
        left = _BATCHES_PER_ROUND
        try:
            while True:
                left -= self._start(left, report)
                running = {t for lane in self._lanes.values() for t in lane.running - lane.late}
                if not running:
                    break
                done, slow = await asyncio.wait(
                    running, timeout=_LATE_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                if not done:
                    self._leave(slow)
        except asyncio.CancelledError:
            for lane in self._lanes.values():
                for task in lane.running:
                    task.cancel()
            raise
        report.waiting = self.waiting
        return report

    def _start(self, limit: int, report: Report) -> int:
        """Start what is due and has room, a batch of each storage in turn; how many batches."""
        options, now = self._around.deletes, self._around.clock.monotonic()
        room = options.at_once - sum(len(x.running - x.late) for x in self._lanes.values())
        room = min(room, limit)
        started = 0
        busy = True
        while busy and started < room:
            busy = False
            for lane in self._lanes.values():
                if started < room and len(lane.running) < options.per_storage and lane.is_due(now):
                    self._begin(lane, lane.take(now), report)
                    started += 1
                    busy = True
        return started

    def _begin(self, lane: Lane, batch: list[Pending], report: Report) -> None:
        task = asyncio.ensure_future(self._delete(lane, batch, report))
        lane.running.add(task)
        task.add_done_callback(lane.running.discard)
        task.add_done_callback(lane.late.discard)

    def _leave(self, slow: set[asyncio.Task[None]]) -> None:
        for lane in self._lanes.values():
            if late := slow & lane.running:
                _log.warning("storage %s: a delete takes over %g s", lane.storage, _LATE_S)
                lane.late |= late

    # ---- one batch ---------------------------------------------------------------------------

    async def _delete(self, lane: Lane, batch: list[Pending], report: Report) -> None:
        try:
            by_index: dict[InstanceIndex, list[Pending]] = {}
            for pending in batch:
                by_index.setdefault(pending.index, []).append(pending)
            names: dict[Pending, list[str]] = {}
            for index, items in by_index.items():
                await self._look(lane, index, items, names)
            gone = await self._free(lane, names, report)
            for index, items in by_index.items():
                await self._settle(lane, index, [p for p in items if p in gone], report)
        except Exception:
            # A backend that fails in a way of its own must not stop the deletes of others.
            _log.exception("deleting bytes on storage %s", lane.storage)
        finally:
            # Cut short, or the index store failed: nothing may be forgotten.
            for pending in batch:
                if pending.is_busy:
                    report.failed += 1
                    self._later(lane, pending, BACKOFF_S_FIRST)

    async def _look(
        self,
        lane: Lane,
        index: InstanceIndex,
        items: Sequence[Pending],
        names: dict[Pending, list[str]],
    ) -> None:
        """The objects of each entry that may be deleted now; others stay busy."""
        # Only what cannot come back may lose its bytes: a replica that takes over without the
        # retiring commit would serve the blocks again.
        sure = await _confirmed(index, {home_shard(p.trash.extent_id) for p in items})
        items = [p for p in items if home_shard(p.trash.extent_id) in sure]
        for pending in items:
            if index.trash.get(pending.trash.key) != pending.trash:
                pending.is_busy = False
                if lane.entries.get(pending.trash.key) is pending:
                    lane.remove(pending.trash.key)
        items = [p for p in items if p.is_busy]
        if not self._around.registered(lane.storage):
            # Its storage was removed by force: nobody can free these bytes any more.
            names.update((p, []) for p in items)
            return
        headers = await index.headers_of(dict.fromkeys(p.trash.extent_id for p in items))
        turn = Turn(index.clock)
        for pending in items:
            extent = headers[pending.trash.extent_id]
            if isinstance(extent, KvcmError):
                continue
            if extent is None:
                # What named the objects does not parse: they are left to the repair sweep.
                _log.error(
                    "extent %s: its record is lost, its bytes stay", pending.trash.extent_id.hex()
                )
                names[pending] = []
                continue
            objects = index.objects_of(extent)
            if objects is None:
                self._failed(lane, pending, f"storage {lane.storage!r} is not open")
                continue
            wanted = pending.trash.objects & bits.ones(len(objects))
            names[pending] = [objects[i].name for i in bits.positions(wanted)]
            if turn.is_over():
                await turn.give()

    async def _free(
        self, lane: Lane, names: dict[Pending, list[str]], report: Report
    ) -> set[Pending]:
        """Delete the objects in one call; the entries whose objects are all gone."""
        flat = [name for part in names.values() for name in part]
        answers: Sequence[Exception | None] = ()
        if flat:
            backend = self._around.backend(lane.storage)
            try:
                if backend is None:
                    raise StorageError(f"storage {lane.storage!r} is not open")
                answers = await backend.delete(flat)
            except KvcmError as error:
                answers = [error] * len(flat)
            if backend is not lane.backend:
                # It was opened anew: what failed before has a fresh chance, beside this batch.
                lane.backend = backend
                lane.wake(self._around.clock.monotonic())
        at = 0
        gone: set[Pending] = set()
        first: Exception | None = None
        for pending, part in names.items():
            failed = next((a for a in answers[at : at + len(part)] if a is not None), None)
            at += len(part)
            if failed is None:
                gone.add(pending)
                continue
            first = first or failed
            report.failed += 1
            self._failed(lane, pending, str(failed))
        if first is not None:
            _log.warning(
                "storage %s: %d of %d objects' bytes not deleted: %s",
                *(lane.storage, len(names) - len(gone), len(names), first),
            )
        return gone

    async def _settle(
        self, lane: Lane, index: InstanceIndex, gone: Sequence[Pending], report: Report
    ) -> None:
        """The bytes are deleted: entries go, or wait for their second pass."""
        pairs: list[tuple[Trash, Trash | None]] = []
        for pending in gone:
            trash = pending.trash
            second = trash.late_writer and not trash.again and self._around.registered(lane.storage)
            pairs.append((trash, replace(trash, again=True) if second else None))
        if not pairs:
            return
        answers = await replace_trash(index, pairs)
        turn = Turn(index.clock)
        for pending, (trash, again), error in zip(gone, pairs, answers, strict=True):
            if turn.is_over():
                await turn.give()
            if error is not None:
                continue
            pending.is_busy = False
            report.done += 1
            was_dead = trash.key in lane.dead
            if again is not None:
                self.add(index, again)
            elif lane.entries.get(trash.key) is pending:
                lane.remove(trash.key)
            now = self._around.clock.monotonic()
            if was_dead and now >= lane.woken_at + _WAKE_S:
                # The storage takes deletes again: the others need not wait an hour for theirs.
                lane.woken_at = now
                lane.wake(now)

    def _failed(self, lane: Lane, pending: Pending, error: str) -> None:
        options = self._around.deletes
        now_s = self._around.clock.now()
        if lane.failed(pending, error, now_s, options.tries_max):
            _log.error(
                "storage %s: giving up on extent %s for now, after %d tries: %s",
                *(lane.storage, pending.trash.extent_id.hex(), pending.tries, error),
            )
        if pending.tries < options.tries_max:
            wait = min(_BACKOFF_S_MAX, BACKOFF_S_FIRST * 2.0 ** min(pending.tries, 10))
        else:
            wait = options.dead_letter_retry_s
        self._later(lane, pending, wait)

    def _later(self, lane: Lane, pending: Pending, wait_s: float) -> None:
        """Due again after between half of the wait and all of it: chance keeps what failed
        together from being tried together for ever."""
        if lane.entries.get(pending.trash.key) is not pending:
            # Replaced meanwhile by what the store says now.
            pending.is_busy = False
            return
        chance = int.from_bytes(self._around.clock.random_bytes(2), "big") / 0xFFFF
        lane.push(pending, self._around.clock.monotonic() + wait_s * (0.5 + chance / 2))


async def _confirmed(index: InstanceIndex, numbers: set[int]) -> set[int]:
    """Those home shards of which everything known outlives the loss of a server."""

    async def is_sure(number: int) -> bool:
        try:
            await index.shards.confirm(number)
        except KvcmError as error:
            _log.warning("instance %s, shard %d: %s", index.uid, number, error)
            return False
        return True

    wanted = list(numbers)
    answers = await asyncio.gather(*map(is_sure, wanted))
    return {number for number, sure in zip(wanted, answers, strict=True) if sure}
