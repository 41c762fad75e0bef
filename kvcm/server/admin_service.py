"""The handlers of AdminService, for both transports (wire.md §2, §7, §9)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import Metric

from kvcm.cache.api import CacheService
from kvcm.core.clock import Clock
from kvcm.core.errors import EntityNotExist, InvalidArgument, Unsupported
from kvcm.core.types import AccountRole, StorageConfig, StorageType
from kvcm.registry.registry import Registry
from kvcm.server import logs, metrics_reply, pb_entities
from kvcm.server.backends import BackendSet
from kvcm.server.calls import Call
from kvcm.server.callstats import CallStats
from kvcm.server.leadership import Leadership
from kvcm.server.meta_service import MetaService
from kvcm.storage_backends.factory import with_former_root

log = logging.getLogger(__name__)

AnyCall = Call[Any, Any]

ANSWERED_BY_ALL = frozenset(
    {
        "GetMetrics",
        "CheckHealth",
        "GetManagerClusterInfo",
        "LeaderDemote",
        "GetLeaderElectorConfig",
        "UpdateLeaderElectorConfig",
        "UpdateLogger",
    }
)
"""All other methods are for the leader only."""


class AdminService:
    """What operators call."""

    def __init__(
        self,
        registry: Registry,
        cache: CacheService,
        backends: BackendSet,
        meta: MetaService,
        leadership: Leadership,
        stats: CallStats,
        clock: Clock,
        *,
        is_well: Callable[[], bool],
        metrics: Callable[[], Iterable[Metric]],
    ) -> None:
        self._metrics = metrics
        self._is_well = is_well
        self._registry = registry
        self._cache = cache
        self._backends = backends
        self._meta = meta
        self._leadership = leadership
        self._stats = stats
        self._clock = clock

    # -- storages

    async def AddStorage(self, call: AnyCall) -> None:
        config = _storage(call.request)
        if config.global_unique_name in self._registry.view.storages:
            # Refused by the registry, before anything is opened or created.
            await self._registry.put_storage(config, expect_new=True)
        await self._put_opened(config, expect_new=True, new_place=True)

    async def UpdateStorage(self, call: AnyCall) -> None:
        config = _storage(call.request)
        name = config.global_unique_name
        stored = self._stored(name)
        if _moves(stored, config):
            if not call.request.force_update:
                self._refuse_while_used(name, "force_update")
            moved = with_former_root(config, stored)
            await self._put_opened(moved, expect_new=False, new_place=True)
            await self._cache.drop_storage(name)
        else:
            await self._put_opened(config, expect_new=False, new_place=False)

    async def RemoveStorage(self, call: AnyCall) -> None:
        name = call.request.storage_unique_name
        self._stored(name)
        if not call.request.force:
            self._refuse_while_used(name, "force")
        await self._registry.set_storage_enabled(name, False)
        await self._cache.drop_storage(name)
        await self._registry.remove_storage(name)

    async def EnableStorage(self, call: AnyCall) -> None:
        await self._registry.set_storage_enabled(call.request.storage_unique_name, True)

    async def DisableStorage(self, call: AnyCall) -> None:
        await self._registry.set_storage_enabled(call.request.storage_unique_name, False)

    async def ListStorage(self, call: AnyCall) -> None:
        for name, config in sorted(self._registry.view.storages.items()):
            shown = call.response.storage.add()
            pb_entities.fill_storage(shown, config)
            shown.disabled = not config.enabled
            shown.unavailable_reason = self._backends.unavailable_reason(name)
            shown.unwritable_reason = self._backends.unwritable(name)
            shown.health = self._backends.state(name).name.lower()

    # -- groups

    async def CreateInstanceGroup(self, call: AnyCall) -> None:
        group = pb_entities.group_of(call.request.instance_group)
        await self._registry.create_group(group)
        self._warn_of_unknown_candidates(group.name)

    async def UpdateInstanceGroup(self, call: AnyCall) -> None:
        group = pb_entities.group_of(call.request.instance_group)
        await self._registry.update_group(group, call.request.current_version)
        self._warn_of_unknown_candidates(group.name)

    async def RemoveInstanceGroup(self, call: AnyCall) -> None:
        # One transaction: a crash leaves no group with half of its instances.
        await self._registry.remove_group(call.request.name, force=call.request.force)

    async def GetInstanceGroup(self, call: AnyCall) -> None:
        group = self._registry.view.groups.get(call.request.name)
        if group is None:
            raise EntityNotExist(f"instance group {call.request.name!r} does not exist")
        pb_entities.fill_group(call.response.instance_group, group)

    # -- cache and instances

    async def GetCacheMeta(self, call: AnyCall) -> None:
        await self._meta.GetCacheMeta(call)

    async def RemoveCache(self, call: AnyCall) -> None:
        await self._meta.RemoveCache(call)

    async def RegisterInstance(self, call: AnyCall) -> None:
        await self._meta.register(call.request)

    async def RemoveInstance(self, call: AnyCall) -> None:
        request = call.request
        await self._cache.remove_instance(request.instance_id, request.instance_group or None)

    async def GetInstanceInfo(self, call: AnyCall) -> None:
        instance = self._meta.instance(call.request.instance_id)
        group = self._registry.view.groups.get(instance.instance_group)
        pb_entities.fill_instance_info(call.response.instance_info, instance, group)

    async def ListInstanceInfo(self, call: AnyCall) -> None:
        wanted = call.request.instance_group_name
        view = self._registry.view
        for _, instance in sorted(view.instances.items()):
            if wanted and instance.instance_group != wanted:
                continue
            group = view.groups.get(instance.instance_group)
            pb_entities.fill_instance_info(call.response.instance_info.add(), instance, group)

    # -- accounts and snapshots

    async def AddAccount(self, call: AnyCall) -> None:
        request = call.request
        role = pb_entities.member_of(AccountRole, request.role, "role")
        await self._registry.add_account(request.user_name, request.password, role)

    async def DeleteAccount(self, call: AnyCall) -> None:
        await self._registry.delete_account(call.request.user_name)

    async def ListAccount(self, call: AnyCall) -> None:
        for account in await self._registry.list_accounts():
            pb_entities.fill_account(call.response.accounts.add(), account)

    async def GenConfigSnapshot(self, call: AnyCall) -> None:
        call.response.config_snapshot = await self._registry.export_snapshot()

    async def LoadConfigSnapshot(self, call: AnyCall) -> None:
        before = self._registry.view.storages
        await self._registry.load_snapshot(
            call.request.config_snapshot, self._cache.busy_instance_uids()
        )
        after = self._registry.view.storages
        self._backends.create(
            n for n, c in after.items() if n not in before or _moves(before[n], c)
        )
        for instance_id in self._registry.view.instances:
            self._cache.prepare_instance(instance_id)

    # -- answered by every node

    async def GetMetrics(self, call: AnyCall) -> None:
        response = call.response
        response.timestamp = int(self._clock.now() * 1_000)
        for api, stats in self._stats.items():
            counter = response.metrics.add(metric_name="service.query_counter")
            counter.metric_value.int_value = stats.calls
            duration = response.metrics.add(metric_name="service.query_rt_us")
            duration.metric_value.float_value = stats.mean_us
            for metric in (counter, duration):
                metric.metric_tags.add(tag_key="api_name", tag_value=api)
        await metrics_reply.fill(response, self._metrics())

    async def CheckHealth(self, call: AnyCall) -> None:
        call.response.is_leader = self._leadership.is_leader
        call.response.is_health = self._is_well()
        call.response.elector_last_loop_time_ms = int(self._clock.now() * 1_000)

    async def GetManagerClusterInfo(self, call: AnyCall) -> None:
        response = call.response
        response.info_updated_time = int(self._clock.now() * 1_000)
        response.self_node_id = self._leadership.node_id
        if self._leadership.is_leader:
            response.leader_node_id = self._leadership.node_id

    async def LeaderDemote(self, call: AnyCall) -> None:
        self._leadership.demote()

    async def GetLeaderElectorConfig(self, call: AnyCall) -> None:
        call.response.campaign_delay_time_ms = self._leadership.campaign_delay_ms

    async def UpdateLeaderElectorConfig(self, call: AnyCall) -> None:
        self._leadership.set_campaign_delay(call.request.campaign_delay_time_ms)

    async def UpdateLogger(self, call: AnyCall) -> None:
        logs.set_level(call.request.module_name, call.request.log_level)

    # -- helpers

    async def _put_opened(
        self, config: StorageConfig, *, expect_new: bool, new_place: bool
    ) -> None:
        backend = await self._backends.try_open(config, new=new_place)
        self._backends.adopt(backend)
        try:
            await self._registry.put_storage(config, expect_new=expect_new)
        except BaseException:
            # Cancelled, too: no backend stays that the registry does not know.
            self._backends.disown(backend)
            raise
        if self._backends.get(config.global_unique_name) is not backend:
            self._backends.disown(backend)

    def _stored(self, name: str) -> StorageConfig:
        stored = self._registry.view.storages.get(name)
        if stored is None:
            raise EntityNotExist(f"storage {name!r} does not exist")
        return stored

    def _refuse_while_used(self, name: str, field: str) -> None:
        count = self._cache.storage_blocks(name)
        if count:
            raise InvalidArgument(
                f"{count} blocks live on storage {name!r}; with {field} they become misses"
            )

    def _warn_of_unknown_candidates(self, name: str) -> None:
        view = self._registry.view
        group = view.groups.get(name)
        unknown = [n for n in group.storage_candidates if n not in view.storages] if group else []
        if unknown:
            log.warning(
                "instance group %r: unknown storage candidates %s count once they exist",
                name,
                ", ".join(unknown),
            )


def _storage(request: Any) -> StorageConfig:
    config = pb_entities.storage_of(request.storage)
    if config.type is StorageType.UNSPECIFIED:
        raise Unsupported(f"storage {config.global_unique_name!r}: type local is not built in")
    return config


# A change of these leaves the blocks where they are.
_HARMLESS = frozenset({"key_count_per_file", "touch_file_when_create", "former_roots"})


def _moves(stored: StorageConfig, wanted: StorageConfig) -> bool:
    """Whether blocks on the stored storage could not be found with the wanted one."""
    if stored.type is not wanted.type:
        return True
    keys = (stored.spec.keys() | wanted.spec.keys()) - _HARMLESS
    return any(stored.spec.get(k) != wanted.spec.get(k) for k in keys)
