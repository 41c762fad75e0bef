"""Evicting what is over a mark, and making room for writes that were refused."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvcm.core import quota
from kvcm.core.errors import KvcmError
from kvcm.core.types import InstanceGroup, StorageConfig
from kvcm.metaindex.changes import change_many
from kvcm.metaindex.entry import Entry
from kvcm.metaindex.events import Reason
from kvcm.metaindex.ledger import Delta
from kvcm.metaindex.pressure import Scope
from kvcm.reclaimer.base import Away, Report, Surroundings, retire_with
from kvcm.reclaimer.watermark import Excess, group_excesses, shares, storage_excess

EVICTED_AT_ONCE = 8
"""Extents of one step: their commits are sent together, then others get the event loop. RocksDB
works on the loop: kept small for its sake (with 64 blocks each, none of the steps seen in 15 s of
reclaim took 2 ms of processor time)."""
EVICTED_PER_TURN = 1024
"""Extents after which the next group has its turn."""


class EvictionLoop:
    """Evicts the coldest extents of groups that crossed a mark, deepest first.

    It runs when a write crosses a mark or is refused for want of room, when the configuration
    changes, and in any case every ``period_s``.
    """

    name = "eviction"
    period_s = 0.2

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._not_before: dict[str, float] = {}
        self._unmoved: set[Scope] = set()
        """What freed nothing, or no more than a step: writes that cross its mark do not wake it."""

    @property
    def wakeup(self) -> asyncio.Event:
        """Set when there is something to do before the period is over."""
        return self._around.index.shared.pressure.wakeup

    async def run_once(self, now: float) -> Report:
        pressure = self._around.index.shared.pressure
        if not pressure.wakeup.is_set():
            self._unmoved.clear()
        waiters, wanted = pressure.waiters(), pressure.take()
        report = Report()
        try:
            members: dict[str, list[str]] = defaultdict(list)
            loading: set[str] = set()
            for index in self._around.index.by_uid.values():
                if index.loaded:
                    members[index.group].append(index.uid)
                else:
                    loading.add(index.group)
            for group in list(self._around.groups()):
                mine = {scope: n for scope, n in wanted.items() if scope.group == group.name}
                uids = members.get(group.name)
                # What is still being loaded counts, but cannot go yet: the others do not pay for
                # it, unless a write needs the room.
                if uids and (mine or group.name not in loading):
                    await self._relieve_group(group, uids, mine, now, report)
            for config in list(self._around.storages()):
                await self._relieve_storage(config, wanted, now, report)
        finally:
            pressure.relieved(waiters)
        return report

    async def _relieve_group(
        self,
        group: InstanceGroup,
        uids: Sequence[str],
        wanted: Mapping[Scope, int],
        now: float,
        report: Report,
    ) -> None:
        """The group's own limits. A refused write does not wait for ``trigger_period_seconds``."""
        scope = Scope(group.name)
        is_due = now >= self._not_before.get(group.name, now) and scope not in self._unmoved
        if not wanted and not is_due:
            return
        ledger = self._around.index.shared.ledger
        for excess in group_excesses(group, uids, ledger, wanted):
            freed = await self._evict(group, excess, report)
            if not freed or _is_bounded(group):
                self._unmoved.add(scope)
            self._not_before[group.name] = now + quota.reclaim_of(group).trigger_period_seconds

    async def _relieve_storage(
        self, config: StorageConfig, wanted: Mapping[Scope, int], now: float, report: Report
    ) -> None:
        scope = Scope(storage=config.global_unique_name)
        if scope not in wanted and scope in self._unmoved:
            return
        ledger = self._around.index.shared.ledger
        amount = storage_excess(config, ledger, wanted)
        if amount <= 0:
            return
        groups = {group.name: group for group in self._around.groups()}
        bounded, freed = False, 0
        for excess in shares(config, amount, groups.values(), ledger):
            group = groups[excess.scope.group]
            bounded = bounded or _is_bounded(group)
            freed += await self._evict(group, excess, report)
        if not freed or bounded:
            self._unmoved.add(scope)

    async def _evict(self, group: InstanceGroup, excess: Excess, report: Report) -> int:
        """Evict until ``excess`` is gone, nothing evictable is left, or the turn is over.

        Returns:
            Bytes freed.
        """
        pressure = self._around.index.shared.pressure
        order = self._around.index.shared.order_of(group.name)
        _, kind, uid, storage = excess.scope
        amount, bytes_max = _bounds(group, excess)
        skipped = _Skipped()
        freed = freed_bytes = evicted = 0
        while freed < amount and freed_bytes < bytes_max:
            if evicted >= EVICTED_PER_TURN:
                pressure.wake()
                break
            found = order.coldest(
                EVICTED_AT_ONCE, uid=uid, storage_type=kind, storage=storage, skip=skipped
            )
            if not found and not order.behind:
                break
            batch = _enough(
                found, amount - freed, bytes_max - freed_bytes, uid is not None, order.together
            )
            for gone in await self._retire(batch, skipped, report):
                freed += gone.blocks if uid is not None else gone.counted
                freed_bytes += gone.counted
            evicted += len(batch)
            pressure.progressed()
            await asyncio.sleep(0)
        if skipped:
            order.refresh(EVICTED_PER_TURN)
        return freed_bytes

    async def _retire(
        self, batch: Sequence[Entry], skipped: _Skipped, report: Report
    ) -> list[Delta]:
        """Retire extents together; what each freed."""
        by_uid: dict[str, list[Entry]] = defaultdict(list)
        for entry in batch:
            entry.leaving = True
            by_uid[entry.uid].append(entry)
        try:
            parts = await asyncio.gather(
                *(self._retire_of(uid, members, skipped) for uid, members in by_uid.items())
            )
        finally:
            for entry in batch:
                entry.leaving = False
        freed = [delta for part in parts for delta in part]
        report.done += len(freed)
        report.failed += len(batch) - len(freed)
        return freed

    async def _retire_of(
        self, uid: str, entries: Sequence[Entry], skipped: _Skipped
    ) -> list[Delta]:
        index = self._around.index.by_uid.get(uid)
        if index is None:
            skipped.add(entries)
            return []
        held = {entry.extent_id: (entry, entry.held) for entry in entries}
        freed: list[Delta] = []
        changes = await change_many(index, held, retire_with(index), reason=Reason.EVICTED)
        for extent_id, change in changes.items():
            entry, delta = held[extent_id]
            if isinstance(change, KvcmError):
                skipped.failed(entry, change)
            elif isinstance(change, Exception):
                raise change
            elif change is None:
                # Its record is lost or unreadable: it can free nothing, so it must not count.
                index.book.forget(extent_id)
            else:
                freed.append(delta)
        return freed


