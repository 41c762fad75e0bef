"""Evicting what is over a mark."""

from __future__ import annotations

from kvcm.core.errors import KvcmError
from kvcm.metaindex.book import Entry
from kvcm.metaindex.records import Phase
from kvcm.reclaimer.base import PER_ROUND, Away, Report, Surroundings, retire_with
from kvcm.reclaimer.watermark import Excess, excesses

_AT_ONCE = 32


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
        away = Away()
        failed: set[Entry] = set()
        by_uid = self._around.index.by_uid
        order = self._around.index.shared.order_of(group)
        while left > 0 and report.done < PER_ROUND:
            victims = order.coldest(
                _AT_ONCE, uid=excess.uid, storage_type=excess.storage_type, skip=failed
            )
            if not victims and not order.behind:
                return
            for entry in victims:
                if left <= 0 or report.done >= PER_ROUND:
                    return
                index = by_uid.get(entry.uid)
                if index is None or entry in away or entry.phase is not Phase.SETTLED:
                    failed.add(entry)
                    continue
                held = entry.held
                entry.leaving = True
                try:
                    change = await index.change(entry.extent_id, retire_with(index))
                except KvcmError as error:
                    away.failed("evicting", entry, error)
                    failed.add(entry)
                    report.failed += 1
                    continue
                finally:
                    entry.leaving = False
                if change is None:
                    # Its record is lost or unreadable: it can free nothing, so it must not count.
                    index.book.forget(entry.extent_id)
                    continue
                left -= held.blocks if excess.in_blocks else held.counted
                report.done += 1
