"""Ending write sessions whose time-out has passed."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvcm.core.errors import KvcmError
from kvcm.metaindex.book import Entry
from kvcm.metaindex.instance import InstanceIndex
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
            left = index.book.overdue(now, PER_ROUND)
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
                index.book.expect(entry, now + BACKOFF_S_FIRST)
                report.failed += 1
            left.pop()


def _expire_with(index: InstanceIndex) -> Callable[[Extent, State], State | None]:
    def decide(_extent: Extent, state: State) -> State | None:
        if state.phase is not Phase.OPEN:
            return None
        return state.next(index.new_version(), phase=Phase.ABORTED, cause=Cause.EXPIRED)

    return decide
