"""Keeping eviction orders ready: the policy as configured, and what is too old for TTL."""

from __future__ import annotations

from kvcm.core.errors import KvcmError
from kvcm.core.quota import group_capacity
from kvcm.metaindex.changes import change_many
from kvcm.metaindex.entry import Entry
from kvcm.metaindex.events import Reason
from kvcm.metaindex.order import EvictionOrder
from kvcm.metaindex.policy import policy_of
from kvcm.reclaimer.base import PER_ROUND, Away, Report, Surroundings, retire_with

_STEPS_PER_ROUND = 256


class OrderLoop:
    """Follows each group's policy, and retires what is older than its ``ttl_seconds``."""

    name = "order"
    period_s = 0.2

    def __init__(self, around: Surroundings) -> None:
        self._around = around

    async def run_once(self, now: float) -> Report:
        report = Report()
        for group in list(self._around.groups()):
            order = self._around.index.shared.order_of(group.name)
            cache = group.cache_config
            order.set_policy(policy_of(cache.reclaim_strategy if cache is not None else None))
            used = self._around.index.shared.ledger.group(group.name).counted
            order.resize(min(group_capacity(group), used))
            order.refresh(_STEPS_PER_ROUND)
            if order.policy.ttl_ms:
                await self._expire(order, report)
        return report

    async def _expire(self, order: EvictionOrder, report: Report) -> None:
        """Leaves first: what they stood on is asked for again."""
        now_ms = int(self._around.clock.now() * 1000)
        done = failed = 0
        away = Away()
        while done < PER_ROUND:
            old = order.expired(now_ms, PER_ROUND - done)
            by_uid: dict[str, list[Entry]] = {}
            for entry in old:
                if entry not in away:
                    by_uid.setdefault(entry.uid, []).append(entry)
            if not by_uid and not order.behind:
                break
            before = done
            for uid, entries in by_uid.items():
                gone = await self._retire(uid, entries, away)
                done += gone
                failed += len(entries) - gone
            if done == before and not order.behind:
                break
        report.done += done
        report.failed += failed

    async def _retire(self, uid: str, entries: list[Entry], away: Away) -> int:
        index = self._around.index.by_uid.get(uid)
        if index is None:
            return 0
        done = 0
        for entry in entries:
            entry.leaving = True
        try:
            ids = [entry.extent_id for entry in entries]
            answers = await change_many(index, ids, retire_with(index), reason=Reason.AGED)
        finally:
            for entry in entries:
                entry.leaving = False
        for entry in entries:
            answer = answers[entry.extent_id]
            if isinstance(answer, KvcmError):
                away.failed("expiring", entry, answer)
            elif isinstance(answer, Exception):
                raise answer
            else:
                done += 1
                if answer is None:
                    # Its record is lost or unreadable.
                    index.book.forget(entry.extent_id)
        return done
