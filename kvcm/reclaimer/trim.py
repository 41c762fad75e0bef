"""Freeing what trims and removals left behind."""

from __future__ import annotations

from functools import partial

from kvcm.metaindex.book import Entry
from kvcm.metaindex.instance import InstanceIndex
from kvcm.metaindex.records import Phase
from kvcm.reclaimer.base import PER_ROUND, Report, Surroundings, each, retire_with


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
            await each(self._dead(index), "freeing", partial(_free, index), report)
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
        return dead[:PER_ROUND]


async def _free(index: InstanceIndex, entry: Entry) -> None:
    if await index.change(entry.extent_id, retire_with(index)) is None:
        index.book.forget(entry.extent_id)
