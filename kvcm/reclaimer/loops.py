"""Background loops: each is ``run_once(now)`` under the server's supervisor, with a report."""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvcm.core.clock import Clock
from kvcm.core.errors import KvcmError, NotReady, StaleFence, StorageError
from kvcm.core.types import Instance, InstanceGroup
from kvcm.metaindex import bits
from kvcm.metaindex.book import Entry
from kvcm.metaindex.ids import home_shard
from kvcm.metaindex.index import MetaIndex
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.records import Cause, Extent, Phase, State, Trash
from kvcm.reclaimer.watermark import Excess, excesses

_log = logging.getLogger(__name__)
_PER_ROUND = 512
_BACKOFF_S_FIRST = 1.0
_LOAD_BACKOFF_S = 0.5
_BACKOFF_S_MAX = 300.0
_DELETES_AT_ONCE = 256
_DELETE_S_MAX = 5.0
"""A storage that takes longer is left to itself; the others go on."""


@dataclass(slots=True)
class Report:
    """What one round did."""

    done: int = 0
    failed: int = 0
    waiting: int = 0


class Loop(Protocol):
    """One background loop."""

    name: str
    period_s: float

    async def run_once(self, now: float) -> Report:
        """One bounded round at monotonic time ``now``."""


class Deleter(Protocol):
    """The half of a storage backend that frees bytes."""

    async def delete(self, names: Sequence[str]) -> list[Exception | None]: ...

    async def remove_instance(self, cluster_uid: str, instance_uid: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the loops need from outside.

    ``registered`` tells whether a storage is still configured. ``grace_s`` is the least time
    between retiring and deleting for a group; ``late_s`` how long a writer may still re-create an
    object after its session ended.
    """

    index: MetaIndex
    clock: Clock
    groups: Callable[[], Iterable[InstanceGroup]]
    backend: Callable[[str], Deleter | None]
    registered: Callable[[str], bool]
    grace_s: Callable[[str], float]
    late_s: float
    forget_instance: Callable[[str], Awaitable[None]]


class LoadLoop:
    """Claims and loads the indexes of registered instances, and clears up unknown outcomes."""

    name = "load"
    period_s = 0.05

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._not_before: dict[str, float] = {}

    async def run_once(self, now: float) -> Report:
        report = Report()
        for index in list(self._around.index.by_uid.values()):
            doubted = index.shards.doubted
            if (index.loaded and not doubted) or now < self._not_before.get(index.uid, now):
                continue
            try:
                if index.loaded:
                    await index.shards.ensure(doubted)
                else:
                    await index.load()
            except KvcmError as error:
                _log.warning("loading instance %s: %s", index.uid, error)
                self._not_before[index.uid] = now + _LOAD_BACKOFF_S
                report.failed += 1
                continue
            self._not_before.pop(index.uid, None)
            report.done += 1
        return report


class ExpiryLoop:
    """Aborts open extents whose time-out has passed."""

    name = "expiry"
    period_s = 0.2

    def __init__(self, around: Surroundings) -> None:
        self._around = around

    async def run_once(self, now: float) -> Report:
        report = Report()
        for index in list(self._around.index.by_uid.values()):
            left = index.book.overdue(now, _PER_ROUND)
            try:
                await self._expire(index, left, now, report)
            finally:
                # Cut short: they are not given out again by themselves.
                for entry in left:
                    index.book.expect(entry, entry.deadline)
        return report

    async def _expire(
        self, index: InstanceIndex, left: list[Entry], now: float, report: Report
    ) -> None:
        """Work through ``left`` from its end; what is dealt with leaves it."""
        while left:
            entry = left[-1]
            try:
                await index.change(entry.extent_id, _expire_with(index))
                report.done += 1
            except KvcmError as error:
                _log.warning("expiring extent %s: %s", entry.extent_id.hex(), error)
                index.book.expect(entry, now + _BACKOFF_S_FIRST)
                report.failed += 1
            left.pop()


def _expire_with(index: InstanceIndex) -> Callable[[Extent, State], State | None]:
    def decide(_extent: Extent, state: State) -> State | None:
        if state.phase is not Phase.OPEN:
            return None
        return state.next(index.new_version(), phase=Phase.ABORTED, cause=Cause.EXPIRED)

    return decide


def retire_with(index: InstanceIndex) -> Callable[[Extent, State], State | None]:
    """A decision that takes out whatever serves, and cancels what is open."""

    def decide(_extent: Extent, state: State) -> State | None:
        if state.phase is Phase.OPEN:
            return state.next(index.new_version(), phase=Phase.ABORTED, cause=Cause.CANCELLED)
        if state.phase is Phase.SETTLED:
            return state.next(index.new_version(), phase=Phase.RETIRED, serving=0)
        return None

    return decide


Away = set[tuple[str, int]]
"""Shards that failed in this round; what lies in others goes on."""


def _place(entry: Entry) -> tuple[str, int]:
    return entry.uid, home_shard(entry.extent_id)


class EvictionLoop:
    """Evicts the coldest extents of groups that crossed a mark, deepest first."""

    name = "eviction"
    period_s = 0.2

    def __init__(self, around: Surroundings) -> None:
        self._around = around

    async def run_once(self, now: float) -> Report:
        report = Report()
        for group in self._around.groups():
            members = [
                i for i in self._around.index.by_uid.values() if i.group == group.name and i.loaded
            ]
            if not members:
                continue
            ledger = self._around.index.shared.ledger
            for excess in excesses(group, [i.uid for i in members], ledger):
                await self._evict(group.name, excess, report)
        return report

    async def _evict(self, group: str, excess: Excess, report: Report) -> None:
        left = excess.amount
        away: Away = set()
        by_uid = self._around.index.by_uid
        for entry in list(self._victims(group, excess)):
            if left <= 0 or report.done >= _PER_ROUND:
                return
            index = by_uid.get(entry.uid)
            if index is None or entry.pins or entry.phase is not Phase.SETTLED:
                continue
            if _place(entry) in away:
                continue
            held = entry.held
            entry.leaving = True
            try:
                change = await index.change(entry.extent_id, retire_with(index))
            except KvcmError as error:
                _log.warning("evicting extent %s: %s", entry.extent_id.hex(), error)
                report.failed += 1
                if isinstance(error, NotReady | StaleFence):
                    away.add(_place(entry))
                continue
            finally:
                entry.leaving = False
            if change is None:
                # Its record is lost or unreadable: it can free nothing, so it must not count.
                index.book.forget(entry.extent_id)
                continue
            left -= held.blocks if excess.in_blocks else held.counted
            report.done += 1

    def _victims(self, group: str, excess: Excess) -> Iterable[Entry]:
        count = 0
        for entry in self._around.index.shared.order_of(group):
            if excess.storage_type is not None and entry.storage_type != excess.storage_type:
                continue
            if excess.uid is not None and entry.uid != excess.uid:
                continue
            if entry.pins:
                continue
            yield entry
            count += 1
            if count >= _PER_ROUND:
                return


class TrimLoop:
    """Frees what trims, removed instances and removed storages left behind."""

    name = "trim"
    period_s = 0.1

    def __init__(self, around: Surroundings) -> None:
        self._around = around

    async def run_once(self, now: float) -> Report:
        report = Report()
        for index in list(self._around.index.by_uid.values()):
            if not index.loaded:
                continue
            away: Away = set()
            for entry in self._dead(index):
                if _place(entry) in away:
                    continue
                try:
                    if await index.change(entry.extent_id, retire_with(index)) is None:
                        index.book.forget(entry.extent_id)
                    report.done += 1
                except KvcmError as error:
                    _log.warning("freeing extent %s: %s", entry.extent_id.hex(), error)
                    report.failed += 1
                    if isinstance(error, NotReady | StaleFence):
                        away.add(_place(entry))
        return report

    def _dead(self, index: InstanceIndex) -> list[Entry]:
        if not index.closed and index.trimmed_to == index.trim:
            return []
        live = (Phase.OPEN, Phase.SETTLED)
        dead = [
            e
            for e in index.book.entries.values()
            if e.phase in live and (index.closed or e.trim < index.trim)
        ]
        if not dead:
            index.trimmed_to = index.trim
        return dead[:_PER_ROUND]


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
                    self._push(now + _BACKOFF_S_FIRST, pending)
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
                self._push(now + _BACKOFF_S_FIRST, pending)

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
                wait = min(_BACKOFF_S_MAX, _BACKOFF_S_FIRST * 2 ** min(pending.tries, 10))
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


class ForgetLoop:
    """Removes the records of extents that are over, and instances that are empty."""

    name = "forget"
    period_s = 0.5

    def __init__(self, around: Surroundings) -> None:
        self._around = around

    async def run_once(self, now: float) -> Report:
        report = Report()
        for index in list(self._around.index.by_uid.values()):
            if not index.loaded:
                continue
            ready = self._ready(index, now)
            away: Away = set()
            for entry in ready[:_PER_ROUND]:
                if _place(entry) in away:
                    continue
                try:
                    await self._forget(index, entry)
                    report.done += 1
                except KvcmError as error:
                    _log.warning("forgetting extent %s: %s", entry.extent_id.hex(), error)
                    report.failed += 1
                    if isinstance(error, NotReady | StaleFence):
                        away.add(_place(entry))
            if index.closed and not index.book.entries and not index.trash:
                try:
                    await self._drop(index.instance)
                except KvcmError as error:
                    _log.warning("forgetting instance %s: %s", index.uid, error)
                    report.failed += 1
        return report

    def _ready(self, index: InstanceIndex, now: float) -> list[Entry]:
        over = index.book.over
        if not over:
            return []
        busy = {t.extent_id for t in index.trash.values()}
        return [
            e
            for e in over.values()
            if e.extent_id not in busy and (e.keep_until <= now or index.closed)
        ]

    async def _forget(self, index: InstanceIndex, entry: Entry) -> None:
        found = await index.read(entry.extent_id)
        if found is None:
            index.book.forget(entry.extent_id)
            return
        extent, state = found
        if not index.closed:
            await index.delete_rows(extent)
        await index.forget(extent, state)

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


class StampLoop:
    """Writes changed last-access stamps, so that a restart keeps the eviction order."""

    name = "stamps"
    period_s = 5.0

    def __init__(self, around: Surroundings) -> None:
        self._around = around

    async def run_once(self, now: float) -> Report:
        report = Report()
        for index in list(self._around.index.by_uid.values()):
            try:
                while saved := await index.save_stamps(_PER_ROUND):
                    report.done += saved
            except KvcmError as error:
                _log.warning("saving stamps of instance %s: %s", index.uid, error)
                report.failed += 1
        return report


def build_loops(around: Surroundings) -> list[Loop]:
    """All loops, in the order in which one pass makes most progress."""
    trash = TrashLoop(around)
    return [
        LoadLoop(around),
        ExpiryLoop(around),
        TrimLoop(around),
        EvictionLoop(around),
        trash,
        ForgetLoop(around),
        StampLoop(around),
    ]
