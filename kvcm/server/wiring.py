"""The only place that names concrete stores, backends and use cases."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from pydantic import SecretStr

from kvcm.cache.api import CacheService, UsageReport
from kvcm.cache.base import CacheSettings
from kvcm.cache.manager import CacheManager
from kvcm.core.clock import Clock
from kvcm.core.errors import ConfigError
from kvcm.metaindex.events import Watchers
from kvcm.metaindex.store import KVStore
from kvcm.metaindex.stores.memory import MemoryStore
from kvcm.observability import ceiling_watch
from kvcm.observability.ceiling import Ceilings
from kvcm.observability.trace_events import TraceEvents
from kvcm.observability.trace_files import TraceFiles
from kvcm.reclaimer.base import DeleteOptions, Surroundings
from kvcm.reclaimer.loops import build_loops
from kvcm.reclaimer.repair import Repair, ScrubLoop
from kvcm.reclaimer.repair_scope import RepairPorts
from kvcm.reclaimer.space import SpaceControl
from kvcm.registry.database import with_password
from kvcm.registry.registry import Registry
from kvcm.registry.view import RegistryView
from kvcm.server import previews
from kvcm.server.backends import BackendSet
from kvcm.server.settings import Settings
from kvcm.server.supervisor import Loop
from kvcm.storage_backends.factory import build_backend

CEILING_NAME = "ceiling.bin"
"""File of the data directory that keeps the hit-rate windows."""
EVENTS_FOLDER = "events"
"""Folder of the data directory where trace events are recorded unless another is set."""


class ManagedCache(CacheService, Protocol):
    """The use cases with their life cycle and background loops."""

    loops: list[Loop]
    repair: Repair | None
    space: SpaceControl | None
    watchers: Watchers
    ceilings: Ceilings | None

    async def open(self) -> None: ...

    async def close(self) -> None: ...


class BuildCache(Protocol):
    """How the use cases are made; tests put their own here."""

    def __call__(
        self,
        settings: Settings,
        clock: Clock,
        registry: Registry,
        store: KVStore,
        backends: BackendSet,
    ) -> ManagedCache: ...


def build_registry(settings: Settings, clock: Clock) -> Registry:
    """The registry, not open yet; raises ConfigError for a bad URL."""
    return Registry(
        registry_url(settings),
        clock,
        auto_migrate=settings.registry_auto_migrate,
        shards_max=settings.cache.shards_max,
    )


def registry_url(settings: Settings) -> str:
    """The URL with its password, which may come from elsewhere.

    Raises:
        ConfigError: a bad URL, or a password file that cannot be read; without the password.
    """
    secret = _secret("registry", settings.registry_password, settings.registry_password_file)
    return with_password(settings.registry_url, secret) if secret else settings.registry_url


def _secret(what: str, given: SecretStr, file: Path | None) -> str:
    if file is None:
        return given.get_secret_value()
    try:
        return file.read_text(encoding="utf-8").rstrip("\r\n")
    except OSError as error:
        raise ConfigError(f"{what}_password_file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what}_password_file {file} is not UTF-8") from None


def build_store(settings: Settings, clock: Clock) -> KVStore:
    """The index store, not open yet.

    Raises:
        ConfigError: a bad URL, or a file of it that cannot be read; shows no password.
    """
    scheme, _, path = settings.index_url.partition(":")
    if scheme == "memory":
        return MemoryStore(clock=clock)
    # Imported here, all of them: a manager on another store does not need the library.
    if scheme != "rocksdb":
        from kvcm.metaindex.stores.valkey import ValkeyStore
        from kvcm.metaindex.stores.valkey_url import parse_url

        secret = _secret("index", settings.index_password, settings.index_password_file)
        return ValkeyStore(parse_url(settings.index_url, secret), clock=clock)
    from kvcm.metaindex.stores.rocksdb import RocksStore

    return RocksStore(
        Path(path), sync=settings.rocksdb.sync, cache_bytes=settings.rocksdb.cache_bytes
    )


def build_backends(settings: Settings, clock: Clock) -> BackendSet:
    """The storages, none open yet."""
    return BackendSet(
        lambda config: build_backend(config, clock),
        clock,
        period_s=settings.probe_period_s,
        timeout_s=settings.probe_timeout_s,
    )


def build_events(settings: Settings, clock: Clock, watchers: Watchers) -> TraceEvents:
    """The events of what ``watchers`` are told, recorded as the settings say."""
    options = settings.trace_events
    files: TraceFiles | None = None
    if options.enabled:
        files = TraceFiles(
            options.folder or settings.data_dir / EVENTS_FOLDER,
            clock.now,
            file_bytes_max=options.file_bytes_max,
            files_max=options.files_max,
        )
    return TraceEvents(clock, watchers, files, options.sample)


class Manager(CacheManager):
    """The use cases of a leader with their background loops and repair.

    ``scrub_per_second`` is the pace of the scrubber, to be set before ``open``; 0 = off.
    """

    loops: list[Loop]
    repair: Repair | None = None
    scrub_per_second: int = 0
    space: SpaceControl | None = None
    deletes = DeleteOptions()
    ceilings: Ceilings | None = None
    """To be set before ``open``; None = off."""

    async def open(self) -> None:
        """Open the use cases, then make the loops (nothing runs yet)."""
        await super().open()
        around = self._surroundings()
        self.repair = Repair(
            RepairPorts(
                around, lambda: self._registry.view, self._backends.get, self._backends.available
            )
        )
        loops = build_loops(around)
        self.space = SpaceControl(loops)
        scrub = ScrubLoop(self.repair, self.scrub_per_second)
        self.loops = [*loops, self.admission, scrub]
        if self.ceilings is not None:
            await self._open_ceilings(self.ceilings)
            self.loops.append(self.ceilings)

    async def _open_ceilings(self, ceilings: Ceilings) -> None:
        def follow(view: RegistryView) -> None:
            registered = {i.uid: (i.instance_id, i.instance_group) for i in view.instances.values()}
            capacities = ceiling_watch.capacities(view.groups.values(), view.storages)
            ceilings.follow(view.cluster_uid, registered, capacities)

        follow(self._registry.view)
        self._registry.subscribe(follow)
        await ceilings.open()
        self.watchers.append(ceiling_watch.CeilingWatcher(ceilings))

    async def close(self) -> None:
        """End a repair run, then as the use cases."""
        if self.repair is not None:
            await self.repair.stop()
        await super().close()
        if self.ceilings is not None:
            await self.ceilings.close()

    def _surroundings(self) -> Surroundings:
        registry, settings = self._registry, self._settings
        return Surroundings(
            index=self.index,
            clock=self._clock,
            groups=lambda: registry.view.groups.values(),
            storages=lambda: registry.view.storages.values(),
            backend=self._backends.get,
            registered=lambda name: name in registry.view.storages,
            grace_s=self._grace_s,
            late_s=float(settings.write_timeout_s_max),
            forget_instance=registry.forget_instance,
            deletes=self.deletes,
        )

    def _look_ahead(self, report: UsageReport, view: RegistryView) -> None:
        previews.look_ahead(report, self.index, view)

    def _grace_s(self, group: str) -> float:
        found = self._registry.view.groups.get(group)
        cache = found.cache_config if found is not None else None
        reclaim = cache.reclaim_strategy if cache is not None else None
        delay_s = reclaim.delay_before_delete_ms / 1000 if reclaim is not None else 0.0
        return max(delay_s, self._settings.grace_s_min)


def build_cache(
    settings: Settings, clock: Clock, registry: Registry, store: KVStore, backends: BackendSet
) -> ManagedCache:
    """The use cases, not open yet."""
    options = settings.cache
    manager = Manager(
        registry,
        store,
        backends,
        clock,
        CacheSettings(
            reply_bytes_max=options.reply_bytes_max,
            read_cache_bytes=options.read_cache_bytes,
            write_timeout_s_default=options.write_timeout_s_default,
            write_timeout_s_max=options.write_timeout_s_max,
            grace_s_min=options.grace_s_min,
            room_wait_s=options.room_wait_s,
        ),
    )
    if settings.ceiling.enabled:
        manager.ceilings = Ceilings(clock, settings.data_dir / CEILING_NAME)
    manager.scrub_per_second = settings.repair.scrub_per_second
    deleting = settings.deleting
    manager.deletes = DeleteOptions(
        tries_max=deleting.tries_max,
        dead_letter_retry_s=deleting.dead_letter_retry_s,
        at_once=deleting.calls_at_once,
        per_storage=deleting.calls_per_storage,
    )
    return manager
