"""Saving access stamps."""

from __future__ import annotations

import logging

from kvcm.core.errors import KvcmError
from kvcm.reclaimer.base import PER_ROUND, Report, Surroundings

_log = logging.getLogger(__name__)


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
                while saved := await index.save_stamps(PER_ROUND):
                    report.done += saved
            except KvcmError as error:
                _log.warning("saving stamps of instance %s: %s", index.uid, error)
                report.failed += 1
        return report
