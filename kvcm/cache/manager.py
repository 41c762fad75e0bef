"""The cache service of a leader: the use cases over one index, following the registry."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from kvcm.cache.api import (
    FinishWriteRequest,
    LookupAnswer,
    LookupRequest,
    MetaAnswer,
    MetaRequest,
    RemoveRequest,
    ReportAnswer,
    ReportRequest,
    StartWriteAnswer,
    StartWriteRequest,
    TrimRequest,
    UsageReport,
)
from kvcm.cache.base import CacheSettings, Context
from kvcm.cache.files import Files
from kvcm.cache.lookup import Lookup
from kvcm.cache.removal import Removal
from kvcm.cache.report import Reports
from kvcm.cache.usage import usage_report
from kvcm.cache.write import Writes
from kvcm.core import quota
from kvcm.core.clock import Clock
from kvcm.core.errors import KvcmError
from kvcm.core.types import Instance, InstanceGroup
from kvcm.metaindex.events import Watchers
from kvcm.metaindex.index import MetaIndex
from kvcm.metaindex.shared import Shared
from kvcm.metaindex.store import KVStore
from kvcm.registry.view import RegistryView
from kvcm.storage_backends.base import DataStorageBackend

_log = logging.getLogger(__name__)


class RegistryPort(Protocol):
    """What the cache service asks of the registry."""

    @property
    def view(self) -> RegistryView: ...

    def subscribe(self, callback: Callable[[RegistryView], None]) -> object: ...

    async def next_epoch(self) -> int: ...

    async def raise_trim(self, instance_uid: str) -> int: ...

    async def close_instance(self, instance_id: str, group: str | None) -> Instance: ...

    async def forget_instance(self, instance_uid: str) -> None: ...


class Backends(Protocol):
    """The opened storages by name."""

    def get(self, name: str) -> DataStorageBackend | None: ...

    def available(self, name: str) -> bool: ...

    def writable(self, name: str) -> bool: ...

    def free_bytes(self, name: str) -> int | None: ...

    def available_for_s(self, name: str) -> float: ...

    def complain(self, name: str, reader: str) -> None: ...


class CacheManager:
    """Implements ``CacheService`` (kvcm/cache/api.py). Call ``open`` first."""

    def __init__(
        self,
        registry: RegistryPort,
        store: KVStore,
        backends: Backends,
        clock: Clock,
        settings: CacheSettings,
        watchers: Watchers | None = None,
    ) -> None:
        self.watchers = Watchers() if watchers is None else watchers
        """Told what happens to blocks; may change at any time."""
        self._registry = registry
        self._store = store
        self._backends = backends
        self._clock = clock
        self._settings = settings
        self._warned: set[str] = set()

    async def open(self) -> None:
        """Take a new epoch and follow the registry. The store must be open.

        Raises:
            ConfigError, Unavailable: the registry.
        """
        epoch = await self._registry.next_epoch()
        view = self._registry.view
        self.shared = Shared(
            self._store,
            self._backends,
            self._clock,
            epoch=epoch,
            cluster_uid=view.cluster_uid,
            secret=view.secret,
            cache_bytes=self._settings.read_cache_bytes,
            watchers=self.watchers,
        )
        self.index = MetaIndex(self.shared)
        context = Context(
            self.index,
            self._clock,
            self._settings,
            lambda name: self._registry.view.groups.get(name),
            lambda name: self._registry.view.storages.get(name),
        )
        self.admission = context.admission
        self._lookup = Lookup(context)
        self._files = Files(self._backends.get, view.cluster_uid)
        self._writes = Writes(context, self._files)
        self._removal = Removal(context, self._registry.raise_trim)
        self._reports = Reports(context, self._backends)
        self._follow(view)
        self._registry.subscribe(self._follow)

    def _warn_of_groups_that_never_evict(self, view: RegistryView) -> None:
        for name, group in view.groups.items():
            if not quota.never_evicts(group):
                self._warned.discard(name)
            elif name not in self._warned:
                self._warned.add(name)
                _log.warning(
                    "instance group %r has a quota but no watermark (trigger_strategy): "
                    "when it is full its writes are refused, nothing is evicted",
                    name,
                )

    def _group_of(self, name: str) -> InstanceGroup | None:
        return self._registry.view.groups.get(name)

    def _follow(self, view: RegistryView) -> None:
        for config in view.storages.values():
            self.shared.storage_types[config.global_unique_name] = config.type
        self.index.follow(view.instances.values(), view.closing)
        self.admission.follow(view.groups.values())
        self._warn_of_groups_that_never_evict(view)
        # Limits and marks may have changed.
        self.shared.pressure.wake()

    async def close(self) -> None:
        """Wait for clean-ups and save the access stamps."""
        await self._writes.settled()
        await self._removal.settled()
        await self._files.close()
        for index in list(self.index.by_uid.values()):
            try:
                while await index.save_stamps(1024):
                    pass
            except KvcmError as error:
                _log.warning("access stamps of instance %s are not saved: %s", index.uid, error)

    # ---- use cases ---------------------------------------------------------------------------

    async def lookup(self, request: LookupRequest) -> LookupAnswer:
        """See ``Lookup.lookup``."""
        return await self._lookup.lookup(request)

    async def get_meta(self, request: MetaRequest) -> MetaAnswer:
        """See ``Lookup.get_meta``."""
        return await self._lookup.get_meta(request)

    async def start_write(self, request: StartWriteRequest) -> StartWriteAnswer:
        """See ``Writes.start``."""
        return await self._writes.start(request)

    async def finish_write(self, request: FinishWriteRequest) -> None:
        """See ``Writes.finish``."""
        await self._writes.finish(request)

    async def abandon(self, instance_id: str, session_id: str) -> None:
        """See ``Writes.abandon``."""
        await self._writes.abandon(instance_id, session_id)

    async def remove(self, request: RemoveRequest) -> None:
        """See ``Removal.remove``."""
        await self._removal.remove(request)

    async def trim(self, request: TrimRequest) -> None:
        """See ``Removal.trim``."""
        await self._removal.trim(request)

    async def report(self, request: ReportRequest) -> ReportAnswer:
        """See ``Reports.report``."""
        return await self._reports.report(request)

    async def remove_instance(self, instance_id: str, group: str | None) -> None:
        """Close an instance; its space is freed in the background.

        Raises:
            InstanceNotExist: none of that id (in that group).
        """
        instance = await self._registry.close_instance(instance_id, group)
        index = self.index.by_uid.get(instance.uid)
        if index is not None:
            index.closed = True

    # ---- storages and instances --------------------------------------------------------------

    def prepare_instance(self, instance_id: str) -> None:
        """Make the folders of a registered instance on its group's storages, in the background."""
        view = self._registry.view
        instance = view.instances.get(instance_id)
        group = view.groups.get(instance.instance_group) if instance is not None else None
        if instance is None or group is None:
            return
        for name in group.storage_candidates:
            self._files.prepare(instance.uid, name)

    def storage_blocks(self, storage: str) -> int:
        """Locations (open and serving) on a storage."""
        return self.shared.ledger.storage(storage).blocks

    async def drop_storage(self, storage: str) -> None:
        """Forget all blocks of a storage: they become misses.

        Raises:
            NotReady: the index store failed; call again.
        """
        await self._removal.drop_storage(storage)

    def busy_instance_uids(self) -> set[str]:
        """Uids of instances that hold blocks or open sessions, or are not loaded yet."""
        ledger = self.shared.ledger
        return {
            uid
            for uid, index in self.index.by_uid.items()
            if not index.closed and (not index.loaded or ledger.instance(uid).blocks)
        }

    def usage(self, *, ahead: bool = False) -> UsageReport:
        """Space by instance, group, storage and type; see ``CacheService``."""
        view = self._registry.view
        report = usage_report(self.index, view)
        report.error_reports = {
            (kind.name.lower(), outcome.name.lower()): count
            for (kind, outcome), count in self._reports.counts.items()
        }
        report.admission = {name: g.usage() for name, g in self.admission.groups.items()}
        if ahead:
            self._look_ahead(report, view)
        return report

    def _look_ahead(self, report: UsageReport, view: RegistryView) -> None:
        """Add what the next evictions would take; whoever knows the reclaimer does."""
