"""Removing the records of what is over."""

from __future__ import annotations

import logging
from functools import partial

from kvcm.core.errors import KvcmError, StorageError
from kvcm.core.types import Instance
from kvcm.metaindex.book import Entry
from kvcm.metaindex.instance import InstanceIndex
from kvcm.reclaimer.base import PER_ROUND, Report, Surroundings, each

_log = logging.getLogger(__name__)


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
            ready = self._ready(index, now)[:PER_ROUND]
            await each(ready, "forgetting", partial(self._forget, index), report)
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
