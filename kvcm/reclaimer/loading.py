"""Claiming and loading the indexes of registered instances."""

from __future__ import annotations

import logging

from kvcm.core.errors import KvcmError
from kvcm.reclaimer.base import Report, Surroundings

_log = logging.getLogger(__name__)
_LOAD_BACKOFF_S = 0.5


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