class _Skipped:
    """What failed in this turn, and what lies in shards that did."""

    def __init__(self) -> None:
        self._entries: set[Entry] = set()
        self._away = Away()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __contains__(self, entry: object) -> bool:
        return entry in self._entries or (isinstance(entry, Entry) and entry in self._away)

    def add(self, entries: Iterable[Entry]) -> None:
        """They are not tried again in this turn."""
        self._entries.update(entries)

    def failed(self, entry: Entry, error: KvcmError) -> None:
        """One failed; a fault of the store keeps the turn from its shard."""
        self._entries.add(entry)
        self._away.failed("evicting", entry, error)


def _is_bounded(group: InstanceGroup) -> bool:
    reclaim = quota.reclaim_of(group)
    return reclaim.reclaim_step_size > 0 or reclaim.reclaim_step_percentage > 0


def _bounds(group: InstanceGroup, excess: Excess) -> tuple[int, int]:
    """What one round takes of an excess at most: in its unit, and in bytes."""
    reclaim = quota.reclaim_of(group)
    amount, bytes_max = excess.amount, reclaim.reclaim_step_size or quota.UNLIMITED
    if reclaim.reclaim_step_percentage and excess.limit < quota.UNLIMITED:
        share = excess.limit * reclaim.reclaim_step_percentage // 100
        amount = min(amount, max(1, share))
    return amount, bytes_max


def _enough(
    entries: Sequence[Entry],
    amount: int,
    bytes_max: int,
    in_blocks: bool,
    together: Callable[[Entry, Entry], bool],
) -> list[Entry]:
    """As many of ``entries`` as it takes, one at least; what goes ``together`` is not parted."""
    taken: list[Entry] = []
    for entry in entries:
        is_enough = amount <= 0 or bytes_max <= 0
        if is_enough and taken and not together(taken[-1], entry):
            break
        taken.append(entry)
        amount -= entry.held.blocks if in_blocks else entry.held.counted
        bytes_max -= entry.held.counted
    return taken
