"""Ending write sessions whose time-out has passed."""

from __future__ import annotations

import logging

from kvcm.metaindex.book import Entry
from kvcm.metaindex.changes import change_many
from kvcm.metaindex.events import Reason
from kvcm.metaindex.instance import Decide, InstanceIndex
from kvcm.metaindex.records import Cause, Extent, Phase, State
from kvcm.reclaimer.base import BACKOFF_S_FIRST, PER_ROUND, Report, Surroundings

_log = logging.getLogger(__name__)


class ExpiryLoop:
    """Aborts open extents whose time-out has passed."""

    name = "expiry"
    period_s = 0.2

    def __init__(self, around: Surroundings) -> None:
        self._around = around

    async def run_once(self, now: float) -> Report:
        report = Report()
        for index in list(self._around.index.by_uid.values()):
            overdue = index.book.overdue(now, PER_ROUND)
            if overdue:
                await self._expire(index, overdue, now, report)
        return report

    async def _expire(
        self, index: InstanceIndex, overdue: list[Entry], now: float, report: Report
    ) -> None:
        # They are not given out again by themselves: cut short, they are due as before.
        again = {entry: entry.deadline for entry in overdue}
        try:
            ids = [entry.extent_id for entry in overdue]
            decide = _expire_with(index)
            answers = await change_many(index, ids, decide, reason=Reason.EXPIRED)
            for entry in overdue:
                error = answers[entry.extent_id]
                if isinstance(error, Exception):
                    _log.warning("expiring extent %s: %s", entry.extent_id.hex(), error)
                    again[entry] = now + BACKOFF_S_FIRST
                    report.failed += 1
                else:
                    del again[entry]
                    report.done += 1
        finally:
            for entry, deadline in again.items():
                index.book.expect(entry, deadline)


def _expire_with(index: InstanceIndex) -> Decide:
    def decide(_extent: Extent, state: State) -> State | None:
        if state.phase is not Phase.OPEN:
            return None
        return state.next(index.new_version(), phase=Phase.ABORTED, cause=Cause.EXPIRED)

    return decide
